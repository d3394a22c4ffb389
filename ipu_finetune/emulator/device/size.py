# SPDX-License-Identifier: Apache-2.0
"""Whether a model's weights go into the graph that is handed to the compiler.

PopTorch hands the compiler an ONNX graph, a protobuf message, and a message cannot be larger than 2 GB (2³¹ − 1 bytes).
With the session option `saveInitializersToFile` the weights lie in a file beside it; optimum-graphcore always sets it.
"""

from typing import Iterable, Optional

import torch

from .errors import Error

__all__ = ["MESSAGE_LIMIT", "check_graph_size", "weight_bytes"]

MESSAGE_LIMIT = 2**31 - 1
"""The largest protobuf message, bytes."""


def weight_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of parameters and buffers, tied ones once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def check_graph_size(size: int, weights_file: Optional[str]) -> Optional[str]:
    """Return what to tell the user about the size of a model's weights, or None where they fit into the graph.

    Args:
        size: bytes of all weights, as `weight_bytes` counts them.
        weights_file: the session option `saveInitializersToFile`, None or empty where it is not set.

    Raises:
        Error: the weights are too large for the graph and nothing keeps them outside.
    """
    if size <= MESSAGE_LIMIT:
        return None
    excess = f"{size / 1e9:.1f} GB > 2 GB"
    if weights_file:
        return f"{excess}: using external weights"
    raise Error(
        f"{excess}: the model's weights do not fit into the graph, a protobuf message, and the compiler would fail. "
        "Keep them in a file: options._Popart.set('saveInitializersToFile', 'weights.onnx')"
    )
