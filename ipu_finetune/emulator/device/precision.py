# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the device where it differs from PyTorch's on the CPU.

Operators of a traced graph are called through one of the functions of this module where that is needed, and directly
where it is not: with fp32 throughout and no checks nothing is wrapped.
"""

import dataclasses
import enum
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from .errors import Error
from .graph import is_view, mutated_arguments
from .partials import with_half_partials

__all__ = ["Arithmetic", "Overflow", "function_for", "saturate"]

_aten = torch.ops.aten
_LARGEST = 65504.0


class Overflow(enum.Enum):
    """What an fp16 result beyond 65504 becomes."""

    IEEE = "ieee"
    """Infinity, as PyTorch has it."""
    CLIP = "clip"
    """The largest finite number with the same sign."""
    NAN = "nan"
    """Not a number: Poplar's "NaN on overflow"."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a graph's operators compute.

    Attributes:
        half_partials: matrix products and convolutions of fp16 values add up in fp16 rather than in fp32.
        overflow: what becomes of fp16 results that are too large.
        exceptions: raise where a result is not finite although the arguments are.
    """

    half_partials: bool = False
    overflow: Overflow = Overflow.IEEE
    exceptions: bool = False


def function_for(node: fx.Node, arithmetic: Arithmetic) -> Callable[..., Any]:
    """Return what computes a node."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_view(target):
        return target
    function: Callable[..., Any] = _TOLERANT.get(target, target)
    if _touches_half(node):
        if arithmetic.half_partials:
            function = with_half_partials(target) or function
        if function is target:
            function = _Rounding(target, node)
        if arithmetic.overflow is not Overflow.IEEE and _makes_half(node):
            function = _limit(function, arithmetic.overflow)
    if arithmetic.exceptions:
        function = _Checked(function, node)
    return function


def _scatter_add(values: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _scatter_add_(values.clone(), dim, index, source)


def _scatter_add_(values: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    # Poplar's multi-update leaves out an index that lies beyond the tensor, where PyTorch's kernel raises.
    inside = (index >= 0) & (index < values.shape[dim])
    picked = source[tuple(slice(0, size) for size in index.shape)]
    return values.scatter_add_(dim, torch.where(inside, index, 0), torch.where(inside, picked, 0))


_TOLERANT: Dict[Any, Callable[..., Any]] = {
    _aten.scatter_add.default: _scatter_add,
    _aten.scatter_add_.default: _scatter_add_,
}


def _values(node: fx.Node) -> List[torch.Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _makes_half(node: fx.Node) -> bool:
    return any(value.dtype == torch.float16 for value in _values(node))


def _touches_half(node: fx.Node) -> bool:
    return _makes_half(node) or any(_makes_half(used) for used in node.all_input_nodes)


# What kernels say that do not take fp16, or not together with fp32.
_NO_HALF = ("not implemented for", "Could not run", "expected scalar type", "mixed dtype")


class _Rounding:
    """Computes in fp32 and rounds where this CPU's kernel does not take fp16."""

    def __init__(self, function: Any, node: fx.Node) -> None:
        self._function = function
        self._types = tree_map(lambda v: v.dtype if isinstance(v, torch.Tensor) else None, node.meta.get("val"))
        self._native = True
        self.__name__ = str(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._native:
            try:
                return self._function(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if not any(text in str(error) for text in _NO_HALF):
                    raise
                self._native = False
        return self._rounded(args, kwargs)

    def _rounded(self, args: Any, kwargs: Any) -> Any:
        wide: List[Any] = []

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
                wide.append((value, value.float()))
                return wide[-1][1]
            return torch.float32 if value is torch.float16 else value

        wide_args, wide_kwargs = tree_map(widen, (args, kwargs))
        result = self._function(*wide_args, **wide_kwargs)
        written = mutated_arguments(self._function, wide_args, wide_kwargs)
        for narrow, value in wide:
            if any(value is each for each in written):
                narrow.copy_(value)
                if result is value:
                    return narrow
        if isinstance(result, torch.Tensor):
            return result.to(self._types) if self._types is not None else result
        kind = type(result)
        return kind(
            item.to(dtype) if isinstance(item, torch.Tensor) and dtype is not None else item
            for item, dtype in zip(result, self._types)
        )


def saturate(value: torch.Tensor, overflow: Overflow) -> torch.Tensor:
    """Turn infinities of an fp16 tensor, in place, into what the device makes of an overflow."""
    if overflow is Overflow.CLIP:
        return value.clamp_(-_LARGEST, _LARGEST)
    return value if overflow is Overflow.IEEE else value.masked_fill_(torch.isinf(value), float("nan"))


def _limit(function: Callable[..., Any], overflow: Overflow) -> Callable[..., Any]:
    def narrow(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            return saturate(value, overflow)
        return value

    def limited(*args: Any, **kwargs: Any) -> Any:
        return tree_map(narrow, function(*args, **kwargs))

    return limited


# Making a constant that is not finite (a mask of -inf) is no floating-point operation.
_NO_ARITHMETIC = ("full", "fill", "scalar_tensor", "empty", "_to_copy", "copy", "clone", "masked_fill", "where")
_COMPARISONS = ("lt", "le", "gt", "ge", "max", "min", "amax", "amin", "argmax", "argmin", "maximum", "minimum")


class _Checked:
    """Raises where an operator makes something out of finite values that is not finite."""

    def __init__(self, function: Callable[..., Any], node: fx.Node) -> None:
        self._function = function
        self._name = str(node.target)
        self._module = node.meta.get("module", "")
        base = node.target._schema.name.split("::")[1].rstrip("_")  # type: ignore[union-attr]
        self._arithmetic = base not in _NO_ARITHMETIC
        self._compares = base in _COMPARISONS
        self.__name__ = self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._arithmetic:
            return self._function(*args, **kwargs)
        before = _seen(args, kwargs)
        result = self._function(*args, **kwargs)
        if self._compares and before[0]:
            self._raise("a comparison with NaN", "invalid operation")
        after = _seen(result, None)
        if after[0] and not before[0]:
            self._raise("the result holds NaN", "invalid operation, such as 0 * inf, 0 / 0 or the root of a negative")
        if after[1] and not before[1]:
            self._raise("the result holds an infinity", "division by zero or overflow")
        return result

    def _raise(self, what: str, why: str) -> None:
        where = f" in module '{self._module}'" if self._module else ""
        raise Error(
            f"Floating point exception: {self._name}{where}: {what} ({why}). "
            "Precision.enableFloatingPointExceptions is on."
        )


def _seen(values: Any, more: Optional[Any]) -> Any:
    """Return whether there is a NaN, and whether there is an infinity."""
    nan = infinite = False
    for leaf in tree_leaves((values, more)):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                nan = nan or bool(torch.isnan(leaf).any())
                infinite = infinite or bool(torch.isinf(leaf).any())
        elif isinstance(leaf, float) and not (-float("inf") < leaf < float("inf")):
            nan, infinite = nan or leaf != leaf, infinite or leaf == leaf
    return nan, infinite
