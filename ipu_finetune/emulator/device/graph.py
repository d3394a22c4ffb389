# SPDX-License-Identifier: Apache-2.0
"""A traced micro-batch as a graph, and the Python function that replays it.

The graph is a `torch.fx.Graph` of ATen operators: forward, backward and the delivery of every gradient, in the order
in which they ran. Each node's `meta` holds `val` (a fake tensor, or a tuple of them), `module` (the path of the module
that ran it), `stage` and `ipu`, and `backward`. Passes that fuse or replace operations work on this graph; the forecast
reads it; nothing else needs to know how a model's Python code looked.
"""

import dataclasses
import hashlib
import keyword
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import fx

__all__ = [
    "Branch",
    "GraphInput",
    "Loop",
    "SubGraph",
    "TracedGraph",
    "compile_graph",
    "drop_unused",
    "is_view",
    "item_of",
    "mutated_arguments",
    "owns_result",
    "root_of",
    "written_nodes",
]


@dataclasses.dataclass
class GraphInput:
    """One placeholder.

    Attributes:
        kind: `weight`, `input` (of a micro-batch), `constant`, `seed` (gradient of the loss) or `book`.
        key: the weight's name, the input's number, or None.
        node: the placeholder.
        value: the tensor, for a constant.
    """

    kind: str
    key: Any
    node: fx.Node
    value: Optional[torch.Tensor] = None


@dataclasses.dataclass
class TracedGraph:
    """What was traced.

    Attributes:
        graph: its output is a flat tuple with the returned tensors.
        inputs: placeholders, in order.
        structure: what `forward` returned, with fake tensors in it.
        loss: a tensor with the loss's shape and dtype, of no value; None in inference.
    """

    graph: fx.Graph
    inputs: List[GraphInput]
    structure: Any = None
    loss: Optional[torch.Tensor] = None

    def operations(self) -> Iterable[fx.Node]:
        """Yield every node that computes something, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def fingerprint(self) -> str:
        """Return the SHA-256 of operators, arguments, shapes and types, in order; values of tensors do not count."""
        digest = hashlib.sha256()
        numbers: Dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            numbers[node] = len(numbers)
            text = [node.op, _target_name(node), _plain(node.args, numbers), _plain(node.kwargs, numbers)]
            digest.update(f"{text} {_describe(node.meta.get('val'))}\n".encode())
        return digest.hexdigest()


def _target_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return str(node.meta.get("kind", ""))
    target: Any = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(type(target)))


def _plain(value: Any, numbers: Dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return f"%{numbers.get(value, -1)}"
    if isinstance(value, (list, tuple)):
        return [_plain(item, numbers) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, numbers) for key, item in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None), torch.dtype)) else type(value).__name__


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape))
    return [_describe(item) for item in value] if isinstance(value, (list, tuple)) else None


# ---- facts about operators


def is_view(function: Any) -> bool:
    """Whether the operator returns an alias of an argument that it does not change."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    return any(item.alias_info is not None and not item.alias_info.is_write for item in schema.returns)


# Kernels that write running statistics without saying so in their schema, by argument name.
_SILENT_WRITES = ("running_mean", "running_var")


def mutated_arguments(function: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[Any]:
    """Return the arguments that a call writes into."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return []
    silent = "batch_norm" in schema.name and "backward" not in schema.name
    training = True
    written = []
    for index, parameter in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(parameter.name)
        if parameter.name in ("training", "train"):
            training = bool(value)
        writes = parameter.alias_info is not None and parameter.alias_info.is_write
        if value is not None and (writes or (silent and parameter.name in _SILENT_WRITES)):
            written += list(value) if isinstance(value, (list, tuple)) else [value]
    return written if not silent or training or schema.is_mutable else []


def item_of(values: Any, index: int) -> Any:
    """Return one of an operator's several results."""
    return values[index]


def _shares_memory(function: Any) -> bool:
    return is_view(function) or function is torch.ops.aten._unsafe_view.default


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's tensor lies in."""
    while node.op == "call_function":
        base: Any = None
        if node.target is item_of:
            source: Any = node.args[0]
            base = source.args[0] if _shares_memory(source.target) else None
        elif _shares_memory(node.target):
            base = node.args[0]
        else:
            written = mutated_arguments(node.target, node.args, node.kwargs)
            base = written[0] if len(written) == 1 and isinstance(node.meta.get("val"), torch.Tensor) else None
        if not isinstance(base, fx.Node):
            return node
        node = base
    return node


def written_nodes(graph: fx.Graph) -> List[fx.Node]:
    """Return the nodes whose tensors an operator of the graph writes into."""
    found: List[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function":
            written = mutated_arguments(node.target, node.args, node.kwargs)
            found += [each for each in written if isinstance(each, fx.Node)]
            if isinstance(node.target, (Branch, Loop)):
                found += node.target.written(node.args)
    return found


def owns_result(node: fx.Node) -> bool:
    """Whether a node's tensor is memory that nothing but its single reader holds."""
    if len(node.users) != 1 or node.op != "call_function":
        return False
    target: Any = node.target
    if target is item_of:
        source: Any = node.args[0]
        return isinstance(source.target, torch._ops.OpOverload) and not _shares_memory(source.target)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    base = node.args[0] if node.args else None
    if _shares_memory(target) or mutated_arguments(target, node.args, node.kwargs):
        return isinstance(base, fx.Node) and owns_result(base)
    return True


def _has_effect(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not node.meta.get("pure", False)
    # Random operators stay, so that the random state moves on as it does when the model's Python code runs.
    random = torch.Tag.nondeterministic_seeded in target.tags and not is_view(target)
    return random or bool(mutated_arguments(target, node.args, node.kwargs))


def drop_unused(graph: fx.Graph) -> None:
    """Remove operators whose results nobody reads."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node):
            graph.erase_node(node)


# ---- replay


class _Writer:
    """Writes the source text of a graph's function and collects what it refers to."""

    def __init__(self) -> None:
        self.scope: Dict[str, Any] = {}
        self._names: Dict[int, str] = {}
        self._kept: List[Any] = []

    def refer(self, value: Any, prefix: str) -> str:
        if id(value) not in self._names:
            name = f"{prefix}{len(self.scope)}"
            self._names[id(value)] = name
            self.scope[name] = value
            self._kept.append(value)
        return self._names[id(value)]

    def text(self, value: Any, registers: Dict[fx.Node, str]) -> str:
        if isinstance(value, fx.Node):
            return registers[value]
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(self.text(item, registers) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(self.text(item, registers) + ', ' for item in value)})"
        return self.refer(value, "c")


def _last_uses(graph: fx.Graph) -> Dict[fx.Node, List[fx.Node]]:
    seen = set()
    dying: Dict[fx.Node, List[fx.Node]] = {}
    for node in reversed(list(graph.nodes)):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                dying.setdefault(node, []).append(used)
    return dying


def compile_graph(
    graph: fx.Graph,
    inputs: List[fx.Node],
    choose: Callable[[fx.Node], Callable[..., Any]] = lambda node: node.target,  # type: ignore[assignment,return-value]
) -> Callable[..., Any]:
    """Return a function of the placeholders `inputs`, in this order, that runs the graph.

    Intermediate results are let go after their last use, so that a replay holds no more than autograd would.

    Args:
        graph: the traced graph.
        inputs: its placeholders.
        choose: what to call for a node; its operator by default.
    """
    writer = _Writer()
    registers: Dict[fx.Node, str] = {node: f"a{index}" for index, node in enumerate(inputs)}
    dying = _last_uses(graph)
    lines: List[str] = []
    for node in graph.nodes:
        if node.op == "call_function":
            registers[node] = f"v{len(registers)}"
            arguments = [writer.text(item, registers) for item in node.args]
            for name, item in node.kwargs.items():
                # `from` is an argument of aten.random_, and no name for Python.
                argument = writer.text(item, registers)
                arguments.append(f"**{{{name!r}: {argument}}}" if keyword.iskeyword(name) else f"{name}={argument}")
            call = f"{writer.refer(choose(node), 'f')}({', '.join(arguments)})"
            lines.append(f"{registers[node]} = {call}" if node.users else call)
        elif node.op == "output":
            lines.append(f"return {writer.text(node.args[0], registers)}")
            continue
        dead = [registers[used] for used in dying.get(node, []) if used in registers]
        if dead:
            lines.append(f"del {', '.join(dead)}")
    head = f"def replay({', '.join(registers[node] for node in inputs)}):\n"
    source = head + "\n".join(f"    {line}" for line in lines) + "\n"
    exec(compile(source, "<traced graph>", "exec"), writer.scope)
    return writer.scope["replay"]


# ---- control flow that is decided at run time


class SubGraph:
    """A traced body: its own graph, the placeholders of its inputs and of the outer tensors that it reads."""

    def __init__(self, graph: fx.Graph, inputs: List[fx.Node], lifted: List[fx.Node], outputs: List[Any]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.lifted = lifted
        self.outer: List[torch.Tensor] = []
        self.outputs = outputs
        self._function: Optional[Callable[..., Any]] = None

    def written(self, outer: Any) -> List[fx.Node]:
        """Return those of the outer nodes that the body writes into."""
        roots = {root_of(node) for node in written_nodes(self.graph)}
        return [node for node, inner in zip(outer, self.lifted) if inner in roots]

    def __call__(self, inputs: Iterable[Any], outer: Iterable[Any]) -> Tuple[Any, ...]:
        """Run the body."""
        if self._function is None:
            self._function = compile_graph(self.graph, [*self.inputs, *self.lifted])
        return self._function(*inputs, *outer)


class Branch:
    """Runs one of two bodies."""

    __name__ = "branch"

    def __init__(self, then: SubGraph, other: SubGraph) -> None:
        self.then, self.other = then, other

    def written(self, args: Any) -> List[fx.Node]:
        """Return the nodes that either body writes into."""
        return self.then.written(args[2]) + self.other.written(args[4])

    def __call__(self, condition: Any, then_args: Any, then_outer: Any, else_args: Any, else_outer: Any) -> Any:
        """Return the chosen body's outputs."""
        if bool(condition.reshape(())):
            return self.then(then_args, then_outer)
        return self.other(else_args, else_outer)


class Loop:
    """Runs a body on its own results."""

    __name__ = "loop"

    def __init__(self, count: int, body: SubGraph) -> None:
        self.count, self.body = count, body

    def written(self, args: Any) -> List[fx.Node]:
        """Return the nodes that the body writes into."""
        return self.body.written(args[1])

    def __call__(self, inputs: Any, outer: Any) -> Any:
        """Return the last results."""
        values = tuple(value.clone() for value in inputs)
        for _ in range(self.count):
            values = self.body(values, outer)
        return values
