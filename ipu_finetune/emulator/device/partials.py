# SPDX-License-Identifier: Apache-2.0
"""Matrix products and convolutions whose partial sums are fp16.

An IPU's matrix unit adds up a block of fp16 channels at a time; with half partials the running sum is rounded to fp16
after each block. Products and sums within one block are exact to fp32 here. The size of the block is this emulator's
choice (16); it decides how much precision is lost, not where.
"""

from typing import Any, Callable, Dict, Optional

import torch

__all__ = ["CHANNELS", "with_half_partials"]

_aten = torch.ops.aten

#: input channels that are added up before the sum is rounded
CHANNELS = 16


def _add_up(parts: Any) -> torch.Tensor:
    total = None
    for part in parts:
        total = part.half() if total is None else (total.float() + part).half()
    assert total is not None
    return total


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    pieces = zip(left.float().split(CHANNELS, dim=-1), right.float().split(CHANNELS, dim=-2))
    return _add_up(torch.matmul(a, b) for a, b in pieces)


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    return (beta * bias.float() + alpha * _mm(left, right).float()).half()


def _convolution(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> torch.Tensor:
    rest = (stride, padding, dilation, transposed, output_padding)
    if groups > 1 or transposed:
        # Groups have few channels each: their sums fit one step, or the whole is rounded once.
        result = _aten.convolution.default(values.float(), weight.float(), None, *rest, groups).half()
    else:
        pieces = zip(values.float().split(CHANNELS, dim=1), weight.float().split(CHANNELS, dim=1))
        result = _add_up(_aten.convolution.default(a, b, None, *rest, 1) for a, b in pieces)
    if bias is None:
        return result
    return (result.float() + bias.float().reshape(-1, *[1] * (result.dim() - 2))).half()


_REPLACED: Dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _addmm,
    _aten.convolution.default: _convolution,
}


def with_half_partials(function: Any) -> Optional[Callable[..., torch.Tensor]]:
    """Return the operator with fp16 partial sums, or None where it has no sums."""
    return _REPLACED.get(function)
