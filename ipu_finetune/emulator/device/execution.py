# SPDX-License-Identifier: Apache-2.0
"""How one micro-batch is executed: the seam between the traced graph and what carries it out.

A `Program` knows the order of micro-batches, the weights, the random states and the update. It asks an `Execution` for
one thing only: run the graph on these values. An execution that fuses operators or merges micro-batches replaces
`GraphExecution` without anything else changing.
"""

from typing import Any, Protocol, Sequence, Tuple

import torch

from .graph import TracedGraph, compile_graph
from .precision import Arithmetic, function_for

__all__ = ["Execution", "GraphExecution"]


class Execution(Protocol):
    """Runs one micro-batch."""

    def run(self, values: Sequence[Any]) -> Tuple[torch.Tensor, ...]:
        """Return the outputs for values in the order of `TracedGraph.inputs`.

        Gradients go to the book among the values; weights that the model changes are changed in place.
        """


class GraphExecution:
    """Runs the operators one by one, as PyTorch has them.

    Args:
        traced: the graph.
        arithmetic: where operators differ from PyTorch's.
    """

    def __init__(self, traced: TracedGraph, arithmetic: Arithmetic) -> None:
        placeholders = [each.node for each in traced.inputs]
        self._function = compile_graph(traced.graph, placeholders, lambda node: function_for(node, arithmetic))

    def run(self, values: Sequence[Any]) -> Tuple[torch.Tensor, ...]:
        """Return the outputs of one micro-batch."""
        # The graph holds the backward pass, so that autograd has nothing to record.
        with torch.no_grad():
            return self._function(*values)
