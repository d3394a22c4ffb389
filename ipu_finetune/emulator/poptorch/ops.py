# SPDX-License-Identifier: Apache-2.0
"""Operators and annotations that PopTorch adds to PyTorch.

Annotations about memory and layout are the identity here; what computes something computes it with PyTorch. Operators
whose code cannot be traced are recorded as calls, to run with real values at every replay.
"""

from typing import Any, ClassVar, Dict

import torch

from ..device.errors import Error
from ..device.state import current
from ._control_flow import cond, for_loop
from ._cpu_op import CPU
from ._decoders import ctc_beam_search_decoder
from ._geometry import fps, nearest
from ._overlap import set_overlap_for_input, set_overlap_for_output
from ._print import ipu_print_tensor
from ._slices import dynamic_slice, dynamic_update
from .enums import MatMulSerializationMode

__all__ = [
    "CPU",
    "Attribute",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nearest",
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
    """Multiply matrices that the IPU would cut into `factor` parts along `mode`; the result is that of `matmul`.

    Args:
        lhs: m x n matrices.
        rhs: n x p matrices.
        mode: the dimension that is cut: input channels m, reducing dimension n, output channels p, or none.
        factor: number of parts; must divide that dimension.
        keep_precision: add the parts in fp32; both kinds of matrices are multiplied with fp32 accumulation here.

    Raises:
        AssertionError: an argument of the wrong type.
        Error: the parts would not be equal.
    """
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
        raise Error(
            f"You may only set available memory for torch.tensor values. {type(tensor).__name__} is not supported."
        )
    if not 0 <= float(available_memory_proportion) <= 1:
        raise Error(f"The available memory proportion must lie in 0..1, got {available_memory_proportion}")
    return tensor


def nop(tensor: Tensor) -> Tensor:
    """Do nothing."""
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"nop must take a torch.tensor argument. {type(tensor).__name__} is not supported.")
    return tensor


class NameScope:
    """Name the operations within the block."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionError(f"Parameter to NameScope must be a string, got {name!r}")
        self.name = name

    def __enter__(self) -> "NameScope":
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class Attribute:
    """Attach attributes to the operations within the block: `Attribute(__outline={"layer": "embedding"})`.

    Blocks nest: an inner one adds keys to an attribute, or changes them, until it ends. No attribute changes a result.

    Raises:
        Error: an attribute that is no dictionary of strings.
    """

    #: attribute -> key -> value, in force for the operations that follow
    _current_attrs: ClassVar[Dict[str, Dict[str, str]]] = {}

    def __init__(self, **attributes: Dict[str, str]) -> None:
        for name, values in attributes.items():
            if not isinstance(values, dict):
                raise Error(f"Attribute '{name}' must be a dictionary of strings, got {values!r}")
            for key, value in values.items():
                if not isinstance(key, str) or not isinstance(value, str):
                    raise Error(f"Attribute '{name}': keys and values must be strings, got {key!r}: {value!r}")
        self._attributes = attributes
        self._saved: Dict[str, Dict[str, str]] = {}

    def __enter__(self) -> "Attribute":
        self._saved = Attribute._current_attrs
        merged = {name: dict(values) for name, values in self._saved.items()}
        for name, values in self._attributes.items():
            merged.setdefault(name, {}).update(values)
        Attribute._current_attrs = merged
        return self

    def __exit__(self, *_: Any) -> None:
        Attribute._current_attrs = self._saved
