# SPDX-License-Identifier: Apache-2.0
"""`--set section.key=value`: parsing, conversion by the declared type, and what changed.

Overrides apply before anything is derived from the recipe.
"""

import dataclasses
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple, Union

from ipu_finetune._fields import from_text, hints, render
from ipu_finetune.errors import RecipeError, did_you_mean
from ipu_finetune.recipe import SECTIONS, Recipe, unknown_key

__all__ = ["Override", "apply", "parse"]


class Override(NamedTuple):
    """One value for one field.

    Attributes:
        key: `section.field`.
        text: the value as written.
        origin: what the user wrote, for messages, e.g. ``--seed abc``.
    """

    key: str
    text: str
    origin: str


def parse(text: str) -> Override:
    """Split ``section.key=value``.

    Raises:
        ValueError: there is no '=', or two in a row; the message gives the position, counted from 1.
    """
    key, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"'{text}': no '=' up to its end at position {len(text)}; write section.key=value")
    position = len(key) + 1
    if not key.strip():
        raise ValueError(f"'{text}': nothing before the '=' at position {position}; write section.key=value")
    if value.startswith("="):
        raise ValueError(
            f"'{text}': '==' at position {position}; write one '=' (a text that starts with '=' in quotes)"
        )
    return Override(key.strip(), value, text)


def apply(recipe: Recipe, overrides: Iterable[Union[str, Override]]) -> Tuple[Recipe, List[str]]:
    """Return the recipe with the overrides in place, and a line for each value that they change.

    Args:
        recipe: the recipe to start from; it is not changed.
        overrides: ``section.key=value`` texts, or parsed ones.

    Raises:
        RecipeError: an override cannot be read, names no field, does not suit the field's type, or sets a field that
            another one sets too; all of them at once. Ranges are left to `recipe.check`.
    """
    problems: List[str] = []
    changes: Dict[str, Tuple[Any, str]] = {}
    for override in overrides:
        if isinstance(override, str):
            try:
                override = parse(override)
            except ValueError as error:
                problems.append(str(error))
                continue
        try:
            section, key = _field_of(recipe, override.key)
            value = from_text(override.text, hints(SECTIONS[section])[key])
        except ValueError as error:
            problems.append(f"{override.origin}: {error}")
            continue
        if override.key in changes:
            earlier = changes[override.key][1]
            problems.append(f"{override.origin}: {override.key} is already set by '{earlier}'; give it once")
        changes[override.key] = (value, override.origin)
    if problems:
        raise RecipeError(problems, where="overrides")

    diff = []
    parts = {name: getattr(recipe, name) for name in SECTIONS}
    for dotted, (value, _) in changes.items():
        section, key = dotted.split(".")
        before = getattr(parts[section], key)
        parts[section] = dataclasses.replace(parts[section], **{key: value})
        if before != value:
            diff.append(f"{dotted}: {render(before)} -> {render(value)}")
    return Recipe(**parts), diff


def _field_of(recipe: Recipe, dotted: str) -> Tuple[str, str]:
    """Return section and key of an existing field."""
    section, _, key = dotted.partition(".")
    if not key or section not in SECTIONS:
        every = [f"{name}.{each}" for name, cls in SECTIONS.items() for each in hints(cls)]
        same = [each for each in every if each.rsplit(".", 1)[1] == dotted.rsplit(".", 1)[-1]]
        what = "unknown section" if key else "names no section"
        near = f" (did you mean {' or '.join(repr(each) for each in same)}?)" if same else did_you_mean(dotted, every)
        raise ValueError(f"{what}{near}; sections: {', '.join(SECTIONS)}")
    if key not in hints(SECTIONS[section]):
        raise ValueError(unknown_key(section, key))
    if getattr(recipe, section) is None:
        raise ValueError(f"this recipe has no {section}")
    return section, key
