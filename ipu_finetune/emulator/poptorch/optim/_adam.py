# SPDX-License-Identifier: Apache-2.0
"""The optimizers with two moments: Adam, AdamW and LAMB, with PopTorch's arguments."""

from typing import Any, ClassVar, Dict, Iterable, List, Optional, Tuple

import torch

from ._base import MOMENTUM_TYPES, Optimizer, given

__all__ = ["LAMB", "Adam", "AdamW"]


def _refuse_amsgrad(amsgrad: Optional[bool]) -> None:
    if amsgrad:
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


class _AdamBase(Optimizer):
    _group_attributes: ClassVar[List[str]] = ["lr", "betas", "eps", "weight_decay"]
    _type_attributes: ClassVar[Dict[str, str]] = MOMENTUM_TYPES

    # amsgrad is refused where it is on, but PopTorch lets it be marked like any other setting.
    _further_attributes: ClassVar[Tuple[str, ...]] = ("amsgrad",)

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
            "accum_type": accum_type,
            "first_order_momentum_accum_type": first_order,
            "second_order_momentum_accum_type": second_order,
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
            lr=given(lr, 1e-3),
            betas=given(betas, (0.9, 0.999)),
            eps=given(eps, 1e-8),
            weight_decay=given(weight_decay, 0.0),
        )
        self._configure_adam(
            {
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "max_grad_norm": max_grad_norm,
            },
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
            lr=given(lr, 1e-3),
            betas=given(betas, (0.9, 0.999)),
            eps=given(eps, 1e-8),
            weight_decay=given(weight_decay, 0.01),
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)
        self._configure_adam(
            {
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "max_grad_norm": max_grad_norm,
            },
            loss_scaling,
            max_grad_norm,
            accum_type,
            first_order_momentum_accum_type,
            second_order_momentum_accum_type,
        )

    def step(self, closure: Any = None) -> Any:
        """Update the weights on the host; an IPU never calls this."""
        if all(group.get("bias_correction", True) for group in self.param_groups):
            return super().step(closure)
        return self._host_step(closure)


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
    _type_attributes: ClassVar[Dict[str, str]] = MOMENTUM_TYPES

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
            "lr": given(lr, 1e-3),
            "betas": given(betas, (0.9, 0.999)),
            "eps": given(eps, 1e-8),
            "weight_decay": given(weight_decay, 0.01),
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._configure(
            {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_weight_norm": max_weight_norm},
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
        return self._host_step(closure)
