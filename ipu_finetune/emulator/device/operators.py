# SPDX-License-Identifier: Apache-2.0
"""Which operators can be put into a graph for an IPU: the table `operators.json` and questions to it.

PyTorch names an operation twice: by the function that a model calls (`torch.Tensor.nan_to_num`) and by the aten
operators that remain after decomposition (`aten.native_layer_norm.default`). `function_verdict` and `verdict` answer
for one each; `call_verdict` also looks at the arguments, for operators that PopTorch supports in part.

A verdict is about operations on values that are only known when the model runs. What is computed from constants alone
is evaluated while compiling and may use any operator.
"""

import dataclasses
import functools
import json
import pkgutil
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from . import operator_arguments

__all__ = ["Verdict", "base_name", "call_verdict", "function_verdict", "operators", "unsupported_message", "verdict"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether an operation can be put into a graph.

    Attributes:
        name: what was asked about, as `aten::name` or the function's qualified name.
        supported: True, False, or None for a name that no list has.
        why: the limits of a supported operator, or what is wrong with an unsupported one.
        replacement: what to write instead; may be empty.
        source: key into the table's `sources`; empty for an unlisted name.
    """

    name: str
    supported: Optional[bool]
    why: str = ""
    replacement: str = ""
    source: str = ""

    def sentence(self) -> str:
        """Return the reason and the advice in one line."""
        parts = [self.name]
        if self.why:
            parts.append(f": {self.why}")
        if self.replacement:
            parts.append(f" (instead: {self.replacement})")
        return "".join(parts)


@functools.lru_cache(maxsize=1)
def _table() -> Dict[str, Any]:
    data = pkgutil.get_data(__package__, "operators.json")
    assert data is not None
    table: Dict[str, Any] = json.loads(data)
    return table


def operators() -> Mapping[str, Mapping[str, Any]]:
    """Return the table: aten name -> `supported` (true, false or "partly"), `source`, `note`, `replacement`."""
    entries: Mapping[str, Mapping[str, Any]] = _table()["operators"]
    return entries


def base_name(aten_name: str) -> str:
    """Return an operator's name without namespace, overload and the underscore of its in-place form.

    `aten.add_.Tensor`, `aten::add.out` and `add` are all `add`; `__iand__` is `__and__`.
    """
    name = aten_name.replace("::", ".")
    if name.startswith("aten."):
        name = name[len("aten.") :]
    name = name.split(".")[0]
    if name.startswith("__i") and name.endswith("__") and f"__{name[3:]}" in operators():
        return f"__{name[3:]}"
    if name.endswith("_") and not name.endswith("__") and name not in operators():
        return name[:-1]
    return name


@functools.lru_cache(maxsize=4096)
def verdict(aten_name: str) -> Verdict:
    """Say whether an aten operator can be put into a graph.

    Args:
        aten_name: with or without namespace, overload and in-place underscore. Another namespace is unlisted.
    """
    if "." in aten_name.replace("::", ".") and not aten_name.startswith(("aten.", "aten::")):
        prefix = aten_name.replace("::", ".").split(".")[0]
        if prefix not in operators():
            return Verdict(aten_name, None)
    name = base_name(aten_name)
    entry = operators().get(name)
    if entry is None:
        if "backward" in name or name.startswith("sym_"):
            return Verdict(f"aten::{name}", True, source="kernel")
        return Verdict(f"aten::{name}", None)
    return _from_entry(f"aten::{name}", entry)


def _from_entry(name: str, entry: Mapping[str, Any]) -> Verdict:
    supported = bool(entry["supported"])
    why = entry.get("note", "" if supported else "PopTorch has no lowering for it")
    return Verdict(name, supported, why, entry.get("replacement", ""), entry.get("source", "refused"))


_FAMILIES = {"linalg": "linalg_", "fft": "fft_", "special": "special_"}


def _aten_of(qualified_name: str) -> str:
    """Return the aten name that a function or method most likely stands for."""
    parts = qualified_name.split(".")
    if parts[-1] == "__get__":
        parts = parts[:-1]
    prefix = _FAMILIES.get(parts[-2], "") if len(parts) > 1 else ""
    name = base_name(prefix + parts[-1])
    return name if name in operators() or prefix == "linalg_" else base_name(parts[-1])


@functools.lru_cache(maxsize=4096)
def function_verdict(qualified_name: str) -> Verdict:
    """Say whether a function or method of PyTorch can be called on traced tensors.

    Args:
        qualified_name: as `torch.overrides.resolve_name` gives it: `torch.nan_to_num`, `torch.Tensor.item`,
            `torch.nn.functional.gelu`.
    """
    entry = _table()["functions"].get(qualified_name)
    if entry is not None:
        return _from_entry(qualified_name, entry)
    name = _aten_of(qualified_name)
    found = operators().get(name)
    # An int for the number of repeats, the usual case, has a constant shape: `call_verdict` sees the difference.
    if found is None or name == "repeat_interleave":
        return Verdict(qualified_name, None)
    return _from_entry(qualified_name, found)


def call_verdict(name: str, args: Tuple[Any, ...] = (), kwargs: Optional[Mapping[str, Any]] = None) -> Verdict:
    """Say whether this call can be put into a graph, given its arguments.

    Args:
        name: of an aten operator (`aten.topk.default`) or of a function (`torch.lstm`).
        args: its positional arguments; tensors may be fake.
        kwargs: its arguments by name.
    """
    is_aten = name.startswith(("aten.", "aten::"))
    found = verdict(name) if is_aten else function_verdict(name)
    if found.supported is False:
        return found
    short = base_name(name) if is_aten else _aten_of(name)
    problem = operator_arguments.refuse(short, is_aten, args, dict(kwargs or {}))
    if problem is None:
        return found
    entry = operators().get(short, {})
    return Verdict(found.name, False, problem, entry.get("replacement", ""), "refused")


def unsupported_message(found: Iterable[Tuple[Verdict, str]]) -> str:
    """Return the text of the error that refuses to compile a model.

    Args:
        found: the verdicts, each with where it was met (module path, source line); duplicates are dropped.
    """
    entries = list(dict.fromkeys(found))
    names: List[str] = list(dict.fromkeys(verdict.name for verdict, _ in entries))
    lines = [f"Unsupported ops found in compiled model: [{', '.join(names)}]."]
    for each, where in entries:
        lines.append(f"  {each.sentence()}{f' at {where}' if where else ''}")
    return "\n".join(lines)
