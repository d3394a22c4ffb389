# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call: bound to `forward`, and compared with those that the model was compiled for."""

import inspect
from typing import Any, Callable, Dict, List, Tuple

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
        """Return the arguments by name; defaults fill the gaps before the last one that was given.

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
        given = [index for index, name in enumerate(self._names) if name in bound or name in rest]
        last = max(given, default=-1)
        result: Dict[str, Any] = {}
        for index, parameter in enumerate(self._positional):
            name = parameter.name
            if name in bound:
                result[name] = bound[name]
            elif name in rest:
                result[name] = rest.pop(name)
            elif parameter.default is _Kind.empty:
                raise Error(f"Mandatory parameter {name} missing")
            elif index < last:
                result[name] = parameter.default
        for index, value in enumerate(args[len(self._names) :]):
            result[f"*{index}"] = value
        for name, parameter in self._keyword.items():
            if name in rest:
                result[name] = rest.pop(name)
            elif parameter.default is _Kind.empty:
                raise Error(f"Mandatory parameter {name} missing")
        result.update(rest)
        return result

    def split(self, arguments: Dict[str, Any]) -> InputArgs:
        """Return positional arguments and those by name."""
        args = [arguments[name] for name in self._names if name in arguments]
        args += [value for name, value in arguments.items() if name.startswith("*")]
        taken = set(self._names)
        return InputArgs(args, {k: v for k, v in arguments.items() if k not in taken and not k.startswith("*")})

    def call(self, model: nn.Module, arguments: Dict[str, Any]) -> Any:
        """Call the module with arguments by name."""
        split = self.split(arguments)
        return model(*split.args, **split.kwargs)


def shapes_of(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments with every tensor replaced by one without data."""

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return {name: nested.rebuild(value, shape) for name, value in arguments.items()}


def validate(compiled: Dict[str, Any], arguments: Dict[str, Any]) -> None:
    """Raise if a call does not look exactly like the one that was compiled.

    Raises:
        Error: names what differs and says how to recompile.
    """
    missing = [name for name in compiled if name not in arguments]
    unexpected = [name for name in arguments if name not in compiled]
    if missing or unexpected:
        text = f"Number of arguments mismatch: expected {len(compiled)} arguments but got {len(arguments)}."
        if missing:
            text += f" Missing arguments: {', '.join(missing)}."
        if unexpected:
            text += f" Unexpected arguments: {', '.join(unexpected)}."
        raise Error(text + _RECOMPILE)
    for name, expected in compiled.items():
        _compare(name, expected, arguments[name])


def _compare(name: str, expected: Any, value: Any) -> None:
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise _mismatch("Type", name, "a tensor", repr(value))
        if expected.dtype != value.dtype:
            raise _mismatch("Data type", name, expected.dtype, value.dtype)
        if expected.shape != value.shape:
            raise _mismatch("Shape", name, expected.shape, value.shape)
        return
    if type(expected) is not type(value):
        raise _mismatch("Type", name, type(expected), type(value))
    if nested.describe(expected) != nested.describe(value):
        raise _mismatch("Structure", name, nested.describe(expected), nested.describe(value))
    wanted, found = list(nested.leaves(expected, name)), list(nested.leaves(value, name))
    if len(wanted) == 1 and wanted[0][1] is expected:
        if not _equal(expected, value):
            raise _mismatch("Value", name, expected, value)
        return
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
