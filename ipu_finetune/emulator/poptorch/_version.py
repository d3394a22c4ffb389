# SPDX-License-Identifier: Apache-2.0
"""The poptorch version that the look-alike answers with."""

__version__ = "3.3.0+emulated"
