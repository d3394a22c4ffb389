# SPDX-License-Identifier: Apache-2.0
"""The host's view of a call: how a combined batch is cut into micro-batches and how results are put together.

```
dimension 0 of every input    [ device iterations | gradient accumulation | replicas (innermost) | micro-batch rows ]
```
so that micro-batch (d, a, r) is the slice of B rows that starts at `((d * A + a) * G + group(r)) * B`.
"""

import logging
from typing import Any, Dict, List, Optional, Sequence

import torch

from . import nested
from .enums import OutputMode
from .errors import Error
from .plan import Plan

__all__ = ["CombinedBatch", "OutputCollector", "to_device_dtype", "to_host_dtype"]

_logger = logging.getLogger("ipu_finetune.emulator")
_warned_non_contiguous = False


def to_device_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the values that the IPU sees: 32-bit integers and floats of at most 32 bits.

    Integers keep the dtype int64, because PyTorch's CPU kernels ask for it; values beyond int32 wrap as on the device.
    """
    if tensor.dtype == torch.int64:
        return tensor.to(torch.int32).to(torch.int64)
    if tensor.dtype in (torch.float64, torch.bfloat16):
        return tensor.to(torch.float32)
    return tensor


def to_host_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return an output in the dtype in which it comes back from an IPU."""
    if tensor.dtype == torch.int64:
        return tensor.to(torch.int32)
    if tensor.dtype in (torch.float64, torch.bfloat16):
        return tensor.to(torch.float32)
    return tensor


def _check(tensor: torch.Tensor, plan: Plan) -> int:
    """Return B, or raise if dimension 0 does not hold a whole number of rows per micro-batch."""
    factor = plan.micro_batches
    size = tensor.shape[0] if tensor.dim() else 1
    if size % factor == 0 and (tensor.dim() or factor == 1):
        return size // factor
    raise AssertionError(
        f"Invalid batch dimension: In the input {tensor.shape}, the batch dimension ({size}) must be a multiple of "
        f"Options.deviceIterations({plan.device_iterations}) * "
        f"(Options.replicationFactor({plan.replicas}) / Options.inputReplicaGrouping({plan.group_size})) * "
        f"Options.Training.gradientAccumulation({plan.accumulation}) = {factor} because it is used to calculate the "
        "batch size which will be executed on the device in any given iteration."
    )


class CombinedBatch:
    """The inputs of one call, ready to be taken micro-batch by micro-batch.

    Args:
        arguments: the call's values by parameter name; tensors may be nested.
        plan: the batch arithmetic.

    Raises:
        AssertionError: a tensor's dimension 0 is not a multiple of the micro-batches per call.
        Error: a tensor is not on the CPU.
    """

    def __init__(self, arguments: Dict[str, Any], plan: Plan) -> None:
        self.plan = plan
        self.arguments = arguments
        self._originals: List[torch.Tensor] = []
        self._inputs: List[torch.Tensor] = []
        self._pieces: List[Sequence[torch.Tensor]] = []
        for path, leaf in nested.leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                rows = _check(leaf, plan)
                ready = self._transfer(path, leaf)
                self._originals.append(leaf)
                self._inputs.append(ready)
                self._pieces.append(ready.split(rows) if ready.dim() and plan.micro_batches > 1 else (ready,))
        self._versions = [tensor._version for tensor in self._inputs]

    @staticmethod
    def _transfer(path: str, tensor: torch.Tensor) -> torch.Tensor:
        global _warned_non_contiguous
        if tensor.device.type != "cpu":
            raise Error(
                f"Input '{path}' is on {tensor.device}: tensors given to an IPU model must be on the host, "
                "call .cpu() on it."
            )
        if tensor.requires_grad:
            _logger.warning("Input '%s' has requires_grad set; it was detached, gradients do not leave the IPU.", path)
            tensor = tensor.detach()
        if tensor.is_inference():
            # Transformers' pipelines call models in inference mode, whose tensors count no versions.
            tensor = tensor.clone()
        if not tensor.is_contiguous():
            if not _warned_non_contiguous:
                _logger.warning(
                    "At least one input tensor is not contiguous: it is made so at every call. "
                    "Calling .contiguous() beforehand saves the copy."
                )
                _warned_non_contiguous = True
            tensor = tensor.contiguous()
        return to_device_dtype(tensor)

    def tensors(self, iteration: int, step: int, replica: int) -> List[torch.Tensor]:
        """Return the tensors of micro-batch (d, a, r), in the order of the arguments' leaves."""
        plan = self.plan
        index = (iteration * plan.accumulation + step) * plan.groups + plan.group(replica)
        pieces = [pieces[index] for pieces in self._pieces]
        # Replicas that share an input must not see what another one does to it.
        return [piece.clone() for piece in pieces] if plan.group_size > 1 else pieces

    def micro_batch(self, iteration: int, step: int, replica: int) -> Dict[str, Any]:
        """Return the arguments of micro-batch (d, a, r)."""
        tensors = iter(self.tensors(iteration, step, replica))
        return nested.rebuild(self.arguments, lambda _: next(tensors))

    def write_back(self) -> None:
        """Copy what the model changed in place into the caller's tensors, as the device's input streams do."""
        for original, ready, version in zip(self._originals, self._inputs, self._versions):
            # A view shares its base's version counter, so untouched inputs are recognised without comparing values.
            if ready is not original and ready._version != version:
                with torch.inference_mode(original.is_inference()), torch.no_grad():
                    original.copy_(ready)


class OutputCollector:
    """Gathers the outputs of every micro-batch and returns what the output mode asks for, in the model's structure.

    | mode | length of dimension 0, in micro-batches | content |
    |---|---|---|
    | All | D * A * R | every micro-batch |
    | EveryN | D * A * R / N | iterations d with (d + 1) % N == 0 |
    | Final | R | the last micro-batch of each replica |
    | Sum | R | the sum over iterations and accumulation, per replica |
    """

    def __init__(self, plan: Plan, structure: Any) -> None:
        self.plan = plan
        self._columns: List[List[torch.Tensor]] = []
        self._structure = structure

    def wanted(self, iteration: int, step: int) -> bool:
        """Whether the outputs of this micro-batch take part in what is returned."""
        plan = self.plan
        if plan.output_mode == OutputMode.Final:
            return iteration == plan.device_iterations - 1 and step == plan.accumulation - 1
        if plan.output_mode == OutputMode.EveryN:
            return (iteration + 1) % plan.output_period == 0
        return True

    def add(self, iteration: int, step: int, replica: int, tensors: Sequence[torch.Tensor]) -> None:
        """Take the output tensors of micro-batch (d, a, r)."""
        if not self.wanted(iteration, step):
            return
        if not self._columns:
            self._columns = [[] for _ in tensors]
        for column, tensor in zip(self._columns, tensors):
            if self.plan.output_mode == OutputMode.Sum and len(column) > replica:
                column[replica] = column[replica] + tensor
            else:
                # Copied: it may be a view of a weight or of the input, which live on.
                column.append(tensor.clone())

    def result(self) -> Any:
        """Return the structure that the model returned, or None if it holds no tensor."""
        if not self._columns:
            return None
        joined = iter([self._join(column) for column in self._columns])
        return nested.rebuild(self._structure, lambda _: next(joined))

    @staticmethod
    def _join(column: List[torch.Tensor]) -> torch.Tensor:
        tensor = column[0]
        if len(column) > 1:
            tensor = torch.stack(column) if tensor.dim() == 0 else torch.cat(column)
        tensor = to_host_dtype(tensor)
        tensor.backward = refuse_backward  # type: ignore[method-assign]
        return tensor

    def counts(self) -> Optional[int]:
        """The number of micro-batches in the result."""
        return len(self._columns[0]) if self._columns else None


def refuse_backward(*_: Any, **__: Any) -> None:
    """Take the place of `backward` on outputs: the backward pass has already run on the device."""
    raise Error(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a trainingModel, the "
        "backwards pass is performed automatically when invoking the model. If you're using an inferenceModel, you "
        "should use a trainingModel instead."
    )
