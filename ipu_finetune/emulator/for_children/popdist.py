# SPDX-License-Identifier: Apache-2.0
"""Found by `import popdist` in a process that an emulated script started; see `ipu_finetune.emulator.children`."""

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
