# SPDX-License-Identifier: Apache-2.0
"""Where weights come from, and what is refused."""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
import transformers

from ipu_finetune.errors import DataError, RecipeError
from ipu_finetune.models import hub
from ipu_finetune.models.pretrained import build_model, find_checkpoint, load_config, load_tokenizer

QA = "AutoModelForQuestionAnswering"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture
def folder(tiny_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(str(tiny_model), str(copy))
    return copy


def build(folder, **options):
    checkpoint = find_checkpoint(str(folder))
    return build_model(checkpoint, load_config(checkpoint), QA, **options)


def as_pickle(folder):
    state = safetensors.torch.load_file(str(folder / "model.safetensors"))
    torch.save(state, str(folder / "pytorch_model.bin"))
    (folder / "model.safetensors").unlink()


def test_the_body_is_the_checkpoints_and_the_head_is_drawn_from_the_seed(tiny_model):
    model, drawn = build(tiny_model, seed=3)
    again, _ = build(tiny_model, seed=3)
    other, _ = build(tiny_model, seed=4)
    stored = transformers.BertModel.from_pretrained(str(tiny_model), add_pooling_layer=False).state_dict()
    ours = model.bert.state_dict()
    assert all(torch.equal(ours[name], stored[name]) for name in ours)
    assert drawn == ["qa_outputs.bias", "qa_outputs.weight"]
    assert torch.equal(model.qa_outputs.weight, again.qa_outputs.weight)
    assert not torch.equal(model.qa_outputs.weight, other.qa_outputs.weight)


def test_the_packaged_minilm_is_checked_against_its_hash():
    checkpoint = find_checkpoint(MINILM)
    assert checkpoint.sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    config = load_config(checkpoint, dropout=0.0)
    assert (config.num_hidden_layers, config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (6, 0.0, 0.0)
    build_model(checkpoint, config, QA)
    with pytest.raises(DataError, match="has SHA-256 53aa5.*expected 0000"):
        build_model(dataclasses.replace(checkpoint, sha256="0000"), config, QA)


def test_known_sizes_are_enough_to_draw_a_large_model_with_no_hub():
    checkpoint = find_checkpoint("bert-large-uncased", init="config")
    config = load_config(checkpoint)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (24, 1024, 16)
    assert load_tokenizer(checkpoint).vocab_size == config.vocab_size == 30522


def test_drawn_weights_load_nothing(folder):
    (folder / "model.safetensors").write_bytes(b"not weights")
    model, drawn = build(folder, init="config", seed=1)
    assert drawn == []
    assert model.qa_outputs.weight.abs().sum() > 0


def test_a_pickle_needs_to_be_allowed(folder):
    as_pickle(folder)
    with pytest.raises(DataError, match="only as a pickle.*--allow-pickle"):
        build(folder)
    model, _ = build(folder, allow_pickle=True)
    assert model.config.num_hidden_layers == 2


class _Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_is_refused_even_where_pickles_are_allowed(folder, tmp_path):
    as_pickle(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"bert": _Payload(tmp_path / "ran")}))
    with pytest.raises(DataError, match="cannot be read by torch's weights_only loader"):
        build(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_damaged(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"model.safetensors is damaged or not safetensors"):
        build(folder)


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"does not hold the weights of BertForQuestionAnswering: 16 are missing"):
        build(folder)


def test_sharded_weights_are_put_together_and_stay_in_the_folder(folder):
    state = safetensors.torch.load_file(str(folder / "model.safetensors"))
    names = sorted(state)
    half = len(names) // 2
    parts = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for part, keys in parts.items():
        safetensors.torch.save_file({key: state[key] for key in keys}, str(folder / part))
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {key: part for part, keys in parts.items() for key in keys}}))
    _model, drawn = build(folder)
    assert drawn == ["qa_outputs.bias", "qa_outputs.weight"]
    index.write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(DataError, match="outside the checkpoint"):
        build(folder)


def test_a_folder_without_weights_says_what_to_do(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="has no model.safetensors.*--set model.init=config"):
        build(folder)


def test_a_missing_folder_is_not_looked_for_on_the_hub():
    with pytest.raises(DataError, match="there is no such folder"):
        find_checkpoint("./nowhere")


def test_a_model_without_the_task_is_refused(tmp_path):
    transformers.ViTConfig().save_pretrained(str(tmp_path))
    checkpoint = find_checkpoint(str(tmp_path))
    with pytest.raises(RecipeError, match="ViTConfig has no AutoModelForQuestionAnswering"):
        build_model(checkpoint, load_config(checkpoint), QA)


def test_offline_the_hub_is_not_asked_and_the_answer_is_quick(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.is_reachable()
    with pytest.raises(DataError, match="the hub cannot be reached and the cache lacks it; give a folder with --model"):
        find_checkpoint("somebody/some-model")


def test_an_endpoint_that_does_not_answer_is_not_reachable(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not hub.is_reachable(timeout=1.0)


def test_the_hubs_cache_serves_with_no_network(tiny_model, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--somebody--tiny"
    shutil.copytree(str(tiny_model), str(repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = (
        "from ipu_finetune.models.pretrained import *\n"
        "checkpoint = find_checkpoint('somebody/tiny')\n"
        f"model, _ = build_model(checkpoint, load_config(checkpoint), {QA!r})\n"
        "print(checkpoint.revision, model.config.hidden_size)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.stdout.split() == [commit, "32"], answer.stderr
