# SPDX-License-Identifier: Apache-2.0
"""Copy a recipe's file, to edit it and run the copy."""

import argparse
import shutil
from pathlib import Path

from ipu_finetune._discovery import is_recipe_file, recipe_path
from ipu_finetune.errors import UsageError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("model", metavar="MODEL", help="model of the recipe")
    parser.add_argument("dataset", metavar="DATASET", help="data set of the recipe")
    parser.add_argument("file", metavar="FILE.py", help="where the copy goes; must not exist yet")


def run(arguments: argparse.Namespace) -> int:
    """Copy the file and say how to run it."""
    source = recipe_path(arguments.model, arguments.dataset)
    copy = Path(arguments.file).expanduser()
    if not is_recipe_file(copy):
        raise UsageError(f"'{copy}': a recipe is a Python file; let the name end in .py")
    if copy.exists():
        raise UsageError(f"'{copy}' exists already; choose another name or remove it")
    if not copy.parent.is_dir():
        raise UsageError(f"'{copy}': there is no folder '{copy.parent}'; make it first")
    shutil.copyfile(source, copy)
    print(f"{copy}: edit it, then ipu-finetune run {copy}")
    return 0
