# SPDX-License-Identifier: Apache-2.0
"""A compiled model: what one host call does.

```
for d in device iterations:
    for a in gradient accumulation:          one weight update
        for r in replicas:                    all with the same weights, each with its own random state
            replay the traced graph on micro-batch (d, a, r)
    reduce over a and r, unscale, clip, update
```
The user's module takes part in compilation only; what runs is the graph, on the device's own tensors.
"""

import dataclasses
import time
import warnings
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from . import wrappers
from .batching import CombinedBatch, OutputCollector
from .cache import CacheAnswer
from .enums import OutputMode
from .errors import Error
from .execution import Execution, GraphExecution
from .gradients import GradientBook
from .graph import root_of, written_nodes
from .layout import Layout
from .plan import Anchor, Plan
from .precision import Arithmetic
from .replica_weights import stripped
from .rng import DeviceRandom
from .settings import settings
from .tracing import trace
from .updates import DeviceOptimizer, OptimizerImage
from .weights import WeightStore

__all__ = ["Emulation", "Program"]


class Emulation:
    """What the emulator can tell and an IPU would not; `PoplarExecutor.emulation`.

    Attributes:
        updates: weight updates done since compilation.
        skipped_updates: updates left out because a gradient was not finite (automatic loss scaling only).
        last_updates_skipped: one bool per update of the last call.
        loss_scale: the scale in force, or None in inference.
        underflow_share: share of zeros among the fp16 gradients of the last update; None without fp16 parameters.
        layout: stages and IPUs, once compiled.
        ipus: IPUs that a real run would reserve.
        executable_cache: ``hit``, ``miss`` or ``off``, once compiled.
        cache_answer: the same with the reason, the key and the entry's path.
        stages: seconds that each stage of the compilation took.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.skipped_updates = 0
        self.last_updates_skipped: List[bool] = []
        self.loss_scale: Optional[float] = None
        self.underflow_share: Optional[float] = None
        self.layout: Optional[Layout] = None
        self.ipus: Optional[int] = None
        self.executable_cache = "off"
        self.cache_answer: Optional[CacheAnswer] = None
        self.stages: Dict[str, float] = {}
        self._warned_underflow = False

    @property
    def last_update_skipped(self) -> bool:
        """Whether the last weight update was left out."""
        return bool(self.last_updates_skipped) and self.last_updates_skipped[-1]


class Program:
    """Weights, random states and optimizer of one compiled model, and the loop that runs them.

    Args:
        model: the user's module; its structure at this moment is what stays compiled.
        call: calls the module with arguments by name.
        example: arguments of a whole combined batch.
        plan: the resolved options.
        image: the optimizer's settings; None in inference.
        emulation: where figures are reported.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[nn.Module, Dict[str, Any]], Any],
        example: Dict[str, Any],
        plan: Plan,
        image: Optional[OptimizerImage],
        emulation: Emulation,
    ) -> None:
        self.plan = plan
        self.model = model
        self.emulation = emulation
        # Traced under the user's own class, whatever wraps the model outside of calls.
        own_class = wrappers.plain_class_of(type(model))
        self.weights = WeightStore(model)
        self.random = DeviceRandom(plan.seed, plan.replicas)
        grouped = self.weights.group(plan.groupings, plan.replicas)
        tensors = [weight.tensor for weight in grouped]
        with torch.inference_mode(False), _ClassGuard(model, own_class), stripped(tensors):
            first = CombinedBatch(example, plan).micro_batch(0, 0, 0)
            self.trace = trace(model, call, first, plan, self.weights)
        self.weights.upload()
        self._check_buffers(self.trace.changed_buffers)
        emulation.layout = self.trace.layout
        self.optimizer: Optional[DeviceOptimizer] = None
        self._book: Optional[GradientBook] = None
        if image is not None:
            self.optimizer = DeviceOptimizer(image, self.weights, plan)
            emulation.loss_scale = self.optimizer.scale.value
            self.rebind_gradients()
        arithmetic = Arithmetic(plan.half_partials, settings().overflow, plan.float_exceptions)
        written = {root_of(node) for node in written_nodes(self.trace.graph.graph)}
        # Constants that the graph changes in place: every replay starts from their values.
        self._written_constants = {
            position
            for position, each in enumerate(self.trace.graph.inputs)
            if each.kind == "constant" and each.node in written
        }
        self.execution: Execution = GraphExecution(self.trace.graph, arithmetic)
        self.times: Dict[str, List[float]] = {}
        self.anchored: Dict[str, torch.Tensor] = {}

    def _check_buffers(self, changed: List[str]) -> None:
        known = {weight.name for weight in self.weights.buffers()}
        for name in self.plan.updatable_buffers:
            if name not in known:
                raise Error(f"Buffer '{name}' of updatableNamedBuffers is not in the model: it has {sorted(known)}")
        if not changed or self.plan.replicas == 1:
            return
        # Batch norm keeps its statistics inside of the operator, where PopTorch does not see them change.
        refused = [name for name in changed if name not in self.weights.batch_norm_names()]
        if self.plan.broadcast_buffers and refused:
            raise Error(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                f"poptorch.Options.broadcastBuffers(False). Buffers that change: {', '.join(refused)}"
            )
        self.weights.replicate_buffers(changed, self.plan.replicas)

    def rebind_gradients(self) -> None:
        """Take the set of trained parameters from the optimizer again."""
        if self.optimizer is not None:
            self._book = GradientBook(self.optimizer.trained(), self.plan, self.optimizer.image.type_of("gradient"))

    # ---- running

    def run(self, arguments: Dict[str, Any]) -> Any:
        """Run one combined batch and return the outputs that the output mode asks for."""
        with torch.inference_mode(False):
            return self._run(arguments)

    def _run(self, arguments: Dict[str, Any]) -> Any:
        plan = self.plan
        batch = CombinedBatch(arguments, plan)
        call = _Call(batch, OutputCollector(plan, self.trace.graph.structure), self._anchor_collectors())
        self.emulation.last_updates_skipped = []
        bindings = [self._bind(replica) for replica in range(plan.replicas)]
        with self.random.session():
            try:
                for iteration in range(plan.device_iterations):
                    for step in range(plan.accumulation):
                        self._step(call, bindings, iteration, step)
                    if plan.training:
                        scale = self.optimizer.scale.value if self.optimizer is not None else 1.0
                        self._update()
                        self._anchor_updates(call, iteration, scale)
            finally:
                if self._book is not None:
                    self._book.clear()
        batch.write_back()
        self.times = self._timing(call)
        self.anchored = {name: collector.result() for name, collector in call.anchors.items()}
        return call.outputs.result()

    def _bind(self, replica: int) -> List[Any]:
        """Return what a replica's replay is called with, in the order of the graph's inputs; inputs are left open."""
        bound: List[Any] = []
        for each in self.trace.graph.inputs:
            if each.kind == "weight":
                weight = self.weights.get(each.key)
                assert weight is not None
                bound.append(weight.per_replica[replica] if weight.per_replica else weight.device)
            else:
                bound.append(each.value if each.kind == "constant" else self._book)
        return bound

    def _step(self, call: "_Call", bindings: List[List[Any]], iteration: int, step: int) -> None:
        seed = None
        if self.optimizer is not None and self.trace.graph.loss is not None:
            seed = self.optimizer.scale.seed(self.trace.graph.loss)
        for replica, values in enumerate(bindings):
            self.random.use(replica)
            tensors = call.batch.tensors(iteration, step, replica)
            for position, each in enumerate(self.trace.graph.inputs):
                if each.kind == "input":
                    values[position] = tensors[each.key]
                elif each.kind == "seed":
                    values[position] = seed
                elif position in self._written_constants:
                    assert each.value is not None
                    values[position] = each.value.clone()
            call.consumed.append(time.perf_counter())
            if self._book is not None:
                self._book.micro_batch_begins(replica)
                if call.anchors:
                    self._book.on_delivery = call.gradient_anchor(iteration, step, replica)
            results = self.execution.run(values)
            if self._book is not None:
                self._book.micro_batch_done()
            if call.outputs.wanted(iteration, step):
                call.produced.append(time.perf_counter())
            call.outputs.add(iteration, step, replica, results)

    # ---- anchored tensors

    def _anchor_collectors(self) -> Dict[str, OutputCollector]:
        plan = self.plan
        return {
            anchor.name: OutputCollector(
                dataclasses.replace(plan, output_mode=anchor.mode, output_period=anchor.period), _FAKE_TENSOR
            )
            for anchor in plan.anchors
            if self.can_anchor(anchor)
        }

    def can_anchor(self, anchor: Anchor) -> bool:
        """Whether there is a tensor with an anchor's name."""
        return anchor.name in self.tensor_names()

    def tensor_names(self) -> List[str]:
        """Return the names of the tensors that can be anchored."""
        if self.optimizer is None:
            return []
        trained = [weight.name for weight in self.weights.parameters() if weight.requires_grad]
        names = [f"{kind}___{name}" for kind in ("Gradient", "UpdatedVar") for name in trained]
        return [*names, "lossScaling_FLOAT", "finalLossScale"]

    def _anchor_updates(self, call: "_Call", iteration: int, scale_used: float) -> None:
        if not call.anchors:
            return
        assert self.optimizer is not None
        scale = torch.tensor(scale_used)
        for name, collector in call.anchors.items():
            kind, _, parameter = name.partition("___")
            weight = self.weights.get(parameter)
            value = weight.device if kind == "UpdatedVar" and weight is not None else scale
            if kind != "Gradient" and value is not None:
                for replica in range(self.plan.replicas):
                    collector.add(iteration, self.plan.accumulation - 1, replica, [value])

    def _update(self) -> None:
        optimizer, book, emulation = self.optimizer, self._book, self.emulation
        assert optimizer is not None
        assert book is not None
        with torch.no_grad():
            self._reduce_across_processes(book)
            if self.plan.float_exceptions and not book.all_finite():
                raise Error(
                    "Floating point exception: a gradient is not finite "
                    "(Precision.enableFloatingPointExceptions is on)."
                )
            skip = self.plan.auto_loss_scaling and book.overflowed()
            share = None
            if skip:
                optimizer.scale.overflowed()
                book.clear()
                emulation.skipped_updates += 1
            else:
                share = book.underflow_share()
                optimizer.apply(book, self.random)
                emulation.updates += 1
                emulation.underflow_share = share
                self._warn_underflow(share)
                optimizer.scale.finished(share)
        emulation.last_updates_skipped.append(skip)
        emulation.loss_scale = optimizer.scale.value

    def _warn_underflow(self, share: Optional[float]) -> None:
        emulation = self.emulation
        if share != 1.0 or emulation._warned_underflow:
            return
        emulation._warned_underflow = True
        assert self.optimizer is not None
        warnings.warn(
            f"underflow 100 %: every fp16 gradient is zero at loss scale {self.optimizer.scale.value:g}; raise "
            "loss_scaling or use automatic loss scaling",
            UserWarning,
            stacklevel=2,
        )

    def _reduce_across_processes(self, book: GradientBook) -> None:
        if self.plan.processes == 1:
            return
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise Error(
                f"Options.Distributed names {self.plan.processes} processes, but torch.distributed is not initialised "
                "in this one, so gradients cannot be reduced: call popdist.init() first."
            )
        for _, gradient in book.totals():
            torch.distributed.all_reduce(gradient)

    def _timing(self, call: "_Call") -> Dict[str, List[float]]:
        produced = call.produced
        if self.plan.output_mode == OutputMode.Sum:
            produced = produced[-self.plan.replicas :]
        consumed = [moment - call.started for moment in call.consumed]
        written = [moment - call.started for moment in produced]
        return {
            "input": consumed,
            "input_complete": list(consumed),
            "output": written,
            "output_complete": list(written),
        }


_FAKE_TENSOR = torch.empty(0)


class _Call:
    """What one host call gathers."""

    def __init__(self, batch: CombinedBatch, outputs: OutputCollector, anchors: Dict[str, OutputCollector]) -> None:
        self.batch = batch
        self.outputs = outputs
        self.anchors = anchors
        self.started = time.perf_counter()
        self.consumed: List[float] = []
        self.produced: List[float] = []

    def gradient_anchor(self, iteration: int, step: int, replica: int) -> Callable[[str, torch.Tensor], None]:
        """Return what keeps the gradients of one micro-batch that were asked for."""

        def keep(name: str, gradient: torch.Tensor) -> None:
            collector = self.anchors.get(f"Gradient___{name}")
            if collector is not None:
                collector.add(iteration, step, replica, [gradient])

        return keep


class _ClassGuard:
    """Gives the model its own class for the time of a call."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        self._model, self._kind = model, kind

    def __enter__(self) -> None:
        self._wrapped = type(self._model)
        self._model.__class__ = self._kind

    def __exit__(self, *_: Any) -> None:
        self._model.__class__ = self._wrapped
