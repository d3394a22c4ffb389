# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, fixed and automatic.

The backward pass starts from the loss scale instead of one, so that small fp16 gradients do not round to zero;
gradients are multiplied by its reciprocal in fp32 before clipping and the optimizer see them. The automatic scale
starts at 65536 unless the optimizer names another one, halves when a gradient is not finite (that update is skipped),
doubles at once when every fp16 gradient is zero, and doubles after 2000 clean updates.
"""

import logging
from typing import Optional

import torch

__all__ = ["GROWTH_INTERVAL", "LossScale"]

_logger = logging.getLogger("ipu_finetune.emulator")

GROWTH_INTERVAL = 2000
_START = 65536.0
_LARGEST = 2.0**24


class LossScale:
    """The scale in force.

    Args:
        base: `loss_scaling` of the optimizer.
        automatic: `Options.Training.setAutomaticLossScaling`.

    Attributes:
        factor: what the automatic rule multiplies `base` with; stored as `lossScaleUpdateFactor`.
        clean_updates: updates since the factor last changed.
    """

    def __init__(self, base: float, automatic: bool) -> None:
        self.base = float(base)
        self.automatic = automatic
        self.factor = _START / self.base if automatic and self.base == 1.0 else 1.0
        self.clean_updates = 0
        self._limited = False

    @property
    def value(self) -> float:
        """The scale that the backward pass starts from."""
        return self.base * self.factor

    def fit(self, loss: torch.Tensor) -> None:
        """Lower a scale that the loss's type cannot hold: to the largest power of two that fp16 has."""
        if loss.dtype != torch.float16 or self.value <= 32768.0:
            return
        if not self._limited:
            _logger.warning(
                "A loss scale of %g does not fit an fp16 loss; 32768 is used. Compute the loss in fp32 to use it.",
                self.value,
            )
            self._limited = True
        self.factor = 32768.0 / self.base

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the loss with respect to itself, in the loss's dtype; the scale must `fit` it."""
        self.fit(loss)
        return torch.full_like(loss, self.value)

    def overflowed(self) -> None:
        """A gradient was not finite."""
        self.factor *= 0.5
        self.clean_updates = 0

    def finished(self, underflow_share: Optional[float]) -> None:
        """An update went through."""
        if not self.automatic:
            return
        self.clean_updates += 1
        if underflow_share == 1.0 or self.clean_updates >= GROWTH_INTERVAL:
            self.clean_updates = 0
            if not self._limited and self.value < _LARGEST:
                self.factor *= 2.0
