# SPDX-License-Identifier: Apache-2.0
"""The embedded question-answering sample: 140 invented paragraphs in SQuAD v1.1 JSON, written by this project."""

from pathlib import Path

__all__ = ["SQUAD_SAMPLE"]

SQUAD_SAMPLE = Path(__file__).with_name("squad_sample.json")
"""Where the data set lies; `generate_squad_sample` rewrites it byte for byte."""
