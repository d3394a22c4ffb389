# SPDX-License-Identifier: Apache-2.0
"""Custom operators: compiled PopART code on an IPU, registered Python replacements here."""

import contextlib
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from ...errors import did_you_mean
from ..device.errors import Error
from ..device.state import current

__all__ = ["custom_op", "registerCustomOpReplacement"]

Replacement = Callable[..., Sequence[torch.Tensor]]

_replacements: Dict[str, Replacement] = {}


def registerCustomOpReplacement(name: str, replacement: Replacement, domain: str = "") -> None:
    """Give a custom operator a body for the emulator; PopTorch itself has no such function.

    Args:
        name: the operator's name, as passed to `custom_op`.
        replacement: called with the inputs and with `example_outputs` and `attributes` by name; returns the outputs.
        domain: the operator's domain; without one, the replacement serves every domain.
    """
    _replacements[f"{domain}:{name}"] = replacement


_FLOAT_MAX = torch.finfo(torch.float32).max


def _check_attributes(attributes: Dict[str, Any]) -> None:
    """Raise for what could not be handed to compiled code: it takes ASCII keys, and ints, floats and ASCII texts."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings, got {key!r}")
        if not isinstance(value, (float, int, str, list, tuple)):
            raise ValueError(f"Attribute '{key}': values must be floats, ints, strings or a list/tuple, got {value!r}")
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values or not isinstance(values[0], (float, int, str)):
            raise ValueError(f"Attribute '{key}': a list/tuple must hold floats, ints or strings, got {value!r}")
        if not all(isinstance(item, type(values[0])) for item in values):
            raise ValueError(f"Attribute '{key}': the types in a list/tuple must all be the same, got {value!r}")
        for text in [key, *values]:
            if isinstance(text, str) and not text.isascii():
                raise ValueError(f"{text} contains non-ASCII characters.")
        for number in values:
            _check_float(key, number)


def _check_float(key: str, value: Any) -> None:
    if not isinstance(value, float) or value != value or abs(value) in (float("inf"), 0.0):
        return
    if abs(value) > _FLOAT_MAX:
        side = "high" if value > 0 else "low"
        raise Error(f"Attribute '{key}': {value:g} is too {side} for a Popart float attribute.")


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> List[torch.Tensor]:
    """Apply a custom operator through its replacement.

    Raises:
        ValueError: an attribute that could not be passed to compiled code.
        Error: no replacement was registered, or its outputs do not look like `example_outputs`.
    """
    attributes = dict(attributes or {})
    _check_attributes(attributes)
    replacement = _replacements.get(f"{domain}:{name}") or _replacements.get(f":{name}")
    if replacement is None:
        known = [key.partition(":")[2] for key in _replacements]
        raise Error(
            f"The custom operator {domain}.{name} (version {domain_version}) is compiled code that the emulator cannot "
            f"run{did_you_mean(name, known)}. Register a Python body for it with "
            f"poptorch.registerCustomOpReplacement('{name}', function)."
        )
    # Stands in for compiled code, so it may use operators that PopTorch itself does not support.
    with current.recorder.unreviewed() if current.recorder is not None else contextlib.nullcontext():
        outputs = list(replacement(*inputs, example_outputs=example_outputs, attributes=attributes))
    wanted = [tuple(example.shape) for example in example_outputs]
    if [tuple(output.shape) for output in outputs] != wanted:
        raise Error(
            f"The replacement of {domain}.{name} returned shapes {[tuple(o.shape) for o in outputs]}, but its example "
            f"outputs have {wanted}"
        )
    return outputs


# ---- the two operators that optimum-graphcore 0.7.1 uses


def _gather_last_dim(data: torch.Tensor, index: torch.Tensor, **_: Any) -> List[torch.Tensor]:
    if data.shape[:-1] != index.shape[:-1]:
        raise Error(
            f"FastGatherLastDim: the index has shape {tuple(index.shape)}, but all dimensions save the last must be "
            f"those of the data, {tuple(data.shape)}"
        )
    return [torch.gather(data, -1, index.to(torch.int64))]


def _group_dequantize(
    packed: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, *, example_outputs: Any, attributes: Any
) -> List[torch.Tensor]:
    """Unpack 4-bit numbers, then scale and shift each group.

    Four 16-bit words hold a block of 4 x 4 numbers: number (j, c) is the j-th lowest nibble of word c.
    """
    shifts = torch.tensor([0, 4, 8, 12]).reshape(1, 4, 1)
    words = (packed.to(torch.int64) & 0xFFFF).reshape(-1, 1, 4)
    numbers = (words >> shifts) & 0xF
    rows, groups = packed.shape[:2]
    values = numbers.reshape(rows, groups, -1).to(scale.dtype) * scale + bias
    return [values.reshape(rows, -1).to(example_outputs[0].dtype)]


registerCustomOpReplacement("FastGatherLastDim", _gather_last_dim, "poptorch.custom_ops")
registerCustomOpReplacement("GroupQuantizeDecompress", _group_dequantize, "optimum.custom_ops")
