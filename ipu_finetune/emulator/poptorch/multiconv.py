# SPDX-License-Identifier: Apache-2.0
"""`poptorch.MultiConv`: convolutions that an IPU would run together."""

from typing import Any, List, Sequence, Union

import torch

from ..device.errors import Error
from .enums import MultiConvPlanType

__all__ = ["MultiConv"]


class MultiConv:
    """A block whose independent convolutions share the tiles; results are those of running them one by one."""

    _active = False

    def __enter__(self) -> "MultiConv":
        if MultiConv._active:
            raise Error("Nested poptorch.MultiConv is not supported.")
        MultiConv._active = True
        return self

    def __exit__(self, *_: Any) -> None:
        MultiConv._active = False

    def availableMemoryProportions(self, value: Union[float, Sequence[float]]) -> "MultiConv":
        """Set the share of memory for all, or for each, of the convolutions."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or not all(isinstance(item, float) and 0 < item <= 1 for item in values):
            raise AssertionError(f"Invalid memory proportions, expected floats in 0..1, got {value!r}!")
        return self

    def partialsTypes(self, value: Union[torch.dtype, Sequence[torch.dtype]]) -> "MultiConv":
        """Set the dtype of partial sums for all, or for each, of the convolutions."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(item, torch.dtype) for item in values):
            raise AssertionError(f"Invalid partials types: {value!r}!")
        if any(item not in (torch.float, torch.half) for item in values):
            raise ValueError(f"Invalid partials types, expected torch.float or torch.half, got {value!r}")
        return self

    def enableConvDithering(self, value: Union[bool, Sequence[bool]]) -> "MultiConv":
        """Spread the convolutions over the tiles."""
        values: List[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values or not all(isinstance(item, bool) for item in values):
            raise AssertionError(f"Invalid conv dithering, expected bools, got {value!r}!")
        return self

    def planType(self, value: MultiConvPlanType) -> "MultiConv":
        """Choose between parallel and serial execution."""
        if not isinstance(value, MultiConvPlanType):
            raise AssertionError(f"Invalid plan type: {value!r}!")
        return self

    def perConvReservedTiles(self, value: int) -> "MultiConv":
        """Reserve tiles for each convolution."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise AssertionError(f"Invalid number of tiles: {value!r}!")
        return self

    def cycleBackOff(self, value: float) -> "MultiConv":
        """Allow slower plans that use less memory."""
        if not isinstance(value, float) or not 0 <= value <= 1:
            raise AssertionError(f"Invalid cycle back off, expected a float in 0..1, got {value!r}!")
        return self
