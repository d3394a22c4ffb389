# SPDX-License-Identifier: Apache-2.0
"""What the IPU optimizers have in common: their link to the device and their state dictionary."""

import weakref
from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Tuple

import torch

from ...device.optimizer_settings import OptimizerImage
from ...device.rules import RULES, State
from .._logging import logger
from ._attributes import VariableAttributes

__all__ = ["MOMENTUM_TYPES", "Optimizer", "Pending", "check_accum_type", "copy_groups", "given"]

Tensors = Optional[Dict[str, torch.Tensor]]


#: arguments of the optimizers with moments -> kind of accumulator
MOMENTUM_TYPES = {
    "accum_type": "gradient",
    "first_order_momentum_accum_type": "first",
    "second_order_momentum_accum_type": "second",
}


def given(value: Any, default: Any) -> Any:
    """Return an argument, or its default where it was left out."""
    return default if value is None else value


class Pending(NamedTuple):
    """State that was loaded and waits for the next run."""

    state: Tensors
    parameters: Tensors


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
        accum_type: dtype of the gradient accumulator. The attributes of the other accumulators are called as the
            constructors' arguments.
    """

    _rule = ""
    _group_attributes: ClassVar[List[str]] = []
    #: names that can be marked although the device has no such setting
    _further_attributes: ClassVar[Tuple[str, ...]] = ()
    #: attribute -> kind of accumulator whose type it holds
    _type_attributes: ClassVar[Dict[str, str]] = {"accum_type": "gradient"}
    _own_attributes: ClassVar[Tuple[str, ...]] = ("loss_scaling", "max_grad_norm", "variable_attrs")

    def _configure(
        self,
        chosen: Dict[str, Any],
        loss_scaling: Optional[float],
        max_grad_norm: Optional[float],
        types: Dict[str, Optional[torch.dtype]],
    ) -> None:
        """Take what PyTorch's constructor does not.

        Args:
            chosen: the settings that were passed by hand; the others are compiled in.
            loss_scaling: None for 1.
            max_grad_norm: None or infinity for no clipping.
            types: accumulator dtypes by attribute; None is float32.
        """
        self.loss_scaling = 1.0 if loss_scaling is None else float(loss_scaling)
        if not self.loss_scaling > 0:
            raise ValueError(f"loss_scaling must be positive, got {loss_scaling}")
        self.max_grad_norm = None if max_grad_norm in (None, float("inf")) else float(max_grad_norm)
        for attribute, dtype in types.items():
            setattr(self, attribute, check_accum_type(attribute, torch.float32 if dtype is None else dtype))
        variable = [name for name, value in chosen.items() if value is not None]
        allowed = [*self._group_attributes, *self._further_attributes, "loss_scaling", "max_grad_norm"]
        self.variable_attrs = VariableAttributes([*variable, "lr", "loss_scaling"], allowed)
        self._pending: Optional[Pending] = None
        self._executor: Optional[weakref.ReferenceType[Any]] = None
        self._exported: Optional[Tuple[Any, Pending]] = None

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
            types={
                kind: check_accum_type(attribute, getattr(self, attribute))
                for attribute, kind in self._type_attributes.items()
            },
            defaults={
                name: self.defaults[name]  # type: ignore[attr-defined]
                for name in self._group_attributes
                if name in self.defaults  # type: ignore[attr-defined]
            },
        )

    def _link(self, executor: Any) -> None:
        self._executor = weakref.ref(executor)
        self._exported = None

    def _take_pending(self) -> Optional[Pending]:
        pending, self._pending = self._pending, None
        return pending

    def _device(self) -> Any:
        executor = self._executor() if self._executor is not None else None
        return executor._device_optimizer() if executor is not None and not executor._offline() else None

    def _snapshot(self) -> Pending:
        """Return state and settings as they are loaded or lie on the device; read again only after they changed."""
        if self._pending is not None:
            return self._pending
        device, executor = self._device(), self._executor() if self._executor is not None else None
        if device is None or executor is None:
            return Pending(None, None)
        stale = self._exported is None or self._exported[0] != device.version
        # Of a detached model the state came to the host when it was detached.
        transfer = stale and executor.isAttachedToDevice()
        logger.debug(
            "Writing optimiser state tensors from IPU to host." if transfer else "Using cached optimiser state dict"
        )
        if self._exported is None or stale:
            self._exported = (device.version, Pending(device.export_state(), device.export_parameters()))
        return self._exported[1]

    def _forget_snapshot(self) -> None:
        """Let go of the copies: the device is about to move on."""
        self._exported = None

    # ---- saving and loading

    def get_state_dict(self) -> Dict[str, Any]:
        """As `state_dict`."""
        return self.state_dict()

    def state_dict(self) -> Dict[str, Any]:
        """Return PyTorch's dictionary with the device's `ipu_state` and `ipu_param`; both None before compilation."""
        state = super().state_dict()  # type: ignore[misc]
        found = self._snapshot()
        state["ipu_state"] = None if found.state is None else dict(found.state)
        state["ipu_param"] = None if found.parameters is None else dict(found.parameters)
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take settings now, and the device's state before the next run; missing entries keep their device values.

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
        state, parameters = state_dict["ipu_state"], state_dict["ipu_param"]
        if state is not None or parameters is not None:
            self._pending = Pending(dict(state or {}), dict(parameters or {}))

    # ---- on the host

    def _host_step(self, closure: Any = None) -> Any:
        """Update the weights on the host with the rule that the IPU runs: for a comparison with a plain loop."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:  # type: ignore[attr-defined]
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._host_update(parameter, group)
        return loss

    def _host_update(self, parameter: torch.Tensor, group: Dict[str, Any]) -> None:
        kept = self.state[parameter]  # type: ignore[attr-defined]
        state = State()
        state.step = int(kept.get("step", 0)) + 1
        state.update({slot: tensor for slot, tensor in kept.items() if slot != "step"})
        gradient = parameter.grad.clone()  # type: ignore[union-attr]
        RULES[self._rule](parameter, gradient, state, group)
        kept.update(state, step=state.step)

    def __getstate__(self) -> Dict[str, Any]:
        # The link to an executor belongs to this process; what is on the device goes along as pending state.
        state = dict(super().__getstate__())  # type: ignore[misc]
        for name in (*self._own_attributes, *self._type_attributes):
            if name in self.__dict__:
                state[name] = self.__dict__[name]
        found = self._snapshot()
        state["_pending"] = found if found.state is not None else None
        state["_executor"] = state["_exported"] = None
        return state


def copy_groups(optimizer: Any, names: List[str]) -> Any:
    """Return the named settings and the parameters of each group."""
    groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    return groups, [list(group["params"]) for group in optimizer.param_groups]
