# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: verbs, exit codes, one message per mistake, and an answer before anyone waits."""

import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import ipu_finetune
from ipu_finetune import cli
from ipu_finetune.errors import (
    CheckpointError,
    DoesNotFitError,
    Interrupted,
    NonFiniteLossError,
    TargetUnavailableError,
)

pytestmark = pytest.mark.pure


@pytest.fixture
def failing(monkeypatch):
    """Let the verb `ls` raise what the test asks for."""

    def fail(error):
        from ipu_finetune.cli import ls

        def run(arguments):
            raise error

        monkeypatch.setattr(ls, "run", run)

    return fail


def test_help_names_every_verb_and_nothing_that_is_not_there(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.split("verbs:")[1].splitlines() if line.startswith("  ")] == [
        "run",
        "ls",
        "show",
        "cp",
        "predict",
        "emulate",
        "cache",
        "doctor",
    ]


def test_without_a_word_the_help_is_printed(capsys):
    assert cli.main([]) == 0
    assert "MODEL DATASET" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["run", "ls", "show", "cp", "predict", "emulate", "cache", "doctor"])
def test_every_verb_has_help(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    assert f"usage: ipu-finetune {verb}" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ipu-finetune {ipu_finetune.__version__}\n"


def test_the_version_is_the_one_that_is_packaged():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE).group(1) == ipu_finetune.__version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lss"], "'lss' is neither a verb nor a model (did you mean 'ls'"),
        (["fit", "minilm", "squad"], "'fit' is neither a verb nor a model"),
        (["minilmm", "squad"], "did you mean 'minilm'"),
        (["minilm"], "'minilm' needs a data set: squad, squad-sample, squad_v2"),
        (["minilm", "squad", "extra"], "too many arguments: extra"),
        (["minilm", "squad", "--max-step", "3"], "unknown option --max-step (did you mean '--max-steps'"),
        (["run", "minilm", "squad", "--set"], "expected one argument"),
        (["ls", "recipe"], "cannot list 'recipe' (did you mean 'recipes'"),
        (["run", "minilm", "squad", "--pod", "pod17"], "unknown pod 'pod17' (did you mean 'pod16'"),
        (["minilm", "squad", "--target", "emulater"], "unknown target 'emulater' (did you mean 'emulator'"),
        (["predict", "question-answerin", "--model", "x"], "unknown task 'question-answerin'"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_2(words, message, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ipu-finetune: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("no room"), 1),
        (NonFiniteLossError("nan"), 1),
        (DoesNotFitError("too big"), 3),
        (TargetUnavailableError("no IPU"), 4),
        (Interrupted("checkpoint at x"), 130),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/runs"), 1),
        (ZeroDivisionError("a bug"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code_and_no_traceback(failing, error, code, capsys):
    failing(error)
    assert cli.main(["ls"]) == code
    err = capsys.readouterr().err
    assert str(error) in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


def test_a_bug_is_called_one_and_says_where(failing, capsys):
    failing(ZeroDivisionError("a bug"))
    cli.main(["ls"])
    assert "unexpected ZeroDivisionError at test_cli_main.py:" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--debug", "ls"], ["ls", "--debug"]])
def test_debug_adds_the_traceback(failing, words, capsys):
    failing(CheckpointError("no room"))
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "ipu-finetune: no room"


def test_our_warnings_are_one_line_and_other_peoples_stay(tmp_path, capsys):
    shown = warnings.showwarning
    config = tmp_path / "ipu_config.json"
    config.write_text(json.dumps({"layers_per_ipu": [6], "sharded_execution_for_inference": True}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["show", "minilm", "squad", "--set", f"ipu.config={config}"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("ipu-finetune: warning: ") for line in lines)
    assert "sharded_execution_for_inference is retired" in lines[0]
    assert warnings.showwarning is shown


def test_python_m_is_the_same_command_line():
    done = subprocess.run([sys.executable, "-m", "ipu_finetune", "lss"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ipu-finetune: 'lss'")


@pytest.mark.parametrize("words", [["--help"], ["ls"], ["show", "bert-large", "squad"]], ids=" ".join)
def test_it_answers_in_under_half_a_second_without_torch(words):
    code = (
        "import sys\nfrom ipu_finetune.cli import main\n"
        f"code = main({words!r})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'optimum', 'poptorch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - begun)
        assert done.returncode == 0, done.stderr
    assert statistics.median(seconds) < 0.5


def test_importing_the_package_changes_nothing_in_the_process():
    code = (
        "import logging, os, sys, warnings\n"
        "before = (dict(os.environ), logging.root.level, warnings.showwarning, list(warnings.filters), list(sys.path))\n"
        "import ipu_finetune, ipu_finetune.cli, ipu_finetune.targets, ipu_finetune.recipe, ipu_finetune.ipu_config\n"
        "after = (dict(os.environ), logging.root.level, warnings.showwarning, list(warnings.filters), list(sys.path))\n"
        "sys.exit(before != after)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
