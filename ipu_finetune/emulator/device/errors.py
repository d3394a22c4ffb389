# SPDX-License-Identifier: Apache-2.0
"""The exceptions that scripts written for PopTorch catch, as part of ipu-finetune's own tree."""

from ...errors import IpuFinetuneError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]


class Error(IpuFinetuneError, RuntimeError):
    """What an IPU, its compiler or PopTorch itself would refuse.

    Attributes:
        message: the text.
        type: where the error was raised; `poptorch_py_error` for checks made in Python.
        location: a source location, when there is one.
    """

    def __init__(self, message: str = "", type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location


class RecoverableError(Error):
    """A fault after which the device can be used again.

    Attributes:
        recovery_action: one of `IPU_RESET`, `LINK_RESET`, `PARTITION_RESET`, `FULL_RESET`.
    """

    def __init__(
        self, message: str = "", type: str = "recoverable", location: str = "", recovery_action: str = "IPU_RESET"
    ) -> None:
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A fault that needs somebody to look at the machine."""
