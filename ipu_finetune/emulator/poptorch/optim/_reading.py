# SPDX-License-Identifier: Apache-2.0
"""Reading any supported optimizer: PopTorch's own, or one of PyTorch's."""

from typing import Any, Dict, List, Set, Tuple

import torch

from ...device.optimizer_settings import OptimizerImage
from .._logging import logger
from ._base import Optimizer, copy_groups

__all__ = ["OptimizerReader", "read_optimizer"]

_TORCH: List[Tuple[Any, str, Dict[str, Any]]] = [
    (torch.optim.AdamW, "adamw", {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    (torch.optim.Adam, "adam", {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}),
    (
        torch.optim.RMSprop,
        "rmsprop",
        {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False},
    ),
    (torch.optim.SGD, "sgd", {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}),
]
_HOST_ONLY = frozenset(
    ("amsgrad", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay")
)
_OF_PYTORCH = frozenset(("params", "param_names", "max_momentum"))


def read_optimizer(optimizer: Any) -> OptimizerImage:
    """Return what the device copies from an optimizer.

    For PyTorch's own optimizers a setting that has its default value in every group is compiled in.

    Raises:
        AssertionError: a kind that does not run on an IPU.
        ValueError: Adam with amsgrad.
    """
    return optimizer._image() if isinstance(optimizer, Optimizer) else _read_torch(optimizer)


def _read_torch(optimizer: Any) -> OptimizerImage:
    for kind, rule, defaults in _TORCH:
        # AdamW became a subclass of Adam in newer versions of PyTorch, so the order of the table matters.
        if isinstance(optimizer, kind):
            if any(group.get("amsgrad") for group in optimizer.param_groups):
                raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
            if any(group.get("maximize") for group in optimizer.param_groups):
                raise ValueError("maximize=True is not supported on the IPU: negate the loss instead.")
            groups, members = copy_groups(optimizer, ["lr", *defaults])
            for group in groups:
                group["lr"] = float(group["lr"])
            constants = [name for name in defaults if all(group[name] == defaults[name] for group in groups)]
            own = {name: optimizer.defaults.get(name) for name in ("lr", *defaults)}
            return OptimizerImage(rule=rule, groups=groups, members=members, constants=constants, defaults=own)
    raise AssertionError(
        f"Unsupported optimizer type {type(optimizer).__name__}. Types supported: SGD, Adam, AdamW, RMSprop of "
        "torch.optim and poptorch.optim, and poptorch.optim.LAMB"
    )


class OptimizerReader:
    """Reads the optimizers of one model, and says once what an IPU ignores of them.

    Attributes that are there when the model is wrapped are part of how the optimizer was made. One that appears later
    was probably meant to change something, so it is reported.

    Args:
        quiet: report at debug level only (`Options.relaxOptimizerAttributesChecks`).
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._first = True
        self._own: Set[str] = set()
        self._groups: Dict[int, Set[str]] = {}
        self._subclasses: Set[type] = set()

    def read(self, optimizer: Any) -> OptimizerImage:
        """Return what the device copies; the errors are those of `read_optimizer`."""
        image = read_optimizer(optimizer)
        self._note_subclass(optimizer)
        known = set(image.groups[0]) if image.groups else set()
        self._note("optimizer attribute", type(optimizer).__name__, self._own, _extra_attributes(optimizer))
        for index, group in enumerate(optimizer.param_groups):
            extra = set(group) - known - _HOST_ONLY - _OF_PYTORCH
            self._note(
                f"group {index} attribute", type(optimizer).__name__, self._groups.setdefault(index, set()), extra
            )
        self._first = False
        return image

    def _note(self, what: str, kind: str, seen: Set[str], extra: Set[str]) -> None:
        new = sorted(extra - seen)
        seen |= extra
        if new and not self._first:
            level = logger.debug if self._quiet else logger.warning
            level("Ignoring unexpected %s in %s optimizer: %s", what, kind, new)

    def _note_subclass(self, optimizer: Any) -> None:
        kind = type(optimizer)
        if kind in self._subclasses or kind.__module__.split(".")[0] == "torch" or _is_ours(kind):
            return
        self._subclasses.add(kind)
        base = next(each for each in kind.__mro__ if _is_ours(each) or each.__module__.startswith("torch."))
        logger.warning(
            "%s is a subclass of %s. Poptorch does not run Python optimizer code directly: the IPU runs the update of "
            "%s, not an overridden step().",
            kind.__name__,
            base.__name__,
            base.__name__,
        )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__}.")


def _extra_attributes(optimizer: Any) -> Set[str]:
    """Return the names of attributes that neither PyTorch nor PopTorch gave the optimizer."""
    known = {"defaults", "state", "param_groups"}
    if isinstance(optimizer, Optimizer):
        known |= {*optimizer._own_attributes, *optimizer._type_attributes}
    extra = {name for name in vars(optimizer) if not name.startswith("_") and name not in known}
    # Learning rate schedulers put a wrapper of their own around step().
    return {name for name in extra if not (name == "step" and callable(optimizer.step))}
