# SPDX-License-Identifier: Apache-2.0
"""Names of PopTorch's own machinery that scripts have been seen to use."""

import json
from typing import Any, Dict

import torch

from ..device.errors import Error
from ..device.state import current

__all__ = ["accessAttributes", "createPoptorchError", "getIpuTensorId"]


def createPoptorchError(msg: str) -> Error:
    """Return, not raise, the error that PopTorch's Python code raises."""
    return Error(msg, type="poptorch_py_error")


def accessAttributes(attribute_id_str: str) -> Dict[str, Any]:
    """Return the attributes that a JSON text holds.

    Raises:
        ValueError: not a string, or not the text of a JSON object. PopTorch's compiled core also has ids of attributes;
            there is no such core here.
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError(f"attribute_id_str must be a string, got {type(attribute_id_str).__name__}")
    if not attribute_id_str.startswith("{"):
        raise ValueError(f"Invalid attribute_id_str {attribute_id_str!r}: expected a JSON object")
    return json.loads(attribute_id_str)


def getIpuTensorId(x: torch.Tensor) -> int:
    """Return the number of a tensor's operation in the graph that is being traced.

    Raises:
        Error: not called inside a model while it is compiled.
    """
    recorder = current.recorder
    if recorder is None:
        raise Error("getIpuTensorId: the tensor is not on an IPU. Ask inside the forward() of a model being compiled.")
    node = recorder.node_of(x)
    return next(number for number, each in enumerate(node.graph.nodes) if each is node)
