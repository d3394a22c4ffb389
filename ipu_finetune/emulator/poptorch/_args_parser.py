# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call: bound to `forward`, and compared with those that the model was compiled for."""

import copy
import dataclasses
import inspect
from typing import Any, Callable, Dict, List, Mapping, Tuple

import torch
from torch import nn

from ..device import nested
from ..device.errors import Error

__all__ = ["ArgsParser", "InputArgs"]

_Kind = inspect.Parameter

_RECOMPILE = (
    "\nThis error occurred because the inputs passed at runtime don't match the inputs used to compile the model.\n"
    "To recompile the model for the new inputs you must explicitly call destroy() first."
)


class InputArgs:
    """What a model was compiled for; tensors are kept as shapes.

    Attributes:
        args: positional arguments.
        kwargs: arguments that `forward` only takes by name.
    """

    def __init__(self, args: List[Any], kwargs: Dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class ArgsParser:
    """Binds calls to the signature of a module's `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())
        self._positional = [p for p in parameters if p.kind in (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)]
        self._names = [p.name for p in self._positional]
        self._keyword = {p.name: p for p in parameters if p.kind == _Kind.KEYWORD_ONLY}
        self._takes_more = any(p.kind == _Kind.VAR_POSITIONAL for p in parameters)
        self._takes_any = any(p.kind == _Kind.VAR_KEYWORD for p in parameters)

    def bind(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
        """Return the arguments by name, in the order of the signature; those that were not given have their defaults.

        A default that is a tensor is an input like any other: a later call may pass another tensor of its shape.

        Raises:
            AssertionError: too many arguments, one that is passed twice, or a name that `forward` does not have.
            Error: a mandatory one is missing.
        """
        if len(args) > len(self._names) and not self._takes_more:
            raise AssertionError(
                f"Too many arguments provided: expected {self._names} ({len(self._names)}) but got {len(args)}"
            )
        bound: Dict[str, Any] = dict(zip(self._names, args))
        rest = dict(kwargs)
        for name in kwargs:
            if name in bound:
                raise AssertionError(f"Parameter {name} was passed more than once")
            if name not in self._names and name not in self._keyword and not self._takes_any:
                raise AssertionError(
                    f"{name} is not a valid parameter. Valid ones: {self._names + list(self._keyword)}"
                )
        result: Dict[str, Any] = {}
        for parameter in self._positional:
            name = parameter.name
            if name in bound:
                result[name] = bound[name]
            elif name in rest:
                result[name] = rest.pop(name)
            elif parameter.default is _Kind.empty:
                raise Error(f"Mandatory parameter {name} missing")
            else:
                result[name] = parameter.default
        for index, value in enumerate(args[len(self._names) :]):
            result[f"*{index}"] = value
        for name, parameter in self._keyword.items():
            if name in rest:
                result[name] = rest.pop(name)
            elif parameter.default is _Kind.empty:
                raise Error(f"Mandatory parameter {name} missing")
            else:
                result[name] = parameter.default
        result.update(rest)
        return result

    def split(self, arguments: Dict[str, Any]) -> InputArgs:
        """Return positional arguments and those by name."""
        args = [arguments[name] for name in self._names if name in arguments]
        args += [value for name, value in arguments.items() if name.startswith("*")]
        taken = set(self._names)
        return InputArgs(args, {k: v for k, v in arguments.items() if k not in taken and not k.startswith("*")})

    def validate(self, compiled: Dict[str, Any], arguments: Dict[str, Any]) -> Dict[str, Any]:
        """Raise if a call does not look exactly like the one that was compiled.

        Returns:
            The arguments, with dictionaries in the order of the compiled ones.

        Raises:
            Error: names what differs and says how to recompile.
        """
        given, expected = (len(self.split(each).args) for each in (arguments, compiled))
        if given != expected:
            raise Error(
                f"Number of positional arguments mismatch: expected {expected} arguments but got {given}." + _RECOMPILE
            )
        text = _keys_differ(compiled, arguments)
        if text:
            raise Error(f"Number of arguments mismatch: {text}{_RECOMPILE}")
        return {name: _compare(name, expected, arguments[name]) for name, expected in compiled.items()}

    def call(self, model: nn.Module, arguments: Dict[str, Any]) -> Any:
        """Call the module with arguments by name."""
        split = self.split(arguments)
        return model(*split.args, **split.kwargs)


def shapes_of(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments with every tensor replaced by one without data."""

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return {name: nested.rebuild(value, shape) for name, value in arguments.items()}


def _keys_differ(expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> str:
    missing = [str(name) for name in expected if name not in found]
    unexpected = [str(name) for name in found if name not in expected]
    if not missing and not unexpected:
        return ""
    text = f"expected {len(expected)} arguments but got {len(found)}."
    if missing:
        text += f" Missing arguments: {', '.join(missing)}."
    if unexpected:
        text += f" Unexpected arguments: {', '.join(unexpected)}."
    return text


def _compare(name: str, expected: Any, value: Any) -> Any:
    """Raise on a difference; return the value, with dictionaries in the order of the compiled ones."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise _mismatch("Type", name, torch.Tensor, type(value))
        if expected.dtype != value.dtype:
            raise _mismatch("Data type", name, expected.dtype, value.dtype)
        if expected.shape != value.shape:
            raise _mismatch("Shape", name, expected.shape, value.shape)
        return value
    if type(expected) is not type(value):
        raise _mismatch("Type", name, type(expected), type(value))
    if any(kind in nested.custom_parsers for kind in type(expected).__mro__):
        _compare_leaves(name, expected, value)
        return value
    if isinstance(expected, Mapping):
        return _compare_mappings(name, expected, value)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(value):
            raise _mismatch("Length", name, len(expected), len(value))
        items = [_compare(f"{name}[{index}]", a, b) for index, (a, b) in enumerate(zip(expected, value))]
        if all(ours is theirs for ours, theirs in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not _equal(expected, value):
        raise _mismatch("Value", name, expected, value)
    return value


def _compare_mappings(name: str, expected: Any, value: Any) -> Any:
    text = _keys_differ(expected, value)
    if text:
        raise Error(f"Number of entries of {name} mismatch: {text}{_RECOMPILE}")
    items = {key: _compare(f"{name}[{key!r}]", inner, value[key]) for key, inner in expected.items()}
    if list(value) == list(items) and all(value[key] is item for key, item in items.items()):
        return value
    # A graph's inputs are numbered in the order of the compiled dictionary.
    if type(value) is dict:
        return items
    clone: Any = copy.copy(value)
    if dataclasses.is_dataclass(value):
        return clone  # its order is that of its fields
    clone.clear()
    clone.update(items)
    return clone


def _compare_leaves(name: str, expected: Any, value: Any) -> None:
    wanted, found = list(nested.leaves(expected, name)), list(nested.leaves(value, name))
    if len(wanted) != len(found):
        raise _mismatch("Number of tensors", name, len(wanted), len(found))
    for (path, inner), (_, other) in zip(wanted, found):
        _compare(path, inner, other)


def _equal(expected: Any, value: Any) -> bool:
    if expected is value:
        return True
    try:
        return bool(expected == value)
    except (TypeError, ValueError, RuntimeError):
        return False


def _mismatch(what: str, name: str, expected: Any, value: Any) -> Error:
    return Error(f"{what} mismatch for {name}: expected {expected} but got {value}" + _RECOMPILE)
