# SPDX-License-Identifier: Apache-2.0
"""The names of PopTorch's compiled core that scripts and tests use."""

from ..device.errors import Error, RecoverableError, UnrecoverableError
from ._hardware import ipuHardwareVersion as _version

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "ipuHardwareVersion", "isCompilingWithDispatcher"]


def ipuHardwareVersion() -> int:
    """Return the generation of the IPU, 0 without one."""
    try:
        return _version()
    except AssertionError:
        return 0


def isCompilingWithDispatcher() -> bool:
    """Whether tensors lie on a device of their own: never here."""
    return False
