# SPDX-License-Identifier: Apache-2.0
"""Letting the processes that an emulated process starts see the emulator too.

A forked child inherits what its parent imported. A fresh interpreter inherits the environment (`subprocess`, launchers)
or `sys.path` (multiprocessing by spawn or forkserver). So the folder `for_children`, whose modules install the emulator
when they are imported, stands first on both: `import poptorch` finds it there before any code of ours has run. Nothing
else in the child changes, and a child that never imports PopTorch never loads us.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Callable, List, Optional

__all__ = ["FOLDER", "find_behind", "is_child_module", "show_to_children"]

#: The folder whose modules install the emulator when they are imported.
FOLDER = Path(__file__).resolve().parent / "for_children"

_VARIABLE = "PYTHONPATH"


def is_child_module(origin: Optional[str]) -> bool:
    """Whether a module's file is one of ours that only leads to the emulator."""
    return origin is not None and Path(origin).resolve().parent == FOLDER


def find_behind(name: str) -> Optional[ModuleSpec]:
    """Return where a module is found that one of ours stands before."""
    return PathFinder.find_spec(name, [each for each in sys.path if each != str(FOLDER)])


def show_to_children() -> Callable[[], None]:
    """Have processes that are started from now on find the emulator by `import poptorch`; return what undoes it."""
    folder = str(FOLDER)
    before = os.environ.get(_VARIABLE)
    inherited: List[str] = before.split(os.pathsep) if before else []
    if folder not in inherited:
        os.environ[_VARIABLE] = os.pathsep.join([folder, *inherited])
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)

    def undo() -> None:
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before
        if added and folder in sys.path:
            sys.path.remove(folder)

    return undo
