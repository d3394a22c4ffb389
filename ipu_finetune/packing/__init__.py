# SPDX-License-Identifier: Apache-2.0
"""Packing: several sequences in one row, so that fewer positions are padding."""
