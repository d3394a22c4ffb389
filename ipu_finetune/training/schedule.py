# SPDX-License-Identifier: Apache-2.0
"""The learning rate as a function of the number of weight updates made so far."""

import math
from typing import Callable

__all__ = ["learning_rate_schedule"]


def learning_rate_schedule(name: str, peak: float, updates: int, warmup_ratio: float) -> Callable[[int], float]:
    """Return the learning rate of update number `i` (from 0) of `updates` planned ones.

    The shapes are those of `transformers.get_scheduler`: a linear rise over ``ceil(updates × warmup_ratio)`` updates,
    then ``linear`` decay to 0, half a ``cosine``, or ``constant``.
    """
    warmup = math.ceil(updates * warmup_ratio)

    def rate(update: int) -> float:
        if update < warmup:
            return peak * update / max(1, warmup)
        if name == "constant":
            return peak
        left = max(1, updates - warmup)
        if name == "linear":
            return peak * max(0.0, (updates - update) / left)
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * (update - warmup) / left)))

    return rate
