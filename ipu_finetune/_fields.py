# SPDX-License-Identifier: Apache-2.0
"""Dataclass fields that carry their own rules: declared type, help, command-line flag, choices, range.

A recipe's options are declared once, as fields; the command line, `--set`, the JSON twin and the checks all read them
from here.
"""

import dataclasses
import json
import math
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union, get_args, get_origin, get_type_hints

__all__ = ["convert", "describe", "field", "from_text", "hints", "render", "rule_broken"]

REQUIRED = dataclasses.MISSING

_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NONE_WORDS = ("none", "null")


def field(
    default: Any = REQUIRED,
    *,
    help: str,
    flag: Optional[str] = None,
    choices: Sequence[str] = (),
    low: Optional[float] = None,
    high: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        default: value where the option is not given; without it the option must be given.
        help: one line for `--help` and the documentation.
        flag: the command-line option that sets this field, e.g. ``--max-steps``.
        choices: the only values allowed.
        low, high: smallest and largest value allowed; in a list, of every element.
        above, below: as `low` and `high`, the limit itself not allowed.
    """
    metadata: Dict[str, Any] = {"help": help, "flag": flag, "choices": tuple(choices)}
    metadata.update(low=low, high=high, above=above, below=below)
    return dataclasses.field(default=default, metadata=metadata)


def hints(cls: Any) -> Dict[str, Any]:
    """Return the declared type of each field of a dataclass, with names resolved."""
    declared = get_type_hints(cls)
    return {each.name: declared[each.name] for each in dataclasses.fields(cls)}


def describe(hint: Any) -> str:
    """Say in words what a declared type takes, e.g. ``a number or a list of numbers``."""
    origin = get_origin(hint)
    if origin is Union:
        return " or ".join(describe(each) for each in get_args(hint))
    if origin is list:
        return f"a list of {_PLURALS.get(get_args(hint)[0], 'values')}"
    if origin is dict:
        return "a JSON object"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "none",
    Any: "a value",
}
_PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the declared type; an integer serves as a number, nothing else changes its kind.

    Raises:
        ValueError: the value is not of that type; the message is the rule.
    """
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Union:
        for each in get_args(hint):
            try:
                return convert(value, each)
            except ValueError:
                continue
    elif origin is list:
        if isinstance(value, list):
            return [convert(element, get_args(hint)[0]) for element in value]
    elif origin is dict:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return dict(value)
    elif hint is float:
        # A bool is an int to Python, and NaN a float; neither is a number that a recipe can mean.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, hint):
        return value
    raise ValueError(f"must be {describe(hint)}")


def from_text(text: str, hint: Any) -> Any:
    """Read a value as written on a command line, by the declared type.

    Lists are JSON or separated by spaces: ``[0 6 3 3]``. Texts may stand bare. ``none`` and ``null`` are None where
    the type allows it.

    Raises:
        ValueError: the text is not a value of that type; the message is the rule.
    """
    text = text.strip()
    origin = get_origin(hint)
    if origin is Union:
        kinds = get_args(hint)
        if type(None) in kinds and text.lower() in _NONE_WORDS:
            return None
        for each in kinds:
            try:
                return from_text(text, each)
            except ValueError:
                continue
    elif origin is list:
        if text.startswith("[") and text.endswith("]"):
            return _list_from_text(text, hint)
    elif hint is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif hint is int:
        if _INTEGER.fullmatch(text):
            return int(text)
    elif hint is float:
        if _NUMBER.fullmatch(text):
            return convert(float(text), float)
    elif hint is str:
        if text:
            return _string_from_text(text)
    elif hint is not type(None):
        try:
            return convert(json.loads(text), hint)
        except ValueError:
            pass
    raise ValueError(f"must be {describe(hint)}")


def _list_from_text(text: str, hint: Any) -> List[Any]:
    try:
        value = json.loads(text)
    except ValueError:
        words = [word for word in re.split(r"[\s,]+", text[1:-1]) if word]
        return [from_text(word, get_args(hint)[0]) for word in words]
    return convert(value, hint)


def _string_from_text(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return convert(json.loads(text), str)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a text, and a quoted one JSON ({error})") from error


def render(value: Any) -> str:
    """Write a value as `--set` takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def rule_broken(value: Any, hint: Any, metadata: Mapping[str, Any]) -> Optional[str]:
    """Return the rule that a field's value breaks (type, choice or range), or None."""
    try:
        value = convert(value, hint)
    except ValueError as error:
        return str(error)
    if value is None:
        return None
    choices = metadata.get("choices") or ()
    if choices and value not in choices:
        return f"must be one of {', '.join(choices)}"
    elements = value if isinstance(value, list) else [value]
    numbers = [each for each in elements if isinstance(each, (int, float)) and not isinstance(each, bool)]
    if all(_inside(number, metadata) for number in numbers):
        return None
    prefix = "every element " if isinstance(value, list) else ""
    return f"{prefix}must be {_interval(metadata)}"


def _inside(number: float, limits: Mapping[str, Any]) -> bool:
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    return (
        (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )


def _interval(limits: Mapping[str, Any]) -> str:
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    left = f"[{low}" if low is not None else f"({above}" if above is not None else None
    right = f"{high}]" if high is not None else f"{below})" if below is not None else None
    if left and right:
        return f"in {left},{right}"
    if left:
        return f"at least {low}" if low is not None else f"greater than {above}"
    return f"at most {high}" if high is not None else f"less than {below}"
