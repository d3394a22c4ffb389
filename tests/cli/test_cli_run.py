# SPDX-License-Identifier: Apache-2.0
"""`run` and `predict`: what they hand on, what they print, and what stops before anything heavy."""

import io
import json
import sys
import types

import pytest

import ipu_finetune
from ipu_finetune import _environment, cli, targets
from ipu_finetune.cli._parser import recipe_flags
from ipu_finetune.errors import Interrupted

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _no_ipu_and_torch_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    monkeypatch.setattr(targets, "_poptorch_is_installed", lambda: False)
    monkeypatch.setattr(targets, "_require_torch", lambda target: None)
    monkeypatch.setattr(_environment, "find_versions", dict)


@pytest.fixture
def calls(monkeypatch):
    """Stand where `finetune` is looked up, and keep what it was called with."""
    seen = []

    def finetune(recipe, **options):
        print("a library talks on stdout")
        seen.append((recipe, options))
        return types.SimpleNamespace(
            output="runs/x",
            target="emulator",
            emulated=True,
            metrics={"f1": 80.5, "exact_match": 70.0},
            record="runs/x/record.json",
            summary="f1 80.50\nrun folder: runs/x",
        )

    monkeypatch.setitem(vars(ipu_finetune), "finetune", finetune)
    return seen


def test_run_is_the_verb_where_none_is_given(calls):
    assert cli.main(["minilm", "squad-sample"]) == 0
    assert cli.main(["run", "minilm", "squad-sample"]) == 0
    assert cli.main(["--target", "emulator", "minilm", "--seed", "42", "squad-sample"]) == 0
    assert calls[0] == calls[1]
    assert calls[0][0].name == "minilm-squad-sample"
    assert calls[0][1] == {
        "target": targets.choose("auto"),
        "output": None,
        "resume": None,
        "overwrite": False,
        "progress": True,
        "compile_timeout": None,
    }
    assert calls[2][1]["target"].name == "emulator"


def test_every_flag_reaches_its_field(calls, capsys):
    words = ["minilm", "squad", "--target", "cpu", "--output", "out", "--overwrite", "--quiet", "--allow-pickle"]
    words += ["--model", "123", "--data", "true", "--pod", "pod4", "--max-steps", "3", "--seed", "7"]
    assert cli.main([*words, "--set", "training.learning_rate=3e-5", "--set", "training.global_batch_size=16"]) == 0
    recipe, options = calls[0]
    assert (recipe.model.checkpoint, recipe.task.data, recipe.ipu.pod) == ("123", "true", "pod4")
    assert (recipe.training.max_steps, recipe.training.seed, recipe.training.learning_rate) == (3, 7, 3e-5)
    assert recipe.model.allow_pickle is True
    assert options == {
        "target": targets.choose("cpu"),
        "output": "out",
        "resume": None,
        "overwrite": True,
        "progress": False,
        "compile_timeout": None,
    }
    err = capsys.readouterr().err
    assert "set training.seed: 42 -> 7" in err
    assert "target: cpu" in err


def test_a_recipe_file_is_run_and_resumed(calls, tmp_path):
    copy = tmp_path / "mine.py"
    assert cli.main(["cp", "minilm", "squad", str(copy)]) == 0
    assert cli.main([str(copy), "--resume"]) == 0
    assert cli.main(["run", str(copy), "--resume", str(tmp_path)]) == 0
    assert [options["resume"] for _, options in calls] == [True, str(tmp_path)]


def test_json_prints_one_object_on_stdout_and_nothing_else(calls, capsys):
    assert cli.main(["minilm", "squad", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "output": "runs/x",
        "target": "emulator",
        "emulated": True,
        "metrics": {"f1": 80.5, "exact_match": 70.0},
        "record": "runs/x/record.json",
    }
    assert captured.out.count("\n") == 1
    assert "a library talks" in captured.err


def test_without_json_the_summary_is_printed(calls, capsys):
    cli.main(["minilm", "squad"])
    assert "run folder: runs/x" in capsys.readouterr().out


def test_quiet_still_says_which_target_auto_chose(calls, capsys):
    cli.main(["minilm", "squad", "--quiet"])
    assert capsys.readouterr().err.startswith("target: emulator (no IPU found")


def test_every_error_of_the_options_is_reported_together(calls, capsys):
    words = [
        "minilm",
        "squad",
        "--seed",
        "abc",
        "--max-steps",
        "x",
        "--set",
        "training.lr",
        "--set",
        "task.n_best=many",
    ]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    for part in (
        "--seed abc: must be an integer",
        "--max-steps x: must be an integer",
        "'training.lr': no '='",
        "n_best",
    ):
        assert part in err
    assert calls == []


def test_a_flag_and_a_set_for_the_same_field_contradict(calls, capsys):
    assert cli.main(["minilm", "squad", "--seed", "1", "--set", "training.seed=2"]) == 2
    assert "--seed 1: training.seed is already set by 'training.seed=2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["minilm", "squad", "--resume", "--overwrite"], "give one of the two"),
        (["minilm", "squad", "--resume", "nosuchfolder"], "there is no such folder"),
        (["--resume", "minilm", "squad"], "--resume minilm: there is no such folder"),
        (
            ["minilm", "squad-sample", "--set", "packing.verify=true"],
            "packing.verify=true has no effect with packing.enabled=false",
        ),
        (["minilm", "squad", "--set", "training.epochs=0"], "training.epochs=0.0: must be greater than 0"),
    ],
)
def test_what_cannot_work_stops_before_anything_heavy(calls, words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
    assert calls == []


def test_u21_a_named_ipu_that_is_absent_is_exit_4_and_nothing_is_run(calls, capsys):
    assert cli.main(["minilm", "squad", "--target", "ipu"]) == 4
    err = capsys.readouterr().err
    assert "poptorch is not installed" in err
    assert "POPLAR_SDK_ENABLED" in err
    assert calls == []


def test_u70_without_a_token_a_run_works_and_a_push_stops_before_it(calls, capsys, monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cli.main(["minilm", "squad"]) == 0
    assert len(calls) == 1
    assert cli.main(["minilm", "squad", "--set", "model.push_to_hub=me/mine"]) == 2
    assert "needs a token" in capsys.readouterr().err
    assert len(calls) == 1


def test_u55_a_version_that_cannot_work_stops_before_anything_heavy(calls, capsys, monkeypatch):
    monkeypatch.setattr(_environment, "find_versions", lambda: {"transformers": "4.20.0", "datasets": "3.7.0"})
    assert cli.main(["minilm", "squad"]) == 1
    assert "transformers 4.20.0 < 4.29.2" in capsys.readouterr().err
    assert not calls
    monkeypatch.setattr(_environment, "find_versions", lambda: {"datasets": "3.7.0"})
    assert cli.main(["minilm", "squad"]) == 0
    assert "warning: datasets 3.7.0 > 3.6" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_u38_a_compile_timeout_is_a_number_of_seconds(text, calls, capsys):
    assert cli.main(["minilm", "squad", "--compile-timeout", text]) == 2
    assert f"'{text}' is not a number of seconds above 0" in capsys.readouterr().err
    assert cli.main(["minilm", "squad", "--compile-timeout", "60"]) == 0
    assert calls[-1][1]["compile_timeout"] == 60.0


def test_an_interrupted_run_is_exit_130_and_says_where_its_checkpoint_is(monkeypatch, capsys):
    def finetune(recipe, **options):
        raise Interrupted("stopped; checkpoint runs/x/checkpoints/step-3; --resume goes on")

    monkeypatch.setitem(vars(ipu_finetune), "finetune", finetune)
    assert cli.main(["minilm", "squad"]) == 130
    assert "runs/x/checkpoints/step-3" in capsys.readouterr().err


def test_the_flags_of_run_are_the_ones_that_fields_declare(capsys):
    cli.main(["run", "--help"])
    out = capsys.readouterr().out
    for key, each in recipe_flags().items():
        assert each.metadata["flag"] in out
        assert f"({key})" in out
    assert "the schedule stays planned over the epochs" in " ".join(out.split())


# --- predict


class Answerer:
    """Answers with the first word of the context; a stand-in for the pipeline behind `predict`."""

    def __init__(self):
        self.target = targets.Target("cpu", False, "target: cpu")
        self.notes = []
        self.closed = False

    def __call__(self, questions):
        print("a library talks on stdout")
        return [{"answer": each["context"].split()[0], "start": 0} for each in questions]

    def close(self):
        self.closed = True


@pytest.fixture
def pipelines(monkeypatch):
    made = []

    def pipeline(task, **options):
        made.append((task, options, Answerer()))
        return made[-1][2]

    monkeypatch.setitem(vars(ipu_finetune), "pipeline", pipeline)
    return made


PREDICT = ["predict", "question-answering", "--model", "run/model", "--target", "cpu"]


def test_predict_answers_one_question_from_the_options(pipelines, capsys):
    assert cli.main([*PREDICT, "--question", "Who?", "--context", "Ada wrote it."]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [{"answer": "Ada", "start": 0}]
    assert captured.err.splitlines() == ["target: cpu", "a library talks on stdout"]
    task, options, answerer = pipelines[0]
    assert (task, options) == (
        "question-answering",
        {"model": "run/model", "target": "cpu", "allow_pickle": False, "max_sequences": 1},
    )
    assert answerer.closed


LINES = '{"question": "q1", "context": "Ada x", "id": "one"}\n\n{"question": "q2", "context": "Zoë y"}\n'


def test_predict_answers_a_file_in_its_order(pipelines, capsys, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(LINES, encoding="utf-8")
    assert cli.main([*PREDICT, str(path)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"id": "one", "answer": "Ada", "start": 0},
        {"answer": "Zoë", "start": 0},
    ]


def test_predict_reads_stdin_and_prints_one_object_for_json(pipelines, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(LINES))
    assert cli.main([*PREDICT, "-", "--json"]) == 0
    out = capsys.readouterr().out
    content = json.loads(out)
    assert out.count("\n") == 1
    assert [each["answer"] for each in content.pop("answers")] == ["Ada", "Zoë"]
    assert content == {"task": "question-answering", "model": "run/model", "target": "cpu", "emulated": False}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--question", "q"], 2, "give --question TEXT and --context TEXT"),
        (["x.jsonl", "--question", "q"], 2, "not both"),
        (["nosuch.jsonl"], 1, "nosuch.jsonl: cannot be read"),
    ],
)
def test_predict_without_a_question_stops_before_the_model(pipelines, words, code, message, capsys):
    assert cli.main([*PREDICT, *words]) == code
    assert message in capsys.readouterr().err
    assert pipelines == []


def test_predict_names_every_line_that_is_no_question(pipelines, capsys, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q"}\n{oops\n' + LINES + "[1]\n")
    assert cli.main([*PREDICT, str(path)]) == 1
    err = capsys.readouterr().err
    assert all(f"line {number}: " in err for number in (1, 2, 6))
    assert "line 3" not in err
    assert pipelines == []
    path.write_text("\n")
    assert cli.main([*PREDICT, str(path)]) == 1
    assert "holds no question" in capsys.readouterr().err
