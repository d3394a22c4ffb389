# SPDX-License-Identifier: Apache-2.0
"""Gradients of the micro-batches of one weight update, accumulated on the device.

In the common case autograd adds straight into the parameter's gradient. Only where the accumulator has another dtype
than the parameter, or keeps a running mean, is a micro-batch's gradient taken out and added by hand.
"""

from typing import Dict, Iterator, List, Optional, Tuple

import torch

from .plan import Plan
from .weights import Weight

__all__ = ["GradientBook"]


class GradientBook:
    """Accumulates until the update.

    Args:
        weights: the parameters that are trained.
        plan: how many micro-batches an update has and how they are reduced.
        accumulator_type: dtype in which gradients are summed.
    """

    def __init__(self, weights: List[Weight], plan: Plan, accumulator_type: torch.dtype) -> None:
        self._weights = weights
        self._running = plan.running_mean
        self._type = accumulator_type
        several = plan.accumulation * plan.replicas > 1
        self._staged = several and (
            plan.running_mean or any(weight.tensor.dtype != accumulator_type for weight in weights)
        )
        self._sums: Dict[str, torch.Tensor] = {}
        self._count = 0

    def micro_batch_done(self) -> None:
        """The gradients of one more micro-batch have been computed."""
        if not self._staged:
            return
        count, self._count = self._count, self._count + 1
        keep, add = (count / (count + 1), 1 / (count + 1)) if self._running else (1.0, 1.0)
        for weight in self._weights:
            gradient, weight.tensor.grad = weight.tensor.grad, None
            total = self._sums.get(weight.name)
            if total is not None and keep != 1.0:
                total.mul_(keep)
            if gradient is None:
                continue
            if total is None:
                self._sums[weight.name] = _dense(gradient).to(self._type).mul(add)
            else:
                total.add_(_dense(gradient).to(self._type), alpha=add)

    def totals(self) -> Iterator[Tuple[Weight, torch.Tensor]]:
        """Yield the reduced gradient of each parameter that took part; it may be changed in place."""
        for weight in self._weights:
            gradient = self._sums.get(weight.name) if self._staged else weight.tensor.grad
            if gradient is not None and gradient.is_sparse:
                # Kept, so that what is changed in place from here on is the gradient itself.
                weight.tensor.grad = gradient = gradient.to_dense()
            if gradient is not None:
                yield weight, gradient

    def forget(self, weight: Weight) -> None:
        """Free one gradient."""
        weight.tensor.grad = None
        self._sums.pop(weight.name, None)

    def clear(self) -> None:
        """Start the next update from nothing."""
        for weight in self._weights:
            weight.tensor.grad = None
        self._sums.clear()
        self._count = 0

    def all_finite(self) -> bool:
        """Whether no gradient holds a NaN or an infinity."""
        return all(bool(torch.isfinite(gradient).all()) for _, gradient in self.totals())

    def underflow_share(self) -> Optional[float]:
        """Return the share of zeros among the elements of all fp16 parameters' gradients; None if there are none."""
        zeros = elements = 0
        for weight, gradient in self.totals():
            if weight.tensor.dtype == torch.float16:
                elements += gradient.numel()
                zeros += gradient.numel() - int(torch.count_nonzero(gradient))
        return zeros / elements if elements else None


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
