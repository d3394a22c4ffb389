# SPDX-License-Identifier: Apache-2.0
"""`ls`, `show` and `cp`."""

import json

import pytest

from ipu_finetune import cli
from ipu_finetune._discovery import load_recipe
from ipu_finetune.recipe import fingerprint, from_dict

pytestmark = pytest.mark.pure


def run_json(words, capsys):
    assert cli.main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_ls_lists_the_recipes(capsys):
    assert cli.main(["ls"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bert-large", "squad"] in [row[:2] for row in rows]
    assert ["minilm", "squad-sample"] in [row[:2] for row in rows]
    listed = run_json(["ls"], capsys)["recipes"]
    assert [row["model"] for row in listed] == [row[0] for row in rows[1:]]


def test_ls_lists_models_tasks_configs_and_pods(capsys):
    models = {row["model"]: row for row in run_json(["ls", "models"], capsys)["models"]}
    assert models["minilm"]["datasets"] == ["squad", "squad-sample", "squad_v2"]
    assert [row["task"] for row in run_json(["ls", "tasks"], capsys)["tasks"]] == ["question-answering"]
    configs = {row["config"]: row for row in run_json(["ls", "configs"], capsys)["configs"]}
    assert configs["bert-large"]["layers_per_ipu"] == [3, 7, 7, 7]
    assert {"bert-base", "minilm", "distilbert"} <= set(configs)
    pods = {row["pod"]: row for row in run_json(["ls", "pods"], capsys)["pods"]}
    assert (pods["bow-pod16"]["ipus"], pods["bow-pod16"]["memory_gb"]) == (16, 14.4)


def test_show_resolves_the_config_for_a_pod(capsys):
    shown = run_json(["show", "bert-large", "squad", "--pod", "pod16"], capsys)
    assert shown["ipu_config"]["replication_factor"] == 4
    assert shown["ipu_config"]["layers_per_ipu"] == [3, 7, 7, 7]
    known = {"micro_batch_size": 1, "replicas": 4, "global_batch": 256, "ipus": 16}
    # 256 sequences / 4 replicas; with 6 in a pack, 64 / 6 = 10.7
    assert shown["batch"] == {**known, "gradient_accumulation": None, "accumulation_range": [11, 64]}
    words = ["show", "bert-large", "squad", "--pod", "pod16", "--set", "packing.enabled=false"]
    assert run_json(words, capsys)["batch"] == {**known, "gradient_accumulation": 64}
    recipe = load_recipe("bert-large", "squad", overrides=["ipu.pod=pod16"])
    assert from_dict(shown["recipe"]) == recipe
    assert shown["fingerprint"] == fingerprint(recipe)


def test_show_prints_every_field_the_layout_and_what_changed(capsys):
    assert cli.main(["show", "bert-large", "squad", "--pod", "pod16", "--set", "training.seed=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "learning_rate = 6e-05",
        "layers_per_ipu = [3, 7, 7, 7]",
        "IPU 0: layers 0 to 2",
        "IPU 3: layers 17 to 23",
        "global batch = 256 sequences per update, from micro-batch 1 pack × replicas 4 × accumulation, which follows "
        "from the data (64 at 1 sequence in a pack, 11 at 6), on 16 IPUs",
        "training.seed: 42 -> 7",
    ):
        assert line in lines


def test_show_expands_wildcards_where_the_model_is_known(capsys):
    words = ["show", "bert-base", "squad", "--set", "ipu.layers_per_ipu=[-1 -1]"]
    assert run_json(words, capsys)["ipu_config"]["layers_per_ipu"] == [6, 6]


def test_show_holds_the_layout_against_a_local_model(capsys, tmp_path):
    config = {"model_type": "bert", "num_hidden_layers": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["show", "minilm", "squad", "--model", str(tmp_path)]) == 2
    assert "6≠4" in capsys.readouterr().err


def test_show_announces_the_config_that_auto_chose(capsys, tmp_path):
    config = {"model_type": "distilbert", "n_layers": 6, "vocab_size": 30522}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["show", "minilm", "squad", "--model", str(tmp_path), "--set", "ipu.config=auto"]) == 0
    assert "ipu config: built-in 'distilbert', chosen for distilbert with 6 layers" in capsys.readouterr().out


def test_show_of_a_pod_that_is_too_small_is_exit_3(capsys):
    assert cli.main(["show", "bert-large", "squad", "--pod", "pod4", "--set", "ipu.replication_factor=2"]) == 3
    assert "pod4 has 4; use pod16" in capsys.readouterr().err


def test_cp_copies_the_recipe_and_overwrites_nothing(capsys, tmp_path):
    copy = tmp_path / "mine.py"
    assert cli.main(["cp", "minilm", "squad", str(copy)]) == 0
    assert load_recipe(copy) == load_recipe("minilm", "squad")
    assert f"ipu-finetune run {copy}" in capsys.readouterr().out
    assert cli.main(["cp", "bert-large", "squad", str(copy)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert load_recipe(copy).name == "minilm-squad"


@pytest.mark.parametrize(("file", "message"), [("mine.txt", "end in .py"), ("nosuch/mine.py", "there is no folder")])
def test_cp_refuses_a_place_that_cannot_be_run(file, message, capsys, tmp_path):
    assert cli.main(["cp", "minilm", "squad", str(tmp_path / file)]) == 2
    assert message in capsys.readouterr().err
