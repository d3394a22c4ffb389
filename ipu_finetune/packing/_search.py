# SPDX-License-Identifier: Apache-2.0
"""The algorithm ``best``: best fit, exact filling, the linear programme; each only where those before fall short."""

import math
from typing import List, Tuple

import numpy as np

from ipu_finetune.packing._best_fit import Pack, Strategies, longest_pack_first, merged, shortest_pack_first, total
from ipu_finetune.packing._columns import affordable, relaxed_packs
from ipu_finetune.packing._exact_fill import fill_exactly

__all__ = ["fewest_packs", "lower_bound"]

# Of the packs that are needed in any case. Below the first, a slower method has too little to win; below the second,
# the linear programme has.
_GOOD_ENOUGH = 0.002
_TOLERANCE = 0.0002

_WORK = 1_000_000_000  # elementary steps of each slow method, about a second; a count, so that no clock has a say
_TRIES = 8


def fewest_packs(
    counts: np.ndarray, max_length: int, max_sequences: int, rng: np.random.Generator
) -> Tuple[Strategies, int]:
    """Return packs for all sequences, never more than best fit makes, and a number of packs that no plan goes below.

    Args:
        counts: entry l is the number of sequences of l tokens, int64 of shape [max_length + 1].
        max_length: positions of a pack.
        max_sequences: most sequences in one pack.
        rng: breaks ties and draws the rounding.
    """
    limits = max_length, max_sequences
    bound = lower_bound(counts, *limits)
    good = bound * (1.0 + _GOOD_ENOUGH)
    longest_first = longest_pack_first(counts, *limits)
    best = min(longest_first, shortest_pack_first(counts, *limits), key=total)
    if total(best) <= good:
        return best, bound
    full, left = fill_exactly(counts, *limits, work=_WORK)
    exact = merged(full, _best_fit(left, *limits))
    best = min(best, exact, key=total)
    if total(best) <= good or not affordable(counts, *limits, work=_WORK):
        return best, bound
    start = list(merged(longest_first, exact))
    relaxed, packs, proven = relaxed_packs(counts, *limits, start, bound, _TOLERANCE, _WORK, rng)
    bound = max(bound, math.ceil(proven * (1.0 - 1e-9)))
    possible = max(bound, math.ceil(packs * (1.0 - 1e-9)))
    for _ in range(_TRIES):
        if total(best) <= possible:
            break
        best = min(best, _rounded(counts, *limits, relaxed, rng), key=total)
    return best, bound


def lower_bound(counts: np.ndarray, max_length: int, max_sequences: int) -> int:
    """Return a number of packs that no plan goes below, from sizes and numbers alone.

    It is the largest of: all tokens in full packs; all sequences in packs with as many as are allowed, but those alone
    that are too long to share; and, for each length a up to half a pack, those over ``max_length - a`` alone, one pack
    for each other one over half, and full packs for the tokens of those between a and half that do not fit beside
    them (Martello and Toth 1990, "L2").
    """
    if not counts.any():
        return 0
    number, tokens = np.cumsum(counts), np.cumsum(counts * np.arange(max_length + 1))
    half = max_length // 2
    a = np.arange(1, half + 1)
    alone = number[-1] - number[max_length - a]
    over_half = number[max_length - a] - number[half]
    room = over_half * max_length - (tokens[max_length - a] - tokens[half])
    outside = np.maximum(0, tokens[half] - tokens[a - 1] - room)
    by_size = alone + over_half + -(-outside // max_length)
    shortest = int(np.flatnonzero(counts)[0])
    cannot_share = int(number[-1] - number[max(max_length - shortest, 0)])
    by_number = cannot_share - (cannot_share - int(number[-1])) // max_sequences
    return max(-(-int(tokens[-1]) // max_length), by_number, int(by_size.max(initial=0)))


def _best_fit(counts: np.ndarray, max_length: int, max_sequences: int) -> Strategies:
    """Return the better of the two published fillings."""
    return min(
        (fill(counts, max_length, max_sequences) for fill in (longest_pack_first, shortest_pack_first)), key=total
    )


def _rounded(
    counts: np.ndarray,
    max_length: int,
    max_sequences: int,
    relaxed: List[Tuple[Pack, float]],
    rng: np.random.Generator,
) -> Strategies:
    """Round each amount up or down at random, as far as there are sequences for it, and fill the rest anew."""
    left = counts.copy()
    packs: Strategies = {}
    for index in rng.permutation(len(relaxed)):
        pack, amount = relaxed[index]
        repeats = int(amount + rng.random())
        repeats = min([repeats, *(int(left[length]) // pack.count(length) for length in pack)])
        if repeats > 0:
            packs[pack] = packs.get(pack, 0) + repeats
            for length in pack:
                left[length] -= repeats
    full, rest = fill_exactly(left, max_length, max_sequences, work=_WORK // 50)
    ends = [merged(full, _best_fit(rest, max_length, max_sequences)), _best_fit(left, max_length, max_sequences)]
    return merged(packs, min(ends, key=total))
