# SPDX-License-Identifier: Apache-2.0
"""Recipes on disk: one Python module per model and data set, found by its file's name.

A module defines `recipe`. It is executed under a private name and leaves nothing behind, neither in `sys.modules` nor
beside the file.
"""

import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Iterable, List, NamedTuple, Optional, Union

from ipu_finetune._fields import hints
from ipu_finetune._ipu_files import config_path
from ipu_finetune._overrides import Override, apply
from ipu_finetune._shipped import shipped_folder
from ipu_finetune.errors import RecipeError, UsageError, did_you_mean
from ipu_finetune.recipe import SECTIONS, Recipe

__all__ = [
    "Found",
    "config_path",
    "file_stem",
    "is_known_model",
    "is_recipe_file",
    "known_models",
    "list_recipes",
    "load_recipe",
    "recipe_path",
]


class Found(NamedTuple):
    """A recipe and the file that defines it."""

    recipe: Recipe
    path: Path


def list_recipes() -> List[Found]:
    """Return every recipe of the `recipes` folder, by name.

    Raises:
        RecipeError: files that are broken or whose name does not agree with their recipe; all of them at once.
    """
    found, problems = [], []
    for path in _files():
        try:
            recipe = _execute(path)
            _check_name(recipe, path)
            found.append(Found(recipe, path))
        except RecipeError as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(problems, where="recipes")
    return found


def load_recipe(
    model: Union[str, Path], dataset: Optional[str] = None, *, overrides: Iterable[Union[str, Override]] = ()
) -> Recipe:
    """Load a recipe by model and data set, or from a file.

    Args:
        model: the recipe's model, or (without `dataset`) the path of a recipe file.
        dataset: the recipe's data set.
        overrides: ``section.key=value`` texts, as `--set` takes them.

    Raises:
        UsageError: there is no such recipe; the message names the nearest.
        RecipeError: the file or an override is broken.
    """
    path = recipe_path(model, dataset)
    recipe = _execute(path)
    if dataset is not None:  # a file that is named outright may be called anything
        _check_name(recipe, path)
    return apply(recipe, overrides)[0]


def recipe_path(model: Union[str, Path], dataset: Optional[str] = None) -> Path:
    """Return the file of a recipe, without executing it.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if is_recipe_file(model):
        if dataset is not None:
            raise UsageError(f"'{model}' is a recipe file, which names its own data set; leave out '{dataset}'")
        path = Path(model).expanduser()
        if not path.is_file():
            raise UsageError(f"there is no recipe file '{path}'")
        return path
    if dataset is not None:
        path = shipped_folder("recipes") / f"{file_stem(str(model), dataset)}.py"
        if path.is_file():
            return path
    pairs = [(found.recipe.model.name, found.recipe.task.dataset) for found in list_recipes()]
    datasets = [each for name, each in pairs if name == str(model)]
    if datasets and dataset is None:
        raise UsageError(f"'{model}' needs a data set: {', '.join(datasets)}")
    if datasets:
        raise UsageError(f"'{model}' has no recipe for '{dataset}'{did_you_mean(str(dataset), datasets)}")
    wanted = str(model) if dataset is None else f"{model} {dataset}"
    near = did_you_mean(wanted, [" ".join(pair) for pair in pairs])
    raise UsageError(f"there is no recipe '{wanted}'{near}; ipu-finetune ls has them all")


def is_recipe_file(word: Union[str, Path]) -> bool:
    """Whether a word on the command line means a file and not a model."""
    return str(word).endswith(".py")


def is_known_model(word: str) -> bool:
    """Whether some recipe's file name starts with that model; nothing is executed to know it."""
    return any(path.stem.startswith(file_stem(word, "")) for path in _files())


def known_models() -> List[str]:
    """Return the names of the models that have recipes."""
    return sorted({found.recipe.model.name for found in list_recipes()})


def file_stem(model: str, dataset: str) -> str:
    """Return what the file of a model's and a data set's recipe is called, without its ending."""
    return re.sub(r"\W+", "_", f"{model}_{dataset}").lower()


def _files() -> List[Path]:
    return sorted(path for path in shipped_folder("recipes").glob("*.py") if not path.name.startswith("_"))


def _check_name(recipe: Recipe, path: Path) -> None:
    expected = file_stem(recipe.model.name, recipe.task.dataset)
    if path.stem != expected:
        raise RecipeError(
            [
                f"holds the recipe '{recipe.model.name} {recipe.task.dataset}', which belongs in {expected}.py; rename "
                "the file, or change model.name or task.dataset"
            ],
            where=str(path),
        )


def _execute(path: Path) -> Recipe:
    """Run a recipe module and return its `recipe`."""
    module = ModuleType(f"_ipu_finetune_recipe_{path.stem}")
    module.__file__ = str(path)
    try:
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        exec(code, module.__dict__)
    except SyntaxError as error:
        raise RecipeError([f"line {error.lineno}: {error.msg}"], where=str(path)) from error
    except Exception as error:
        # A recipe is the user's own Python and may raise anything; the line is what they need.
        raise RecipeError([f"line {_line_in(path, error)}: {_explain(error)}"], where=str(path)) from error
    recipe: Any = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        what = "defines no 'recipe'" if recipe is None else f"'recipe' is a {type(recipe).__name__}"
        raise RecipeError([f"{what}; it must define recipe = Recipe(...)"], where=str(path))
    wrong = [name for name in ("model", "task") if not isinstance(getattr(recipe, name), SECTIONS[name])]
    if wrong:
        raise RecipeError([f"{name} must be {SECTIONS[name].__name__}(...)" for name in wrong], where=str(path))
    return recipe


def _line_in(path: Path, error: Exception) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] else 1


def _explain(error: Exception) -> str:
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if isinstance(error, TypeError) and unexpected:
        known = [each for cls in (*SECTIONS.values(), Recipe) for each in hints(cls)]
        return f"unknown key '{unexpected.group(1)}'{did_you_mean(unexpected.group(1), known)}"
    return f"{type(error).__name__}: {error}"
