# SPDX-License-Identifier: Apache-2.0
"""Slices whose start is a tensor: their size is a constant, so the shapes stay static."""

from typing import Any

import torch

from ..device.errors import Error
from ..device.state import current

__all__ = ["dynamic_slice", "dynamic_update"]

Tensor = torch.Tensor


def _check(function: str, tensor: Any, dim: Any, start: Any, size: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"{function} must take a torch.tensor input. {type(tensor).__name__} is not supported.")
    if not isinstance(dim, int):
        raise Error(f"{function}: Dimension must be an integer, got {dim!r}.")
    if not -tensor.dim() <= dim < tensor.dim():
        raise Error(f"{function}: dimension {dim} is out of range for a tensor with {tensor.dim()} dimensions")
    if not isinstance(start, torch.Tensor):
        raise Error(
            f"Slice start argument to {function} must be a torch.tensor. {type(start).__name__} is not supported."
        )
    if start.numel() != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise Error(
            f"{function}: start must be an integer typed tensor with one element, got {start.dtype} of shape "
            f"{tuple(start.shape)}"
        )
    if not isinstance(size, int):
        raise Error(f"{function}: Size must be an integer, got {size!r}.")
    if size == 0:
        raise Error("The start and end of a slice must be different.")
    if size < 0:
        raise Error(f"Taking a slice of a tensor with the end less than the start is not supported (size {size}).")
    if size > tensor.shape[dim]:
        raise Error(f"{function}: size {size} is above the dimension's {tensor.shape[dim]}")
    return dim % tensor.dim()


def _device_type(tensor: Tensor) -> torch.dtype:
    """Return a tensor's type where the code runs: an IPU has no 64-bit numbers."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    return narrow.get(tensor.dtype, tensor.dtype) if current.running else tensor.dtype


def _positions(start: Tensor, size: int, step: int, length: int) -> Tensor:
    """Return the indices of a slice; as on an IPU, one that leaves the dimension goes on at its beginning."""
    return (start.reshape(()).to(torch.int64) + torch.arange(0, size, step)) % length


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Tensor:
    """Return every `step`-th of `size` rows along `dim` from a start that is only known when the model runs.

    Args:
        tensor: what is sliced.
        dim: the dimension.
        start: an integer tensor with one element.
        size: a constant; in a compiled model it must divide the dimension.
        step: a constant.

    Raises:
        Error: an argument of the wrong kind or size.
    """
    dim = _check("dynamic_slice", tensor, dim, start, size)
    if not isinstance(step, int):
        raise Error(f"dynamic_slice: Step must be an integer, got {step!r}.")
    if step < 1:
        raise Error(f"Slicing step must be at least 1, got {step}")
    length = tensor.shape[dim]
    if current.running and length % size:
        raise Error(f"The size of the slice ({size}) must be a factor of the slicing dimension ({length}).")
    return torch.index_select(tensor, dim, _positions(start, size, step, length))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Return `input` with `size` rows along `dim` replaced by `src`, from a start that is only known at run time.

    Args:
        input: the tensor, which is not changed.
        src: same type and rank; `size` rows along `dim`, elsewhere the shape of `input`.
        dim: the dimension.
        start: an integer tensor with one element.
        size: a constant.

    Raises:
        Error: an argument of the wrong kind or size.
    """
    dim = _check("dynamic_update", input, dim, start, size)
    if not isinstance(src, torch.Tensor):
        raise Error(f"Src argument to dynamic_update must be a torch.tensor. {type(src).__name__} is not supported.")
    if input.dim() != src.dim():
        raise Error(
            f"dynamic_update: input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    kinds = _device_type(input), _device_type(src)
    if kinds[0] != kinds[1]:
        raise Error(f"dynamic_update: input and src tensor must have same dtype. ({kinds[0]} vs {kinds[1]})")
    wanted = list(input.shape)
    wanted[dim] = size
    if list(src.shape) != wanted:
        raise Error(f"dynamic_update: src must have the shape {tuple(wanted)}, got {tuple(src.shape)}")
    rows = _positions(start, size, 1, input.shape[dim])
    updated = torch.index_put(input.movedim(dim, 0), (rows,), src.to(input.dtype).movedim(dim, 0))
    return updated.movedim(0, dim)
