# SPDX-License-Identifier: Apache-2.0
"""Why an executable was not found: the difference between what is asked for and the most similar one that is there."""

import json
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

__all__ = ["flatten", "nearest", "why"]

# Everything else that differs shows in the traced graph as well, so the graph alone is only named when nothing else is.
_CONSEQUENCE = "graph"
_NAMES = {"shapes": "input shapes", "dtypes": "input types"}
_SHOWN = 3
_VALUE_LENGTH = 48

Path = Tuple[str, ...]
Leaves = Dict[Path, Any]


def flatten(parts: Any, at: Path = ()) -> Leaves:
    """Return the leaves of nested dictionaries and of lists of dictionaries, by their path."""
    if isinstance(parts, Mapping) and parts:
        found: Leaves = {}
        for key, value in parts.items():
            found.update(flatten(value, (*at, str(key))))
        return found
    if isinstance(parts, list) and any(isinstance(each, (Mapping, list)) for each in parts):
        found = {}
        for index, value in enumerate(parts):
            found.update(flatten(value, (*at, str(index))))
        return found
    return {at: parts}


def nearest(wanted: Mapping[str, Any], known: Iterable[Mapping[str, Any]]) -> Optional[Mapping[str, Any]]:
    """Return the parts among `known` that differ from `wanted` in the fewest leaves; the first of several."""
    leaves, best, fewest = flatten(wanted), None, -1
    for parts in known:
        others = flatten(parts)
        differing = sum(1 for path in {*leaves, *others} if not _same(leaves, others, path))
        if best is None or differing < fewest:
            best, fewest = parts, differing
    return best


def why(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what changed from `before` to `now`, such as ``input shapes [1,128] -> [1,384]``.

    Equal changes below one part are one: 24 dropout layers that all changed are ``dropout 0.1 -> 0.2 (24 places)``.
    """
    old, new = flatten(before), flatten(now)
    changes: Dict[Tuple[str, str, str], List[Path]] = {}
    for path in sorted({*old, *new}):
        if not _same(old, new, path):
            top = path[0] if path else ""
            changes.setdefault((top, _text(old, path), _text(new, path)), []).append(path)
    named = {change: paths for change, paths in changes.items() if change[0] != _CONSEQUENCE}
    if not named:
        return "the traced graph differs; everything else is the same" if changes else "nothing differs"
    sentences = [_sentence(change, paths) for change, paths in named.items()]
    if len(sentences) > _SHOWN:
        sentences = [*sentences[:_SHOWN], f"{len(sentences) - _SHOWN} more"]
    return ", ".join(sentences)


def _same(old: Leaves, new: Leaves, path: Path) -> bool:
    return path in old and path in new and old[path] == new[path]


def _sentence(change: Tuple[str, str, str], paths: List[Path]) -> str:
    top, before, after = change
    name = _NAMES.get(top, top)
    if len(paths) > 1:
        return f"{name} {before} -> {after} ({len(paths)} places)"
    # The index of an input says less than its shape does.
    inner = ".".join(word for word in paths[0][1:] if not word.isdigit())
    return f"{name} {before} -> {after}" if inner in ("", name) else f"{name} {inner} {before} -> {after}"


def _text(leaves: Leaves, path: Path) -> str:
    if path not in leaves:
        return "nothing"
    value = leaves[path]
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 1]}…"
