# SPDX-License-Identifier: Apache-2.0
"""`cond` and `for_loop`: bodies that become graphs of their own while a model is traced."""

from typing import Any, Callable, List, Sequence

import torch

from ..device.errors import Error
from ..device.state import current

__all__ = ["cond", "for_loop"]

Tensor = torch.Tensor
Body = Callable[..., Any]


def _refuse_training(function: str) -> None:
    if current.running and current.training:
        raise Error(f"poptorch.{function}() is only supported in inference.")


def _as_list(results: Any) -> List[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _trace(function: str, body: Body, inputs: Sequence[Any]) -> Any:
    """Return the body as a graph of the tensors among its inputs; anything else is a constant of it."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]

    def on_copies(*values: Tensor) -> List[Tensor]:
        # Inputs are passed by value: what a body does to them in place stays inside.
        remaining = iter(values)
        results = _as_list(body(*[next(remaining).clone() if isinstance(v, torch.Tensor) else v for v in inputs]))
        for result in results:
            if not isinstance(result, torch.Tensor):
                raise Error(f"poptorch.{function}: a body must return tensors, got {type(result).__name__}")
        return results

    assert current.recorder is not None
    return current.recorder.subgraph(on_copies, tensors), tensors


def _looks(outputs: Sequence[Tensor]) -> List[str]:
    return [f"{output.dtype} {tuple(output.shape)}" for output in outputs]


def cond(
    condition: Tensor,
    then_body: Body,
    then_inps: List[Tensor],
    else_body: Body,
    else_inps: List[Tensor],
) -> List[Any]:
    """Return the results of one of two bodies, chosen when the model runs.

    Bodies may read tensors of the code around them. They work on copies: a tensor that a body changes must be
    returned by it.

    Args:
        condition: a tensor with one element.
        then_body: called with `then_inps` if the condition is true.
        then_inps: a list of tensors, which may be empty.
        else_body: called with `else_inps` otherwise; returns tensors of the same number, shapes and types.
        else_inps: a list of tensors, which may be empty.

    Raises:
        ValueError: the inputs are not lists.
        Error: in a training model, or the bodies return different things.
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError(
            "poptorch.cond expects then_inps and else_inps tensors to be a list of tensors. (Object is not list)"
        )
    _refuse_training("cond")
    if not isinstance(condition, torch.Tensor) or condition.numel() != 1:
        shape = tuple(condition.shape) if isinstance(condition, torch.Tensor) else type(condition).__name__
        raise Error(f"poptorch.cond: the condition must be a tensor with one element, got {shape}")
    if current.recorder is None:
        return _as_list(then_body(*then_inps) if bool(condition.reshape(())) else else_body(*else_inps))
    then, then_tensors = _trace("cond", then_body, then_inps)
    other, else_tensors = _trace("cond", else_body, else_inps)
    if _looks(then.outputs) != _looks(other.outputs):
        raise Error(
            "poptorch.cond: then_body and else_body have to return the same number of outputs with the same shapes "
            f"and types, but they return {_looks(then.outputs)} and {_looks(other.outputs)}"
        )
    outputs: List[Any] = current.recorder.branch(condition, then, then_tensors, other, else_tensors)
    return outputs


def for_loop(count: int, body: Body, inputs: List[Tensor]) -> List[Tensor]:
    """Apply `body` to its own results `count` times.

    Args:
        count: a constant number of iterations.
        body: takes as many tensors as it returns, with the same shapes and types.
        inputs: its first arguments; they are not changed.

    Raises:
        ValueError: the inputs are not a list of tensors.
        Error: in a training model, or the body's results cannot be its next arguments.
    """
    if not isinstance(inputs, list):
        raise ValueError(
            f"poptorch.for_loop expects input tensors (inputs) to be a list of tensors, got {type(inputs).__name__}. "
            "(Object is not list)"
        )
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. "
                f"(Object contained in list at index {index} is not torch.tensor)"
            )
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"poptorch.for_loop: the number of iterations must be a constant int, got {count!r}")
    _refuse_training("for_loop")
    if current.recorder is None:
        values = [value.clone() for value in inputs]
        for _ in range(count):
            results = _as_list(body(*values))
            _check_carried(inputs, results)
            values = results
        return values
    graph, _ = _trace("for_loop", body, inputs)
    _check_carried(inputs, graph.outputs)
    outputs: List[Tensor] = current.recorder.loop(count, graph, inputs)
    return outputs


def _check_carried(inputs: Sequence[Tensor], results: Sequence[Any]) -> None:
    if len(results) != len(inputs):
        raise Error(f"poptorch.for_loop: the body takes {len(inputs)} tensors but returned {len(results)}")
    if _looks(results) != _looks(inputs):
        raise Error(
            "poptorch.for_loop: the body's results are its next arguments, so shapes and types must stay the same: it "
            f"takes {_looks(inputs)} but returned {_looks(results)}"
        )
