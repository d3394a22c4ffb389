# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam, AdamW, RMSprop and LAMB with PopTorch's arguments."""

from typing import Any, ClassVar, Iterable, List, Optional, Tuple

import torch

from ._base import Optimizer

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "RMSprop"]


def _refuse_amsgrad(amsgrad: Optional[bool]) -> None:
    if amsgrad:
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


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
        velocity_scaling: accepted; no effect on results.
        use_combined_accum: accumulate into the velocity; no effect on results.
        accum_type: dtype of the gradient accumulator.
        velocity_accum_type: dtype of the velocity.
        max_grad_norm: clip gradients to this global norm.
    """

    _rule = "sgd"
    _group_attributes: ClassVar[List[str]] = ["lr", "momentum", "dampening", "weight_decay", "nesterov"]

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
            momentum=_or(momentum, 0.0),
            dampening=_or(dampening, 0.0),
            weight_decay=_or(weight_decay, 0.0),
            nesterov=_or(nesterov, False),
        )
        self.velocity_scaling = velocity_scaling
        self.use_combined_accum = use_combined_accum
        chosen = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "max_grad_norm": max_grad_norm,
        }
        if use_combined_accum and (accum_type is not None or velocity_accum_type is not None):
            raise AssertionError("accum_type and velocity_accum_type are only available with use_combined_accum=False")
        self._configure(
            chosen,
            loss_scaling,
            max_grad_norm,
            {"gradient": _or(accum_type, torch.float32), "first": _or(velocity_accum_type, torch.float32)},
        )


class _AdamBase(Optimizer):
    _group_attributes: ClassVar[List[str]] = ["lr", "betas", "eps", "weight_decay"]

    def _configure_adam(
        self,
        chosen: Any,
        loss_scaling: Optional[float],
        max_grad_norm: Optional[float],
        accum_type: Optional[torch.dtype],
        first_order: Optional[torch.dtype],
        second_order: Optional[torch.dtype],
    ) -> None:
        types = {
            "gradient": _or(accum_type, torch.float32),
            "first": _or(first_order, torch.float32),
            "second": _or(second_order, torch.float32),
        }
        self._configure(chosen, loss_scaling, max_grad_norm, types)


class Adam(_AdamBase, torch.optim.Adam):
    """Adam; weight decay is added to the gradient. Arguments as AdamW's."""

    _rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(
            params,
            lr=_or(lr, 1e-3),
            betas=_or(betas, (0.9, 0.999)),
            eps=_or(eps, 1e-8),
            weight_decay=_or(weight_decay, 0.0),
        )
        self._configure_adam(
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm},
            loss_scaling,
            max_grad_norm,
            accum_type,
            first_order_momentum_accum_type,
            second_order_momentum_accum_type,
        )


class AdamW(_AdamBase, torch.optim.AdamW):
    """AdamW.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor, times the learning rate, by which weights shrink.
        bias_correction: correct the moments for their start at zero.
        loss_scaling: factor on the loss, taken out again before the update.
        accum_type: dtype of the gradient accumulator.
        first_order_momentum_accum_type: dtype of the first moment.
        second_order_momentum_accum_type: dtype of the second moment.
        max_grad_norm: clip gradients to this global norm.
    """

    _rule = "adamw"
    _group_attributes: ClassVar[List[str]] = [*_AdamBase._group_attributes, "bias_correction"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: bool = True,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        super().__init__(
            params,
            lr=_or(lr, 1e-3),
            betas=_or(betas, (0.9, 0.999)),
            eps=_or(eps, 1e-8),
            weight_decay=_or(weight_decay, 0.01),
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self._configure_adam(
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm},
            loss_scaling,
            max_grad_norm,
            accum_type,
            first_order_momentum_accum_type,
            second_order_momentum_accum_type,
        )


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
        first_order_momentum_accum_type: dtype of the mean gradient.
        second_order_momentum_accum_type: dtype of the mean square.
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
            lr=_or(lr, 1e-2),
            alpha=_or(alpha, 0.99),
            eps=_or(eps, 1e-8),
            weight_decay=_or(weight_decay, 0.0),
            momentum=_or(momentum, 0.0),
            centered=_or(centered, False),
        )
        self.defaults["use_tf_variant"] = bool(use_tf_variant)
        for group in self.param_groups:
            group.setdefault("use_tf_variant", bool(use_tf_variant))
        self._configure(
            {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum},
            loss_scaling,
            None,
            {
                "gradient": _or(accum_type, torch.float32),
                "first": _or(first_order_momentum_accum_type, torch.float32),
                "second": _or(second_order_momentum_accum_type, torch.float32),
            },
        )


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB: Adam's direction, scaled per parameter by the ratio of the weight's norm to the direction's.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: share of the weight in the direction.
        bias_correction: correct the moments for their start at zero.
        loss_scaling: factor on the loss, taken out again before the update.
        max_weight_norm: the weight's norm counts up to this value; None is 65500, 0 leaves Adam's direction as it is.
        accum_type: dtype of the gradient accumulator.
        first_order_momentum_accum_type: dtype of the first moment.
        second_order_momentum_accum_type: dtype of the second moment.
    """

    _rule = "lamb"
    _group_attributes: ClassVar[List[str]] = [
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "bias_correction",
        "max_weight_norm",
    ]

    def __init__(
        self,
        params: Iterable[Any],
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        bias_correction: bool = True,
        loss_scaling: Optional[float] = None,
        max_weight_norm: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
    ) -> None:
        defaults = {
            "lr": _or(lr, 1e-3),
            "betas": _or(betas, (0.9, 0.999)),
            "eps": _or(eps, 1e-8),
            "weight_decay": _or(weight_decay, 0.01),
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._configure(
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_weight_norm": max_weight_norm},
            loss_scaling,
            None,
            {
                "gradient": _or(accum_type, torch.float32),
                "first": _or(first_order_momentum_accum_type, torch.float32),
                "second": _or(second_order_momentum_accum_type, torch.float32),
            },
        )

    def step(self, closure: Any = None) -> Any:
        """Never runs on an IPU: the device updates the weights.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("poptorch.optim.LAMB only runs inside a poptorch.trainingModel; step() is not for the host")
