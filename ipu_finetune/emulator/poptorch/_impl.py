# SPDX-License-Identifier: Apache-2.0
"""Private helpers of PopTorch that other libraries reach for."""

import contextlib
from typing import Any, Iterator

from torch import nn

from ..device import wrappers
from ..device.state import current
from ..device.wrappers import PoptorchBuffer, PoptorchParameter

__all__ = [
    "PoptorchBuffer",
    "PoptorchParameter",
    "isDispatchTracing",
    "isRunningOnIpu",
    "rewrapModelIfNecessary",
    "unwrapIfWrapped",
    "unwrapModelIfNecessary",
]


def isDispatchTracing() -> bool:
    """Whether tensors lie on a device of their own: never here, they are the CPU's."""
    return False


def isRunningOnIpu() -> bool:
    """Whether the code that asks runs inside a compiled model."""
    return current.running


def unwrapModelIfNecessary(model: nn.Module) -> None:
    """Give a model that is being trained its own class and its parameters' classes back, with fresh values."""
    owner = wrappers.owner_of(model)
    if owner is None:
        return
    owner.copyWeightsToHostIfNeeded()
    for tensor in [*model.parameters(), *model.buffers()]:
        wrappers.plain(tensor)
    model.__class__ = wrappers.plain_class_of(type(model))


def _restoreWrapperIfNecessary(model: nn.Module) -> None:
    """Give a model and its parameters the wrapped classes again, if they belong to an executor."""
    owner = wrappers.owner_of(model)
    if owner is not None:
        owner._wrap()


def rewrapModelIfNecessary(model: nn.Module) -> None:
    """Undo `unwrapModelIfNecessary`."""
    _restoreWrapperIfNecessary(model)


@contextlib.contextmanager
def unwrapIfWrapped(model: nn.Module) -> Iterator[Any]:
    """Within the block, the model has its own classes."""
    unwrapModelIfNecessary(model)
    try:
        yield model
    finally:
        rewrapModelIfNecessary(model)
