# SPDX-License-Identifier: Apache-2.0
"""One forward pass that finds out what compilation needs to know, and leaves no mark.

It runs a real micro-batch: blocks and operations are followed for the layout, losses are collected, buffers and
attributes that the model changes are noted. Weights, buffers, random states and attributes are put back afterwards.
"""

import contextlib
import dataclasses
import hashlib
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import nested
from .layout import Layout, LayoutTracer
from .losses import LossFinder, LossRecorder
from .plan import Plan
from .state import running
from .structure import AttributeGuard, ModuleSnapshot
from .weights import Weight, WeightStore

__all__ = ["Trace", "trace"]


@dataclasses.dataclass
class Trace:
    """What one forward pass showed.

    Attributes:
        layout: stages and IPUs.
        finder: where the final loss is found; None in inference.
        outputs: number of tensors returned.
        changed_buffers: names of the buffers that the model writes into.
        stateful: modules whose plain attributes the forward pass changes.
        fingerprint: SHA-256 of the operations and their shapes, in order.
    """

    layout: Layout
    finder: Optional[LossFinder]
    outputs: int
    changed_buffers: List[str]
    stateful: List[nn.Module]
    fingerprint: str


class _WatchOperations(TorchDispatchMode):
    """Tells the layout of every operation that reaches a kernel, and takes the graph's fingerprint."""

    def __init__(self, tracer: LayoutTracer) -> None:
        super().__init__()
        self._tracer = tracer
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd's bookkeeping is no operation of the model.
        if func is not torch.ops.aten.detach.default:
            self._tracer.operation()
            self.digest.update(f"{func} {[_signature(each) for each in args]}\n".encode())
        return func(*args, **(kwargs or {}))


def _signature(value: Any) -> Any:
    """Describe an argument by what shapes the graph: a tensor by its type and shape, never by its values."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return [_signature(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(type(value))


@contextlib.contextmanager
def _host_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def trace(
    model: nn.Module,
    call: Callable[[nn.Module, Dict[str, Any]], Any],
    arguments: Dict[str, Any],
    plan: Plan,
    weights: WeightStore,
) -> Trace:
    """Run one micro-batch forward and return what it showed.

    Args:
        model: the user's module.
        call: calls it with arguments by name.
        arguments: a private copy of the first micro-batch.
        plan: tells training from inference and holds the execution strategy.
        weights: already uploaded; the host still holds the same values.
    """
    tracer = LayoutTracer(plan.strategy)
    with weights.swapped_in(), _host_random_state():
        versions = weights.versions()
        structure = ModuleSnapshot(model)
        guard = AttributeGuard(model)
        stateful: List[nn.Module] = []
        try:
            with running(plan.training, tracer), torch.set_grad_enabled(plan.training):
                with LossRecorder() as recorder, _WatchOperations(tracer) as operations:
                    outputs = call(model, arguments)
                finder = LossFinder(recorder.finish(), outputs) if plan.training else None
            weights.check_assignments()
        finally:
            changed = weights.changed_since(versions)
            stateful = guard.restore()
            structure.restore()
            _undo(changed)
    tensors = [leaf for _, leaf in nested.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return Trace(
        layout=tracer.layout(),
        finder=finder,
        outputs=len(tensors),
        changed_buffers=[weight.name for weight in changed if not weight.is_parameter],
        stateful=stateful,
        fingerprint=operations.digest.hexdigest(),
    )


def _undo(changed: List[Weight]) -> None:
    with torch.no_grad():
        for weight in changed:
            assert weight.device is not None
            if weight._host is not None:
                weight.device.copy_(weight._host)
