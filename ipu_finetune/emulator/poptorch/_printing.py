# SPDX-License-Identifier: Apache-2.0
"""Modules as text, with the blocks that begin at them."""

import builtins
from typing import Any, List

from torch import nn

from ..device import wrappers
from .blocks import _BlockHook

__all__ = ["module_repr", "print"]


def _begins(module: nn.Module) -> str:
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _BlockHook)]
    return "".join(f"{hook!r} " for hook in hooks)


def module_repr(module: nn.Module) -> str:
    """Return the text of a module as PyTorch prints it, with `BeginBlock(...)` before each module that begins one."""
    extra = module.extra_repr()
    lines: List[str] = extra.split("\n") if extra else []
    children = [
        f"({name}): " + module_repr(child).replace("\n", "\n  ")
        for name, child in module._modules.items()
        if child is not None
    ]
    name = _begins(module) + wrappers.plain_class_of(type(module)).__name__
    if not children and len(lines) <= 1:
        return f"{name}({extra})"
    return "\n  ".join([f"{name}(", *lines, *children]) + "\n)"


def print(module: Any) -> None:
    """Print a module as `module_repr` has it, or anything else as Python does."""
    builtins.print(module_repr(module) if isinstance(module, nn.Module) else module)
