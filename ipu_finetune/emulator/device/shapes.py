# SPDX-License-Identifier: Apache-2.0
"""Results of operators whose inner sizes PyTorch only knows when it has seen the values.

What the model sees of them has a fixed shape; what is passed on to their own backward pass need not be known to trace.
"""

from typing import Any, Callable, Dict

import torch

__all__ = ["RESULTS"]

_aten = torch.ops.aten


def _ctc_loss(log_probs: torch.Tensor, *_: Any, **__: Any) -> Any:
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    losses = torch.empty(batch if log_probs.dim() == 3 else (), dtype=log_probs.dtype)
    return losses, torch.empty((batch, 1, 1), dtype=log_probs.dtype)


def _ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


#: operator -> its results as fake tensors; called in place of the operator while tracing
RESULTS: Dict[Any, Callable[..., Any]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
