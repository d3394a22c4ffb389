# SPDX-License-Identifier: Apache-2.0
"""Runs: one execution of a recipe, its folder and its record."""
