# SPDX-License-Identifier: Apache-2.0
"""The enumerations of PopTorch, at the place where scripts import them from."""

from ..device import enums as _enums
from ..device.enums import *  # noqa: F403

__all__ = list(_enums.__all__)
