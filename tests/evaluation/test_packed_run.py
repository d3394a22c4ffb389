# SPDX-License-Identifier: Apache-2.0
"""Whole runs on packs: the same optimisation, the same scores and the same order as without."""

import json
import math

import numpy as np
import pytest
import torch

from ipu_finetune._discovery import load_recipe
from ipu_finetune.errors import RecipeError
from ipu_finetune.evaluation.run import finetune

PACKED = {"packing__enabled": True, "packing__max_sequences": 3, "task__max_length": 128, "task__doc_stride": 16}
PADDED = {**PACKED, "packing__enabled": False}
# All 48 features in each update, so that both see the same sequences whatever shares a row.
WHOLE = {
    "training__optimizer": "sgd",
    "training__learning_rate": 0.1,
    "training__global_batch_size": 48,
    "training__micro_batch_size": 1,
    "training__epochs": 3,
    "training__eval_steps": 1,
}


def rows_of(folder, kind):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture
def both(tiny_recipe, tmp_path, target):
    """The folders and results of a packed and of a padded run over the same data."""
    runs = {}
    for name, changes in (("packed", PACKED), ("padded", PADDED)):
        runs[name] = finetune(tiny_recipe(**changes, **WHOLE), target=target, output=str(tmp_path / name))
    return tmp_path, runs


def test_packed_updates_are_those_of_the_padded_sequences(both, state_of):
    folder, runs = both
    packed, padded = (rows_of(folder / name, "training") for name in ("packed", "padded"))
    assert len(packed) == len(padded) == 3
    for ours, theirs in zip(packed, padded):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["sequences"] == theirs["sequences"]
        assert ours["real_tokens"] == theirs["real_tokens"]
    for name, tensor in state_of(folder / "padded").items():
        assert torch.allclose(tensor, state_of(folder / "packed")[name], atol=1e-5), name
    assert runs["packed"].metrics == pytest.approx(runs["padded"].metrics)


def test_u73_packed_question_answering_is_scored_while_it_trains(both):
    folder, runs = both
    during = rows_of(folder / "packed", "evaluation")
    assert [row["step"] for row in during] == [1, 2]
    padded = rows_of(folder / "padded", "evaluation")
    for ours, theirs in zip(during, padded):
        assert ours["f1"] == pytest.approx(theirs["f1"])
        assert ours["exact_match"] == pytest.approx(theirs["exact_match"])
        assert ours["examples"] == 12
    record = json.loads((folder / "packed" / "record.json").read_text())
    assert record["metrics"] == runs["packed"].metrics


def test_the_record_says_what_packing_did(both):
    folder, _ = both
    record = json.loads((folder / "packed" / "record.json").read_text())
    packing = record["packing"]
    assert packing["sequences"] == 48
    assert packing["packs"] < 48
    assert packing["sequences_per_pack"] == pytest.approx(48 / packing["packs"], abs=1e-4)
    assert packing["max_sequences"] == 3
    tokens = record["batch"]["real_tokens"] / 3
    assert packing["efficiency"] == pytest.approx(tokens / (packing["packs"] * 128), abs=1e-6)
    assert packing["wasted_positions"] == packing["packs"] * 128 - tokens
    assert packing["expected_speed_up"] == packing["sequences_per_pack"]
    assert packing["verified"] is None
    assert record["batch"]["rows"] == packing["packs"]
    assert record["batch"]["sequences"] == 3 * 48
    assert json.loads((folder / "padded" / "record.json").read_text())["packing"] is None


def test_the_plan_is_stated_in_sequences_and_announced(tiny_recipe, tmp_path, capsys):
    recipe = tiny_recipe(**PACKED, training__max_steps=1, training__micro_batch_size=1)
    finetune(recipe, target="cpu", output=str(tmp_path / "run"), progress=True)
    text = capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    packs = record["packing"]["packs"]
    per_update = record["batch"]["gradient_accumulation"] * 48 / packs
    assert f"48 features in {packs} packs · combined batch 1 × 1 ×" in text
    assert f"{per_update:,.1f} sequences per update (recipe: 8, rounded)" in text
    assert "isolation: on" in text
    assert "of the positions hold a token" in text
    assert abs(per_update - 8) <= 0.2 * 8


def test_a_global_batch_that_packs_cannot_make_is_refused_with_one_that_they_can(tiny_recipe, tmp_path):
    recipe = tiny_recipe(**PACKED, training__global_batch_size=4, training__micro_batch_size=4)
    with pytest.raises(RecipeError, match=r"sequences per pack \(nearest: \d+\.\d\); use training\.global_batch_size="):
        finetune(recipe, target="cpu", output=str(tmp_path / "run"))


def test_an_interrupted_packed_run_resumes_to_the_same_bits(tiny_recipe, tmp_path, target, state_of):
    changes = {**PACKED, "training__micro_batch_size": 1, "model__dropout": 0.1}
    finetune(tiny_recipe(**changes), target=target, output=str(tmp_path / "whole"))
    finetune(tiny_recipe(**changes, training__max_steps=3), target=target, output=str(tmp_path / "parts"))
    finetune(tiny_recipe(**changes), target=target, output=str(tmp_path / "parts"), resume=True)
    whole, parts = state_of(tmp_path / "whole"), state_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_verify_proves_isolation_on_the_users_model_before_training(tiny_recipe, tmp_path, capsys):
    recipe = tiny_recipe(**PACKED, packing__verify=True, training__max_steps=1, training__micro_batch_size=1)
    finetune(recipe, target="cpu", output=str(tmp_path / "run"), progress=True)
    text = capsys.readouterr().err
    assert text.index("packing verified: isolation: on (") < text.rindex("training:   0%")
    verified = json.loads((tmp_path / "run" / "record.json").read_text())["packing"]["verified"]
    assert verified["isolation"] == "on"
    assert verified["sequences"] >= 4


def test_verify_without_packs_is_refused(tiny_recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"packing\.verify=true has no effect with packing\.enabled=false"):
        finetune(tiny_recipe(packing__verify=True), target="cpu", output=str(tmp_path / "run"))


def test_replicas_and_device_iterations_see_the_same_packs(tiny_recipe, tmp_path, state_of):
    changes = {
        **PACKED,
        "training__optimizer": "sgd",
        "training__learning_rate": 0.1,
        "training__global_batch_size": 11,
        "training__micro_batch_size": 1,
        "ipu__replication_factor": 2,
        "ipu__device_iterations": 2,
    }
    for name in ("cpu", "emulator"):
        finetune(tiny_recipe(**changes), target=name, output=str(tmp_path / name))
    ours, theirs = state_of(tmp_path / "cpu"), state_of(tmp_path / "emulator")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_an_element_weighs_the_same_in_a_full_and_in_a_half_empty_pack():
    from ipu_finetune.batching import BatchPlan
    from ipu_finetune.training.order import TrainingRows, read_batch

    plan = BatchPlan(rows=2, micro_batch_size=1, gradient_accumulation=2, sequences=4)
    data = TrainingRows({"x": np.zeros((2, 1))}, valid=np.array([[True, True, True], [True, False, False]]))
    _, weights = read_batch(data, np.array([0, 1]), plan)
    # Each micro-batch's sum is halved by the mean over two micro-batches; four sequences share the update.
    assert weights.tolist() == [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0]]
    assert math.isclose(float(weights.sum()) / 2, 1.0)


def test_packs_are_kept_for_the_next_run_and_change_nothing(tiny_recipe, tmp_path, capsys, state_of):
    recipe = tiny_recipe(**PACKED, training__micro_batch_size=1, training__max_steps=2, training__seed=77)
    texts = []
    for name in ("first", "second"):
        finetune(recipe, target="cpu", output=str(tmp_path / name), progress=True)
        texts.append(capsys.readouterr().err)
    assert "packs kept in " in texts[0]
    assert "packs read from " in texts[1]
    first, second = state_of(tmp_path / "first"), state_of(tmp_path / "second")
    assert all(torch.equal(first[name], second[name]) for name in first)
    records = [json.loads((tmp_path / name / "record.json").read_text()) for name in ("first", "second")]
    assert records[0]["features_sha256"] == records[1]["features_sha256"]
    data = [json.loads((tmp_path / name / "data.json").read_text())["features"] for name in ("first", "second")]
    assert data[0]["train"]["rows"] == data[1]["train"]["rows"] == 48
    assert data[0]["train"]["real_tokens"] == data[1]["train"]["real_tokens"]
    # Another length is another entry.
    other = tiny_recipe(**{**PACKED, "task__max_length": 96}, training__micro_batch_size=1, training__seed=77)
    finetune(other, target="cpu", output=str(tmp_path / "other"), progress=True)
    assert "packs kept in " in capsys.readouterr().err


@pytest.mark.parametrize("dataset", ["squad", "squad_v2"])
@pytest.mark.parametrize("model", ["minilm", "bert-base", "bert-large"])
@pytest.mark.parametrize("setting", ["packing.max_sequences=6", "packing.enabled=false"])
def test_every_packed_recipe_runs_packed_and_padded(model, dataset, setting, tiny_model, tiny_data, tmp_path):
    small = [f"model.checkpoint={tiny_model}", f"task.data={tiny_data}", "task.max_length=128", "task.doc_stride=32"]
    small += ["ipu.layers_per_ipu=[2]", "ipu.inference_layers_per_ipu=[2]", "training.max_steps=1", "ipu.config=minilm"]
    small += ["training.global_batch_size=8", "training.eval_batch_size=4"]
    recipe = load_recipe(model, dataset, overrides=[*small, setting])
    assert load_recipe(model, dataset).packing.enabled
    run = finetune(recipe, target="cpu", output=str(tmp_path / "run"))
    assert run.metrics["examples"] == 12
    packing = json.loads((tmp_path / "run" / "record.json").read_text())["packing"]
    assert (packing is None) is (setting == "packing.enabled=false")
