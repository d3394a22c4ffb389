# SPDX-License-Identifier: Apache-2.0
"""Reading any supported optimizer: PopTorch's own, or one of PyTorch's."""

from typing import Any, Dict, List, Set, Tuple

import torch

from ...device.updates import OptimizerImage
from .._logging import logger
from ._base import Optimizer, copy_groups

__all__ = ["read_optimizer"]

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
_HOST_ONLY = {"amsgrad", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
_reported: Set[Tuple[str, int, Tuple[str, ...]]] = set()


def read_optimizer(optimizer: Any, quiet: bool = False) -> OptimizerImage:
    """Return what the device copies from an optimizer.

    For PyTorch's own optimizers a setting that has its default value in every group is compiled in.

    Raises:
        AssertionError: a kind that does not run on an IPU.
        ValueError: Adam with amsgrad.
    """
    if isinstance(optimizer, Optimizer):
        image = optimizer._image()
        known = set(optimizer._group_attributes)
    else:
        image = _read_torch(optimizer)
        known = set(image.groups[0]) if image.groups else set()
    _report_unknown(optimizer, known, quiet)
    return image


def _read_torch(optimizer: Any) -> OptimizerImage:
    for kind, rule, defaults in _TORCH:
        if isinstance(optimizer, kind):
            # AdamW became a subclass of Adam in newer versions of PyTorch, so the order of the table matters.
            if type(optimizer) is not kind:
                logger.warning(
                    "%s is a subclass of %s: the IPU runs the latter's update, not an overridden step().",
                    type(optimizer).__name__,
                    kind.__name__,
                )
            if any(group.get("amsgrad") for group in optimizer.param_groups):
                raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
            if any(group.get("maximize") for group in optimizer.param_groups):
                raise ValueError("maximize=True is not supported on the IPU: negate the loss instead.")
            groups, members = copy_groups(optimizer, ["lr", *defaults])
            for group in groups:
                group["lr"] = float(group["lr"])
            constants = [name for name in defaults if all(group[name] == defaults[name] for group in groups)]
            return OptimizerImage(rule=rule, groups=groups, members=members, constants=constants)
    raise AssertionError(
        f"Unsupported optimizer type {type(optimizer).__name__}. Types supported: SGD, Adam, AdamW, RMSprop of "
        "torch.optim and poptorch.optim, and poptorch.optim.LAMB"
    )


def _report_unknown(optimizer: Any, known: Set[str], quiet: bool) -> None:
    for index, group in enumerate(optimizer.param_groups):
        unknown = sorted(
            set(group) - known - _HOST_ONLY - {"params", "initial_lr", "swa_lr", "param_names", "max_momentum"}
        )
        key = (type(optimizer).__name__, index, tuple(unknown))
        if unknown and key not in _reported:
            _reported.add(key)
            level = logger.debug if quiet else logger.warning
            level(
                "Ignoring unexpected group %d attribute in %s optimizer: %s",
                index,
                type(optimizer).__name__,
                unknown,
            )
