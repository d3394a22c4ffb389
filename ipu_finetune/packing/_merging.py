# SPDX-License-Identifier: Apache-2.0
"""A plan of packs that are already made: those that a caller chose, or those of all windows of a stream."""

from collections import Counter
from typing import Any, Mapping

import numpy as np

from ipu_finetune.packing._best_fit import Pack
from ipu_finetune.packing._search import lower_bound
from ipu_finetune.packing.plan import Plan

__all__ = ["plan_of", "strategies_of"]


def strategies_of(assignment: Any, lengths: np.ndarray) -> "Counter[Pack]":
    """Return how many packs of an assignment hold which lengths, the longest first."""
    in_order = lengths[assignment.indices]
    packs = np.split(in_order, np.asarray(assignment.offsets)[1:-1])[: len(assignment.offsets) - 1]
    return Counter(tuple(sorted(pack.tolist(), reverse=True)) for pack in packs)


def plan_of(strategies: Mapping[Pack, int], max_length: int, max_sequences: int, algorithm: str) -> Plan:
    """Return the plan that makes these packs.

    Args:
        strategies: the lengths that share a pack, the longest first, and how many packs are like this.
        max_length: positions of a pack.
        max_sequences: most sequences in one.
        algorithm: that made them.
    """
    counts = np.zeros(max_length + 1, np.int64)
    for pack, repeats in strategies.items():
        for length in pack:
            counts[length] += repeats
    ordered = sorted(strategies.items(), reverse=True)
    bound = lower_bound(counts, max_length, min(max_sequences, max_length))
    return Plan(
        int(max_length),
        int(max_sequences),
        algorithm,
        tuple(pack for pack, _ in ordered),
        tuple(n for _, n in ordered),
        bound,
    )
