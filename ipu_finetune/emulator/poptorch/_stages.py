# SPDX-License-Identifier: Apache-2.0
"""The stages of a compilation: what is going on, how long it takes, and where an error came from."""

import contextlib
import logging
import os
import platform
import time
import traceback
from typing import Any, Dict, Iterator, Optional

import torch

from ..device.errors import Error
from ._version import __version__

try:
    import resource
except ImportError:  # no such module on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Stages", "versions"]

_logger = logging.getLogger("ipu_finetune.emulator")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.path.abspath(torch.__file__))
_STANDARD = os.path.dirname(os.path.abspath(contextlib.__file__))


def versions() -> str:
    """Return the versions that a compilation depends on, for messages."""
    return f"emulated PopTorch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


class Stages:
    """Runs the parts of a compilation, each under a name.

    Attributes:
        seconds: by stage, in order.
    """

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Log start, length and memory of the block; an error of our own machinery gets the stage and the versions.

        Raises:
            Error: something went wrong that is neither a refusal nor raised by the user's code; the original error is
                its cause.
        """
        started = time.perf_counter()
        _logger.info("compiling: %s ...", name)
        try:
            yield
        except (Error, AssertionError, Warning):
            raise
        except Exception as error:
            if _raised_by_user(error):
                raise
            raise Error(
                f"Compilation failed in stage '{name}': {type(error).__name__}: {error} ({versions()}). This is not an "
                "error of the model's code. The original error is given as the cause."
            ) from error
        finally:
            self.seconds[name] = time.perf_counter() - started
        _logger.info("compiling: %s took %.2f s%s", name, self.seconds[name], _memory())


def _memory() -> str:
    if resource is None:
        return ""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if platform.system() == "Darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f", {peak / 2**30:.1f} GiB of host memory at most so far"


def _raised_by_user(error: BaseException) -> bool:
    """Whether the error came through code that is neither ours nor PyTorch's nor Python's own."""
    frames: Optional[Any] = traceback.extract_tb(error.__traceback__)
    for frame in frames or ():
        path = os.path.abspath(frame.filename)
        if frame.filename.startswith("<") or path.startswith((_OURS, _LIBRARY)):
            continue
        if path.startswith(_STANDARD) and "site-packages" not in path:
            continue
        return True
    return False
