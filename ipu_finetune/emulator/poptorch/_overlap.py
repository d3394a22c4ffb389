# SPDX-License-Identifier: Apache-2.0
"""`set_overlap_for_input` and `set_overlap_for_output`: transfers that run while the device computes.

The results of a model do not depend on them, but their use is restricted; what is wrong with it can only be said once
the whole forward pass is known.
"""

import weakref
from typing import Any, List

import torch

from ..device import nested
from ..device.enums import OutputMode
from ..device.errors import Error
from ..device.state import current
from .enums import OverlapMode

__all__ = ["set_overlap_for_input", "set_overlap_for_output"]

_INPUT, _OUTPUT = "poptorch.set_overlap_for_input", "poptorch.set_overlap_for_output"


class _Marks:
    """The marked inputs and outputs of one trace, and their check at its end."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = weakref.ref(recorder)
        self._inputs: List[torch.Tensor] = []
        self._outputs: List[torch.Tensor] = []
        self._overlaps = False
        self._plan = getattr(recorder, "plan", None)
        recorder.on_finish(self.check)

    def add(self, kind: str, tensor: torch.Tensor, mode: OverlapMode) -> torch.Tensor:
        """Return the tensor that stands for the marked one."""
        self._overlaps |= mode is not OverlapMode.NoOverlap
        if kind == _OUTPUT:
            self._outputs.append(tensor)
            return tensor
        # A view, so that what else is done with the input itself can be told from what is done with its marked twin.
        self._inputs.append(tensor)
        return tensor.view_as(tensor)

    def check(self, outputs: Any) -> None:
        """Raise if a mark is where it must not be, or the options do not allow overlap."""
        returned = [id(leaf) for _, leaf in nested.leaves(outputs) if isinstance(leaf, torch.Tensor)]
        recorder = self._recorder()
        assert recorder is not None
        for tensor in self._inputs:
            if not recorder.is_input(tensor):
                raise Error(f"{_INPUT} applied on a node which is not a tensor input to the model.")
            if recorder.users_of(tensor) > 1 or id(tensor) in returned:
                number = next(each.key for each in recorder.inputs if each.node is recorder.node_of(tensor))
                raise Error(
                    f"{_INPUT} must be the only op applied to an input. This is not the case for input {number} to "
                    "the model."
                )
        for tensor in self._outputs:
            times = returned.count(id(tensor))
            if times == 0:
                raise Error(f"{_OUTPUT} applied on a node which is not a tensor output to the model.")
            if times > 1:
                raise Error(
                    f"{_OUTPUT} cannot be used with a tensor that is returned twice. Please check all returned "
                    "tensors including those nested in tuples/lists."
                )
        if self._overlaps and self._plan is not None:
            _check_options(self._plan)


def _check_options(plan: Any) -> None:
    if plan.strategy is not None and plan.strategy.pipelined:
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one IPU, please "
            "switch to poptorch.ShardedExecution."
        )
    if not plan.io_tiles:
        raise Error(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    if plan.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"Unsupported output mode for overlapped IO: {plan.output_mode}. Please switch output mode to "
            "poptorch.OutputMode.All or poptorch.OutputMode.Sum."
        )


_marks: "weakref.WeakKeyDictionary[Any, _Marks]" = weakref.WeakKeyDictionary()


def _apply(kind: str, tensors: Any, mode: Any) -> Any:
    if not isinstance(mode, OverlapMode):
        raise Error(f"{kind}: mode must be a poptorch.OverlapMode, got {mode!r}")
    for _, leaf in nested.leaves(tensors):
        if not isinstance(leaf, torch.Tensor):
            raise Error(
                f"You may only set overlap for torch.tensor {'inputs' if kind == _INPUT else 'outputs'}. "
                f"{type(leaf).__name__} is not supported."
            )
    recorder = current.recorder
    if recorder is None:
        return tensors
    marks = _marks.get(recorder)
    if marks is None:
        marks = _marks[recorder] = _Marks(recorder)
    return nested.rebuild(tensors, lambda tensor: marks.add(kind, tensor, mode))


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Let a model input be transferred while the device computes.

    Args:
        input_tensors: a tensor, or tuples, lists and dictionaries of them; nothing else may be done with them.
        mode: how far the overlap goes.

    Returns:
        The tensors to go on with.

    Raises:
        Error: not a tensor, or (once the model has been traced) not an input, used elsewhere too, a pipelined model, no
            IO tiles, or an output mode other than All and Sum.
    """
    return _apply(_INPUT, input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Let a model output be transferred while the device computes.

    Args:
        output_tensors: a tensor, or tuples, lists and dictionaries of them, just before they are returned.
        mode: how far the overlap goes.

    Returns:
        The tensors to return.

    Raises:
        Error: not a tensor, or (once the model has been traced) not returned, returned twice, a pipelined model, no IO
            tiles, or an output mode other than All and Sum.
    """
    return _apply(_OUTPUT, output_tensors, mode)
