# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that gives tests of 2023 what PyTorch has dropped since, where that has nothing to do with an IPU.

PopTorch 3.4 goes with PyTorch 2.0.1. A test that fails because a later PyTorch has no such argument says nothing about
the emulator. What is given back, the suite lists as `adapted` and the report quotes; nothing of it is in the emulator.
"""

from contextlib import ExitStack
from typing import Any, List, Optional

import pytest

__all__: List[str] = []

_undo = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Give back what is missing."""
    from torch.utils.data import Sampler

    if "__init__" in vars(Sampler):
        return

    def init(self: Any, data_source: Optional[Any] = None) -> None:
        super(Sampler, self).__init__()

    Sampler.__init__ = init  # type: ignore[method-assign]
    _undo.callback(delattr, Sampler, "__init__")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take it away again."""
    _undo.close()
