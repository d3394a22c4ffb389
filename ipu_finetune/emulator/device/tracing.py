# SPDX-License-Identifier: Apache-2.0
"""The compilation of a model: its Python code runs once, on fake tensors, and becomes a graph.

Forward and, in training, backward are recorded for one micro-batch; blocks are followed for the layout, the final loss
is found, buffers that the model changes are noted. No weight changes, and attributes that the model's code sets are put
back.
"""

import contextlib
import dataclasses
import logging
from typing import Any, Callable, Dict, Iterator, List, Set

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from . import nested, wrappers
from .errors import Error
from .findings import Findings
from .gradients import deliver
from .graph import TracedGraph, owns_result, root_of, written_nodes
from .layout import Layout, LayoutTracer
from .losses import FunctionWatch, final_loss
from .plan import Plan
from .recorder import Recorder
from .refusals import first_values
from .state import running
from .structure import AttributeGuard, ModuleSnapshot
from .weights import Weight, WeightStore

__all__ = ["Trace", "trace"]

_logger = logging.getLogger("ipu_finetune.emulator")


@dataclasses.dataclass
class Trace:
    """What tracing showed.

    Attributes:
        layout: stages and IPUs.
        graph: the operations of one micro-batch.
        outputs: number of tensors returned.
        changed_buffers: names of the buffers that the model writes into.
        fingerprint: SHA-256 of the operations and their shapes, in order.
        findings: what was frozen.
    """

    layout: Layout
    graph: TracedGraph
    outputs: int
    changed_buffers: List[str]
    fingerprint: str
    findings: Findings


@contextlib.contextmanager
def _module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within the block, the recorder knows which module's `forward` is running."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        recorder.modules.append(names.get(id(module), recorder.modules[-1] if recorder.modules else ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if recorder.modules:
            recorder.modules.pop()

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Within the block, recurrent layers are traced as their steps: oneDNN's keep a workspace of their own making."""
    before = torch._C._get_mkldnn_enabled()
    # The public context manager touches further switches, some of which warn.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _plain_words() -> Iterator[None]:
    """Let an error of the user's model speak of tensors: that they are fake here is none of its author's business."""
    # PyTorch logs every shape that does not fit before it raises; the exception is enough.
    quiet = logging.getLogger("torch._subclasses.fake_tensor")
    before, quiet.disabled = quiet.disabled, True
    try:
        yield
    except Exception as error:
        if error.args and isinstance(error.args[0], str) and "FakeTensor" in error.args[0]:
            error.args = (error.args[0].replace("FakeTensor", "Tensor"), *error.args[1:])
        raise
    finally:
        quiet.disabled = before


def trace(
    model: nn.Module,
    call: Callable[[nn.Module, Dict[str, Any]], Any],
    arguments: Dict[str, Any],
    plan: Plan,
    weights: WeightStore,
) -> Trace:
    """Trace one micro-batch and return what it showed.

    Args:
        model: the user's module.
        call: calls it with arguments by name.
        arguments: the first micro-batch; its values matter only where Python code asks for one.
        plan: tells training from inference and holds the execution strategy.
        weights: the model's parameters and buffers.

    Raises:
        Error: the model has no final loss, breaks a layout rule, or holds what a static graph cannot.
    """
    tracer = LayoutTracer(plan.strategy)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake_mode, tracer, plan)
    values: Dict[fx.Node, torch.Tensor] = {}
    recorder.values = first_values(recorder, values)
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrappers.all_plain(weights.tensors()))
        structure, guard = ModuleSnapshot(model), AttributeGuard(model)
        stack.callback(structure.restore)
        stack.callback(guard.restore)
        for weight in weights.weights:
            recorder.add_input("weight", weight.name, weight.tensor)
            values[recorder.inputs[-1].node] = weight.tensor.detach()
        fakes = _add_inputs(recorder, arguments, values)
        stack.enter_context(recorder.watching_seeds())
        stack.enter_context(_module_paths(model, recorder))
        stack.enter_context(running(plan.training, tracer, recorder))
        stack.enter_context(torch.set_grad_enabled(plan.training))
        stack.enter_context(_without_onednn())
        stack.enter_context(_plain_words())
        with fake_mode, recorder:
            with FunctionWatch() as watch:
                outputs = call(model, fakes)
            recorder.run_checks(outputs)
            weights.check_assignments()
            loss = None
            if plan.training:
                candidates = watch.finish()
                loss = candidates[final_loss(candidates)]
                _record_backward(recorder, loss, list(weights.parameters()))
    error = recorder.findings.error()
    if error is not None:
        raise error
    for finding in recorder.findings.all:
        _logger.warning("%s", finding)
    tensors = [leaf for _, leaf in nested.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    like = None if loss is None else torch.empty(tuple(loss.shape), dtype=loss.dtype)
    graph = recorder.finish(tensors, outputs, like)
    _note_ownership(graph.graph)
    changed = _changed_weights(graph)
    return Trace(
        layout=tracer.layout(),
        graph=graph,
        outputs=len(tensors),
        changed_buffers=[weight.name for weight in weights.buffers() if weight.name in changed],
        fingerprint=graph.fingerprint(),
        findings=recorder.findings,
    )


def _add_inputs(recorder: Recorder, arguments: Dict[str, Any], values: Dict[fx.Node, torch.Tensor]) -> Dict[str, Any]:
    count = 0

    def take(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if not tensor.numel():
            raise Error(
                f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}): give the model at least one "
                "row, and leave empty dimensions out."
            )
        twin = recorder.add_input("input", count, tensor)
        values[recorder.inputs[-1].node] = tensor
        count += 1
        return twin

    return nested.rebuild(arguments, take)


def _record_backward(recorder: Recorder, loss: torch.Tensor, weights: List[Weight]) -> None:
    """Record the gradients of the loss, each handed over as soon as it is complete."""
    trained = [weight for weight in weights if weight.tensor.requires_grad]
    if not loss.requires_grad or not trained:
        return
    recorder.backward = True
    with torch.utils._python_dispatch._disable_current_modes():
        like = torch.empty(tuple(loss.shape), dtype=loss.dtype)
    seed = recorder.add_input("seed", None, like)
    gradients = torch.autograd.grad(loss, [weight.tensor for weight in trained], seed, allow_unused=True)
    book = recorder.add_plain_input("book")
    for weight, gradient in zip(trained, gradients):
        if gradient is not None:
            _record_delivery(recorder, book, weight, recorder.node_of(gradient))


def _record_delivery(recorder: Recorder, book: fx.Node, weight: Weight, gradient: fx.Node) -> None:
    graph = recorder.graph
    if gradient.op == "placeholder":
        node = graph.create_node("call_function", deliver, (book, weight.name, gradient, False))
    else:
        with graph.inserting_after(gradient):
            node = graph.create_node("call_function", deliver, (book, weight.name, gradient, False))
    node.meta.update({**gradient.meta, "val": None, "backward": True, "pure": False})


def _note_ownership(graph: fx.Graph) -> None:
    """Let the book keep gradients that nobody else holds, instead of copying them."""
    for node in graph.nodes:
        if node.target is deliver:
            gradient = node.args[2]
            node.args = (*node.args[:3], owns_result(gradient) and gradient.meta["val"].is_contiguous())


def _changed_weights(graph: TracedGraph) -> Set[str]:
    """Return the names of the weights that the graph writes into."""
    written = {root_of(node) for node in written_nodes(graph.graph)}
    return {each.key for each in graph.inputs if each.kind == "weight" and each.node in written}
