# SPDX-License-Identifier: Apache-2.0
"""Operators and annotations that PopTorch adds to PyTorch.

Annotations about memory and layout are the identity here; what computes something computes it with PyTorch.
"""

from typing import Any, Callable, List, Sequence

import torch

from ..device.errors import Error
from ..device.state import current
from .enums import MatMulSerializationMode, OverlapMode

__all__ = [
    "Attribute",
    "NameScope",
    "cond",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

Tensor = torch.Tensor


def isRunningOnIpu() -> bool:
    """Whether the code that asks runs inside a compiled model."""
    return current.running


def _check_tensor(function: str, name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise Error(f"{function}: {name} must be a torch.Tensor, got {type(value).__name__}")


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark a tensor as the loss that the backward pass starts from.

    Args:
        x: any differentiable tensor.
        reduction: "sum" or "mean" over all elements, or "none", which back-propagates ones through every element.

    Raises:
        AssertionError: another reduction.
    """
    if reduction == "none":
        loss = x.view_as(x)
    elif reduction == "sum":
        loss = x.sum()
    elif reduction == "mean":
        loss = x.mean()
    else:
        raise AssertionError(f"Unsupported reduction type! Expected 'sum', 'mean' or 'none', got {reduction!r}")
    if current.running:
        current.marked_losses.append(loss)
    return loss


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Mark tensors that are kept, rather than recomputed, for the backward pass.

    Returns:
        The argument; several arguments become a tuple.

    Raises:
        ValueError: something is not a tensor.
    """
    values = tensors[0] if len(tensors) == 1 else tensors
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"All inputs must be tensors, got {type(value).__name__}")
    return values


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Multiply matrices that the IPU would cut into `factor` parts along `mode`; the result is that of `matmul`."""
    if not isinstance(keep_precision, bool):
        raise AssertionError(f"keep_precision must be a bool, got {keep_precision!r}")
    if not isinstance(factor, int):
        raise AssertionError(f"factor must be an int, got {factor!r}")
    if not isinstance(mode, MatMulSerializationMode):
        raise AssertionError(f"mode must be a MatMulSerializationMode, got {mode!r}")
    if mode != MatMulSerializationMode.Disabled and factor > 1:
        _check_divisible(lhs, rhs, mode, factor)
    return torch.matmul(lhs, rhs)


def _check_divisible(lhs: Tensor, rhs: Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2] if lhs.dim() > 1 else 1,
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }
    if sizes[mode] % factor:
        raise Error(
            f"serializedMatMul: the {mode.value} dimension has {sizes[mode]} elements, which {factor} parts do not "
            "divide"
        )


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Set the memory that the operation behind a tensor may use; the identity."""
    if not isinstance(tensor, torch.Tensor):
        raise Error("You may only set available memory for torch.tensor values")
    if not 0 <= float(available_memory_proportion) <= 1:
        raise Error(f"The available memory proportion must lie in 0..1, got {available_memory_proportion}")
    return tensor


def nop(tensor: Tensor) -> Tensor:
    """Do nothing."""
    _check_tensor("nop", "tensor", tensor)
    return tensor


def ipu_print_tensor(tensor: Tensor, title: str = "", print_gradient: bool = True, *_: Any, **__: Any) -> Tensor:
    """Print the tensor whenever it is computed, and its gradient whenever that is.

    The further arguments, which format the text on the IPU, are accepted.
    """
    _check_tensor("ipu_print_tensor", "tensor", tensor)
    if current.tracer is None:
        print(f"{title}: {tensor.detach()}")
        if print_gradient and tensor.requires_grad:
            tensor.register_hook(lambda gradient: print(f"Gradient___{title}: {gradient}"))
    return tensor


def _check_slice(function: str, tensor: Any, dim: Any, start: Any, size: Any) -> int:
    _check_tensor(function, "tensor", tensor)
    if not isinstance(dim, int):
        raise Error(f"{function}: dim must be an integer, got {dim!r}")
    if not -tensor.dim() <= dim < tensor.dim():
        raise Error(f"{function}: dim {dim} is out of range for a tensor with {tensor.dim()} dimensions")
    _check_tensor(function, "start", start)
    if start.numel() != 1 or start.is_floating_point():
        raise Error(f"{function}: start must hold one integer, got {start.dtype} of shape {tuple(start.shape)}")
    if not isinstance(size, int) or size < 1:
        raise Error(f"{function}: size must be a positive integer, got {size!r}")
    if size > tensor.shape[dim]:
        raise Error(f"{function}: size {size} is above the dimension's {tensor.shape[dim]}")
    return dim % tensor.dim()


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Tensor:
    """Return `size // step` rows of `tensor` along `dim` from a start that is only known when the model runs."""
    dim = _check_slice("dynamic_slice", tensor, dim, start, size)
    if not isinstance(step, int) or step < 1:
        raise Error(f"dynamic_slice: step must be a positive integer, got {step!r}")
    if size % step:
        raise Error(f"dynamic_slice: the step {step} must divide the size {size}")
    index = start.reshape(()).to(torch.int64) + torch.arange(0, size, step)
    return torch.index_select(tensor, dim, index)


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Return `input` with `size` rows along `dim` replaced by `src`, from a start that is only known at run time."""
    dim = _check_slice("dynamic_update", input, dim, start, size)
    _check_tensor("dynamic_update", "src", src)
    if input.dtype != src.dtype:
        raise Error(f"dynamic_update: input is {input.dtype} but src is {src.dtype}")
    if input.dim() != src.dim():
        raise Error(f"dynamic_update: input has {input.dim()} dimensions but src has {src.dim()}")
    index = start.reshape(()).to(torch.int64) + torch.arange(size)
    return torch.index_copy(input, dim, index, src)


def _refuse_training(function: str) -> None:
    if current.running and current.training:
        raise Error(f"poptorch.{function}() is only supported in inference")


def cond(
    condition: Tensor,
    then_body: Callable[..., Any],
    then_inps: List[Tensor],
    else_body: Callable[..., Any],
    else_inps: List[Tensor],
) -> List[Any]:
    """Return the results of one of two bodies, chosen when the model runs.

    Raises:
        ValueError: the inputs are not lists.
        Error: in a training model.
    """
    _refuse_training("cond")
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError("poptorch.cond expects then_inps and else_inps tensors to be a list")
    chosen = then_body(*then_inps) if bool(condition.reshape(())) else else_body(*else_inps)
    return list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[Tensor]) -> List[Tensor]:
    """Apply `body` to its own results `count` times.

    Raises:
        ValueError: the inputs are not a list of tensors, or the body returns another number of them.
        Error: in a training model.
    """
    _refuse_training("for_loop")
    if not isinstance(inputs, list):
        raise ValueError(f"poptorch.for_loop expects input tensors (inputs) to be a list, got {type(inputs).__name__}")
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"poptorch.for_loop: inputs must be tensors, got {type(value).__name__}")
    values = [value.clone() for value in inputs]
    for _ in range(count):
        results = body(*values)
        values = list(results) if isinstance(results, (list, tuple)) else [results]
        if len(values) != len(inputs):
            raise ValueError(f"poptorch.for_loop: the body takes {len(inputs)} tensors but returned {len(values)}")
    return values


def _check_overlap(function: str, tensors: Any, mode: Any) -> None:
    if not isinstance(mode, OverlapMode):
        raise Error(f"{function}: mode must be a poptorch.OverlapMode, got {mode!r}")


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Let a model input be transferred while the device computes; the identity."""
    _check_overlap("set_overlap_for_input", input_tensors, mode)
    return input_tensors


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Let a model output be transferred while the device computes; the identity."""
    _check_overlap("set_overlap_for_output", output_tensors, mode)
    return output_tensors


class _Annotation:
    """A context manager that changes nothing in what is computed."""

    def __enter__(self) -> "_Annotation":
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class NameScope(_Annotation):
    """Name the operations within the block."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionError(f"Parameter to NameScope must be a string, got {name!r}")
        self.name = name


class Attribute(_Annotation):
    """Attach attributes to the operations within the block: `Attribute(__outline={"layer": "embedding"})`."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes
