# SPDX-License-Identifier: Apache-2.0
"""Recipes on disk."""

import shutil
import sys
from pathlib import Path

import pytest

from ipu_finetune import _discovery, _shipped
from ipu_finetune.errors import RecipeError, UsageError
from ipu_finetune.recipe import check

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]

GOOD = """\
from ipu_finetune.recipe import Ipu, Model, Packing, QuestionAnswering, Recipe, Training

recipe = Recipe(
    model=Model("tiny", checkpoint="some/where"),
    task=QuestionAnswering("squad"),
    ipu=Ipu("bert-base"),
    packing=Packing(),
    training=Training(global_batch_size=32, learning_rate=1e-4),
)
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """An empty recipes folder in place of the shipped one."""
    monkeypatch.setattr(_discovery, "shipped_folder", lambda name: tmp_path)
    return tmp_path


def test_the_first_recipes_are_there_valid_and_named_after_their_files():
    found = {(each.recipe.model.name, each.recipe.task.dataset): each.recipe for each in _discovery.list_recipes()}
    assert set(found) >= {
        ("bert-large", "squad"),
        ("bert-base", "squad"),
        ("minilm", "squad"),
        ("minilm", "squad-sample"),
        ("bert-large", "squad_v2"),
        ("bert-base", "squad_v2"),
        ("minilm", "squad_v2"),
    }
    for (model, dataset), recipe in found.items():
        check(recipe)
        assert _discovery.load_recipe(model, dataset) == recipe
        assert recipe.task.version_2 is (dataset == "squad_v2")


def test_bert_large_squad_has_the_published_values():
    recipe = _discovery.load_recipe("bert-large", "squad")
    assert (recipe.training.epochs, recipe.training.global_batch_size, recipe.training.learning_rate) == (2, 256, 6e-5)
    assert (recipe.task.max_length, recipe.task.doc_stride, recipe.training.micro_batch_size) == (384, 128, 1)
    assert (recipe.goal.metric, recipe.goal.value) == ("f1", 90.9)
    assert "1810.04805" in recipe.goal.source


def test_a_recipe_that_is_in_the_folder_is_found(recipes):
    (recipes / "tiny_squad.py").write_text(GOOD)
    assert [each.recipe.name for each in _discovery.list_recipes()] == ["tiny-squad"]
    assert _discovery.load_recipe("tiny", "squad", overrides=["training.seed=7"]).training.seed == 7
    assert _discovery.is_known_model("tiny")
    assert not _discovery.is_known_model("tin")
    assert _discovery.known_models() == ["tiny"]


def test_loading_leaves_nothing_behind(recipes):
    before = set(sys.modules)
    (recipes / "tiny_squad.py").write_text(GOOD)
    _discovery.list_recipes()
    assert set(sys.modules) == before
    assert [path.name for path in recipes.iterdir()] == ["tiny_squad.py"]


def test_a_file_whose_name_does_not_agree_is_refused(recipes):
    (recipes / "tiny_squat.py").write_text(GOOD)
    with pytest.raises(RecipeError, match=r"holds the recipe 'tiny squad', which belongs in tiny_squad\.py"):
        _discovery.list_recipes()


def test_a_file_named_outright_may_be_called_anything(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    assert _discovery.load_recipe(path).name == "tiny-squad"
    assert _discovery.load_recipe(str(path), overrides=["training.epochs=9"]).training.epochs == 9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nrecipe = (\n", r"line 2: "),
        ("x = 1\n\nraise ValueError('bad luck')\n", "line 3: ValueError: bad luck"),
        ("import nosuchmodule\n", "line 1: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("x = 1\n", "defines no 'recipe'"),
        ("recipe = {}\n", "'recipe' is a dict"),
        (
            GOOD.replace("learning_rate", "lerning_rate"),
            r"line \d+: unknown key 'lerning_rate' \(did you mean 'learning_rate'",
        ),
        (GOOD.replace('Model("tiny", checkpoint="some/where")', "'tiny'"), r"model must be Model\(\.\.\.\)"),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(RecipeError, match=message) as caught:
        _discovery.load_recipe(path)
    assert str(path) in str(caught.value)


def test_every_broken_file_is_reported_and_a_sound_one_still_loads(recipes):
    (recipes / "tiny_squad.py").write_text(GOOD)
    (recipes / "a_b.py").write_text("1/0\n")
    (recipes / "c_d.py").write_text("recipe = 3\n")
    with pytest.raises(RecipeError) as caught:
        _discovery.list_recipes()
    assert len(caught.value.problems) == 2
    assert _discovery.load_recipe("tiny", "squad").name == "tiny-squad"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("minilm", "squad-smaple"), "'minilm' has no recipe for 'squad-smaple'.*did you mean 'squad-sample'"),
        (("minilm", None), "'minilm' needs a data set: squad, squad-sample, squad_v2"),
        (("bert-lage", "squad"), "no recipe 'bert-lage squad'.*did you mean 'bert-large squad'"),
        (("nosuch.py", None), r"there is no recipe file 'nosuch\.py'"),
        (("mine.py", "squad"), "is a recipe file, which names its own data set"),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_nearest(arguments, message):
    with pytest.raises(UsageError, match=message):
        _discovery.load_recipe(*arguments)


def test_the_folders_come_from_the_checkout_or_from_inside_the_wheel(tmp_path, monkeypatch):
    assert _shipped.shipped_folder("recipes") == ROOT / "recipes"
    package = tmp_path / "site-packages" / "ipu_finetune"
    shutil.copytree(ROOT / "recipes", package / "_shipped" / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / "recipes").mkdir()  # somebody else's
    monkeypatch.setattr(_shipped, "_PACKAGE", package)
    assert _shipped.shipped_folder("recipes") == package / "_shipped" / "recipes"
    assert _discovery.load_recipe("minilm", "squad").name == "minilm-squad"


def test_recipe_modules_contain_nothing_but_a_recipe():
    for path in (ROOT / "recipes").glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith(("import ", "from "))] == [
            line for line in lines if line.startswith("from ipu_finetune.recipe import ")
        ], path
