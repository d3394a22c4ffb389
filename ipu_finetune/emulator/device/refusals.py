# SPDX-License-Identifier: Apache-2.0
"""What a static graph refuses while it is traced: shapes and Python values that depend on data.

A refusal does not stop the trace: the operator gets its value for the first micro-batch, so that one compilation lists
every finding. A Python branch on a tensor is frozen with the value of the first micro-batch and reported as a warning.
"""

import dataclasses
import functools
from typing import Any, Dict, List, Optional

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .errors import Error
from .findings import Finding, source_line
from .operators import Verdict, call_verdict, function_verdict, verdict

__all__ = ["Answer", "first_values", "refuse_data_dependence", "refuse_host_value", "review", "review_function"]

_aten = torch.ops.aten


@dataclasses.dataclass
class Answer:
    """Stands in for the result of a refused operator."""

    value: Any


_BRANCHES = ("__bool__", "is_nonzero", "equal", "allclose")
_HOST_VALUES = {
    "item": "keep the value as a tensor",
    "__int__": "keep the value as a tensor",
    "__float__": "keep the value as a tensor",
    "__index__": "index with the tensor itself, or use poptorch.dynamic_slice",
    "tolist": "keep the values as a tensor",
    "numpy": "return the tensor from forward() and convert it on the host",
    "__array__": "return the tensor from forward() and convert it on the host",
}

#: operators whose result's shape depends on values -> the usual replacement
_SHAPES: Dict[str, str] = {
    "nonzero": "torch.where(mask, values, 0), which keeps the shape",
    "nonzero_static": "torch.where(mask, values, 0), which keeps the shape",
    "masked_select": "torch.where(mask, values, 0), which keeps the shape",
    "_unique": "find the unique values on the host",
    "_unique2": "find the unique values on the host",
    "unique_dim": "find the unique values on the host",
    "unique_consecutive": "find the unique values on the host",
    "repeat_interleave": "give output_size, or repeat with expand() and reshape()",
}


def _name(func: Any) -> str:
    return func._schema.name.split("::")[-1]


def _changes_shape_with_data(func: Any, args: Any, kwargs: Dict[str, Any]) -> Optional[str]:
    name = _name(func)
    if name in _SHAPES:
        if name == "repeat_interleave" and (
            kwargs.get("output_size") is not None or func is not _aten.repeat_interleave.Tensor
        ):
            return None
        return _SHAPES[name]
    if func is _aten.index.Tensor:
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "torch.where(mask, values, 0), which keeps the shape; x[mask] = value is possible"
    return None


def refuse_data_dependence(recorder: Any, func: Any, args: Any, kwargs: Dict[str, Any]) -> Optional[Answer]:
    """Return the stand-in for an operator that a static graph cannot hold, having noted the finding; else None."""
    if func is _aten._local_scalar_dense.default:
        return _host_value(recorder, args[0])
    if func is _aten.equal.default:
        with _disable_current_modes():
            value = torch.equal(_value_of(recorder, args[0]), _value_of(recorder, args[1]))
        _note_branch(recorder, "equal", value, [args[0], args[1]])
        return Answer(value)
    if func is _aten.bincount.default:
        return Answer(_bincount(recorder, *args, **kwargs))
    replacement = _changes_shape_with_data(func, args, kwargs)
    if replacement is None:
        return None
    real_args, real_kwargs = torch.utils._pytree.tree_map(
        lambda item: _value_of(recorder, item) if isinstance(item, torch.Tensor) else item, (args, kwargs)
    )
    with _disable_current_modes(), torch.no_grad():
        result = func(*real_args, **real_kwargs)
    tensors = [item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    if not all(recorder.constant_only(recorder.node_of(tensor)) for tensor in tensors):
        recorder.findings.add(
            Finding(
                func._schema.name,
                recorder.modules[-1] if recorder.modules else "",
                source_line(),
                "the shape of its result depends on the data",
                replacement,
                shape=True,
            )
        )
    return Answer(torch.utils._pytree.tree_map(recorder._twin, result))


def _bincount(recorder: Any, values: Any, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    if not minlength:
        raise Error(
            "Bincount `minlength` must be specified and must be a constant. On the IPU MK2 platform the minimum length "
            "is also the maximum length: values from there on are not counted."
        )

    def count(counted: torch.Tensor, weighted: Optional[torch.Tensor]) -> List[torch.Tensor]:
        kept = torch.where(counted < minlength, counted, minlength)
        return [torch.bincount(kept, weighted, minlength + 1)[:minlength]]

    with _disable_current_modes():
        dtype = torch.int64 if weights is None else weights.dtype
        example = torch.empty(minlength, dtype=torch.float32 if dtype == torch.float16 else dtype)
    return recorder.call(count, (values, weights), [example])[0]


def _value_of(recorder: Any, tensor: torch.Tensor) -> torch.Tensor:
    return recorder.values(recorder.node_of(tensor))


def _host_value(recorder: Any, tensor: torch.Tensor) -> Answer:
    name = recorder.function.rpartition(".")[2]
    node: fx.Node = recorder.node_of(tensor)
    with _disable_current_modes():
        value = recorder.values(node).item()
    if not recorder.constant_only(node):
        if name in _HOST_VALUES:
            refuse_host_value(recorder, recorder.function)
        else:
            _note_branch(recorder, name, value, [])
    return Answer(value)


def _note_branch(recorder: Any, name: str, value: Any, tensors: Any) -> None:
    if tensors and all(recorder.constant_only(recorder.node_of(tensor)) for tensor in tensors):
        return
    recorder.findings.add(
        Finding(
            recorder.function or name,
            recorder.modules[-1] if recorder.modules else "",
            source_line(),
            f"Python reads a value that depends on the data; the value {value} is frozen at trace time",
            "torch.where or poptorch.cond, which decide at run time",
            fatal=False,
        )
    )


def refuse_host_value(recorder: Any, function: str) -> None:
    """Note that user code wants a tensor's value in Python."""
    recorder.findings.add(
        Finding(
            function,
            recorder.modules[-1] if recorder.modules else "",
            source_line(),
            "Python asks for a value that is only known when the model runs",
            _HOST_VALUES.get(function.rpartition(".")[2], "keep the value as a tensor"),
        )
    )


def review(recorder: Any, func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    """Note an operator that PopTorch does not support; one on constants alone runs while compiling, so any will do."""
    judged = verdict(func._schema.name)
    if judged.supported is False and not _all_constant(recorder, args, kwargs):
        _note_unsupported(recorder, func._schema.name, judged)


def review_function(recorder: Any, func: Any, args: Any, kwargs: Dict[str, Any]) -> None:
    """Note a function that PopTorch supports, but not with these arguments."""
    name = _public_name(func)
    if not name or function_verdict(name).supported is False:
        return  # not supported at all: what it is made of is judged when it runs
    judged = call_verdict(name, args, kwargs)
    if judged.supported is False and not _all_constant(recorder, args, kwargs):
        _note_unsupported(recorder, name, judged)


@functools.lru_cache(maxsize=4096)
def _public_name(func: Any) -> str:
    return torch.overrides.resolve_name(func) or ""


def _all_constant(recorder: Any, args: Any, kwargs: Dict[str, Any]) -> bool:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with _disable_current_modes():
        return bool(tensors) and all(recorder.constant_only(recorder.node_of(tensor)) for tensor in tensors)


def _note_unsupported(recorder: Any, name: str, judged: Verdict) -> None:
    recorder.findings.add(
        Finding(
            name,
            recorder.modules[-1] if recorder.modules else "",
            source_line(),
            f"PopTorch does not support it: {judged.why}" if judged.why else "PopTorch does not support it",
            judged.replacement,
        )
    )


def first_values(recorder: Any, values: Dict[fx.Node, torch.Tensor]) -> Any:
    """Return a function that computes a node of the graph so far for the first micro-batch.

    Args:
        recorder: its graph is read at each call.
        values: what the placeholders hold; not changed.
    """

    def evaluate(node: fx.Node) -> torch.Tensor:
        if node.graph is not recorder.graph:
            raise Error(
                "A value that depends on data is read inside the body of poptorch.cond or for_loop: keep it a tensor."
            )
        known: Dict[fx.Node, Any] = {}
        needed = _ancestors(node)
        with _disable_current_modes(), torch.no_grad():
            for each in recorder.graph.nodes:
                if each not in needed:
                    continue
                if each.op == "placeholder":
                    source = values.get(each)
                    if source is None:
                        source = next(item.value for item in recorder.inputs if item.node is each)
                    known[each] = source.clone()
                else:
                    arguments = fx.node.map_arg((each.args, each.kwargs), lambda used: known[used])
                    known[each] = each.target(*arguments[0], **arguments[1])
        return known[node]

    return evaluate


def _ancestors(node: fx.Node) -> Any:
    """Return the nodes that a value depends on, with in-place changes of any of them."""
    needed = set()
    queue = [node]
    while queue:
        each = queue.pop()
        if each in needed:
            continue
        needed.add(each)
        queue += each.all_input_nodes
    return needed
