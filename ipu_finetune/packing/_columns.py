# SPDX-License-Identifier: Apache-2.0
"""Which packs, and how often, if parts of a pack were allowed: the linear programme behind packing.

Minimise the number of packs such that each length is used as often as it occurs. There is one column for each way to
fill a pack, too many to write down, so the revised simplex method works with as many as there are lengths and asks for
the next: with a price for each length, the most valuable pack that fits (Gilmore and Gomory 1961, "column generation").
Prices under which no pack is worth more than 1 prove a lower bound on the number of packs (Farley 1990).
"""

from typing import Dict, Iterable, List, Tuple

import numpy as np

from ipu_finetune.packing._best_fit import Pack

__all__ = ["affordable", "relaxed_packs"]

_EPSILON = 1e-7
_MOST_LENGTHS = 1024  # work grows with their third power, memory with their second
_OVERHEAD = 200_000  # what the calls of one pivot cost, in elementary steps of arithmetic
_CACHED = 1 << 15  # numbers that are worked on at once and stay in a core's cache
_BLOCK = 32  # pivots that are kept apart before they go into the inverse in one matrix product


class _Basis:
    """As many packs as lengths, the inverse of their matrix, how often each is used, and the prices that follow."""

    def __init__(self, lengths: np.ndarray, most: np.ndarray, demand: np.ndarray) -> None:
        """Start with packs of equal sequences, `most` in each."""
        size = len(lengths)
        self.packs: List[Pack] = [(int(length),) * int(n) for length, n in zip(lengths, most)]
        self.amounts = demand / most
        self.prices = 1.0 / most
        # The inverse is `_inverse - _left @ _right`, of which the first `_pending` columns and rows count.
        self._inverse = np.asfortranarray(np.diag(self.prices))
        self._left, self._right, self._pending = np.zeros((size, _BLOCK)), np.zeros((_BLOCK, size)), 0

    def enter(self, pack: Pack, rows: np.ndarray, gain: float) -> bool:
        """Take a pack in, for the one that limits it; False where rounding errors leave none to go.

        Args:
            pack: its lengths.
            rows: for each of its sequences, the row of its length.
            gain: its value at the present prices, less 1.
        """
        left, right = self._left[:, : self._pending], self._right[: self._pending]
        direction = self._inverse[:, rows].sum(axis=1) - left @ right[:, rows].sum(axis=1)
        ratios = np.full(len(direction), np.inf)
        np.divide(self.amounts, direction, out=ratios, where=direction > 1e-9)
        leaving = int(ratios.argmin())
        if not np.isfinite(ratios[leaving]):
            return False
        step = max(float(ratios[leaving]), 0.0)
        row = (self._inverse[leaving] - left[leaving] @ right) / direction[leaving]
        self.amounts -= step * direction
        self.amounts[leaving] = step
        self.packs[leaving] = pack
        self.prices -= gain * row
        direction[leaving] -= 1.0
        self._left[:, self._pending], self._right[self._pending] = direction, row
        self._pending += 1
        if self._pending == _BLOCK:
            self._inverse -= self._left @ self._right
            self._pending = 0
        return True


class _Pricing:
    """The most valuable pack for given prices, from tables of the best value for a room and a number of sequences."""

    def __init__(self, lengths: np.ndarray, max_length: int, max_sequences: int) -> None:
        self.lengths, self.max_length = lengths, max_length
        self.others = min(max_sequences, max_length // int(lengths[0])) - 1
        self.exact = np.zeros(max_length + 1)
        self.tables: Dict[int, np.ndarray] = {}
        self.work = 0
        self._padded = np.full(2 * max_length + 1, -np.inf)
        self._shifted = np.lib.stride_tricks.sliding_window_view(self._padded, max_length + 1)[::-1]
        self._rows = max(1, _CACHED // (max_length + 1))

    def values(self, prices: np.ndarray) -> np.ndarray:
        """Return, for each length, the value of the best pack that holds it, [lengths]."""
        self.exact[self.lengths] = np.maximum(prices, 0.0)
        self.tables = {0: np.zeros(self.max_length + 1), 1: np.maximum.accumulate(self.exact)}
        return prices + self._table(self.others)[self.max_length - self.lengths]

    def _table(self, sequences: int) -> np.ndarray:
        """Return the best value of at most so many sequences, by the room that they have, [max_length + 1]."""
        if sequences not in self.tables:
            small, large = self._table(sequences // 2), self._table(sequences - sequences // 2)
            # between the steps of one table, a smaller room is as good
            steps = np.flatnonzero(np.concatenate([[True], small[1:] > small[:-1]]))
            self._padded[self.max_length :] = large
            table = large.copy()
            for block in np.split(steps, range(self._rows, len(steps), self._rows)):
                np.maximum(table, (self._shifted[block] + small[block, None]).max(axis=0), out=table)
            self.tables[sequences] = table
            self.work += len(steps) * self.max_length
        return self.tables[sequences]

    def pack(self, lead: int) -> Pack:
        """Return the best pack that holds a sequence of `lead` tokens."""
        found, open_parts = [lead], [(self.others, self.max_length - lead)]
        while open_parts:
            sequences, room = open_parts.pop()
            if not sequences or self.tables[sequences][room] <= 0.0:
                continue
            if sequences == 1:
                found.append(int(self.exact[: room + 1].argmax()))
                continue
            small, large = sequences // 2, sequences - sequences // 2
            first = int((self.tables[small][: room + 1] + self.tables[large][room::-1]).argmax())
            open_parts += [(small, first), (large, room - first)]
        return tuple(sorted(found, reverse=True))


def affordable(counts: np.ndarray, max_length: int, max_sequences: int, work: int) -> bool:
    """Tell whether there are few enough lengths, and few enough ways to add them up, for `relaxed_packs`."""
    lengths = np.flatnonzero(counts)
    half = min(max_sequences, max_length // int(lengths[0])) // 2
    return len(lengths) <= _MOST_LENGTHS and max_length * min(max_length, (len(lengths) + 1) ** half) <= work // 10


def relaxed_packs(
    counts: np.ndarray,
    max_length: int,
    max_sequences: int,
    start: Iterable[Pack],
    bound: float,
    tolerance: float,
    work: int,
    rng: np.random.Generator,
) -> Tuple[List[Tuple[Pack, float]], float, float]:
    """Solve the linear programme, or improve on `start` until `work` is spent.

    Args:
        counts: entry l is the number of sequences of l tokens, int64 of shape [max_length + 1].
        max_length: positions of a pack.
        max_sequences: most sequences in one pack.
        start: packs to begin with; the result is not worse than the best use of them.
        bound: a number of packs that is known to be needed.
        tolerance: stop at so much, relatively, above the bound.
        work: stop after so many elementary steps, some 10⁹ a second.
        rng: breaks ties between packs that limit a step equally.

    Returns:
        Packs and how often each is used, not whole numbers; how many packs these are; and the best lower bound found.
    """
    lengths = np.flatnonzero(counts)
    demand = counts[lengths].astype(float)
    rows = np.zeros(max_length + 1, np.int64)
    rows[lengths] = np.arange(len(lengths))
    basis = _Basis(lengths, np.minimum(max_length // lengths, max_sequences), demand + 1e-3 * rng.random(len(lengths)))
    _enter_all(basis, list(start), rows)
    pricing = _Pricing(lengths, max_length, max_sequences)
    pivots = 0
    while True:
        values = pricing.values(basis.prices)
        lead = int(values.argmax())
        value = float(values[lead])
        bound = max(bound, float(np.maximum(basis.prices, 0.0) @ demand) / max(value, 1.0))
        packs = float(basis.prices @ demand)
        spent = pricing.work + pivots * (len(lengths) ** 2 // 2 + _OVERHEAD)
        if value <= 1.0 + _EPSILON or packs <= bound * (1.0 + tolerance) or spent > work:
            break
        pack = pricing.pack(int(lengths[lead]))
        if not basis.enter(pack, rows[list(pack)], value - 1.0):
            break
        pivots += 1
    return list(zip(basis.packs, basis.amounts.tolist())), packs, bound


def _enter_all(basis: _Basis, packs: List[Pack], rows: np.ndarray) -> None:
    """Use the given packs as well as they can be."""
    columns = np.zeros((len(packs), len(basis.prices)))
    for column, pack in zip(columns, packs):
        np.add.at(column, rows[list(pack)], 1.0)
    for _ in range(4 * len(packs)):
        values = columns @ basis.prices
        best = int(values.argmax())
        if values[best] <= 1.0 + _EPSILON or not basis.enter(packs[best], rows[list(packs[best])], values[best] - 1.0):
            break
