# SPDX-License-Identifier: Apache-2.0
"""IPU configs: strict reading (U35), layers against the model (U39), train/infer pairs (U41), matching (U43), replicas."""

import json
import warnings

import pytest

from ipu_finetune import ipu_config
from ipu_finetune.errors import DoesNotFitError, RecipeError
from ipu_finetune.ipu_config import Ipu

pytestmark = pytest.mark.pure


@pytest.fixture
def config_file(tmp_path):
    def write(content):
        folder = tmp_path / "config"
        folder.mkdir(exist_ok=True)
        (folder / "ipu_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return str(folder)

    return write


# --- U35


def test_u35_a_misspelt_key_is_refused_with_the_right_one(config_file):
    with pytest.raises(RecipeError, match=r"layers_per_ipus: unknown key \(did you mean 'layers_per_ipu'"):
        ipu_config.read(config_file({"layers_per_ipus": [3, 3], "ipus_per_replica": 2}))


@pytest.mark.parametrize("key", ["enable_half_first_order_momentum", "sharded_execution_for_inference"])
def test_u35_a_retired_key_is_warned_of_and_left_out(config_file, key):
    with pytest.warns(UserWarning, match=f"{key} is retired.*remove it"):
        assert ipu_config.read(config_file({key: True, "matmul_proportion": 0.3})).values == {"matmul_proportion": 0.3}


def test_u35_metadata_is_accepted_silently(config_file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = ipu_config.read(config_file({"optimum_version": "1.0", "transformers_version": "4.29.2"}))
    assert read.values == {}


def test_every_problem_of_a_file_is_reported_at_once(config_file):
    content = {"layers_per_ipu": "3", "matmul_proportion": 1.5, "replication_factor": 0, "output_mode": "al", "x": 1}
    with pytest.raises(RecipeError) as caught:
        ipu_config.read(config_file(content))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "layers_per_ipu=3",
        "matmul_proportion=1.5",
        "replication_factor=0",
        "output_mode=al",
        "x",
    ]


def test_an_accumulation_in_a_file_is_warned_of_because_the_global_batch_decides(config_file):
    assert ipu_config.read(config_file({"gradient_accumulation_steps": 1})).values == {}
    with pytest.warns(UserWarning, match=r"gradient_accumulation_steps=16 is not used.*training\.global_batch_size"):
        ipu_config.read(config_file({"gradient_accumulation_steps": 16}))


@pytest.mark.parametrize(("content", "rule"), [("{", "cannot be read as JSON"), ("[1]", "must be a JSON object")])
def test_a_file_that_is_no_json_object_is_refused(config_file, content, rule):
    with pytest.raises(RecipeError, match=rule):
        ipu_config.read(config_file(content))


def test_the_encoder_on_the_host_is_refused_only_where_it_is_switched_on(config_file):
    assert ipu_config.read(config_file({"execute_encoder_on_cpu_for_generation": False})).values == {}
    with pytest.raises(RecipeError, match="execute_encoder_on_cpu_for_generation"):
        ipu_config.read(config_file({"execute_encoder_on_cpu_for_generation": True}))


def test_null_in_a_file_leaves_the_default(config_file):
    content = {"layers_per_ipu": [1, 1], "serialized_embedding_splits_per_ipu": [1, 2], "seed": None}
    settings = ipu_config.resolve(Ipu(config_file({**content, "embedding_serialization_factor": None})))
    assert settings["serialized_embedding_splits_per_ipu"] == [1, 2]
    assert "seed" not in settings


# --- U39


@pytest.mark.parametrize(
    ("layers", "model_layers", "expected"),
    [
        ([-1, -1, -1, -1], 12, [3, 3, 3, 3]),
        ([-1, -1, -1, -1], 13, [3, 3, 3, 4]),
        ([1, 1, -1, -1], 12, [1, 1, 5, 5]),
        ([0, -1], 12, [0, 12]),
        ([-1, 2, -1], 7, [2, 2, 3]),
        ([3, 7, 7, 7], 24, [3, 7, 7, 7]),
        ([12, -1], 12, [12, 0]),
    ],
)
def test_u39_wildcards_share_what_is_left_and_the_last_takes_the_remainder(layers, model_layers, expected):
    before = list(layers)
    assert ipu_config.expand_layers(layers, model_layers) == expected
    assert layers == before


@pytest.mark.parametrize(
    ("layers", "sign"), [([3, 3, 3], "9≠12"), ([4, 4, 4, 1], "13≠12"), ([10, 10, -1], "20>12"), ([0], "0≠12")]
)
def test_u39_layers_that_do_not_match_the_model_are_refused_in_both_directions(layers, sign):
    with pytest.raises(RecipeError, match=sign):
        ipu_config.expand_layers(layers, 12)


def test_u39_two_different_counts_of_ipus_are_a_conflict(config_file):
    with pytest.raises(RecipeError, match=r"\(4 vs 2\)"):
        ipu_config.expand_layers([6, 6], 12, ipus_per_replica=4)
    with pytest.raises(RecipeError, match=r"\(4 vs 2\)"):
        ipu_config.resolve(Ipu(config_file({"ipus_per_replica": 4, "layers_per_ipu": [6, 6]})))


def test_u39_the_number_of_ipus_follows_from_the_layers(config_file):
    settings = ipu_config.resolve(Ipu(config_file({"layers_per_ipu": [0, -1]})), model_layers=12)
    assert settings["layers_per_ipu"] == settings["inference_layers_per_ipu"] == [0, 12]
    assert settings["ipus_per_replica"] == settings["inference_ipus_per_replica"] == 2


def test_a_single_wildcard_covers_every_ipu_of_the_replica(config_file):
    assert ipu_config.expand_layers([-1], 9, ipus_per_replica=2) == [4, 5]
    assert ipu_config.resolve(Ipu(config_file({"ipus_per_replica": 2})), model_layers=9)["layers_per_ipu"] == [4, 5]


@pytest.mark.parametrize("layers", [[], [-2, 3]])
def test_entries_that_mean_nothing_are_refused(layers):
    with pytest.raises(RecipeError):
        ipu_config.expand_layers(layers, 3)


def test_the_table_names_the_layers_of_each_ipu():
    assert ipu_config.layer_table([0, 1, 3]) == ["IPU 0: no encoder layer", "IPU 1: layer 0", "IPU 2: layers 1 to 3"]


# --- U41


def test_u41_training_and_inference_each_have_their_own_number_of_ipus(config_file):
    content = {"ipus_per_replica": 4, "matmul_proportion": [0.2, 0.2, 0.2, 0.2], "inference_ipus_per_replica": 1}
    settings = ipu_config.resolve(Ipu(config_file({**content, "inference_matmul_proportion": 0.3})), model_layers=12)
    assert settings["inference_layers_per_ipu"] == [12]
    assert settings["inference_matmul_proportion"] == 0.3
    with pytest.raises(
        RecipeError, match=r"inference_matmul_proportion.* has 4 values: needs 1 value \(inference_ipus_per_replica=1\)"
    ):
        ipu_config.resolve(Ipu(config_file(content)), model_layers=12)


def test_u41_a_list_of_the_wrong_length_is_refused(config_file):
    with pytest.raises(RecipeError, match="needs 1 or 4 values"):
        ipu_config.resolve(Ipu(config_file({"ipus_per_replica": 4, "matmul_proportion": [0.2, 0.2]})))


@pytest.mark.parametrize("value", [1.5, [0.1, 0.0], 0])
def test_u41_a_proportion_outside_its_range_is_refused(config_file, value):
    with pytest.raises(RecipeError, match=r"must be in \(0,1\]"):
        ipu_config.resolve(Ipu(config_file({"layers_per_ipu": [1, 1]}), matmul_proportion=value))


def test_a_list_of_one_stands_for_every_ipu(config_file):
    config = config_file({"layers_per_ipu": [1, 1], "matmul_proportion": [0.3]})
    settings = ipu_config.resolve(Ipu(config))
    assert settings["matmul_proportion"] == settings["inference_matmul_proportion"] == 0.3


# --- U43


def test_u43_the_built_in_config_is_found_by_architecture_and_layers_and_announced(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "distilbert", "n_layers": 6, "vocab_size": 30522}))
    assert ipu_config.facts(str(tmp_path)) == ipu_config.Facts("distilbert", 6, 30522)
    settled, announcement = ipu_config.settle(Ipu("auto"), str(tmp_path))
    assert settled.config == "distilbert"
    assert announcement == "ipu config: built-in 'distilbert', chosen for distilbert with 6 layers"
    assert sum(ipu_config.resolve(settled, model_layers=6, vocab_size=30522)["layers_per_ipu"]) == 6


@pytest.mark.parametrize(
    ("architecture", "layers", "name"),
    [
        ("bert", 24, "bert-large"),
        ("BertForQuestionAnswering", 12, "bert-base"),
        ("BertModel", 6, "minilm"),
        ("DistilBertForMaskedLM", 6, "distilbert"),
    ],
)
def test_a_config_is_matched_by_model_type_or_class_name(architecture, layers, name):
    assert ipu_config.match(architecture, layers)[0].name == name


@pytest.mark.parametrize(("architecture", "layers"), [("roberta", 12), ("bert", 4), ("distilbert", 12)])
def test_u43_no_other_config_is_taken_where_none_fits(architecture, layers):
    with pytest.raises(RecipeError, match=f"no built-in IPU config fits {architecture} with {layers} layers"):
        ipu_config.match(architecture, layers)


def test_u43_an_unknown_hub_name_lists_the_near_and_the_offline_ones():
    with pytest.raises(RecipeError, match="Graphcore/doesnotexist-ipu.*bert-base, bert-large, distilbert, minilm"):
        ipu_config.read("Graphcore/doesnotexist-ipu")
    with pytest.raises(RecipeError, match="did you mean 'bert-large'"):
        ipu_config.read("Graphcore/bert-large-ipu")


def test_a_config_that_lies_with_the_checkpoint_is_taken_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 6}))
    (tmp_path / "ipu_config.json").write_text(json.dumps({"layers_per_ipu": [2, 4]}))
    settled, announcement = ipu_config.settle(Ipu("auto"), str(tmp_path))
    assert ipu_config.resolve(settled)["layers_per_ipu"] == [2, 4]
    assert "lies with the checkpoint" in announcement


def test_a_named_config_is_never_replaced(tmp_path):
    (tmp_path / "ipu_config.json").write_text("{}")
    assert ipu_config.settle(Ipu("bert-base"), str(tmp_path)) == (Ipu("bert-base"), None)


def test_auto_without_a_model_to_choose_by_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"has no config\.json to choose by"):
        ipu_config.settle(Ipu("auto"), str(tmp_path))
    with pytest.raises(RecipeError, match="the model must be known"):
        ipu_config.resolve(Ipu("auto"))


def test_a_damaged_model_config_gives_no_facts(tmp_path):
    assert ipu_config.facts(str(tmp_path)) is None
    for text in ("{", "[]", '{"model_type": "bert"}'):
        (tmp_path / "config.json").write_text(text)
        assert ipu_config.facts(str(tmp_path)) is None


# --- merging, vocabulary, splits


def test_the_recipes_own_values_win_over_the_file():
    settings = ipu_config.resolve(Ipu("bert-large", layers_per_ipu=[6, 6, 6, 6], optimizer_state_offchip=False))
    assert settings["layers_per_ipu"] == settings["inference_layers_per_ipu"] == [6, 6, 6, 6]
    assert settings["optimizer_state_offchip"] is False
    assert settings["recompute_checkpoint_every_layer"] is True


def test_other_layers_bring_their_own_number_of_ipus():
    settings = ipu_config.resolve(Ipu("bert-base", layers_per_ipu=[6, 6]), model_layers=12)
    assert settings["ipus_per_replica"] == settings["inference_ipus_per_replica"] == 2


def test_public_layouts_are_the_published_ones():
    large = ipu_config.resolve(Ipu("bert-large"), model_layers=24, vocab_size=30522)
    assert large["layers_per_ipu"] == [3, 7, 7, 7]
    assert large["matmul_proportion"] == [0.1, 0.15, 0.15, 0.15]
    assert large["embedding_serialization_factor"] == 2
    assert large["optimizer_state_offchip"] is True
    assert large["recompute_checkpoint_every_layer"] is True
    assert large["replicated_tensor_sharding"] is True
    base = ipu_config.resolve(Ipu("bert-base"), model_layers=12, vocab_size=30522)
    assert (base["layers_per_ipu"], base["matmul_proportion"]) == ([0, 4, 4, 4], 0.22)


def test_a_factor_that_does_not_divide_the_vocabulary_names_the_nearest_that_do():
    # 30522 = 2 · 3 · 5087
    with pytest.raises(RecipeError, match="=4 does not divide the vocabulary of 30522; use 3 or 6"):
        ipu_config.resolve(Ipu("bert-large", embedding_serialization_factor=4), vocab_size=30522)
    with pytest.raises(RecipeError, match="inference_embedding_serialization_factor=5 does not divide"):
        ipu_config.resolve(Ipu("bert-large", inference_embedding_serialization_factor=5), vocab_size=30522)


def test_giving_the_splits_replaces_the_files_factor():
    settings = ipu_config.resolve(Ipu("bert-large", serialized_embedding_splits_per_ipu=[2, 1, 0, 0]))
    assert "embedding_serialization_factor" not in settings
    with pytest.raises(RecipeError, match="give one of the two"):
        ipu_config.resolve(
            Ipu("bert-large", serialized_embedding_splits_per_ipu=[2, 1, 0, 0], embedding_serialization_factor=3)
        )


@pytest.mark.parametrize(
    ("splits", "rule"),
    [([2, 1], "needs 4, one per IPU"), ([0, 0, 0, 0], "at least one"), ([1, 0, 1, 0], "consecutive")],
)
def test_splits_must_cover_the_pipeline_without_a_hole(splits, rule):
    with pytest.raises(RecipeError, match=rule):
        ipu_config.resolve(Ipu("bert-base", serialized_projection_splits_per_ipu=splits))


def test_every_problem_of_the_section_is_reported_at_once():
    section = Ipu(
        "bert-large",
        pod="pod15",
        layers_per_ipu=[3, 3, 3, 3],
        matmul_proportion=[0.1, 2.0],
        embedding_serialization_factor=4,
        device_iterations=0,
    )
    found = ipu_config.problems(section, model_layers=24, vocab_size=30522)
    for part in ("pod15", "12≠24", "(0,1]", "use 3 or 6", "device_iterations=0"):
        assert sum(part in problem for problem in found) == 1, (part, found)
    assert len(found) == 5


# --- the pod decides the replicas


@pytest.mark.parametrize(
    ("pod", "ipus", "expected"), [("pod16", 4, 4), ("pod4", 4, 1), ("bow-pod64", 4, 16), ("pod16", 1, 16)]
)
def test_the_pod_decides_the_replicas(pod, ipus, expected):
    assert ipu_config.replicas(pod, ipus) == expected


def test_pod16_holds_four_replicas_of_bert_large_in_training_and_inference():
    settings = ipu_config.resolve(Ipu("bert-large", pod="pod16"))
    assert settings["replication_factor"] == settings["inference_replication_factor"] == 4
    assert ipu_config.resolve(Ipu("bert-large"))["replication_factor"] == 1


def test_a_pod_that_is_too_small_names_the_one_that_is_not():
    with pytest.raises(
        DoesNotFitError, match="8 IPUs per replica do not fit pod4, which has 4; use pod16, or a layout"
    ):
        ipu_config.replicas("pod4", 8)
    with pytest.raises(DoesNotFitError, match="bow-pod128"):
        ipu_config.replicas("bow-pod64", 65)


def test_a_pod_that_the_replicas_do_not_divide_names_the_layouts_that_do():
    with pytest.raises(DoesNotFitError, match="on 2 or 4 IPUs, or set ipu.replication_factor=5 and leave 1 unused"):
        ipu_config.replicas("pod16", 3)


def test_an_explicit_replication_factor_wins_but_must_fit():
    assert ipu_config.resolve(Ipu("bert-large", pod="pod16", replication_factor=2))["replication_factor"] == 2
    with pytest.raises(
        DoesNotFitError, match=r"=5 × 4 IPUs per replica = 20 IPUs, but pod16 has 16; use pod64, or at most 4"
    ):
        ipu_config.resolve(Ipu("bert-large", pod="pod16", replication_factor=5))
    uneven = ipu_config.resolve(Ipu("minilm", pod="pod16", layers_per_ipu=[2, 2, 2], replication_factor=5))
    assert uneven["replication_factor"] == uneven["inference_replication_factor"] == 5


def test_sharding_over_one_replica_is_noted():
    assert ipu_config.notes(ipu_config.resolve(Ipu("bert-large"))) == [
        "ipu.replicated_tensor_sharding has no effect with 1 replica; a larger --pod gives more"
    ]
    assert ipu_config.notes(ipu_config.resolve(Ipu("bert-large", pod="pod16"))) == []
