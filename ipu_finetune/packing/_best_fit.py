# SPDX-License-Identifier: Apache-2.0
"""The two published ways to fill packs from a histogram: longest pack first and shortest pack first.

Both take the sequences from the longest to the shortest and put each into an open pack: LPFHP into the fullest that
still has room for it, SPFHP into the emptiest. Equal sequences and equal packs move together, so the work depends on
the number of lengths, not of sequences. Source: arXiv 2107.02027; where that leaves a choice (the last of equal packs
first, LPFHP as many equal sequences at once as fit), the figures published with it decide.
"""

from bisect import bisect_left, insort
from typing import Dict, List, Tuple

import numpy as np

__all__ = ["Pack", "Strategies", "longest_pack_first", "merged", "shortest_pack_first", "total"]

Pack = Tuple[int, ...]  # lengths in tokens, the longest first
Strategies = Dict[Pack, int]  # how many packs are filled like this


def total(strategies: Strategies) -> int:
    """Return the number of packs."""
    return sum(strategies.values())


def merged(*parts: Strategies) -> Strategies:
    """Return the packs of all parts together."""
    result: Strategies = {}
    for part in parts:
        for pack, repeats in part.items():
            result[pack] = result.get(pack, 0) + repeats
    return result


class _OpenPacks:
    """Packs with room left, found by their room; of those with equal room, the one that came last."""

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.rooms: List[int] = []  # ascending, each once
        self.by_room: Dict[int, List[Tuple[Pack, int]]] = {}
        self.closed: Strategies = {}

    def put(self, pack: Pack, repeats: int, room: int) -> None:
        if room == 0 or len(pack) == self.max_sequences:
            self.closed[pack] = self.closed.get(pack, 0) + repeats
        elif room in self.by_room:
            self.by_room[room].append((pack, repeats))
        else:
            self.by_room[room] = [(pack, repeats)]
            insort(self.rooms, room)

    def take(self, index: int) -> Tuple[Pack, int]:
        room = self.rooms[index]
        pack, repeats = self.by_room[room].pop()
        if not self.by_room[room]:
            del self.by_room[room], self.rooms[index]
        return pack, repeats

    def all(self) -> Strategies:
        return merged(self.closed, *({pack: n} for packs in self.by_room.values() for pack, n in packs))


def longest_pack_first(counts: np.ndarray, max_length: int, max_sequences: int) -> Strategies:
    """Fill by LPFHP: the fullest pack that fits takes as many sequences of this length as it has room for.

    Args:
        counts: entry l is the number of sequences of l tokens, int64 of shape [max_length + 1].
        max_length: positions of a pack.
        max_sequences: most sequences in one pack.
    """
    packs = _OpenPacks(max_sequences)
    for length in range(max_length, 0, -1):
        left = int(counts[length])
        while left:
            index = bisect_left(packs.rooms, length)
            if index == len(packs.rooms):
                room, repeats = max_length, left
                pack: Pack = ()
            else:
                room = packs.rooms[index]
                pack, repeats = packs.take(index)
            each = min(room // length, max_sequences - len(pack), left)
            filled = min(repeats, left // each)
            if pack and repeats > filled:
                packs.put(pack, repeats - filled, room)
            packs.put(pack + (length,) * each, filled, room - each * length)
            left -= each * filled
    return packs.all()


def shortest_pack_first(counts: np.ndarray, max_length: int, max_sequences: int) -> Strategies:
    """Fill by SPFHP: the emptiest pack takes one sequence; arguments as for `longest_pack_first`.

    Sequences of one length that no open pack has room for get a pack each, all at once, even where two would fit:
    lengths that are all equal are not packed at all. So it is published, and so it stays.
    """
    packs = _OpenPacks(max_sequences)
    for length in range(max_length, 0, -1):
        left = int(counts[length])
        while left:
            if not packs.rooms or packs.rooms[-1] < length:
                packs.put((length,), left, max_length - length)
                break
            room = packs.rooms[-1]
            pack, repeats = packs.take(-1)
            filled = min(repeats, left)
            if repeats > filled:
                packs.put(pack, repeats - filled, room)
            packs.put((*pack, length), filled, room - length)
            left -= filled
    return packs.all()
