# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a tiny model, on the reference target and on the emulator."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from ipu_finetune.errors import CheckpointError, DataError, IpuFinetuneError, RecipeError
from ipu_finetune.evaluation.run import finetune
from ipu_finetune.training import checkpoint

# Adam turns a rounding difference in a tiny gradient into a full-sized step; plain gradient descent does not.
EXACT = {"training__optimizer": "sgd", "training__learning_rate": 0.1}


def same_weights(ones, others):
    assert ones.keys() == others.keys()
    for name, tensor in ones.items():
        assert torch.allclose(tensor, others[name], atol=1e-6), name


def test_a_run_leaves_a_folder_that_describes_itself(tiny_recipe, tmp_path, target):
    run = finetune(tiny_recipe(), target=target, output=str(tmp_path / "run"))
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "data.json",
        "environment.json",
        "ipu_config.json",
        "metrics.jsonl",
        "model",
        "recipe.json",
        "record.json",
    ]
    record = json.loads((folder / "record.json").read_text())
    assert record["target"] == target
    assert record["emulated"] is (target == "emulator")
    assert record["status"] == "ok"
    assert record["batch"]["updates"] == record["batch"]["planned_updates"] == 12
    assert record["batch"]["sequences"] == 96
    assert record["metrics"] == run.metrics
    # U01: every question is scored once, whatever the evaluation batch.
    assert run.metrics["examples"] == 12
    assert record["throughput"]["kind"] == ("emulated" if target == "emulator" else "measured")
    assert ("emulated: this is not IPU speed" in run.summary) is (target == "emulator")
    assert str(folder) in run.summary
    data = json.loads((folder / "data.json").read_text())
    assert data["counts"]["train"] == 48
    assert data["features"]["train"]["rows"] == 48


def test_u16_the_saved_model_is_a_plain_transformers_checkpoint(tiny_recipe, tmp_path, target):
    finetune(tiny_recipe(training__max_steps=2), target=target, output=str(tmp_path / "run"))
    model, info = transformers.BertForQuestionAnswering.from_pretrained(
        str(tmp_path / "run" / "model"), output_loading_info=True
    )
    assert info["missing_keys"] == info["unexpected_keys"] == info["mismatched_keys"] == []
    assert type(model.bert.encoder.layer[0].attention.self).__name__ == "BertSelfAttention"


def test_u16_evaluations_in_between_change_nothing(tiny_recipe, tmp_path, target, state_of):
    for name, every in (("with", 2), ("without", None)):
        finetune(
            tiny_recipe(training__eval_steps=every, training__max_steps=4),
            target=target,
            output=str(tmp_path / name),
        )
    with_evaluation, without = state_of(tmp_path / "with"), state_of(tmp_path / "without")
    assert with_evaluation.keys() == without.keys()
    assert all(torch.equal(with_evaluation[name], without[name]) for name in without)
    rows = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [2]


def test_the_emulator_and_the_reference_make_the_same_model(tiny_recipe, tmp_path, state_of):
    recipe = tiny_recipe(ipu__replication_factor=2, ipu__device_iterations=2, training__micro_batch_size=2, **EXACT)
    runs = {name: finetune(recipe, target=name, output=str(tmp_path / name)) for name in ("cpu", "emulator")}
    same_weights(state_of(tmp_path / "cpu"), state_of(tmp_path / "emulator"))
    assert runs["cpu"].metrics == pytest.approx(runs["emulator"].metrics)


def test_with_adam_the_losses_of_the_two_targets_run_together(tiny_recipe, tmp_path):
    recipe = tiny_recipe(ipu__replication_factor=2, training__micro_batch_size=2)
    for name in ("cpu", "emulator"):
        finetune(recipe, target=name, output=str(tmp_path / name))
    losses = {
        name: [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("cpu", "emulator")
    }
    assert len(losses["cpu"]) == 12
    assert losses["cpu"] == pytest.approx(losses["emulator"], rel=1e-4)
    assert losses["cpu"][-1] < losses["cpu"][0] - 0.1


def test_an_interrupted_run_resumes_to_the_same_bits(tiny_recipe, tmp_path, target, state_of):
    recipe = tiny_recipe(model__dropout=0.1)
    finetune(recipe, target=target, output=str(tmp_path / "unbroken"))
    part = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, max_steps=5))
    finetune(part, target=target, output=str(tmp_path / "broken"))
    run = finetune(recipe, target=target, resume=str(tmp_path / "broken"))
    unbroken, resumed = state_of(tmp_path / "unbroken"), state_of(tmp_path / "broken")
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
    records = [json.loads((tmp_path / name / "record.json").read_text()) for name in ("unbroken", "broken")]
    assert records[0]["batch"] == records[1]["batch"]
    assert (records[0]["restarts"], records[1]["restarts"]) == (0, 1)
    assert records[0]["metrics"] == records[1]["metrics"] == run.metrics


def test_a_pipelined_and_serialized_layout_saves_the_plain_weights(tiny_recipe, tmp_path, state_of):
    recipe = tiny_recipe(
        ipu__layers_per_ipu=[1, 1],
        ipu__inference_layers_per_ipu=[1, 1],
        ipu__embedding_serialization_factor=2,
        ipu__inference_embedding_serialization_factor=3,
        training__micro_batch_size=2,
        training__max_steps=3,
        **EXACT,
    )
    finetune(recipe, target="emulator", output=str(tmp_path / "emulator"))
    finetune(recipe, target="cpu", output=str(tmp_path / "cpu"))
    same_weights(state_of(tmp_path / "cpu"), state_of(tmp_path / "emulator"))


def test_resuming_with_other_settings_is_refused_and_names_them(tiny_recipe, tmp_path):
    finetune(tiny_recipe(training__max_steps=2), target="cpu", output=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"training.learning_rate was 0.001, is 0.5"):
        finetune(tiny_recipe(training__learning_rate=0.5), target="cpu", resume=str(tmp_path / "run"))
    assert (tmp_path / "run" / "record.json").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tiny_recipe, tmp_path):
    output = str(tmp_path / "run")
    finetune(tiny_recipe(training__max_steps=1), target="cpu", output=output)
    before = (tmp_path / "run" / "record.json").read_bytes()
    with pytest.raises(CheckpointError, match="already holds a run; continue it with --resume, replace it with --over"):
        finetune(tiny_recipe(training__max_steps=1), target="cpu", output=output)
    assert (tmp_path / "run" / "record.json").read_bytes() == before
    finetune(tiny_recipe(training__max_steps=2), target="cpu", output=output, overwrite=True)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000002"]


def test_a_folder_with_other_files_is_not_taken(tiny_recipe, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds other files \(thesis.tex\)"):
        finetune(tiny_recipe(), target="cpu", output=str(tmp_path), overwrite=True)
    with pytest.raises(CheckpointError, match="is a file"):
        finetune(tiny_recipe(), target="cpu", output=str(tmp_path / "thesis.tex"))


def test_u34_a_data_set_smaller_than_a_combined_batch_writes_no_model(tiny_recipe, tmp_path, target):
    recipe = tiny_recipe(training__global_batch_size=64, training__micro_batch_size=4)
    with pytest.raises(DataError, match=r"4×1×16×1=64 > 48; use accumulation ≤ 12"):
        finetune(recipe, target=target, output=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_u01_filling_the_last_batch_trains_on_every_row(tiny_recipe, tmp_path, target):
    recipe = tiny_recipe(training__global_batch_size=20, training__micro_batch_size=4, training__drop_last=False)
    finetune(recipe, target=target, output=str(tmp_path / "run"))
    batch = json.loads((tmp_path / "run" / "record.json").read_text())["batch"]
    assert (batch["updates_per_epoch"], batch["filler_rows_per_epoch"], batch["sequences"]) == (3, 12, 96)


def test_a_window_longer_than_the_models_positions_is_refused(tiny_recipe, tmp_path):
    with pytest.raises(RecipeError, match="task.max_length=256: the model has 128 positions"):
        finetune(tiny_recipe(task__max_length=256), target="cpu", output=str(tmp_path / "run"))


def test_layers_that_do_not_match_the_model_are_refused(tiny_recipe, tmp_path):
    with pytest.raises(RecipeError, match="3"):
        finetune(
            tiny_recipe(ipu__layers_per_ipu=[3], ipu__inference_layers_per_ipu=[3]),
            target="emulator",
            output=str(tmp_path / "run"),
        )


def test_a_vocabulary_that_the_serialization_does_not_divide_is_refused(tiny_recipe, tmp_path):
    with pytest.raises(RecipeError, match="30522"):
        finetune(tiny_recipe(ipu__embedding_serialization_factor=4), target="emulator", output=str(tmp_path / "run"))


def test_fp16_runs_on_the_emulator_and_is_refused_on_the_cpu(tiny_recipe, tmp_path):
    recipe = tiny_recipe(training__precision="fp16", training__max_steps=2, training__loss_scaling=64.0)
    run = finetune(recipe, target="emulator", output=str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert run.metrics["examples"] == 12
    with pytest.raises(RecipeError, match="the cpu target has no fp16 training"):
        finetune(recipe, target="cpu", output=str(tmp_path / "cpu"))


def test_u70_no_token_is_needed_to_train_and_a_push_without_one_stops_before_anything(
    tiny_recipe, tmp_path, monkeypatch
):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finetune(tiny_recipe(training__max_steps=1), target="cpu", output=str(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    recipe = tiny_recipe(model__push_to_hub="somebody/tiny", training__max_steps=1)
    with pytest.raises(IpuFinetuneError, match="token"):
        finetune(recipe, target="cpu", output=str(tmp_path / "pushed"))
    assert not (tmp_path / "pushed").exists()


def test_u43_a_model_without_a_device_config_gets_the_built_in_one_that_fits_and_is_told(
    tiny_recipe, tiny_model, tmp_path, capsys
):
    folder = tmp_path / "distilbert"
    config = transformers.DistilBertConfig(
        vocab_size=30522, dim=16, n_layers=6, n_heads=2, hidden_dim=32, max_position_embeddings=64
    )
    transformers.DistilBertModel(config).save_pretrained(str(folder), safe_serialization=True)
    transformers.DistilBertTokenizerFast(vocab_file=str(tiny_model / "vocab.txt")).save_pretrained(str(folder))
    recipe = tiny_recipe(
        model__checkpoint=str(folder),
        ipu__config="auto",
        ipu__layers_per_ipu=None,
        ipu__inference_layers_per_ipu=None,
        training__global_batch_size=12,
        training__max_steps=1,
    )
    run = finetune(recipe, target="emulator", output=str(tmp_path / "run"), progress=True)
    said = capsys.readouterr().err
    assert "distilbert" in said
    assert "IPU0: 2 · IPU1: 4 layers" in said
    assert run.metrics["examples"] == 12
    assert json.loads((tmp_path / "run" / "ipu_config.json").read_text())["layers_per_ipu"] == [2, 4]
