# SPDX-License-Identifier: Apache-2.0
"""Switches of the emulator that PopTorch has no name for.

A script that cannot be changed is run with the environment variables; code that knows the emulator uses `configure`.

| setting | environment variable | values |
|---|---|---|
| overflow | IPU_FINETUNE_EMULATED_OVERFLOW | clip (default): fp16 results saturate at ±65504 · ieee: infinity · nan |

The default is what an IPU does unless floating-point checks are asked for: PopART sets the control register only then
(`IrLowering.cpp`, setFloatingPointBehaviour), and without "NaN on overflow" the hardware saturates.
"""

import contextlib
import dataclasses
import os
from typing import Iterator, List

from ...errors import did_you_mean
from .errors import Error
from .precision import Overflow

__all__ = ["Settings", "configure", "settings"]

_OVERFLOW = "IPU_FINETUNE_EMULATED_OVERFLOW"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The switches in force."""

    overflow: Overflow = Overflow.CLIP


_configured: List[Settings] = []


def settings() -> Settings:
    """Return the settings of the innermost `configure` block, else those of the environment.

    Raises:
        Error: an environment variable has a value that is none of its choices.
    """
    if _configured:
        return _configured[-1]
    text = os.environ.get(_OVERFLOW, Overflow.CLIP.value)
    choices = [each.value for each in Overflow]
    if text not in choices:
        raise Error(f"{_OVERFLOW}={text}: expected one of {', '.join(choices)}{did_you_mean(text, choices)}")
    return Settings(overflow=Overflow(text))


@contextlib.contextmanager
def configure(overflow: Overflow = Overflow.CLIP) -> Iterator[None]:
    """Within the block, models are compiled with these settings."""
    _configured.append(Settings(overflow))
    try:
        yield
    finally:
        _configured.pop()
