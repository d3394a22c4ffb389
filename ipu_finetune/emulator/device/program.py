# SPDX-License-Identifier: Apache-2.0
"""A compiled model: what one host call does.

```
for d in device iterations:
    for a in gradient accumulation:          one weight update
        for r in replicas:                    all with the same weights, each with its own random state
            forward, backward of micro-batch (d, a, r)
    reduce over a and r, unscale, clip, update
```
"""

import contextlib
import time
import warnings
from typing import Any, Dict, List, Optional

import torch
from torch import nn

from . import wrappers
from .batching import CombinedBatch, OutputCollector
from .enums import OutputMode
from .errors import Error
from .execution import Call, EagerExecution, Execution
from .gradients import GradientBook
from .layout import Layout
from .plan import Plan
from .rng import DeviceRandom
from .state import running
from .structure import ModuleSnapshot
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
        call: Call,
        example: Dict[str, Any],
        plan: Plan,
        image: Optional[OptimizerImage],
        emulation: Emulation,
    ) -> None:
        self.plan = plan
        self.model = model
        self.emulation = emulation
        # The traced class is the user's own, whatever wraps the model outside of calls.
        self._model_class = wrappers.plain_class_of(type(model))
        self.snapshot = ModuleSnapshot(model)
        self.weights = WeightStore(model)
        self.weights.upload()
        self.random = DeviceRandom(plan.seed, plan.replicas)
        first = CombinedBatch(example, plan).micro_batch(0, 0, 0, private=True)
        with self._own_class():
            self.trace = trace(model, call, first, plan, self.weights)
        self._check_buffers(self.trace.changed_buffers)
        emulation.layout = self.trace.layout
        self.optimizer: Optional[DeviceOptimizer] = None
        self._book: Optional[GradientBook] = None
        if image is not None:
            self.optimizer = DeviceOptimizer(image, self.weights, plan)
            self._book = GradientBook(self.optimizer.trained(), plan, image.type_of("gradient"))
            emulation.loss_scale = self.optimizer.scale.value
        self.execution: Execution = EagerExecution(
            model, call, self.trace.finder, self.trace.stateful, plan.float_exceptions
        )
        self.times: Dict[str, List[float]] = {}

    def _check_buffers(self, changed: List[str]) -> None:
        known = {weight.name for weight in self.weights.buffers()}
        for name in self.plan.updatable_buffers:
            if name not in known:
                raise Error(f"Buffer '{name}' of updatableNamedBuffers is not in the model: it has {sorted(known)}")
        if not changed or self.plan.replicas == 1:
            return
        if self.plan.broadcast_buffers:
            raise Error(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                f"poptorch.Options.broadcastBuffers(False). Buffers that change: {', '.join(changed)}"
            )
        self.weights.replicate_buffers(changed, self.plan.replicas)

    def _own_class(self) -> "_ClassGuard":
        return _ClassGuard(self.model, self._model_class)

    def rebind_gradients(self) -> None:
        """Take the set of trained parameters from the optimizer again."""
        if self.optimizer is not None:
            self._book = GradientBook(self.optimizer.trained(), self.plan, self.optimizer.image.type_of("gradient"))

    # ---- running

    def run(self, arguments: Dict[str, Any]) -> Any:
        """Run one combined batch and return the outputs that the output mode asks for."""
        plan = self.plan
        batch = CombinedBatch(arguments, plan)
        outputs = OutputCollector(plan)
        self.emulation.last_updates_skipped = []
        started = time.perf_counter()
        consumed: List[float] = []
        produced: List[float] = []
        with contextlib.ExitStack() as on_device:
            on_device.enter_context(self._own_class())
            on_device.enter_context(self.snapshot.in_force())
            on_device.enter_context(self.weights.swapped_in())
            on_device.enter_context(self.random.session())
            on_device.enter_context(running(plan.training))
            if self._book is not None:
                on_device.callback(self._book.clear)
            for iteration in range(plan.device_iterations):
                for step in range(plan.accumulation):
                    self._step(batch, outputs, iteration, step, consumed, produced)
                if plan.training:
                    self._update()
        batch.write_back()
        self.times = self._timing(started, consumed, produced)
        return outputs.result()

    def _step(
        self,
        batch: CombinedBatch,
        outputs: OutputCollector,
        iteration: int,
        step: int,
        consumed: List[float],
        produced: List[float],
    ) -> None:
        replicated = self.weights.has_replicated()
        for replica in range(self.plan.replicas):
            self.random.use(replica)
            if replicated:
                self.weights.use_replica(replica)
            arguments = batch.micro_batch(iteration, step, replica)
            consumed.append(time.perf_counter())
            if self.plan.training:
                assert self.optimizer is not None
                assert self._book is not None
                result = self.execution.forward_backward(arguments, self.optimizer.scale.seed)
                self._book.micro_batch_done()
            else:
                result = self.execution.forward(arguments)
            if outputs.wanted(iteration, step):
                produced.append(time.perf_counter())
            outputs.add(iteration, step, replica, result)

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
            skip = self.plan.auto_loss_scaling and not book.all_finite()
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

    def _timing(self, started: float, consumed: List[float], produced: List[float]) -> Dict[str, List[float]]:
        plan = self.plan
        if plan.output_mode == OutputMode.Sum:
            produced = produced[-plan.replicas :]
        return {
            "input": [moment - started for moment in consumed],
            "input_complete": [moment - started for moment in consumed],
            "output": [moment - started for moment in produced],
            "output_complete": [moment - started for moment in produced],
        }


class _ClassGuard:
    """Gives the model its own class for the time of a call."""

    def __init__(self, model: nn.Module, kind: type) -> None:
        self._model, self._kind = model, kind

    def __enter__(self) -> None:
        self._wrapped = type(self._model)
        self._model.__class__ = self._kind

    def __exit__(self, *_: Any) -> None:
        self._model.__class__ = self._wrapped
