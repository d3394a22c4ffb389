# SPDX-License-Identifier: Apache-2.0
"""The command as a user starts it: one process per test, a tiny model, real signals and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("tiny", {model!r}),
    task=QuestionAnswering("houses", data={data!r}, max_length=64, doc_stride=16, max_answer_length=5),
    ipu=Ipu("minilm", layers_per_ipu=[2], inference_layers_per_ipu=[2], executable_cache_dir=""),
    packing=Packing(enabled=False),
    training=Training(global_batch_size=8, micro_batch_size=4, learning_rate=1e-3, epochs=2, logging_steps=1),
)
"""


@pytest.fixture
def recipe_file(tiny_model, tiny_data, tmp_path):
    path = tmp_path / "tiny_houses.py"
    path.write_text(RECIPE.format(model=str(tiny_model), data=str(tiny_data)))
    return path


def start(*arguments, cwd):
    command = [sys.executable, "-m", "ipu_finetune", *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=str(cwd), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*arguments, cwd):
    process = start(*arguments, cwd=cwd)
    stdout, stderr = process.communicate(timeout=180)
    assert "Traceback" not in stderr, stderr
    return process.returncode, stdout, stderr


def test_the_run_prints_one_json_object_and_says_that_it_is_emulated(recipe_file, tmp_path):
    code, stdout, stderr = run(recipe_file, "--target", "emulator", "--json", "--max-steps", 2, cwd=tmp_path)
    assert code == 0, stderr
    result = json.loads(stdout)
    assert sorted(result) == ["emulated", "metrics", "output", "record", "target"]
    assert (result["target"], result["emulated"]) == ("emulator", True)
    assert result["metrics"]["examples"] == 12
    assert "emulat" in stderr.splitlines()[0]
    assert "48 features · combined batch 4 × 1 × 2 × 1 = 8 rows" in stderr
    folder = tmp_path / result["output"]
    assert folder.parent == tmp_path / "runs" / "tiny-houses"
    assert json.loads((folder / "record.json").read_text())["status"] == "stopped_early"


def test_u75_auto_takes_the_emulator_where_there_is_no_ipu_and_says_so(recipe_file, tmp_path):
    code, stdout, stderr = run(recipe_file, "--max-steps", 1, "--output", "out", cwd=tmp_path)
    assert code == 0, stderr
    assert "no IPU found" in stderr.splitlines()[0]
    assert "emulated: this is not IPU speed" in stdout or "throughput" not in stdout
    assert json.loads((tmp_path / "out" / "record.json").read_text())["emulated"] is True


def test_a_target_that_is_absent_exits_4_and_writes_nothing(recipe_file, tmp_path):
    code, stdout, stderr = run(recipe_file, "--target", "ipu", "--output", "out", cwd=tmp_path)
    assert (code, stdout) == (4, "")
    assert "POPLAR_SDK_ENABLED" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["cpu", "emulator"])
def test_ctrl_c_leaves_a_checkpoint_exits_130_and_the_run_resumes(recipe_file, tmp_path, target):
    options = ["--target", target, "--set", "training.epochs=5000"]
    process = start(recipe_file, *options, "--output", "out", cwd=tmp_path)
    log = tmp_path / "out" / "metrics.jsonl"
    for _ in range(600):
        if log.exists() and log.stat().st_size:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "continue with --resume" in stderr
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    step = int(newest.name.partition("-")[2])
    assert step >= 1
    code, _, stderr = run(recipe_file, *options, "--max-steps", step + 2, "--resume", "out", cwd=tmp_path)
    assert code == 0, stderr
    assert f"resuming from {newest.name}" in stderr
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert (record["batch"]["updates"], record["restarts"]) == (step + 2, 1)


def test_predict_answers_from_a_fine_tuned_model(recipe_file, tmp_path):
    code, _, stderr = run(recipe_file, "--target", "cpu", "--max-steps", 1, "--output", "out", cwd=tmp_path)
    assert code == 0, stderr
    context = "The house number 3 is green and its gate was built in 1907."
    code, stdout, stderr = run(
        "predict",
        "question-answering",
        "--model",
        "out/model",
        "--target",
        "emulator",
        "--question",
        "What colour is house 3?",
        "--context",
        context,
        cwd=tmp_path,
    )
    assert code == 0, stderr
    answer = json.loads(stdout)
    assert context[answer["start"] : answer["end"]] == answer["answer"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--set", "training.global_batch_size=64"], 1, "4×1×16×1=64 > 48; use accumulation ≤ 12"),
        (["--data", "missing.json"], 1, "missing.json"),
        (["--set", "ipu.layers_per_ipu=[3]"], 2, "3"),
        (["--set", "ipu.embedding_serialization_factor=4"], 2, "30522"),
        (["--pod", "pod5"], 2, "pod4"),
        (["--set", "training.learning_rat=1"], 2, "learning_rate"),
        (["--set", "task.max_length=512", "--target", "cpu"], 2, "the model has 128 positions"),
        (["--output", "/proc/nowhere"], 1, "cannot be written"),
        (["--output", "."], 1, "holds other files"),
        (["--resume", "nowhere"], 2, "nowhere"),
        (["--model", "./nowhere"], 1, "there is no such folder"),
    ],
)
def test_a_users_mistake_is_one_message_with_the_right_exit_code(recipe_file, tmp_path, arguments, code, says):
    got, stdout, stderr = run(recipe_file, *arguments, "--json", cwd=tmp_path)
    assert got == code, stderr
    assert says in stderr
    assert stdout == ""
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("model"))
