# SPDX-License-Identifier: Apache-2.0
"""The command line: find the verb, run it, turn errors into one message and an exit code."""

import argparse
import importlib
import os
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

from ipu_finetune import __version__
from ipu_finetune._discovery import is_known_model, is_recipe_file, known_models
from ipu_finetune.cli._parser import Parser
from ipu_finetune.errors import IpuFinetuneError, UsageError, did_you_mean

__all__ = ["main"]

PROG = "ipu-finetune"

# Verb, and what it does; the module ipu_finetune.cli.<verb> has configure(parser) and run(arguments).
VERBS = {
    "run": "train and evaluate (the verb may be left out)",
    "ls": "list recipes, models, tasks, configs or pods",
    "show": "print a resolved recipe",
    "cp": "copy a recipe's file, to edit",
    "predict": "answer from a fine-tuned model",
    "emulate": "run an unmodified PopTorch script on the emulated IPU",
    "cache": "list or remove compiled executables",
    "doctor": "report the environment, or who holds the emulated IPUs",
}
DEFAULT_VERB = "run"
# Verbs whose words belong to another program: the module has main(words) instead, and gets all that follows the verb.
PASS_ON = ("emulate",)

_INTERRUPTED = 130


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return its exit code: see `ipu_finetune.errors` for which error has which."""
    words = list(sys.argv[1:] if argv is None else argv)
    ours = next((at for at, word in enumerate(words) if word in PASS_ON), len(words))
    debug = "--debug" in words[:ours]
    words = [word for word in words[:ours] if word != "--debug"] + words[ours:]
    try:
        with _plain_warnings():
            return _dispatch(words)
    except SystemExit as leaving:  # argparse leaves this way after --help and --version
        return int(leaving.code or 0)
    except IpuFinetuneError as error:
        _report(str(error), debug)
        return error.exit_code
    except KeyboardInterrupt:
        _report("interrupted", debug)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Point stdout elsewhere, or Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _report(str(error), debug)
        return 1
    except Exception as error:
        # Not a user's mistake. Say so, and where, instead of blaming the recipe.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        _report(f"unexpected {type(error).__name__} at {place}: {error}; --debug prints the traceback", debug)
        return 1


def _dispatch(words: List[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--version"):
        _top_level().parse_args(words or ["--help"])
    verb, rest = _split(words)
    module = importlib.import_module(f"ipu_finetune.cli.{verb}")
    if verb in PASS_ON:
        return module.main(rest)
    parser = Parser(prog=f"{PROG} {verb}", description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    module.configure(parser)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return module.run(parser.parse_strictly(rest))


def _split(words: List[str]) -> Tuple[str, List[str]]:
    """Return the verb and its arguments; `run` where the first word is an option, a model or a file."""
    first = words[0]
    if first in VERBS:
        return first, words[1:]
    if first.startswith("-") or is_recipe_file(first) or is_known_model(first):
        return DEFAULT_VERB, words
    near = did_you_mean(first, [*VERBS, *known_models()])
    raise UsageError(f"'{first}' is neither a verb nor a model{near}; see {PROG} --help and {PROG} ls models")


def _top_level() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {verb:8} {text}" for verb, text in VERBS.items())
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} [--debug] [VERB] ...\n       {PROG} MODEL DATASET [options of run]",
        description="Fine-tune Hugging Face Transformers for Graphcore IPUs, or on an emulated IPU.",
        epilog=f"verbs:\n{verbs}\n\n`{PROG} VERB --help` has the options of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return parser


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"{PROG}: {message}", file=sys.stderr)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print this package's warnings as one line each; leave those of others as they are."""
    package = str(Path(__file__).resolve().parent.parent)
    usual = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if issubclass(category, UserWarning) and str(filename).startswith(package):
            print(f"{PROG}: warning: {message}", file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
