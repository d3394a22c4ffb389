# SPDX-License-Identifier: Apache-2.0
"""Functions that run around every compilation."""

import collections
from typing import Any, Callable, Dict

from torch.utils.hooks import RemovableHandle

__all__ = ["registerPostCompileHook", "registerPreCompileHook", "run_hooks"]

_hooks: Dict[str, "collections.OrderedDict[int, Callable[[], Any]]"] = {
    "pre": collections.OrderedDict(),
    "post": collections.OrderedDict(),
}


def _register(when: str, hook: Callable[[], Any]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{when}-compile hook must be callable, got {hook!r}")
    handle = RemovableHandle(_hooks[when])
    _hooks[when][handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` before each compilation; the handle's `remove()` ends it."""
    return _register("pre", hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook` after each compilation; the handle's `remove()` ends it."""
    return _register("post", hook)


def run_hooks(when: str) -> None:
    """Call every hook that is registered for "pre" or "post"."""
    for hook in list(_hooks[when].values()):
        hook()
