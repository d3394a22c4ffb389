# SPDX-License-Identifier: Apache-2.0
"""Transformers models: where their weights come from, and what packing and layout need to know of a family."""
