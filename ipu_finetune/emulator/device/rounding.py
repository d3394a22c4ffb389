# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of fp32 values to fp16: up or down with the probability that keeps the mean exact."""

import torch

__all__ = ["stochastic_half"]

_SMALLEST_NORMAL = 2.0**-14
_QUANTUM = 2.0**-24  # spacing of fp16 subnormals
_DROPPED = 13  # fp32 has 23 fraction bits, fp16 has 10


def stochastic_half(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return `values` (fp32) rounded to one of their two fp16 neighbours at random.

    A random number below one unit of the last kept place is added to the bits of the magnitude and the rest is cut off;
    below fp16's normal range, where the places are fixed, the same is done on the scaled value.
    """
    noise = torch.randint(0, 1 << _DROPPED, values.shape, generator=generator, dtype=torch.int32)
    bits = (values.contiguous().view(torch.int32) + noise) & ~((1 << _DROPPED) - 1)
    normal = bits.view(torch.float32)
    small = values.abs() < _SMALLEST_NORMAL
    scaled = noise.to(torch.float32).mul_(2.0**-_DROPPED).add_(values / _QUANTUM).floor_().mul_(_QUANTUM)
    # What is not finite has no neighbours and must not be disturbed.
    rounded = torch.where(small, scaled, torch.where(torch.isfinite(values), normal, values))
    return rounded.to(torch.float16)
