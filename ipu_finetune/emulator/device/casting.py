# SPDX-License-Identifier: Apache-2.0
"""Mixed float types where PyTorch's CPU kernels refuse them and PopTorch casts.

Element-wise operators follow PyTorch's own promotion. Matrix products and convolutions do not promote: there the
weights are cast to the type of the activations (first tensor), so fp16 activations with fp32 weights give fp16, and
fp32 activations with fp16 weights give fp32.
"""

from typing import Any, Dict, Tuple

import torch

__all__ = ["cast_parameters", "common_type"]

_aten = torch.ops.aten

# operator -> the argument that decides, and those that follow it
_RULES: Dict[Any, Tuple[int, Tuple[int, ...]]] = {
    _aten.mm.default: (0, (1,)),
    _aten.bmm.default: (0, (1,)),
    _aten.mv.default: (0, (1,)),
    _aten.dot.default: (0, (1,)),
    _aten.addmm.default: (1, (0, 2)),
    _aten.addmv.default: (1, (0, 2)),
    _aten.baddbmm.default: (1, (0, 2)),
    _aten.convolution.default: (0, (1, 2)),
    _aten.convolution_backward.default: (1, (0, 2)),
    _aten.native_layer_norm.default: (0, (2, 3)),
    _aten.native_layer_norm_backward.default: (1, (0, 5, 6)),
    _aten.native_group_norm.default: (0, (1, 2)),
}


def common_type(function: Any, args: Tuple[Any, ...]) -> Dict[int, torch.dtype]:
    """Return which arguments must be cast before the operator can run, and to what."""
    rule = _RULES.get(function)
    if rule is None:
        return {}
    leader, followers = rule
    dtype = args[leader].dtype
    if not dtype.is_floating_point:
        return {}
    casts = {}
    for index in followers:
        value = args[index] if index < len(args) else None
        if isinstance(value, torch.Tensor) and value.dtype != dtype and value.dtype.is_floating_point:
            casts[index] = dtype
    return casts


def cast_parameters(name: str, args: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Return the arguments of a convolution function with weight and bias in the input's type.

    PyTorch compares the types before any operator that could be recorded.
    """
    if not name.startswith("conv") or len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return args
    dtype = args[0].dtype
    if not dtype.is_floating_point:
        return args
    cast = [
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in args[1:3]
    ]
    return (args[0], *cast, *args[3:])
