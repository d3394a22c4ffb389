# SPDX-License-Identifier: Apache-2.0
"""What an executor can tell: times, names and values of inner tensors, the compiled operations."""

import datetime
import json
from typing import Any, Dict, List, Tuple

import torch

from ...errors import did_you_mean
from ..device.errors import Error
from ..device.optimizer_settings import kind_of
from ._executor_base import ExecutorBase, tensor_leaves

__all__ = ["ExecutorFigures"]

Latency = Tuple[float, float, float]
_COUNTERS = ("input", "input_complete", "output", "output_complete")
# The operators with which PopART updates one weight.
_UPDATES = {
    "SGD0": ("SGD0VarUpdate",),
    "SGD1": ("SGD1VarUpdate",),
    "SGD2": ("SGD2VarUpdate",),
    "ADAM": ("AdamUpdater", "AdamVarUpdate"),
    "ADAMW": ("AdamUpdater", "AdamVarUpdate"),
    "LAMB": ("AdamUpdater", "AdamVarUpdate"),
    "RMSPROP": ("AdaptiveUpdater", "ScaledVarUpdate"),
}


class ExecutorFigures(ExecutorBase):
    """The part of an executor that answers questions."""

    # ---- times

    def cycleCount(self) -> int:
        """Refuse: only IPU hardware counts cycles, and the emulator has no figure to put in their place.

        Raises:
            Error: always; the text tells whether the option is missing, the model has not run, or there is no IPU.
        """
        if not self._options.log_cycle_count:
            raise Error("Cycle count logging is disabled. Please set option logCycleCount to True to enable.")
        if self._program is None or not self._program.times:
            raise Error("Please run the model at least once before obtaining cycle count.")
        raise Error(
            "Cycle count logging is only supported on actual IPU hardware. This is an emulated IPU: its speed says "
            "nothing about cycles."
        )

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compilation took.

        Raises:
            Error: not compiled, or the option showCompilationProgressBar is off.
        """
        if self._compilation_seconds is None:
            raise Error("Please compile the model before obtaining compilation time.")
        if not self._options.show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar option to obtain compilation time.")
        return datetime.timedelta(seconds=self._compilation_seconds)

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return when each input was read and each output written in the last call, in seconds.

        The lists are those of PopTorch: per tensor, one moment per micro-batch. Nothing is streamed, and so nothing
        counted, with synthetic data.
        """
        if self._program is None or not self._program.times:
            return {name: [[]] for name in _COUNTERS}
        inputs, outputs = len(tensor_leaves(self._compiled_for)), self._program.trace.outputs
        times = self._times()
        return {
            name: [list(times[name]) for _ in range(inputs if name.startswith("input") else outputs)]
            for name in _COUNTERS
        }

    def _times(self) -> Dict[str, List[float]]:
        if self._program is None or not self._program.times or self._options.synthetic_data_mode:
            return {name: [] for name in _COUNTERS}
        return self._program.times

    def _latency(self, first: str, last: str) -> Latency:
        starts, ends = self._times()[first], self._times()[last]
        if not starts or not ends:
            return (0.0, 0.0, 0.0)
        step = max(1, len(starts) // len(ends))
        spans = [end - start for start, end in zip(starts[step - 1 :: step], ends)]
        return (min(spans), max(spans), sum(spans) / len(spans))

    def getHostIpuLatency(self) -> Latency:
        """Return minimum, maximum and mean of the time from reading an input to having it on the device."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return minimum, maximum and mean of the time from having an input to having its output."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return minimum, maximum and mean of the time from having an output to having it on the host."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """Return minimum, maximum and mean of the time from reading an input to having its output on the host."""
        return self._latency("input", "output_complete")

    # ---- inner tensors

    def getTensorNames(self) -> List[str]:
        """Return the names of the compiled model's tensors: inputs, weights, gradients, loss, optimizer settings.

        `Options.anchorTensor` takes the names of gradients, updated weights and the loss scale.

        Raises:
            AssertionError: not compiled, or destroyed.
        """
        if self._program is None or self._compiled_for is None:
            raise AssertionError("The model must be compiled before its tensor names are known: call it or compile().")
        names = [f"input/{name}" for name in self._compiled_for]
        names += [weight.name for weight in self._program.weights.weights]
        if self._training:
            names.append("loss")
        names += [name for name in self._program.tensor_names() if name not in names]
        if self._program.optimizer is not None:
            names += [name for name in self._program.optimizer.setting_names() if name not in names]
        return names

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return the value that a tensor had in the last call.

        Args:
            short_name: the name given to it by `Options.anchorTensor(short_name, ...)`.

        Raises:
            Error: no such name, or the model has not run.
        """
        known = self._options.anchored_tensors
        if short_name not in known:
            raise Error(
                f"No tensor is anchored as '{short_name}'{did_you_mean(short_name, known)}: add "
                f"Options.anchorTensor('{short_name}', <tensor name>) before the model is wrapped."
            )
        value = self._compiled().anchored.get(known[short_name][0])
        if value is None:
            raise Error(f"Run the model before asking for the anchored tensor '{short_name}'.")
        return value

    # ---- operations

    def _debugGetPopartIR(self) -> str:
        """Return the traced operations as JSON, under the key that PopART uses, `maingraph`.

        Forward and backward operators are PyTorch's, as the emulator runs them; weight updates have PopART's names.
        """
        program = self._compiled()
        operations: List[Dict[str, Any]] = []
        together: Dict[int, Dict[str, Any]] = {}
        for number, node in enumerate(program.trace.graph.operations()):
            schema = getattr(node.target, "_schema", None)
            if schema is None:
                continue
            block = node.meta.get("multi_conv")
            if block is not None:
                if block not in together:
                    together[block] = {"id": number, "type": "MultiConv", "name": "MultiConv", "convolutions": []}
                    operations.append(together[block])
                together[block]["convolutions"].append(node.meta.get("module", ""))
                continue
            kind = schema.name.split("::")[-1]
            module = node.meta.get("module", "")
            operations.append(
                {
                    "id": number,
                    "type": kind,
                    "name": f"{module}/{kind}" if module else kind,
                    "attributes": {
                        "backward": bool(node.meta.get("backward", False)),
                        "ipu": node.meta.get("ipu"),
                        "stage": node.meta.get("stage"),
                    },
                }
            )
        optimizer = program.optimizer
        if optimizer is not None:
            for weight in optimizer.trained():
                for kind in _UPDATES[kind_of(optimizer.image)]:
                    operations.append({"id": len(operations), "type": kind, "name": f"{kind}/{weight.name}"})
        return json.dumps({"maingraph": operations})
