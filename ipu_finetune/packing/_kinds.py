# SPDX-License-Identifier: Apache-2.0
"""What packing needs to know of each kind of task: its label columns, and what may be done to a sequence too long."""

from typing import Dict, NamedTuple, Tuple

import numpy as np

from ipu_finetune.errors import UsageError, did_you_mean

__all__ = ["IGNORED", "KINDS", "Kind", "kind_named"]

#: The label that no loss counts, as in PyTorch's cross entropy.
IGNORED = -100

_CUT = ("error", "drop", "truncate")


class Kind(NamedTuple):
    """Labels of a kind of task.

    Attributes:
        labels: names of the label columns.
        per: what a label belongs to: a "sequence", a "token", an "item" of several choices, or, as a "position", a
            sequence whose label is the place of one of its tokens.
        dimensions: of a label column of the source, any of these; a label per token has one less for each sequence.
        dtype: of the packed labels.
        fill: the label of an empty slot or a padding position.
        policies: what may be done to sequences that are longer than a pack.
    """

    labels: Tuple[str, ...]
    per: str
    dimensions: Tuple[int, ...]
    dtype: type
    fill: int
    policies: Tuple[str, ...] = _CUT


KINDS: Dict[str, Kind] = {
    "question-answering": Kind(("start_positions", "end_positions"), "position", (1,), np.int64, 0),
    "classification": Kind(("labels",), "sequence", (1,), np.int64, IGNORED),
    "multi-label": Kind(("labels",), "sequence", (2,), np.float32, 0),
    "regression": Kind(("labels",), "sequence", (1, 2), np.float32, 0),
    "token-classification": Kind(("labels",), "token", (2,), np.int64, IGNORED),
    "masked-lm": Kind(("labels",), "token", (2,), np.int64, IGNORED, (*_CUT, "split")),
    "causal-lm": Kind(("labels",), "token", (2,), np.int64, IGNORED, (*_CUT, "split")),
    # the choices of an item are compared with each other: cutting one would change which is right
    "multiple-choice": Kind(("labels",), "item", (1,), np.int64, IGNORED, ("error", "drop")),
}


def kind_named(name: str) -> Kind:
    """Return a kind.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in KINDS:
        raise UsageError(f"packing knows no kind {name!r}{did_you_mean(str(name), KINDS)}")
    return KINDS[name]
