# SPDX-License-Identifier: Apache-2.0
"""What is going on right now: is a model running on the emulated IPU, and is it being traced.

The operators of the look-alike (`BeginBlock`, `identity_loss` and so on) are called from user code with no handle on
the executor, so the running one is found here.
"""

import contextlib
import threading
from typing import Any, Iterator, List, Optional

import torch

__all__ = ["current", "running"]


class _Current(threading.local):
    def __init__(self) -> None:
        self.running = False
        self.training = False
        self.tracer: Optional[Any] = None
        self.recorder: Optional[Any] = None
        self.marked_losses: List[torch.Tensor] = []


current = _Current()


@contextlib.contextmanager
def running(training: bool, tracer: Any = None, recorder: Any = None) -> Iterator[None]:
    """Within the block, user code runs as on the IPU."""
    saved = dict(vars(current))
    vars(current).update(running=True, training=training, tracer=tracer, recorder=recorder, marked_losses=[])
    try:
        yield
    finally:
        vars(current).update(saved)
