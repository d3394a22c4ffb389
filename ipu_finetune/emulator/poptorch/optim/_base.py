# SPDX-License-Identifier: Apache-2.0
"""What the IPU optimizers have in common: their link to the device and their state dictionary."""

import weakref
from typing import Any, ClassVar, Dict, List, Optional

import torch

from ...device.updates import OptimizerImage
from ._attributes import VariableAttributes

__all__ = ["Optimizer", "check_accum_type"]

State = Optional[Dict[str, torch.Tensor]]


def check_accum_type(name: str, dtype: torch.dtype) -> torch.dtype:
    """Raise AssertionError unless `dtype` is float16 or float32."""
    if dtype not in (torch.float16, torch.float32):
        raise AssertionError(f"{name} must be either torch.float16 or torch.float32, got {dtype}")
    return dtype


class Optimizer:
    """Mixed into each optimizer of this package.

    Attributes:
        variable_attrs: which settings are compiled in.
        loss_scaling: the fixed loss scale.
        max_grad_norm: global norm that gradients are clipped to, or None.
    """

    _rule = ""
    _group_attributes: ClassVar[List[str]] = []

    def _configure(
        self,
        chosen: Dict[str, Any],
        loss_scaling: Optional[float],
        max_grad_norm: Optional[float],
        types: Dict[str, torch.dtype],
    ) -> None:
        """Take what PyTorch's constructor does not.

        Args:
            chosen: the settings that were passed by hand; the others are compiled in.
            loss_scaling: None for 1.
            max_grad_norm: None or infinity for no clipping.
            types: accumulator dtypes by kind.
        """
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        if not self.loss_scaling > 0:
            raise ValueError(f"loss_scaling must be positive, got {loss_scaling}")
        self.max_grad_norm = None if max_grad_norm in (None, float("inf")) else float(max_grad_norm)
        self._types = {kind: check_accum_type(f"{kind} accum_type", dtype) for kind, dtype in types.items()}
        variable = [name for name, value in chosen.items() if value is not None]
        allowed = [*self._group_attributes, "loss_scaling", "max_grad_norm"]
        self.variable_attrs = VariableAttributes([*variable, "lr", "loss_scaling"], allowed)
        self._pending: State = None
        self._executor: Optional[weakref.ReferenceType[Any]] = None

    # ---- the device's side

    def _image(self) -> OptimizerImage:
        groups, members = copy_groups(self, self._group_attributes)
        return OptimizerImage(
            rule=self._rule,
            groups=groups,
            members=members,
            constants=[name for name in self.variable_attrs.constants() if name in self._group_attributes],
            loss_scaling=self.loss_scaling,
            max_grad_norm=self.max_grad_norm,
            types=dict(self._types),
        )

    def _link(self, executor: Any) -> None:
        self._executor = weakref.ref(executor)

    def _take_pending(self) -> State:
        pending, self._pending = self._pending, None
        return pending

    def _device(self) -> Any:
        executor = self._executor() if self._executor is not None else None
        return executor._device_optimizer() if executor is not None else None

    # ---- saving and loading

    def get_state_dict(self) -> Dict[str, Any]:
        """As `state_dict`."""
        return self.state_dict()

    def state_dict(self) -> Dict[str, Any]:
        """Return PyTorch's dictionary with the device's `ipu_state` and `ipu_param`; both None before compilation.

        Tensors are the device's own, not copies.
        """
        device = self._device()
        state = super().state_dict()  # type: ignore[misc]
        state["ipu_state"] = device.export_state() if device is not None else self._pending
        state["ipu_param"] = device.export_parameters() if device is not None else None
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take settings now, and the device's state before the next run.

        Raises:
            RuntimeError: the dictionary is empty or was not made by an IPU optimizer.
        """
        if not state_dict:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if "ipu_state" not in state_dict or "ipu_param" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU. The dictionary must hold 'ipu_state' and "
                f"'ipu_param'; it holds {sorted(state_dict)}"
            )
        plain = {key: value for key, value in state_dict.items() if key not in ("ipu_state", "ipu_param")}
        super().load_state_dict(plain)  # type: ignore[misc]
        for group in self.param_groups:  # type: ignore[attr-defined]
            for name in self._group_attributes:
                group.setdefault(name, self.defaults[name])  # type: ignore[attr-defined]
        if state_dict["ipu_state"]:
            self._pending = dict(state_dict["ipu_state"])

    def __getstate__(self) -> Dict[str, Any]:
        # The link to an executor belongs to this process; what is on the device goes along as pending state.
        state = dict(super().__getstate__())  # type: ignore[misc]
        for name in ("loss_scaling", "max_grad_norm", "_types", "variable_attrs", "velocity_scaling"):
            if name in self.__dict__:
                state[name] = self.__dict__[name]
        device = self._device()
        state["_executor"] = None
        state["_pending"] = device.export_state() if device is not None else self._pending
        return state


def copy_groups(optimizer: Any, names: List[str]) -> Any:
    """Return the named settings and the parameters of each group."""
    groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    return groups, [list(group["params"]) for group in optimizer.param_groups]
