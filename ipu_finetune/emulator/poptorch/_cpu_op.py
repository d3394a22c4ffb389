# SPDX-License-Identifier: Apache-2.0
"""`poptorch.CPU`: a Python function that runs on the host in the middle of a model."""

import contextlib
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..device.errors import Error
from ..device.state import current
from ._recording import record

__all__ = ["CPU"]

Tensor = torch.Tensor


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Within the block, code runs as it does outside of any model."""
    saved = dict(vars(current))
    vars(current).update(running=False, training=False, tracer=None, recorder=None, marked_losses=[])
    try:
        with _disable_current_modes(), torch.no_grad():
            yield
    finally:
        vars(current).update(saved)


def _as_tuple(results: Any) -> Tuple[Any, ...]:
    return tuple(results) if isinstance(results, (list, tuple)) else (results,)


class _HostCall:
    """The node of the graph: calls the function, and hands its results to the device as copies."""

    __name__ = "cpu_op"

    def __init__(self, function: Callable[..., Any], name: str, examples: Sequence[Tensor]) -> None:
        self._function, self._name = function, name
        self._looks = [(tuple(example.shape), example.dtype) for example in examples]

    def __call__(self, *inputs: Any) -> List[Tensor]:
        """Run the function on real tensors."""
        with _on_host():
            results = _as_tuple(self._function(*inputs))
            found = [(tuple(result.shape), result.dtype) for result in results]
            if found != self._looks:
                raise Error(
                    f"poptorch.CPU op '{self._name}' returned {found}, but the graph was compiled for {self._looks}: "
                    "shapes and types of its results must not depend on values"
                )
            return [result.detach().clone() for result in results]


class CPU:
    """A function that runs on the host, with the values that the model has computed so far; inference only.

    While a model is compiled, the function is called once with zeros, to see the shapes and types of its results.

    Args:
        layer_to_call: a function or module of tensors that returns a tensor, or a tuple or list of them.
        ID: a name for the operation.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if not callable(layer_to_call):
            raise Error(f"poptorch.CPU: layer_to_call must be callable, got {type(layer_to_call).__name__}")
        if not isinstance(ID, str):
            raise Error(f"poptorch.CPU: ID must be a string, got {ID!r}")
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._layer_to_call = layer_to_call
        self._ID = ID

    def __call__(self, *inputs: Any) -> Any:
        """Call the function here and now, or put the call into the graph that is being traced.

        Raises:
            Error: in a training model, or the function does not return tensors.
        """
        if not current.running:
            return self._layer_to_call(*inputs)
        if current.training:
            raise Error(f"poptorch.CPU op '{self._ID}': CPU ops are only supported in inference.")
        if current.recorder is None:
            with _on_host():
                return self._layer_to_call(*inputs)
        with _on_host():
            results = self._layer_to_call(*[_zeros_like(value) for value in inputs])
        examples = _as_tuple(results)
        for example in examples:
            if not isinstance(example, torch.Tensor):
                raise Error(f"poptorch.CPU op '{self._ID}' must return tensors, got {type(example).__name__}")
        outputs = record(_HostCall(self._layer_to_call, self._ID, examples), inputs, examples)
        return outputs if isinstance(results, (list, tuple)) else outputs[0]


def _zeros_like(value: Any) -> Any:
    return torch.zeros(tuple(value.shape), dtype=value.dtype) if isinstance(value, torch.Tensor) else value
