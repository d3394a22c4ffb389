# SPDX-License-Identifier: Apache-2.0
"""Blocks: which part of a model runs where. Stages and execution strategies, which use them, are offered here too."""

import functools
import weakref
from typing import Any, Callable, Dict, Optional, Union

from torch import nn

from ..device.errors import Error
from ..device.state import current
from ._strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from ._strategies import _ExecutionStrategy as _ExecutionStrategy

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "removeBlocks",
]


class _AutoIds:
    """Numbers the blocks without a name of one trace; a layer or function that comes back keeps its number."""

    def __init__(self) -> None:
        self._next = 0
        self._owners: Dict[int, str] = {}

    def of(self, owner: Any) -> str:
        if owner is not None and id(owner) in self._owners:
            return self._owners[id(owner)]
        number, self._next = str(self._next), self._next + 1
        if owner is not None:
            self._owners[id(owner)] = number
        return number

    def reset(self) -> None:
        self._next = 0


_auto_ids: "weakref.WeakKeyDictionary[Any, _AutoIds]" = weakref.WeakKeyDictionary()


def _ids_of(tracer: Any) -> _AutoIds:
    if tracer not in _auto_ids:
        _auto_ids[tracer] = _AutoIds()
    return _auto_ids[tracer]


def _begin(user_id: Optional[str], ipu_id: Optional[int], owner: Any = None) -> None:
    """Begin a block if a model is being traced; `owner` is the hook or function that begins it, if there is one."""
    tracer = current.tracer
    if tracer is not None:
        tracer.begin_block(_ids_of(tracer).of(owner) if user_id is None else str(user_id), ipu_id)


# ---- blocks


class _BlockHook:
    """A forward pre-hook that begins a block."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        _begin(self._user_id, self._ipu_id, self)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def _check_ipu(ipu_id: Any) -> None:
    if ipu_id is not None and (not isinstance(ipu_id, int) or isinstance(ipu_id, bool) or ipu_id < 0):
        raise AssertionError(f"ipu_id must be the number of an IPU, got {ipu_id!r}")


class LegacyBeginBlockFn:
    """A function that begins a block when it is called."""

    def __init__(self, function: Callable[..., Any], user_id: Optional[str] = None, ipu_id: Optional[int] = None):
        _check_ipu(ipu_id)
        functools.update_wrapper(self, function, updated=())
        self._function, self._user_id, self._ipu_id = function, user_id, ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the block and call the function."""
        _begin(self._user_id, self._ipu_id, self)
        return self._function(*args, **kwargs)


def BeginBlock(
    layer_to_call: Union[nn.Module, Callable[..., Any]],
    user_id: Optional[str] = None,
    ipu_id: Optional[int] = None,
) -> Any:
    """Let a block begin with this layer; it lasts until the next block.

    Args:
        layer_to_call: a module, which is returned as it is, or a function.
        user_id: name of the block; without one, blocks are numbered in the order in which they run.
        ipu_id: the IPU that holds it.

    Raises:
        Error: the module already begins a block, or is neither module nor function.
    """
    _check_ipu(ipu_id)
    if isinstance(layer_to_call, nn.Module):
        if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
            raise Error("module has already been assigned to a block.")
        layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
        return layer_to_call
    if callable(layer_to_call) and not isinstance(layer_to_call, type):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    raise Error(f"module is not an instance of torch.nn.Module or function: {layer_to_call!r}.")


def removeBlocks(module: nn.Module) -> None:
    """Remove every block that `BeginBlock` has put on the module or below it."""
    if not isinstance(module, nn.Module):
        raise AssertionError(f"removeBlocks takes a torch.nn.Module, got {type(module).__name__}")
    for child in module.modules():
        hooks = child._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _BlockHook)]:
            del hooks[key]


class Block(nn.Module):
    """A block as a context manager: `with poptorch.Block("encoder", ipu_id=1): ...`."""

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        _check_ipu(ipu_id)
        self._user_id, self._ipu_id = user_id, ipu_id

    def __enter__(self) -> "Block":
        _begin(self._user_id, self._ipu_id)
        return self

    def __exit__(self, *_: Any) -> None:
        if current.tracer is not None:
            current.tracer.end_block()

    @staticmethod
    def useAutoId() -> None:
        """Number blocks from zero again; every compilation does so by itself."""
        if current.tracer is not None:
            _ids_of(current.tracer).reset()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that lasts until the next one."""
        _check_ipu(ipu_id)
        _begin(user_id, ipu_id)


class BlockFunction:
    """A decorator that puts a function's body into a block."""

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        _check_ipu(ipu_id)
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, in its block."""

        @functools.wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            with Block(self._user_id, self._ipu_id):
                return function(*args, **kwargs)

        return in_block
