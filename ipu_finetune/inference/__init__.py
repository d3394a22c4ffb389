# SPDX-License-Identifier: Apache-2.0
"""Inference: static shapes without surprises, and `pipeline()` on top of them."""
