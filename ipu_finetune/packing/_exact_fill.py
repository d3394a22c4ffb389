# SPDX-License-Identifier: Apache-2.0
"""Packs without a gap: complete the longest sequence left to exactly a full pack, with the most plentiful lengths."""

from typing import List, Optional, Tuple

import numpy as np

from ipu_finetune.packing._best_fit import Pack, Strategies

__all__ = ["fill_exactly"]


def fill_exactly(counts: np.ndarray, max_length: int, max_sequences: int, work: int) -> Tuple[Strategies, np.ndarray]:
    """Fill as many packs as this rule can without any padding; what it cannot is left.

    Where few sequences may share a pack, best fit ends badly: it gives long sequences the one short partner that fits,
    and the short ones that remain cannot fill packs between them. So each pack here takes its share of all sequences
    left (as many as a pack must hold on average for no position to be lost), and only then fewer. Of the packs with
    that many sequences and no gap, the one whose scarcest length is the most plentiful is taken as often as possible.

    Args:
        counts: entry l is the number of sequences of l tokens, int64 of shape [max_length + 1].
        max_length: positions of a pack.
        max_sequences: most sequences in one pack.
        work: elementary steps, some 10⁹ a second; a count, so that the clock has no say. Where they do not suffice for
            packs of more than three, packs have at most three; where not for these, the rest is left.

    Returns:
        The full packs, and the counts of the sequences that are in none, shaped like `counts`.
    """
    available, left = counts.copy(), np.zeros_like(counts)
    sequences, tokens = int(counts.sum()), int(counts @ np.arange(max_length + 1))
    strategies: Strategies = {}
    for lead in range(max_length, 0, -1):
        while available[lead]:
            share = min(max_sequences, -(-sequences * max_length // tokens))
            if _cost(available, lead, max_length, share) > work:
                share = min(share, 3)
            work -= _cost(available, lead, max_length, share)
            if work < 0:
                return strategies, left + available
            pack = _widest(available, lead, max_length, share)
            if pack is None:
                repeats, pack = int(available[lead]), (lead,)
                left[lead] = repeats
            else:
                repeats = _times(available, pack)
                strategies[pack] = strategies.get(pack, 0) + repeats
            for length in pack:
                available[length] -= repeats
            sequences -= repeats * len(pack)
            tokens -= repeats * sum(pack)
    return strategies, left


def _cost(available: np.ndarray, lead: int, max_length: int, share: int) -> int:
    """Return the elementary steps of `_widest`."""
    room, tables = max_length - lead, max(0, share - 3)
    lengths = int(np.count_nonzero(available[: min(room, lead) + 1])) if tables else 0
    return 10_000 + 4 * room + tables * (10_000 + room * lengths)


def _times(available: np.ndarray, pack: Pack) -> int:
    """Return how often this pack can be filled."""
    return min(int(available[length]) // pack.count(length) for length in set(pack))


def _widest(available: np.ndarray, lead: int, max_length: int, share: int) -> Optional[Pack]:
    """Return the most plentiful full pack with `lead` as its longest sequence; of `share` sequences, else fewer."""
    room = max_length - lead
    if room == 0:
        return (lead,)
    width = _sixteen_bits(available[: room + 1])
    width[lead + 1 :] = 0
    if lead <= room and available[lead] == 1:
        width[lead] = 0
    lengths = np.flatnonzero(width)
    if not len(lengths):
        return None
    # widths[j][s]: the scarcest length's plenty in the best set of exactly j + 1 sequences with s tokens together
    widths = [width]
    padded = np.zeros(2 * room + 1, width.dtype)
    for _ in range(share - 3):
        padded[room:] = widths[-1]
        shifted = np.lib.stride_tricks.sliding_window_view(padded, room + 1)[room - lengths]
        widths.append(np.minimum(width[lengths, None], shifted).max(axis=0))
    for extra in range(share - 1, 0, -1):
        pack = (lead, *sorted(_backtrack(widths, lengths, room, extra), reverse=True))
        if len(pack) > 1 and _times(available, pack):
            return pack
    return None


def _backtrack(widths: List[np.ndarray], lengths: np.ndarray, room: int, extra: int) -> List[int]:
    """Return `extra` lengths that add up to `room`, or none."""
    chosen: List[int] = []
    for rest in range(extra - 1, 0, -1):
        fitting = lengths[: np.searchsorted(lengths, room)]
        width = np.minimum(widths[0][fitting], widths[rest - 1][room - fitting])
        if not len(width) or not width.max():
            return []
        chosen.append(int(fitting[width.argmax()]))
        room -= chosen[-1]
    return [*chosen, room] if widths[0][room] else []


def _sixteen_bits(counts: np.ndarray) -> np.ndarray:
    """Scale counts to uint16, which numpy compares several times faster; what is there stays above 0."""
    shift = max(0, int(counts.max()).bit_length() - 16)
    return np.where(counts > 0, np.maximum(counts >> shift, 1), 0).astype(np.uint16)
