# SPDX-License-Identifier: Apache-2.0
"""Trace points for PopVision's system analyser; without its library they do nothing, as here."""

import contextlib
from typing import Any, Iterator

__all__ = ["Channel"]


class Channel:
    """A named series of trace points."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextlib.contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Mark the block."""
        yield

    def instrument(self, obj: Any, *methods: str) -> Any:
        """Mark calls of the object's methods."""
        return obj
