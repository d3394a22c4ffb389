# SPDX-License-Identifier: Apache-2.0
"""The names of PopTorch's compiled core that scripts and tests use."""

import enum
from typing import Any, Mapping, NoReturn

from ..device.errors import Error, RecoverableError, UnrecoverableError
from ._hardware import ipuHardwareVersion as _version
from ._logging import setLogLevel, setPopartLogLevel
from ._session_options import check_values

__all__ = [
    "Error",
    "RecoverableError",
    "TestErrorType",
    "UnrecoverableError",
    "ipuHardwareVersion",
    "isCompilingWithDispatcher",
    "setLogLevel",
    "setPopartLogLevel",
]


def ipuHardwareVersion(num_ipus: int = 1) -> int:
    """Return the generation of the IPU, 0 without one."""
    try:
        return _version()
    except AssertionError:
        return 0


def isCompilingWithDispatcher() -> bool:
    """Whether tensors lie on a device of their own: never here."""
    return False


def _validateOptions(values: Mapping[str, Any]) -> None:
    """Check what `Options.toDict` returns as at a compilation.

    Raises:
        Error: an unknown option, or a value that the option does not take.
    """
    check_values(values)


class TestErrorType(enum.IntEnum):
    """The layers of the SDK that an error can come from, for programs that try out how they handle each."""

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


# Named like a test case for pytest, which must not collect it.
TestErrorType.__test__ = False  # type: ignore[attr-defined]

#: layer -> class, `.type` and message of its error
_ERRORS = {
    TestErrorType.Poptorch: (Error, "poptorch_cpp_error", "raised by PopTorch"),
    TestErrorType.Popart: (Error, "popart_exception", "raised by PopART"),
    TestErrorType.PopartInternal: (Error, "popart_internal_exception", "raised within PopART"),
    TestErrorType.Poplibs: (Error, "poplibs_exception", "raised by PopLibs"),
    TestErrorType.PoplarUnrecoverable: (
        UnrecoverableError,
        "poplar_unrecoverable_runtime_error",
        "raised by Poplar; the device cannot be used any more",
    ),
    TestErrorType.PoplarUnknown: (Error, "poplar_unknown_runtime_error", "raised by Poplar for an unknown reason"),
    TestErrorType.PoplarRecoverableFullReset: (
        RecoverableError,
        "poplar_recoverable_runtime_error",
        "raised by Poplar; the whole machine must be reset",
    ),
    TestErrorType.PoplarLinkError: (
        Error,
        "poplar_link_error",
        "raised by Poplar's linker. Output: Library -lfoo not found",
    ),
}


def _throwTestError(kind: TestErrorType) -> NoReturn:
    """Raise the error that a layer of the SDK would raise.

    Raises:
        Error: always; a RecoverableError with action FULL_RESET or an UnrecoverableError where the layer has them.
    """
    cls, name, message = _ERRORS[TestErrorType(kind)]
    location = "[0] throwTestError::bottomLevel\n[1] throwTestError::topLevel"
    error = cls(message, type=name, location=location)
    text = f"In {__name__}: '{name}': {message}"
    if isinstance(error, RecoverableError):
        error.recovery_action = "FULL_RESET"
        text += f"\nRecovery action required: {error.recovery_action}"
    error.args = (f"{text}\nError raised in:\n{location}",)
    raise error
