# SPDX-License-Identifier: Apache-2.0
"""Found by `import horovod` in a process that an emulated script started; see `ipu_finetune.emulator.children`."""

import importlib
import pathlib
import sys

try:
    from ipu_finetune import emulator
except ModuleNotFoundError as missing:
    if missing.name != "ipu_finetune":
        raise
    # The parent found the package by its working folder or its own sys.path; neither is inherited.
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))
    from ipu_finetune import emulator

# By force: what is hidden is this file, and whether to hide a real PopTorch was decided when the parent was emulated.
emulator.install(force=True)

if getattr(sys.modules[__name__], "__file__", None) == __file__:
    # A real Horovod is installed, and stays in force.
    before = sys.path[:]
    sys.path[:] = [each for each in before if each != str(pathlib.Path(__file__).resolve().parent)]
    del sys.modules[__name__]
    importlib.import_module(__name__)
    sys.path[:] = before
