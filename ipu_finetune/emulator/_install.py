# SPDX-License-Identifier: Apache-2.0
"""Putting the look-alikes where `import poptorch` finds them, and taking them away again."""

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Dict, Iterator, List, Optional, Tuple

from ..errors import TargetUnavailableError
from .children import find_behind, is_child_module

__all__ = ["install", "is_installed", "uninstall"]

_PACKAGES = ("poptorch", "popart", "popdist")
# What PyTorch programs for IPUs use beside the SDK; a real one is left in its place.
_COMPANIONS = ("horovod",)

_given: Tuple[str, ...] = ()
_replaced: Optional[Dict[str, Optional[ModuleType]]] = None


def is_installed() -> bool:
    """Whether `import poptorch` gives the look-alike."""
    return _replaced is not None


def _ours(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and module.__name__.startswith(__package__ + ".")


def _real(name: str) -> Optional[str]:
    """Return where a package of this name that is not ours comes from, if there is one."""
    if _ours(name):
        return None
    module = sys.modules.get(name)
    if module is not None and not is_child_module(getattr(module, "__file__", None)):
        return str(getattr(module, "__file__", None) or "a module that is already imported")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is not None and is_child_module(spec.origin):
        spec = find_behind(name)
    # A namespace package is a folder that happens to have the name, such as a source checkout.
    return spec.origin if spec is not None and spec.origin not in (None, "namespace") else None


def _submodules(package: ModuleType) -> Iterator[str]:
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield info.name


def _look_alikes(packages: Tuple[str, ...]) -> Dict[str, ModuleType]:
    """Return every module of the look-alikes by the name that scripts import it under."""
    found = {}
    for package in packages:
        ours = importlib.import_module(f"{__package__}.{package}")
        for name in [ours.__name__, *_submodules(ours)]:
            found[name[len(__package__) + 1 :]] = importlib.import_module(name)
    return found


def install(force: bool = False) -> None:
    """Let `import poptorch`, `import popart` and `import popdist` give the look-alikes.

    `import horovod.torch` gives one too, unless a real Horovod is installed. The emulator's log goes to stderr from the
    level that POPTORCH_LOG_LEVEL names.

    A second call does nothing. Modules that were imported before, such as optimum-graphcore, keep what they have.

    Args:
        force: hide a real PopTorch that is installed or already imported.

    Raises:
        TargetUnavailableError: there is a real one and `force` is False.
    """
    global _given, _replaced
    if _replaced is not None:
        return
    if not force:
        real = {name: origin for name, origin in ((name, _real(name)) for name in _PACKAGES) if origin is not None}
        if real:
            where = ", ".join(f"{name} ({origin})" for name, origin in real.items())
            raise TargetUnavailableError(
                f"The emulator was asked for, but a real installation is here: {where}. Choose the target 'ipu' to use "
                "it, or call emulator.install(force=True) to hide it in this process."
            )
    from . import _distribution, _optimum
    from .poptorch import _logging

    given = (*_PACKAGES, *(name for name in _COMPANIONS if _real(name) is None))
    modules: Dict[str, ModuleType] = {**_look_alikes(given), **_optimum.stand_ins()}
    hidden: List[str] = [name for name in sys.modules if name.split(".")[0] in given]
    _logging.start()
    _replaced = {name: sys.modules.get(name) for name in {*modules, *hidden}}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    _given = given
    _distribution.add()


def uninstall() -> None:
    """Undo `install`; modules that were imported in between keep the look-alikes."""
    global _given, _replaced
    if _replaced is None:
        return
    from . import _distribution
    from .poptorch import _logging

    for name in [name for name in sys.modules if name.split(".")[0] in _given]:
        del sys.modules[name]
    for name, module in _replaced.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _distribution.remove()
    _logging.stop()
    _given, _replaced = (), None
