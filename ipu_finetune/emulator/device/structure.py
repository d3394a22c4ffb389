# SPDX-License-Identifier: Apache-2.0
"""The module tree as it was compiled.

What the Python code of a model does to its own objects while it is traced is part of the trace, not of the model: a
compiled graph has no Python state. It is undone afterwards.
"""

from typing import Any, Dict, List, Tuple

from torch import nn

__all__ = ["AttributeGuard", "ModuleSnapshot"]

_TABLES = (
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
)

_Record = Tuple[nn.Module, bool, Tuple[Tuple[Any, ...], ...]]


class ModuleSnapshot:
    """Remembers children, parameters, buffers, hooks and the training flag of every module below `root`."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._records: List[_Record] = [self._record(module) for module in root.modules()]

    @staticmethod
    def _record(module: nn.Module) -> _Record:
        table = module.__dict__
        return module, module.training, tuple(tuple(table.get(name, {}).items()) for name in _TABLES)

    def changed(self) -> List[_Record]:
        """Return today's records of the modules that differ from the compiled ones."""
        different = []
        for record in self._records:
            now = self._record(record[0])
            # Tuples compare by identity first, so equal entries never reach Tensor.__eq__.
            if now[1] != record[1] or not all(_same(a, b) for a, b in zip(now[2], record[2])):
                different.append(now)
        return different

    def restore(self) -> None:
        """Give every module the structure back that it had."""
        today = self.changed()
        if today:
            compiled = {id(record[0]): record for record in self._records}
            for now in today:
                _apply(compiled[id(now[0])])


def _same(left: Tuple[Any, ...], right: Tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(left, right))


def _apply(record: _Record) -> None:
    module, training, tables = record
    module.__dict__["training"] = training
    for name, entries in zip(_TABLES, tables):
        table = module.__dict__.get(name)
        if table is None:
            continue
        table.clear()
        table.update(entries)


class AttributeGuard:
    """Undoes what a forward pass does to plain attributes of its modules: a traced graph has no Python state."""

    def __init__(self, root: nn.Module) -> None:
        self._saved: List[Tuple[nn.Module, Dict[str, Any]]] = [(each, dict(each.__dict__)) for each in root.modules()]

    def restore(self) -> None:
        """Put every attribute back."""
        for module, saved in self._saved:
            now = module.__dict__
            if len(now) == len(saved) and all(now.get(key, _MISSING) is value for key, value in saved.items()):
                continue
            for key in [key for key in now if key not in saved]:
                del now[key]
            now.update(saved)


_MISSING = object()
