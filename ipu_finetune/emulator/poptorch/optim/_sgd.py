# SPDX-License-Identifier: Apache-2.0
"""SGD and RMSprop with PopTorch's arguments."""

from typing import Any, ClassVar, Dict, Iterable, List, Optional, Tuple

import torch

from ...device.optimizer_settings import OptimizerImage
from ._base import MOMENTUM_TYPES, Optimizer, given

__all__ = ["SGD", "RMSprop"]


class SGD(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: factor of the velocity.
        dampening: share of the gradient that does not enter the velocity.
        weight_decay: factor of the weight in its gradient.
        nesterov: look ahead along the velocity.
        maximize: must be False.
        loss_scaling: factor on the loss, taken out again before the update.
        velocity_scaling: factor that a combined accumulator is stored with; no effect on fp32 results.
        use_combined_accum: accumulate into the velocity; no effect on results.
        accum_type: dtype of the gradient accumulator.
        velocity_accum_type: dtype of the velocity.
        max_grad_norm: clip gradients to this global norm.
    """

    _rule = "sgd"
    _group_attributes: ClassVar[List[str]] = ["lr", "momentum", "dampening", "weight_decay", "nesterov"]
    _type_attributes: ClassVar[Dict[str, str]] = {"accum_type": "gradient", "velocity_accum_type": "first"}
    _own_attributes: ClassVar[Tuple[str, ...]] = (*Optimizer._own_attributes, "velocity_scaling", "use_combined_accum")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: bool = False,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        if maximize or differentiable:
            raise ValueError("maximize and differentiable are not supported on the IPU")
        super().__init__(
            params,
            lr,
            momentum=given(momentum, 0.0),
            dampening=given(dampening, 0.0),
            weight_decay=given(weight_decay, 0.0),
            nesterov=given(nesterov, False),
        )
        self.velocity_scaling = velocity_scaling
        self.use_combined_accum = use_combined_accum
        if use_combined_accum:
            for group in self.param_groups:
                group.setdefault("velocity_scaling", velocity_scaling)
        chosen = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "max_grad_norm": max_grad_norm,
        }
        if use_combined_accum and velocity_accum_type is not None:
            raise AssertionError("velocity_accum_type is only available with use_combined_accum=False")
        self._configure(
            chosen,
            loss_scaling,
            max_grad_norm,
            {"accum_type": accum_type, "velocity_accum_type": velocity_accum_type},
        )

    def _image(self) -> OptimizerImage:
        image = super()._image()
        image.combined, image.velocity_scaling = self.use_combined_accum, self.velocity_scaling
        if self.use_combined_accum:
            for copy, group in zip(image.groups, self.param_groups):
                copy["velocity_scaling"] = group.get("velocity_scaling", self.velocity_scaling)
        return image


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        alpha: decay of the mean square.
        eps: added to its root.
        weight_decay: factor of the weight in its gradient.
        momentum: factor of the velocity.
        centered: subtract the squared mean gradient.
        loss_scaling: factor on the loss, taken out again before the update.
        accum_type: dtype of the gradient accumulator.
        first_order_momentum_accum_type: dtype of the mean square.
        second_order_momentum_accum_type: dtype of the mean gradient.
        use_tf_variant: epsilon in the root, mean square from one, learning rate within the velocity.
    """

    _rule = "rmsprop"
    _group_attributes: ClassVar[List[str]] = [
        "lr",
        "alpha",
        "eps",
        "weight_decay",
        "momentum",
        "centered",
        "use_tf_variant",
    ]
    _type_attributes: ClassVar[Dict[str, str]] = MOMENTUM_TYPES

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        super().__init__(
            params,
            lr=given(lr, 1e-2),
            alpha=given(alpha, 0.99),
            eps=given(eps, 1e-8),
            weight_decay=given(weight_decay, 0.0),
            momentum=given(momentum, 0.0),
            centered=given(centered, False),
        )
        self.defaults["use_tf_variant"] = bool(use_tf_variant)
        for group in self.param_groups:
            group.setdefault("use_tf_variant", bool(use_tf_variant))
        self._configure(
            {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum},
            loss_scaling,
            None,
            {
                "accum_type": accum_type,
                "first_order_momentum_accum_type": first_order_momentum_accum_type,
                "second_order_momentum_accum_type": second_order_momentum_accum_type,
            },
        )

    def step(self, closure: Any = None) -> Any:
        """Update the weights on the host; an IPU never calls this."""
        if not any(group["use_tf_variant"] for group in self.param_groups):
            return super().step(closure)
        return self._host_step(closure)
