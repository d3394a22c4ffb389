# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified script that uses PopTorch on the emulated IPU; everything after SCRIPT is the script's own."""

from typing import List

from ipu_finetune.emulator.script import command

__all__ = ["main"]


def main(words: List[str]) -> int:
    """Run the script and return its exit code."""
    return command(words, "ipu-finetune emulate")
