# SPDX-License-Identifier: Apache-2.0
"""`--set`: values by the declared type, never by the old value (U68); every error at once."""

import pytest

from ipu_finetune._overrides import Override, apply, parse
from ipu_finetune.errors import RecipeError
from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

pytestmark = pytest.mark.pure

RECIPE = Recipe(
    model=Model("tiny", checkpoint="some/where"),
    task=QuestionAnswering("squad"),
    ipu=Ipu("bert-base", matmul_proportion=0.2),
    packing=Packing(),
    training=Training(global_batch_size=32, learning_rate=1e-4),
)


def value_of(override):
    section, key = override.split("=")[0].split(".")
    return getattr(getattr(apply(RECIPE, [override])[0], section), key)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("ipu.layers_per_ipu=[0 6 3 3]", [0, 6, 3, 3]),
        ("ipu.matmul_proportion=[0.1,0.2,0.2,0.2]", [0.1, 0.2, 0.2, 0.2]),
        ("ipu.serialized_projection_splits_per_ipu=[1,1]", [1, 1]),
    ],
)
def test_u68_what_the_config_accepts_can_be_written(override, value):
    assert value_of(override) == value


def test_u68_a_seed_that_is_no_number_is_refused():
    with pytest.raises(RecipeError, match="training.seed=abc: must be an integer"):
        apply(RECIPE, ["training.seed=abc"])


def test_u68_two_equal_signs_or_none_give_the_position():
    with pytest.raises(RecipeError, match="'x==y': '==' at position 2"):
        apply(RECIPE, ["x==y"])
    with pytest.raises(RecipeError, match=r"'training\.seed': no '=' up to its end at position 13"):
        apply(RECIPE, ["training.seed"])
    with pytest.raises(RecipeError, match="'=3': nothing before the '=' at position 1"):
        apply(RECIPE, ["=3"])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("ipu.layers_per_ipu=[3,7,7,7]", [3, 7, 7, 7]),
        ("ipu.layers_per_ipu=[ -1  -1 ]", [-1, -1]),
        ("ipu.matmul_proportion=0.3", 0.3),
        ("ipu.matmul_proportion=[0.1 0.2]", [0.1, 0.2]),
        ("ipu.matmul_proportion=[1, 0.5]", [1.0, 0.5]),
        ("ipu.matmul_proportion=none", None),
        ('ipu.parallelize_kwargs={"a": [1]}', {"a": [1]}),
        ("ipu.optimizer_state_offchip=true", True),
        ("training.learning_rate=3e-5", 3e-5),
        ("training.learning_rate=1", 1.0),
        ("training.epochs= 3 ", 3.0),
        ("training.max_steps=2", 2),
        ("training.max_steps=null", None),
        ("training.drop_last=False", False),
        ("training.optimizer=sgd", "sgd"),
        ("model.checkpoint=bert-base-uncased", "bert-base-uncased"),
        ("model.checkpoint=123", "123"),
        ('model.checkpoint="none"', "none"),
        ("model.revision=none", None),
        ("model.revision=true", "true"),
        ("task.data=a,b c.json", "a,b c.json"),
    ],
)
def test_a_value_is_read_by_the_declared_type(override, value):
    found = value_of(override)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "override",
    [
        "training.drop_last=flase",
        "training.drop_last=1",
        "training.drop_last=yes",
        "training.seed=true",
        "training.seed=1.5",
        "training.seed=none",
        "training.seed=1_000",
        "training.learning_rate=nan",
        "training.learning_rate=inf",
        "training.learning_rate=1e999",
        "training.learning_rate=fast",
        "training.learning_rate=[1]",
        "model.checkpoint=",
        'model.checkpoint="half',
        "ipu.layers_per_ipu=3",
        "ipu.layers_per_ipu=[3,7",
        "ipu.layers_per_ipu=[3 x]",
        "ipu.layers_per_ipu=[3.5]",
        "ipu.layers_per_ipu=[true]",
        "ipu.matmul_proportion=[0.1,a]",
        "ipu.parallelize_kwargs=[1]",
    ],
)
def test_a_value_of_another_type_is_refused(override):
    with pytest.raises(RecipeError, match="must be "):
        apply(RECIPE, [override])


def test_a_list_may_begin_with_an_equal_sign_only_in_quotes():
    assert value_of('task.data="=odd"') == "=odd"


def test_the_diff_shows_what_changes_and_nothing_else():
    changed, diff = apply(
        RECIPE, ["ipu.matmul_proportion=[0.1,0.2]", "training.seed=42", "training.max_steps=5", "packing.enabled=false"]
    )
    assert diff == [
        "ipu.matmul_proportion: 0.2 -> [0.1, 0.2]",
        "training.max_steps: none -> 5",
        "packing.enabled: true -> false",
    ]
    assert (changed.training.max_steps, RECIPE.training.max_steps) == (5, None)


def test_unknown_names_are_answered_with_the_nearest_and_every_error_is_reported():
    with pytest.raises(RecipeError) as caught:
        apply(
            RECIPE,
            [
                "training.lerning_rate=1",
                "trainig.seed=1",
                "layers_per_ipu=[1]",
                "ipu.gradient_accumulation_steps=4",
                "goal.value=3",
                "training.seed=x",
                "oops",
            ],
        )
    texts = caught.value.problems
    assert len(texts) == 7
    assert texts[0].startswith("training.lerning_rate=1: unknown key (did you mean 'learning_rate'")
    assert texts[1].startswith("trainig.seed=1: unknown section (did you mean 'ipu.seed' or 'training.seed'?)")
    assert texts[2].startswith("layers_per_ipu=[1]: names no section (did you mean 'ipu.layers_per_ipu'?)")
    assert "follows from training.global_batch_size" in texts[3]
    assert texts[4] == "goal.value=3: this recipe has no goal"
    assert texts[5] == "training.seed=x: must be an integer"
    assert texts[6].startswith("'oops': no '='")


def test_a_field_that_is_set_twice_is_refused():
    flag = Override("training.seed", "2", "--seed 2")
    with pytest.raises(
        RecipeError, match=r"--seed 2: training\.seed is already set by 'training\.seed=1'; give it once"
    ):
        apply(RECIPE, ["training.seed=1", flag])


def test_messages_name_what_the_user_wrote():
    with pytest.raises(RecipeError, match="--seed abc: must be an integer"):
        apply(RECIPE, [Override("training.seed", "abc", "--seed abc")])
    assert parse("a.b=c=d") == Override("a.b", "c=d", "a.b=c=d")
