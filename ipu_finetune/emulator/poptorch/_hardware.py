# SPDX-License-Identifier: Apache-2.0
"""Which IPU the emulator claims to be."""

import os

from ..device.errors import Error

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion", "uses_ipu_model"]

#: Name of the environment variable that chooses the generation: 1, 2, 21, or 0 for a machine without an IPU.
VARIABLE = "IPU_FINETUNE_EMULATED_HARDWARE"
_VERSIONS = {"1": 1, "2": 2, "21": 21, "0": 0}


def uses_ipu_model() -> bool:
    """Whether scripts ask for Graphcore's software model of an IPU, which is not hardware."""
    return os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0") or os.environ.get(
        "POPTORCH_SMALL_IPU_MODEL", "0"
    ) not in ("", "0")


def _version() -> int:
    if uses_ipu_model():
        return 0
    asked = os.environ.get(VARIABLE, "2")
    if asked not in _VERSIONS:
        raise Error(f"{VARIABLE}={asked}: expected 1, 2 or 21 (Bow) for an IPU generation, or 0 for no IPU")
    return _VERSIONS[asked]


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether an IPU can be attached to; `num_ipus` above 64 can never be."""
    return _version() != 0 and num_ipus <= 64


def ipuHardwareVersion() -> int:
    """Return the generation of the IPU: 2 unless `IPU_FINETUNE_EMULATED_HARDWARE` says otherwise.

    Raises:
        AssertionError: there is none.
    """
    version = _version()
    if version == 0:
        raise AssertionError("No IPU hardware available on this system")
    return version
