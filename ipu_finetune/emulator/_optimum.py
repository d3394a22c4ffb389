# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what optimum-graphcore compiles against the Poplar SDK.

`optimum.graphcore.custom_ops` builds a C++ library to learn the SDK's version and others for its custom operators. Both
need Poplar's headers. The operators run here through their Python replacements (`poptorch/custom_ops.py`), so the build
is replaced by nothing; a library without a replacement is refused when its operator is used.
"""

import sys
from types import ModuleType
from typing import Any, Dict

__all__ = ["stand_ins"]

_PREFIX = "optimum.graphcore.custom_ops"


def _sdk_version_hash() -> str:
    from .poptorch import __version__

    return f"ipu-finetune-emulator-{__version__}"


def _load_lib(filepath: Any, timeout: int = 300) -> None:
    """Take the place of compiling and loading a library of custom operators."""


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name, "Stand-in of the emulator: nothing is compiled.")
    module.__dict__.update(content)
    module.__dict__["__all__"] = sorted(content)
    return module


_modules = {
    f"{_PREFIX}.sdk_version_hash.sdk_version_hash_lib": _module(
        "sdk_version_hash_lib", sdk_version_hash=_sdk_version_hash
    ),
    f"{_PREFIX}.utils": _module(f"{_PREFIX}.utils", load_lib=_load_lib),
}


def stand_ins() -> Dict[str, ModuleType]:
    """Return the modules to register, leaving out those that the real library has loaded already."""
    return {name: module for name, module in _modules.items() if sys.modules.get(name) in (None, module)}
