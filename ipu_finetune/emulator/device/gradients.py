# SPDX-License-Identifier: Apache-2.0
"""Gradients of the micro-batches of one weight update, accumulated on the device.

Each arrives as soon as the backward pass has it, so that no more than one micro-batch's gradient of one parameter is
held beside the sums.
"""

from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch

from .plan import Plan
from .precision import saturate
from .replica_weights import widened
from .settings import settings
from .weights import Weight

__all__ = ["GradientBook", "deliver"]


_LARGEST_HALF = 65504.0


def deliver(book: "GradientBook", name: str, gradient: torch.Tensor, owned: bool) -> None:
    """Hand a micro-batch's gradient to the book; the last node of a parameter in a traced graph."""
    book.add(name, gradient, owned)


class GradientBook:
    """Accumulates until the update.

    Args:
        weights: the parameters that are trained.
        plan: how many micro-batches an update has and how they are reduced.
        accumulator_type: dtype in which gradients are summed.

    Attributes:
        on_delivery: called with the name and the gradient of each micro-batch; for anchored tensors.
    """

    def __init__(self, weights: List[Weight], plan: Plan, accumulator_type: torch.dtype) -> None:
        self._weights = weights
        self._running = plan.running_mean
        self._type = accumulator_type
        several = plan.accumulation * plan.replicas > 1
        # With a single micro-batch there is nothing to accumulate, and a gradient keeps its parameter's type.
        self._staged = several and (plan.running_mean or any(weight.dtype != accumulator_type for weight in weights))
        self._names = {weight.name for weight in weights}
        self._groupings = {weight.name: weight.grouping for weight in weights if weight.grouping is not None}
        self._replicas = plan.replicas
        self._replica = 0
        self._sums: Dict[str, torch.Tensor] = {}
        self._count = 0
        self._overflow = settings().overflow
        self.on_delivery: Optional[Callable[[str, torch.Tensor], None]] = None

    def add(self, name: str, gradient: torch.Tensor, owned: bool) -> None:
        """Add the gradient of one micro-batch.

        Args:
            name: the parameter's.
            gradient: in the parameter's shape.
            owned: whether the book may keep and change the tensor.
        """
        if self.on_delivery is not None:
            self.on_delivery(name, gradient)
        if name not in self._names:
            return
        grouping = self._groupings.get(name)
        if grouping is not None:
            gradient, owned = widened(gradient, grouping, self._replica, self._replicas), True
        total = self._sums.get(name)
        if self._staged:
            share = 1 / (self._count + 1) if self._running else 1.0
            if total is None:
                self._sums[name] = gradient.to(self._type).mul(share)
            else:
                self._add(total, gradient.to(self._type), share)
        elif total is None:
            self._sums[name] = gradient if owned else gradient.clone(memory_format=torch.contiguous_format)
        else:
            self._add(total, gradient, 1.0)

    def _add(self, total: torch.Tensor, gradient: torch.Tensor, share: float) -> None:
        total.add_(gradient, alpha=share)
        if total.dtype == torch.float16:
            saturate(total, self._overflow)

    def micro_batch_begins(self, replica: int = 0) -> None:
        """The gradients that arrive from here on are those of this replica's next micro-batch."""
        self._replica = replica
        if self._running and self._count:
            keep = self._count / (self._count + 1)
            for total in self._sums.values():
                total.mul_(keep)

    def micro_batch_done(self) -> None:
        """The gradients of one more micro-batch have been computed."""
        self._count += 1

    def totals(self) -> Iterator[Tuple[Weight, torch.Tensor]]:
        """Yield the reduced gradient of each parameter that took part; it may be changed in place."""
        for weight in self._weights:
            gradient = self._sums.get(weight.name)
            if gradient is not None:
                yield weight, gradient

    def forget(self, weight: Weight) -> None:
        """Free one gradient."""
        self._sums.pop(weight.name, None)

    def clear(self) -> None:
        """Start the next update from nothing."""
        self._sums.clear()
        self._count = 0

    def all_finite(self) -> bool:
        """Whether no gradient holds a NaN or an infinity."""
        return all(bool(torch.isfinite(gradient).all()) for _, gradient in self.totals())

    def overflowed(self) -> bool:
        """Whether a gradient is not finite, or an fp16 one has reached the end of its range."""
        for _, gradient in self.totals():
            limit = _LARGEST_HALF if gradient.dtype == torch.float16 else float("inf")
            if not bool((gradient.abs() < limit).all()):
                return True
        return False

    def underflow_share(self) -> Optional[float]:
        """Return the share of zeros among the elements of all fp16 parameters' gradients; None if there are none."""
        zeros = elements = 0
        for weight, gradient in self.totals():
            if weight.dtype == torch.float16:
                elements += gradient.numel()
                zeros += gradient.numel() - int(torch.count_nonzero(gradient))
        return zeros / elements if elements else None
