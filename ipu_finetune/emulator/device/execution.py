# SPDX-License-Identifier: Apache-2.0
"""How one micro-batch is executed: the seam between what was compiled and what carries it out.

A `Program` knows the order of micro-batches, the weights, the random states and the update. It asks an `Execution` for
one thing only: run this micro-batch, back-propagate if there is a loss, return the outputs. An execution that replays a
traced graph or fuses operations replaces `EagerExecution` without anything else changing.
"""

from typing import Any, Callable, Dict, List, Optional, Protocol

import torch
from torch import nn

from .errors import Error
from .losses import LossFinder
from .nested import leaves
from .state import current
from .structure import AttributeGuard

__all__ = ["EagerExecution", "Execution"]

Arguments = Dict[str, Any]
Call = Callable[[nn.Module, Arguments], Any]


class Execution(Protocol):
    """Runs one micro-batch."""

    def forward(self, arguments: Arguments) -> Any:
        """Return the outputs of an inference micro-batch."""

    def forward_backward(self, arguments: Arguments, seed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the outputs, having added the gradients of the loss times `seed(loss)` to the parameters."""


class EagerExecution:
    """Runs the user's Python code again.

    Args:
        model: the user's module, with device values swapped in.
        call: calls the module with arguments by name.
        finder: where the loss is; None in inference.
        stateful: modules whose attributes the forward pass changes; they are put back, as the trace is what counts.
        check: whether results must be finite.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        finder: Optional[LossFinder],
        stateful: List[nn.Module],
        check: bool = False,
    ) -> None:
        self._model = model
        self._call = call
        self._finder = finder
        self._stateful = stateful
        self._check = check

    def forward(self, arguments: Arguments) -> Any:
        """Return the outputs of an inference micro-batch."""
        with torch.no_grad():
            outputs = self._run(arguments)
        self._check_finite(outputs)
        return outputs

    def forward_backward(self, arguments: Arguments, seed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return the outputs of a training micro-batch after its backward pass."""
        assert self._finder is not None
        with torch.enable_grad():
            current.marked_losses = []
            with self._finder.watching() as recorder:
                outputs = self._run(arguments)
            loss = self._finder.loss(outputs, recorder)
            self._check_finite(outputs)
            if loss.requires_grad:
                torch.autograd.backward(loss, seed(loss))
        current.marked_losses = []
        return outputs

    def _run(self, arguments: Arguments) -> Any:
        if not self._stateful:
            return self._call(self._model, arguments)
        guards = [AttributeGuard(module, recurse=False) for module in self._stateful]
        try:
            return self._call(self._model, arguments)
        finally:
            for guard in guards:
                guard.restore()

    def _check_finite(self, outputs: Any) -> None:
        if not self._check:
            return
        for path, leaf in leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not torch.isfinite(leaf).all():
                raise Error(
                    f"Floating point exception: output '{path}' holds a value that is not finite "
                    "(Precision.enableFloatingPointExceptions is on)."
                )
