# SPDX-License-Identifier: Apache-2.0
"""What the trace of a model found that an IPU would refuse, and what it would freeze.

A static graph has no place for shapes or Python values that depend on data. All findings of one trace are reported
together: whoever ports a model wants the list, not the first line of it.
"""

import dataclasses
import os
import sys
from typing import Any, List, Optional

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from .errors import Error

__all__ = ["Finding", "Findings", "source_line"]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def source_line() -> str:
    """Return `file:line` of the innermost frame that belongs neither to PyTorch nor to the emulator."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = os.path.abspath(frame.f_code.co_filename)
        if not name.startswith((_TORCH, _HERE)) and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a compiled graph cannot hold.

    Attributes:
        operator: its name, as `aten::nonzero` or `Tensor.item`.
        module: path of the module whose `forward` used it; empty for the model itself.
        place: `file:line` of the user's code.
        problem: what is wrong with it.
        replacement: what is usually written instead.
        fatal: refused; otherwise a warning.
        shape: it is a shape that depends on data.
    """

    operator: str
    module: str
    place: str
    problem: str
    replacement: str
    fatal: bool = True
    shape: bool = False

    def __str__(self) -> str:
        where = f"module '{self.module}'" if self.module else "the model"
        advice = f" Usual replacement: {self.replacement}." if self.replacement else ""
        return f"{self.operator} in {where} ({self.place}): {self.problem}.{advice}"


class DataDependentShapeError(Error, DynamicOutputShapeException):
    """A shape that depends on data; also the exception that PyTorch's own tracing has for it."""

    def __init__(self, message: str) -> None:
        Error.__init__(self, message)


class Findings:
    """Collects the findings of one trace, each once."""

    def __init__(self) -> None:
        self.all: List[Finding] = []

    def add(self, finding: Finding) -> None:
        """Note a finding unless the same line has been noted for the same operator."""
        if finding not in self.all:
            self.all.append(finding)

    @property
    def fatal(self) -> List[Finding]:
        """Those that stop the compilation."""
        return [finding for finding in self.all if finding.fatal]

    def error(self) -> Optional[Error]:
        """Return the error that lists every refusal, or None."""
        fatal = self.fatal
        if not fatal:
            return None
        names = sorted({finding.operator for finding in fatal})
        lines = "\n".join(f"  {finding}" for finding in fatal)
        kind = DataDependentShapeError if any(finding.shape for finding in fatal) else Error
        return kind(f"Unsupported ops found in compiled model: {names}. A static graph cannot hold them:\n{lines}")
