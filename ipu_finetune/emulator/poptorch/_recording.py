# SPDX-License-Identifier: Apache-2.0
"""How an operator of `poptorch` puts a call of Python code into the graph that is being traced."""

from typing import Any, Callable, List, Sequence

import torch

from ..device.state import current

__all__ = ["record"]


def record(function: Callable[..., Any], args: Sequence[Any], examples: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Record a call that runs with real values at every replay; it must lie in a block, as any operation.

    Args:
        function: returns a list of tensors, with a `__name__` for the graph.
        args: tensors of the trace, and constants.
        examples: tensors that look like the results.
    """
    assert current.recorder is not None
    if current.tracer is not None:
        current.tracer.operation()
    results: List[torch.Tensor] = current.recorder.call(function, args, examples)
    return results
