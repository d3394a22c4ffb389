# SPDX-License-Identifier: Apache-2.0
"""Nested arguments and results: the tensors inside them, in order, and the way back.

Lists, tuples, named tuples, dictionaries and their subclasses (a Transformers `ModelOutput` is one) are opened;
anything else is a constant, unless a parser was registered for its type.
"""

import copy
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import torch

__all__ = ["Leaf", "custom_parsers", "describe", "leaves", "rebuild"]

#: type -> object with `yieldTensors(value)` and `reconstruct(original, iterator)`
custom_parsers: Dict[type, Any] = {}

Leaf = Tuple[str, Any]  # (path, tensor or constant)


def _parser_for(value: Any) -> Any:
    for kind in type(value).__mro__:
        if kind in custom_parsers:
            return custom_parsers[kind]
    return None


def leaves(value: Any, path: str = "") -> Iterator[Leaf]:
    """Yield (path, leaf) depth first; every tensor is a leaf and so is every constant."""
    parser = _parser_for(value) if custom_parsers else None
    if isinstance(value, torch.Tensor):
        yield path, value
    elif parser is not None:
        for index, tensor in enumerate(parser.yieldTensors(value)):
            yield f"{path}[{index}]", tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` whose tensors, visited in the order of `leaves`, are replaced by `replace(tensor)`."""
    parser = _parser_for(value) if custom_parsers else None
    if isinstance(value, torch.Tensor):
        return replace(value)
    if parser is not None:
        return parser.reconstruct(value, iter([replace(tensor) for tensor in parser.yieldTensors(value)]))
    if isinstance(value, Mapping):
        items = {key: rebuild(item, replace) for key, item in value.items()}
        if type(value) is dict:
            return items
        if dataclasses.is_dataclass(value):
            return type(value)(**items)
        clone = copy.copy(value)
        for key, item in items.items():
            clone[key] = item  # type: ignore[index]
        return clone
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[rebuild(item, replace) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)(rebuild(item, replace) for item in value)
    return value


def describe(value: Any) -> Any:
    """Return what must stay the same between calls: types, keys and lengths, with tensors and constants as leaves."""
    parser = _parser_for(value) if custom_parsers else None
    if isinstance(value, torch.Tensor):
        return "tensor"
    if parser is not None:
        return (type(value).__name__, len(list(parser.yieldTensors(value))))
    if isinstance(value, Mapping):
        return (type(value).__name__, {key: describe(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        parts: List[Any] = [describe(item) for item in value]
        return (type(value).__name__, parts)
    return "constant"
