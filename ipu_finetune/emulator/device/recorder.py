# SPDX-License-Identifier: Apache-2.0
"""Recording what a model does as a graph.

The model's Python code runs once, on fake tensors that have shapes and types but no values. A dispatch mode sees every
ATen operator below autograd, forward and backward, and writes it down. Real tensors that the code meets are weights
(known by identity) or constants of the graph.
"""

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .casting import common_type
from .errors import Error
from .findings import Findings
from .graph import Branch, GraphInput, Loop, SubGraph, TracedGraph, drop_unused, item_of, mutated_arguments
from .refusals import refuse_data_dependence, refuse_host_value, review
from .shapes import RESULTS

__all__ = ["Recorder"]

_aten = torch.ops.aten
# A seed that no user sets: a different one after user code ran means that the code called torch.manual_seed.
_UNSEEDED = 0x7F1A_0E4D_2B96_55C3
_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)
_sequence = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)


def seed_device(seed: int) -> None:
    """Seed the random state in force; the graph's node for `torch.manual_seed` inside a model."""
    torch.default_generator.manual_seed(seed)


class _Scope:
    """One graph that is being written, and the node of every tensor in it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: Dict[int, fx.Node] = {}
        self.kept: List[torch.Tensor] = []  # so that an id stays unique
        self.lifted: List[Tuple[torch.Tensor, fx.Node]] = []
        self.last_placeholder: Optional[fx.Node] = None

    def placeholder(self, name: str, kind: str, value: Any) -> fx.Node:
        with self.graph.inserting_after(self.last_placeholder):
            node = self.graph.create_node("placeholder", name)
        node.meta.update(kind=kind, val=value)
        self.last_placeholder = node
        return node

    def know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)


class Recorder(TorchDispatchMode):
    """Writes operators into a graph while it is active.

    Args:
        fake_mode: what makes and computes fake tensors; entered before the recorder.
        layout: told of every forward operator, and asked where it lies; None for none.
        plan: the resolved options, for operators whose rules depend on them.
    """

    def __init__(self, fake_mode: Any, layout: Any = None, plan: Any = None) -> None:
        super().__init__()
        self.plan = plan
        self.fake_mode = fake_mode
        self.findings = Findings()
        self.inputs: List[GraphInput] = []
        self.modules: List[str] = []
        self.function = ""  # the PyTorch function that user code called last
        self.backward = False
        self.values: Callable[[fx.Node], torch.Tensor] = _no_values
        self._layout = layout
        self._reviewing = True
        self._scopes = [_Scope()]
        self._twins: Dict[int, torch.Tensor] = {}
        self._kept: List[Any] = []
        self._places: Dict[int, Dict[str, Any]] = {}
        self._checks: List[Callable[[Any], None]] = []
        self._marks: Dict[int, Dict[str, Any]] = {}

    # ---- inputs

    @property
    def graph(self) -> fx.Graph:
        """The graph of the whole micro-batch."""
        return self._scopes[0].graph

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the shape, strides and type of a real one."""
        with _disable_current_modes():
            return self.fake_mode.from_tensor(tensor)

    def add_input(self, kind: str, key: Any, tensor: torch.Tensor, twin: Optional[torch.Tensor] = None) -> Any:
        """Declare a graph input; return the tensor that stands for it.

        For a weight that is `tensor` itself, which user code holds; for anything else it is a new fake tensor.
        """
        twin = self.fake(tensor.detach() if isinstance(tensor, torch.Tensor) else tensor) if twin is None else twin
        node = self._scopes[0].placeholder(f"{kind}_{len(self.inputs)}", kind, twin)
        self.inputs.append(GraphInput(kind, key, node, tensor if kind == "constant" else None))
        self._scopes[0].know(twin, node)
        if kind in ("weight", "constant"):
            self._scopes[0].know(tensor, node)
            self._twins[id(tensor)] = twin
            return tensor
        return twin

    def add_plain_input(self, kind: str) -> fx.Node:
        """Declare an input that is no tensor."""
        node = self._scopes[0].placeholder(f"{kind}_{len(self.inputs)}", kind, None)
        self.inputs.append(GraphInput(kind, None, node))
        return node

    # ---- tensors and nodes

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return tensor
        if id(tensor) not in self._twins:
            if tensor.device.type not in ("cpu", "meta"):
                raise Error(
                    f"A tensor on {tensor.device} takes part in the model: an IPU model's tensors start on cpu."
                )
            # Copied: a compiled graph does not follow what its author does to a constant afterwards.
            with _disable_current_modes(), torch.no_grad():
                value = tensor.detach().clone()
            twin = self.fake(value)
            self.add_input("constant", None, value, twin)
            self._scopes[0].know(tensor, self._scopes[0].nodes[id(value)])
            self._twins[id(tensor)] = twin
        return self._twins[id(tensor)]

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that made a tensor, in the graph that is being written."""
        self._twin(tensor)
        return self._find(tensor, len(self._scopes) - 1)

    def _find(self, tensor: torch.Tensor, depth: int) -> fx.Node:
        scope = self._scopes[depth]
        node = scope.nodes.get(id(tensor))
        if node is not None:
            return node
        if depth == 0:
            raise Error(
                "A tensor takes part in the model that was made by an operation that could not be traced: use "
                "PyTorch's operators, or poptorch.CPU for code that runs on the host."
            )
        self._find(tensor, depth - 1)
        node = scope.placeholder(f"outer_{len(scope.lifted)}", "outer", self._twin(tensor))
        scope.lifted.append((tensor, node))
        scope.know(tensor, node)
        scope.know(self._twin(tensor), node)
        return node

    def constant_only(self, node: fx.Node) -> bool:
        """Whether a node's value is known when the model is compiled: it depends on neither data nor weights."""
        seen = set()
        queue = [node]
        while queue:
            each = queue.pop()
            if each in seen:
                continue
            seen.add(each)
            if each.op == "placeholder" and each.meta["kind"] != "constant":
                return False
            target: Any = each.target
            if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
                return False
            if (
                each.op == "call_function"
                and not isinstance(target, torch._ops.OpOverload)
                and not each.meta.get("pure")
            ):
                return False
            queue += each.all_input_nodes
        return True

    # ---- recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self._note_seed()
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self._on_host_alone(func, args, kwargs):
            return self._run_on_host(func, args, kwargs)
        if not self.backward and self._layout is not None:
            self._layout.operation()
        originals = args
        args, kwargs = self._prepare(func, args, kwargs)
        fakes, fake_kwargs = tree_map(self._to_fake, (args, kwargs))
        if not self.backward:
            answer = refuse_data_dependence(self, func, args, kwargs)
            if answer is not None:
                return answer.value
            if self._reviewing:
                review(self, func, args, kwargs)
        try:
            result = RESULTS.get(func, func)(*fakes, **fake_kwargs)
        except torch._subclasses.fake_tensor.UnsupportedOperatorException as error:
            raise Error(f"{func} cannot be compiled: PyTorch cannot tell the shape of its result ({error}).") from error
        node = self._add(func, args, kwargs, result)
        for written in mutated_arguments(func, args, kwargs):
            self._know_again(written, node, result)
        return _originals_for(result, fakes, originals)

    def _on_host_alone(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call changes a tensor of the host in place, with nothing of the model taking part."""
        written = mutated_arguments(func, args, kwargs)
        if not any(isinstance(each, torch.Tensor) for each in written):
            return False
        return all(self._is_host_tensor(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))

    def _is_host_tensor(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.device.type != "cpu":
            return False
        node = self._scopes[0].nodes.get(id(tensor))
        return node is None or node.meta.get("kind") == "constant"

    def _run_on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let Python change its own tensor, once, as it does under PopTorch; later readers see the new value."""
        with _disable_current_modes(), torch.no_grad():
            result = func(*args, **kwargs)
        for tensor in mutated_arguments(func, args, kwargs):
            self._twins.pop(id(tensor), None)
            for scope in self._scopes:
                scope.nodes.pop(id(tensor), None)
        return result

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `.to("ipu")` gives inside a model: a constant of the graph for a tensor of the host."""
        if isinstance(tensor, torch._subclasses.FakeTensor) or id(tensor) in self._twins:
            return tensor
        self.node_of(tensor)
        return self._twin(tensor)

    def _prepare(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Cast what PyTorch's CPU kernels refuse to mix and an IPU does not."""
        casts = common_type(func, args)
        if not casts:
            return args, kwargs
        prepared = list(args)
        for index, dtype in casts.items():
            prepared[index] = self._convert(args[index], dtype)
        return tuple(prepared), kwargs

    def _convert(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cast = _aten._to_copy.default
        result = cast(self._twin(tensor), dtype=dtype)
        self._add(cast, (tensor,), {"dtype": dtype}, result)
        return result

    def _to_fake(self, value: Any) -> Any:
        return self._twin(value) if isinstance(value, torch.Tensor) else value

    def _to_node(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else value

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        scope = self._scopes[-1]
        node_args, node_kwargs = tree_map(self._to_node, (args, kwargs))
        node = scope.graph.create_node("call_function", func, node_args, node_kwargs)
        node.meta["val"] = result
        node.meta.update(self._place())
        self._know_results(scope, node, result)
        return node

    def _know_results(self, scope: _Scope, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            scope.know(result, node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, (torch.Tensor, list, tuple)):
                    part = scope.graph.create_node("call_function", item_of, (node, index))
                    part.meta.update(node.meta, val=item, pure=True)
                    self._know_results(scope, part, item)

    def _know_again(self, written: Any, node: fx.Node, result: Any) -> None:
        # Later readers of a tensor that was changed in place must run after the change.
        if isinstance(written, torch.Tensor) and isinstance(result, torch.Tensor) and result is self._twin(written):
            self._scopes[-1].know(written, node)
            self._scopes[-1].know(self._twin(written), node)

    def _place(self) -> Dict[str, Any]:
        if self.backward:
            autograd_node = _current_node()
            number = autograd_node._sequence_nr() if autograd_node is not None else -1
            return {**self._places.get(number, {}), "backward": True}
        place = {"module": self.modules[-1] if self.modules else "", "backward": False}
        if self._layout is not None:
            place.update(self._layout.place())
        self._places[_sequence() - 1] = place
        return place

    def take_out(self, tensor: torch.Tensor, function: str) -> torch.Tensor:
        """Return a tensor's value for the first micro-batch, for code that leaves the graph, and note that it did."""
        with _disable_current_modes():
            node = self.node_of(tensor)
            if not self.constant_only(node):
                refuse_host_value(self, function)
            return self.values(node)

    def _note_seed(self) -> None:
        seed = torch.initial_seed()
        if seed != _UNSEEDED and not self.backward:
            torch.default_generator.manual_seed(_UNSEEDED)
            if self._seed_is_known:
                self._scopes[-1].graph.create_node("call_function", seed_device, (seed,))

    _seed_is_known = False

    @contextlib.contextmanager
    def watching_seeds(self) -> Iterator[None]:
        """Within the block, calls of `torch.manual_seed` become nodes; the host's random state is put back."""
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(_UNSEEDED)
        self._seed_is_known = True
        try:
            yield
        finally:
            torch.set_rng_state(state)

    @contextlib.contextmanager
    def unreviewed(self) -> Iterator[None]:
        """Within the block, operators stand in for code that a real IPU has compiled, so any may be used."""
        before, self._reviewing = self._reviewing, False
        try:
            yield
        finally:
            self._reviewing = before

    # ---- what operators of poptorch record

    def _fresh(self, example: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes(), self.fake_mode:
            return torch.empty(tuple(example.shape), dtype=example.dtype)

    def call(self, function: Callable[..., Any], args: Sequence[Any], example_outputs: Sequence[torch.Tensor]) -> Any:
        """Record a call of a Python function on real tensors; no gradient goes through it.

        Args:
            function: called with the values of `args` at each replay; returns as many tensors as there are examples,
                in a list or tuple.
            args: tensors of the trace, and constants.
            example_outputs: tensors with the shapes and types of what it returns.
        """
        with _disable_current_modes():
            results = tuple(self._fresh(example) for example in example_outputs)
            self._add(function, tuple(args), {}, results)
        return list(results)

    def subgraph(self, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> SubGraph:
        """Trace a body into a graph of its own; outer tensors that it reads become inputs of it."""
        scope = _Scope()
        arguments = []
        for index, example in enumerate(inputs):
            twin = self._fresh(example)
            scope.know(twin, scope.placeholder(f"input_{index}", "body", twin))
            arguments.append(twin)
        nodes = [scope.nodes[id(twin)] for twin in arguments]
        self._scopes.append(scope)
        try:
            outputs = body(*arguments)
            outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
            scope.graph.output(tuple(self.node_of(output) for output in outputs))
        finally:
            self._scopes.pop()
        sub = SubGraph(scope.graph, nodes, [node for _, node in scope.lifted], [self._twin(o) for o in outputs])
        sub.outer = [tensor for tensor, _ in scope.lifted]
        return sub

    def branch(
        self,
        condition: torch.Tensor,
        then: SubGraph,
        then_inputs: Sequence[torch.Tensor],
        other: SubGraph,
        other_inputs: Sequence[torch.Tensor],
    ) -> List[torch.Tensor]:
        """Record a choice between two bodies that is made at each replay."""
        args = (condition, list(then_inputs), list(then.outer), list(other_inputs), list(other.outer))
        return self.call(Branch(then, other), args, then.outputs)

    def loop(self, count: int, body: SubGraph, inputs: Sequence[torch.Tensor]) -> List[torch.Tensor]:
        """Record a body that runs `count` times on its own results."""
        return self.call(Loop(count, body), (list(inputs), list(body.outer)), body.outputs)

    # ---- annotations

    def is_input(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an input of the model, untouched."""
        node = self._scopes[0].nodes.get(id(tensor))
        return node is not None and node.op == "placeholder" and node.meta["kind"] == "input"

    def users_of(self, tensor: torch.Tensor) -> int:
        """Return how many operators read a tensor so far."""
        return len(self.node_of(tensor).users)

    def mark(self, tensor: torch.Tensor, key: str, value: Any) -> None:
        """Attach a note to a tensor."""
        self._marks.setdefault(id(tensor), {})[key] = value
        self._kept.append(tensor)

    def marks(self, tensor: torch.Tensor) -> Dict[str, Any]:
        """Return a tensor's notes."""
        return self._marks.get(id(tensor), {})

    def on_finish(self, check: Callable[[Any], None]) -> None:
        """Call `check(outputs)` when the forward pass has been traced."""
        self._checks.append(check)

    def run_checks(self, outputs: Any) -> None:
        """Run what `on_finish` collected."""
        for check in self._checks:
            check(outputs)

    # ---- the end

    def finish(self, outputs: Sequence[torch.Tensor], structure: Any, loss: Optional[torch.Tensor]) -> TracedGraph:
        """Close the graph with these outputs and return it without what nobody reads."""
        self.graph.output(tuple(self.node_of(tensor) for tensor in outputs))
        drop_unused(self.graph)
        used = [each for each in self.inputs if each.node.users]
        for each in self.inputs:
            if not each.node.users:
                self.graph.erase_node(each.node)
        return TracedGraph(self.graph, used, structure, loss)


@functools.lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others, which are to be recorded in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _no_values(node: fx.Node) -> torch.Tensor:
    raise Error("values are not known in this trace")


def _originals_for(result: Any, fakes: Any, originals: Any) -> Any:
    """Return a result with the caller's own tensor where an operator returns its argument."""
    for fake, original in zip(fakes, originals):
        if result is fake and isinstance(result, torch.Tensor):
            return original
    return result
