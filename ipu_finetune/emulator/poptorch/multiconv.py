# SPDX-License-Identifier: Apache-2.0
"""`poptorch.MultiConv`: convolutions that an IPU would run together."""

import weakref
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..device.errors import Error
from ..device.state import current
from .enums import MultiConvPlanType

__all__ = ["MultiConv"]

#: the traces that are inside a block at this moment, and how many blocks each one has had
_open: "weakref.WeakSet[Any]" = weakref.WeakSet()
_blocks: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)


class _Counter(TorchDispatchMode):
    """Counts the convolutions that run while it is active; a transposed one cannot take part in a multi-convolution.

    Args:
        recorder: of the trace; the nodes of the convolutions get the number of their block as `multi_conv`.
        block: that number.
    """

    def __init__(self, recorder: Any, block: int) -> None:
        super().__init__()
        self._recorder, self._block = recorder, block
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CONVOLUTIONS and not args[6]:
            self.found += 1
            self._recorder.node_of(result).meta["multi_conv"] = self._block
        return result


def _as_list(name: str, value: Any, kind: type) -> List[Any]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values or not all(isinstance(item, kind) for item in values):
        raise AssertionError(f"Invalid {name}! Expected {kind.__name__} or a list of them, got {value!r}")
    return values


class MultiConv:
    """A block whose independent convolutions share the tiles; results are those of running them one by one.

    A setting is one value for all convolutions of the block, or as many values as there are convolutions. Outside of a
    compiled model the block does nothing.

    Raises:
        Error: on leaving a block without convolutions, or with another number of them than a setting has values; on
            entering a block within a block.
    """

    def __init__(self) -> None:
        self._settings: Dict[str, List[Any]] = {}
        self._plan_type: Optional[MultiConvPlanType] = None
        self._reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None
        self._counter: Optional[_Counter] = None

    def __enter__(self) -> "MultiConv":
        recorder = current.recorder
        if recorder is not None:
            if recorder in _open:
                raise Error("Nested poptorch.MultiConv is not supported.")
            _open.add(recorder)
            _blocks[recorder] = _blocks.get(recorder, 0) + 1
            self._counter = _Counter(recorder, _blocks[recorder] - 1)
            self._counter.__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(kind, value, traceback)
        _open.discard(current.recorder)
        if kind is None:
            self._check(counter.found)

    def _check(self, found: int) -> None:
        if found == 0:
            raise Error("Unexpected end_multi_conv: the poptorch.MultiConv block holds no convolution.")
        for name, values in self._settings.items():
            if len(values) not in (1, found):
                raise Error(
                    f"poptorch.MultiConv: {name} has {len(values)} values, but the block holds {found} convolutions; "
                    "give one value, or one for each."
                )

    def _set(self, name: str, values: Optional[List[Any]]) -> "MultiConv":
        self._settings.pop(name, None)
        if values is not None:
            self._settings[name] = values
        return self

    def availableMemoryProportions(self, value: Union[float, Sequence[float], None]) -> "MultiConv":
        """Set the share of memory, in 0..1, for all, or for each, of the convolutions."""
        values = None if value is None else _as_list("available memory proportion", value, float)
        if values is not None and not all(0 <= item <= 1 for item in values):
            raise AssertionError(f"Invalid available memory proportion! Expected floats in 0..1, got {value!r}")
        return self._set("availableMemoryProportions", values)

    def partialsTypes(self, value: Union[torch.dtype, Sequence[torch.dtype]]) -> "MultiConv":
        """Set the dtype of partial sums, torch.float or torch.half, for all, or for each, of the convolutions."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(item in (torch.float, torch.half) for item in values):
            raise ValueError(f"Invalid partials types. Expecting torch.float or torch.half, got {value!r}")
        return self._set("partialsTypes", values)

    def enableConvDithering(self, value: Union[bool, Sequence[bool], None]) -> "MultiConv":
        """Spread all, or each, of the convolutions over the tiles."""
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is not None and not all(isinstance(item, bool) for item in values):
            raise ValueError(f"enableConvDithering: value must be bool or list of bools, got {value!r}")
        return self._set("enableConvDithering", None if value is None else values)

    def planType(self, value: Optional[MultiConvPlanType]) -> "MultiConv":
        """Choose between parallel and serial execution."""
        if value is not None and not isinstance(value, MultiConvPlanType):
            raise AssertionError(f"Invalid plan type! Expected a poptorch.MultiConvPlanType, got {value!r}")
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> "MultiConv":
        """Reserve tiles for each convolution."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise AssertionError(f"Invalid number of reserved tiles! Expected an int of at least 0, got {value!r}")
        self._reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> "MultiConv":
        """Allow slower plans that use less memory; a number in 0..1."""
        if not isinstance(value, float) or not 0 <= value <= 1:
            raise AssertionError(f"Invalid cycle back off! Expected a float in 0..1, got {value!r}")
        self._cycle_back_off = value
        return self
