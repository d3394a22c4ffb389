# SPDX-License-Identifier: Apache-2.0
"""The source of one test, together with what it uses of its own file."""

import ast
import functools
from typing import Dict, List, Set, Union

__all__ = ["source_of"]

_Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef]


@functools.lru_cache(maxsize=8)
def _definitions(source: str) -> Dict[str, _Definition]:
    """Return a file's functions and classes by name, those within its classes too."""
    found: Dict[str, _Definition] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, node)
    return found


@functools.lru_cache(maxsize=256)
def _text(source: str, name: str) -> str:
    definitions = _definitions(source)
    lines = source.splitlines()
    seen: Set[str] = set()
    waiting: List[str] = [name]
    parts: List[str] = []
    while waiting:
        current = waiting.pop()
        if current in seen or current not in definitions:
            continue
        seen.add(current)
        node = definitions[current]
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
        waiting += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return "\n\n".join(parts)


def source_of(source: str, test: str) -> str:
    """Return the source of a test and of the functions and classes of its file that it uses, directly or not.

    Args:
        source: the file's text.
        test: pytest's id, `file::[Class::]function[parameters]`.
    """
    name = test.split("[", 1)[0].split("::")[-1]
    return _text(source, name) if source else ""
