# SPDX-License-Identifier: Apache-2.0
"""Options that are written down: a file with one call per line, or a JSON object in an environment variable."""

import codeop
import json
import os
from types import CodeType
from typing import TYPE_CHECKING, Any, List, NamedTuple, Tuple

from ..device.errors import Error
from . import enums

if TYPE_CHECKING:
    from .options import Options

__all__ = ["ConfigFileError", "apply_file", "apply_json"]


class ConfigFileError(Error):
    """A line of an options file that is no Python."""


def apply_file(options: "Options", path: str) -> None:
    """Call what the file's lines name on `options`; nothing is called if one of them cannot be read.

    Raises:
        ConfigFileError: a line cannot be read. What a call raises comes through, with the line named.
    """
    from .. import poptorch

    calls: List[Tuple[str, CodeType]] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if text and not text.startswith("#"):
                where = _Place(len(calls) + 1, number, os.path.basename(path), f"options.{text}")
                calls.append((f"{where}{where.rest}", _compiled(where)))
    for place, code in calls:
        try:
            exec(code, {}, {"poptorch": poptorch, "options": options})
        except Exception as error:
            error.args = (f"{error} (at {place})",)
            raise


class _Place(NamedTuple):
    """A line of a file; PopTorch counts the calls and leaves out empty lines and comments."""

    call: int
    line: int
    file: str
    text: str

    def __str__(self) -> str:
        return f"line {self.call} of {self.file}"

    @property
    def rest(self) -> str:
        """The call itself, and its line as an editor shows it."""
        all_lines = "" if self.call == self.line else f"\n(line {self.line} when all lines are counted)"
        return f"\n> {self.text}{all_lines}"


def _compiled(place: _Place) -> CodeType:
    try:
        return compile(place.text, "<options>", "exec")
    except SyntaxError as error:
        # Newer versions of Python name the bracket instead.
        detail = "unexpected EOF while parsing" if _is_unfinished(place.text) else error.msg
        raise ConfigFileError(f"SyntaxError at {place}: {detail}{place.rest}") from error


def _is_unfinished(call: str) -> bool:
    try:
        return codeop.compile_command(call) is None
    except SyntaxError:
        return False


def apply_json(options: "Options", text: str, source: str) -> None:
    """Call what the keys of a JSON object name with its values; a list holds several arguments.

    Args:
        options: what to change.
        text: as `{"deviceIterations": 4, "_Popart.set": ["outlineThreshold", 10.0]}`.
        source: where the text is from, for errors.

    Raises:
        ValueError: not a JSON object.
        AttributeError: a key names no option.
    """
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(calls, dict):
        raise ValueError(f'{source} must be a JSON object as {{"deviceIterations": 4}}, got {text!r}')
    for name, value in calls.items():
        target: Any = options
        for part in name.split("."):
            target = getattr(target, part)
        arguments = value if isinstance(value, list) else [value]
        target(*map(_member, arguments))


def _member(value: Any) -> Any:
    """Turn "OutputMode.All" into the enumeration's member; leave everything else."""
    if isinstance(value, str) and value.count(".") == 1:
        kind, member = value.split(".")
        if kind in enums.__all__:
            return getattr(enums, kind).__members__.get(member, value)
    return value
