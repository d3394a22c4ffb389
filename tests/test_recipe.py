# SPDX-License-Identifier: Apache-2.0
"""Recipes: every problem at once, and a JSON twin."""

import dataclasses
import hashlib
import json
import re

import pytest

import ipu_finetune
from ipu_finetune.errors import RecipeError
from ipu_finetune.ipu_config import Facts
from ipu_finetune.recipe import (
    SECTIONS,
    Goal,
    Ipu,
    Model,
    Packing,
    QuestionAnswering,
    Recipe,
    Training,
    check,
    fingerprint,
    from_dict,
    problems,
    to_dict,
)

pytestmark = pytest.mark.pure


def build(**changes):
    """A valid recipe; `section__field=value` replaces one field."""
    parts = {
        "model": Model("tiny", checkpoint="some/where"),
        "task": QuestionAnswering("squad"),
        "ipu": Ipu("bert-base"),
        "packing": Packing(),
        "training": Training(global_batch_size=32, learning_rate=1e-4),
        "goal": None,
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        parts[section] = dataclasses.replace(parts[section], **{key: value}) if key else value
    return Recipe(**parts)


def test_a_valid_recipe_has_no_problem():
    assert problems(build()) == []
    check(build(goal=Goal("f1", 90.9, "a paper"), training__epochs=2))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("model__checkpoint", None, "must be a text"),
        ("model__init", "random", "must be one of pretrained, config"),
        ("model__dropout", 1.0, "must be in [0,1)"),
        ("task__max_length", "384", "must be an integer"),
        ("task__max_length", True, "must be an integer"),
        ("task__version_2", 1, "must be true or false"),
        ("training__learning_rate", 0.0, "must be greater than 0"),
        ("training__learning_rate", float("nan"), "must be a number"),
        ("training__learning_rate", "3e-5", "must be a number"),
        ("training__epochs", -1, "must be greater than 0"),
        ("training__max_steps", 0, "must be at least 1"),
        ("training__max_steps", 10.0, "must be an integer or none"),
        ("training__optimizer", "adamx", "must be one of adamw, adam, sgd, lamb"),
        ("training__scheduler", "step", "must be one of linear, cosine, constant"),
        ("training__precision", "fp8", "must be one of fp32, fp16, bf16"),
        ("training__warmup_ratio", 1, "must be in [0,1)"),
        ("training__seed", -1, "must be in [0,4294967295]"),
        ("training__report_to", "tensorboard", "must be one of none"),
        ("ipu__layers_per_ipu", [0.5], "must be a list of integers or none"),
        ("ipu__matmul_proportion", 1.5, "must be in (0,1]"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named_with_its_rule(field, value, rule):
    found = problems(build(**{field: value}))
    assert len(found) == 1
    assert found[0].startswith(field.replace("__", ".") + "=")
    assert found[0].endswith(rule)


def test_every_problem_is_reported_at_once():
    recipe = build(
        training__epochs=0,
        training__optimizer="adamx",
        task__doc_stride=380,
        packing__algorithm="nnls",
        ipu__pod="pod17",
        ipu__layers_per_ipu=[4, 4, 4],
        ipu__ipus_per_replica=4,
        ipu__matmul_proportion=[0.1, 0.2],
    )
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    starts = [
        "training.epochs=0: must be greater than 0",
        "training.optimizer=adamx: must be one of",
        "ipu.pod=pod17: unknown pod 'pod17' (did you mean 'pod16'",
        "layers_per_ipu=[4, 4, 4] is for 3 IPUs, but ipus_per_replica=4 (4 vs 3)",
        "ipu.matmul_proportion=[0.1, 0.2] has 2 values: needs 1 or 4",
        "task.doc_stride=380 leaves 1 of task.max_length=384 tokens",
        "packing.algorithm=nnls: must be one of",
    ]
    found = caught.value.problems
    assert len(found) == len(starts), found
    for start in starts:
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)
    assert all(problem in str(caught.value) for problem in found)
    assert caught.value.exit_code == 2


def test_a_windows_overlap_must_leave_room_for_a_question():
    # 384 tokens, 3 of them special, 16 for a question: 365 may overlap
    assert problems(build(task__doc_stride=365)) == []
    assert "at most 365" in problems(build(task__doc_stride=366))[0]


def test_the_longest_answer_must_be_shorter_than_a_window():
    assert (
        "max_answer_length=64"
        in problems(build(task__max_length=64, task__doc_stride=16, task__max_answer_length=64))[0]
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"task__null_threshold": 1.0}, "task.null_threshold=1.0 has no effect"),
        ({"task__validate_every": 4}, "task.validate_every=4 has no effect"),
        ({"task__validation_data": "x.json"}, "task.validation_data needs task.data"),
        ({"packing__verify": True, "packing__enabled": False}, "packing.verify=true has no effect"),
        ({"model__allow_pickle": True, "model__init": "config"}, "model.allow_pickle has no effect"),
    ],
)
def test_an_option_without_effect_is_a_problem(changes, word):
    found = problems(build(**changes))
    assert len(found) == 1
    assert found[0].startswith(word)


def test_options_that_have_an_effect_are_none():
    assert problems(build(task__null_threshold=1.0, task__version_2=True)) == []
    assert problems(build(task__validate_every=4, task__data="x.json")) == []
    assert problems(build(task__validation_data="y.json", task__data="x.json")) == []


def test_a_folder_has_no_revision(tmp_path):
    assert problems(build(model__revision="main")) == []
    found = problems(build(model__revision="main", model__checkpoint=str(tmp_path)))
    assert found[0].startswith("model.revision=main")


def test_a_global_batch_that_the_pods_replicas_cannot_make_is_a_problem():
    assert problems(build(ipu__pod="pod16", training__micro_batch_size=4)) == []
    found = problems(build(ipu__pod="pod64", training__micro_batch_size=4))  # 16 replicas × 4 = 64
    assert len(found) == 1
    assert found[0].startswith("training.global_batch_size=32 cannot be made from micro-batch 4 packs × 16 replicas")
    found = problems(build(ipu__pod="pod64", training__micro_batch_size=4, packing__enabled=False))
    assert len(found) == 1
    assert found[0].startswith("training.global_batch_size=32 cannot be made from micro-batch 4 × 16 replicas")


def test_a_pod_that_is_too_small_is_not_a_fault_of_the_recipe():
    assert problems(build(ipu__pod="pod4", ipu__layers_per_ipu=[1] * 12)) == []


def test_known_layers_and_vocabulary_are_held_against_the_layout():
    recipe = build(ipu__embedding_serialization_factor=4)
    assert problems(recipe) == []
    found = problems(recipe, Facts("bert", 24, 30522))
    assert ["12≠24" in found[0], "use 3 or 6" in found[1], len(found)] == [True, True, 2]


def test_an_auto_config_is_checked_without_a_model():
    assert problems(build(ipu__config="auto")) == []
    assert problems(build(ipu__config="auto", ipu__device_iterations=0))[0].startswith("ipu.device_iterations=0")


def test_a_part_that_is_no_section_is_a_problem():
    with pytest.raises(RecipeError, match=r"training=\{'epochs': 2\}: must be Training\(\.\.\.\)"):
        check(build(training={"epochs": 2}))
    with pytest.raises(RecipeError, match=r"model=None: must be Model"):
        check(build(model=None))


# --- the JSON twin


def test_a_recipe_survives_json():
    recipe = build(
        goal=Goal("f1", 80, "a paper"), ipu__matmul_proportion=[0.1, 1, 0.2, 0.2], ipu__layers_per_ipu=[3] * 4
    )
    content = json.loads(json.dumps(to_dict(recipe)))
    assert from_dict(content) == recipe
    assert content["task"]["kind"] == "question-answering"
    assert from_dict(to_dict(build())) == build()


def test_integers_that_stand_for_numbers_become_numbers():
    content = to_dict(build(training__epochs=2))
    assert isinstance(content["training"]["epochs"], float)
    assert content == to_dict(build(training__epochs=2.0))


def test_every_error_of_a_json_recipe_is_reported_at_once():
    content = to_dict(build())
    content["training"]["lerning_rate"] = content["training"].pop("learning_rate")
    content["training"]["seed"] = "7"
    content["ipu"]["gradient_accumulation_steps"] = 4
    content["trainig"] = {}
    content["task"]["kind"] = "question-answerin"
    del content["model"]
    content["packing"] = 3
    with pytest.raises(RecipeError) as caught:
        from_dict(content)
    first_match_only = [re.sub(r" or '.*'\?", "?", problem) for problem in caught.value.problems]
    assert first_match_only == [
        "trainig: unknown section (did you mean 'training'?)",
        "model: section is missing",
        "task.kind=question-answerin: unknown task (did you mean 'question-answering'?)",
        "ipu.gradient_accumulation_steps: cannot be set; it follows from training.global_batch_size, "
        "training.micro_batch_size and the replicas; set training.global_batch_size",
        "packing=3: must be a JSON object",
        "training.seed=7: must be an integer",
        "training.lerning_rate: unknown key (did you mean 'learning_rate'?)",
        "training.learning_rate: is missing",
    ]


def test_the_fingerprint_is_the_hash_of_the_canonical_json():
    text = json.dumps(to_dict(build()), sort_keys=True, separators=(",", ":"))
    assert fingerprint(build()) == hashlib.sha256(text.encode()).hexdigest()
    assert fingerprint(build(training__epochs=2)) == fingerprint(build(training__epochs=2.0))
    assert fingerprint(build(training__seed=43)) != fingerprint(build())


# --- options are declared once


def test_every_field_has_help_and_only_these_have_flags():
    flags = {}
    for section, cls in SECTIONS.items():
        for each in dataclasses.fields(cls):
            assert each.metadata["help"], each.name
            if each.metadata["flag"]:
                flags[each.metadata["flag"]] = f"{section}.{each.name}"
    assert flags == {
        "--model": "model.checkpoint",
        "--allow-pickle": "model.allow_pickle",
        "--data": "task.data",
        "--pod": "ipu.pod",
        "--max-steps": "training.max_steps",
        "--seed": "training.seed",
    }


def test_the_ipu_section_has_every_field_of_the_frozen_ipu_config():
    """By hand from optimum-graphcore 0.7.1's signature; its own class is asked where it is installed."""
    derived_or_switched_off = {"gradient_accumulation_steps"}
    modes = {"layers_per_ipu", "ipus_per_replica", "replication_factor", "device_iterations", "matmul_proportion"}
    modes |= {f"{part}_serialization_factor" for part in ("embedding", "projection")}
    modes |= {f"serialized_{part}_splits_per_ipu" for part in ("embedding", "projection")} | {"parallelize_kwargs"}
    single = {"optimizer_state_offchip", "replicated_tensor_sharding", "enable_half_partials", "output_mode", "seed"}
    single |= {"recompute_checkpoint_every_layer", "auto_loss_scaling", "executable_cache_dir", "explicit_ir_inference"}
    expected = modes | {f"inference_{name}" for name in modes} | single
    assert {each.name for each in dataclasses.fields(Ipu)} - {"config", "pod"} == expected - derived_or_switched_off


# --- the package


def test_the_package_exports_these_names():
    assert sorted(ipu_finetune.__all__) == [
        "Goal",
        "IPUConfig",
        "Ipu",
        "Model",
        "Packing",
        "QuestionAnswering",
        "Recipe",
        "Training",
        "__version__",
        "emulator",
        "finetune",
        "load_recipe",
        "pipeline",
    ]
    assert ipu_finetune.Recipe is Recipe
    assert ipu_finetune.load_recipe("minilm", "squad").name == "minilm-squad"
    with pytest.raises(AttributeError, match="has no attribute 'fit'"):
        ipu_finetune.fit  # noqa: B018
