# SPDX-License-Identifier: Apache-2.0
"""Train and evaluate a recipe: MODEL DATASET, or a recipe FILE.py."""

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict

from ipu_finetune._discovery import load_recipe
from ipu_finetune._environment import require_versions
from ipu_finetune._overrides import apply
from ipu_finetune.cli._parser import add_recipe_options, add_target_option, overrides
from ipu_finetune.errors import UsageError
from ipu_finetune.recipe import check
from ipu_finetune.targets import choose, require_hub_token

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("model", metavar="MODEL|FILE.py", help="model of a recipe, or a recipe file")
    parser.add_argument("dataset", metavar="DATASET", nargs="?", help="data set of the recipe")
    add_target_option(parser)
    parser.add_argument("--output", metavar="DIR", help="the run's folder (default: runs/RECIPE/DATE-TARGET)")
    parser.add_argument(
        "--resume", metavar="DIR", nargs="?", const=True, help="go on from the last checkpoint (of the run in DIR)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run that is already in --output")
    parser.add_argument(
        "--compile-timeout", type=_seconds, metavar="SECONDS", help="stop a compilation that takes longer"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    add_recipe_options(parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Resolve the recipe, run it, print the result."""
    if arguments.resume and arguments.overwrite:
        raise UsageError("--resume goes on with a run and --overwrite replaces it; give one of the two")
    if isinstance(arguments.resume, str) and not Path(arguments.resume).is_dir():
        raise UsageError(f"--resume {arguments.resume}: there is no such folder; --resume alone goes at the end")
    recipe, changes = apply(load_recipe(arguments.model, arguments.dataset), overrides(arguments))
    check(recipe)
    require_hub_token(recipe.model.push_to_hub)
    # Chosen here, so that an absent target is refused before torch is imported.
    chosen = choose(arguments.target)
    print(chosen.announcement, file=sys.stderr)
    # Before anything that a wrong version would break is imported, let alone compiled.
    for note in require_versions(chosen.name):
        print(note, file=sys.stderr)
    for change in changes:
        print(f"set {change}", file=sys.stderr)

    from ipu_finetune import finetune

    options: Dict[str, Any] = {
        "target": chosen,
        "output": arguments.output,
        "resume": arguments.resume,
        "overwrite": arguments.overwrite,
        "progress": not arguments.quiet,
        "compile_timeout": arguments.compile_timeout,
    }
    if not arguments.json:
        print(finetune(recipe, **options).summary)
        return 0
    # Libraries print to stdout now and then; the JSON object must stand there alone.
    with contextlib.redirect_stdout(sys.stderr):
        done = finetune(recipe, **options)
    result = {name: getattr(done, name) for name in ("output", "target", "emulated", "metrics", "record")}
    print(json.dumps(result))
    return 0
