# SPDX-License-Identifier: Apache-2.0
"""Which lengths share a pack: a plan made from a histogram of lengths, so that 10⁷ sequences cost no more than 10³.

```
plan = from_lengths(lengths, max_length=512, max_sequences=3)
plan.efficiency, plan.packs, plan.sequences_per_pack
packs = assign(plan, lengths, seed=1)  # now the sequences themselves: packs[0] holds row numbers
```

A plan is a list of *strategies*: a way to fill one pack, and how many packs are filled like this. Three algorithms:

- ``lpfhp``, longest pack first, and ``spfhp``, shortest pack first: the published ones (arXiv 2107.02027).
- ``best`` (the default) takes the better of these if it is within 0.2 % of what is possible. Else it searches for packs
  without a gap, and then solves the linear programme behind packing. It never makes more packs than the other two.

The same arguments give the same plan. ``best`` does arithmetic in float64, whose last bit may differ from one kind of
processor to another, and so may its plan: where several hosts must agree, plan on one, or compare `Plan.fingerprint`.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Tuple

import numpy as np

from ipu_finetune.errors import UsageError, did_you_mean
from ipu_finetune.packing._assignment import Assignment, assign_rows
from ipu_finetune.packing._best_fit import Pack, longest_pack_first, shortest_pack_first
from ipu_finetune.packing._counting import checked_counts, count_lengths
from ipu_finetune.packing._search import fewest_packs, lower_bound

__all__ = ["ALGORITHMS", "Assignment", "Plan", "assign", "from_histogram", "from_lengths"]

ALGORITHMS = ("best", "lpfhp", "spfhp")


@dataclass(frozen=True)
class Plan:
    """How sequences share packs, by length.

    Attributes:
        max_length: positions of a pack, in tokens.
        max_sequences: most sequences in one pack.
        algorithm: one of `ALGORITHMS`.
        strategies: the lengths that share a pack, the longest first; each strategy once, the longest first.
        repeats: for each strategy, how many packs are filled like this.
        lower_bound: a number of packs that no plan for these sequences goes below.
    """

    max_length: int
    max_sequences: int
    algorithm: str
    strategies: Tuple[Pack, ...]
    repeats: Tuple[int, ...]
    lower_bound: int

    @property
    def packs(self) -> int:
        """Rows that the device sees."""
        return sum(self.repeats)

    @property
    def sequences(self) -> int:
        """Sequences in all packs."""
        return sum(len(pack) * repeats for pack, repeats in zip(self.strategies, self.repeats))

    @property
    def tokens(self) -> int:
        """Positions that hold a token of a sequence."""
        return sum(sum(pack) * repeats for pack, repeats in zip(self.strategies, self.repeats))

    @property
    def wasted_positions(self) -> int:
        """Positions that hold padding."""
        return self.packs * self.max_length - self.tokens

    @property
    def efficiency(self) -> float:
        """Part of all positions that hold a token, 0 to 1; 1 where there is no pack, since nothing is wasted."""
        return self.tokens / (self.packs * self.max_length) if self.packs else 1.0

    @property
    def sequences_per_pack(self) -> float:
        """Mean number of sequences in a pack; 1 where there is none, as without packing."""
        return self.sequences / self.packs if self.packs else 1.0

    @property
    def speed_up(self) -> float:
        """Rows without packing, one for each sequence, per row with it.

        It is the same number as `sequences_per_pack`, and an upper limit: it holds where a row of a pack costs the
        device as much as a row of one padded sequence.
        """
        return self.sequences_per_pack

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides which sequences share a pack; equal for equal plans."""
        content = repr((self.max_length, self.max_sequences, self.strategies, self.repeats))
        return hashlib.sha256(content.encode()).hexdigest()

    def describe(self) -> str:
        """Return one line for a report."""
        return (
            f"{self.sequences:,} sequences in {self.packs:,} packs of {self.max_length} "
            f"({self.sequences_per_pack:.2f} in a pack, at most {self.max_sequences}): "
            f"{100 * self.efficiency:.2f} % of the positions hold a token ({self.algorithm})"
        )

    def __str__(self) -> str:
        return self.describe()


def from_histogram(counts: Any, max_length: int, max_sequences: int, algorithm: str = "best", seed: int = 0) -> Plan:
    """Plan packs for a histogram of lengths.

    Args:
        counts: entry i is the number of sequences of **i + 1** tokens; as many entries as there are lengths, at most
            `max_length` (more only if they are 0). ``numpy.bincount(lengths)[1:]`` is one.
        max_length: positions of a pack, in tokens.
        max_sequences: most sequences in one pack; 1 leaves each alone.
        algorithm: one of `ALGORITHMS`.
        seed: of the ties and the rounding of ``best``; the other two decide everything by rule.

    Raises:
        DataError: counts that are negative or not whole, or sequences longer than `max_length`.
        UsageError: limits below 1, a negative seed, or an unknown algorithm.
    """
    _check(max_length, max_sequences, algorithm, seed)
    return _plan(checked_counts(counts, max_length), max_length, max_sequences, algorithm, seed)


def from_lengths(
    lengths: Iterable[Any], max_length: int, max_sequences: int, algorithm: str = "best", seed: int = 0
) -> Plan:
    """Plan packs for sequences, of which only the lengths are read, once, and only their histogram is kept.

    Args:
        lengths: tokens of each sequence, 1 to `max_length`: an array [sequences], or an iterable, which may be a
            generator, of numbers or of such arrays.
        max_length: positions of a pack, in tokens.
        max_sequences: most sequences in one pack; 1 leaves each alone.
        algorithm: one of `ALGORITHMS`.
        seed: of the ties and the rounding of ``best``; the other two decide everything by rule.

    Raises:
        DataError: lengths that are below 1, above `max_length` or not whole; nothing is cut or left out.
        UsageError: limits below 1, a negative seed, or an unknown algorithm.
    """
    _check(max_length, max_sequences, algorithm, seed)
    return _plan(count_lengths(lengths, max_length), max_length, max_sequences, algorithm, seed)


def assign(plan: Plan, lengths: Any, seed: Optional[int] = None) -> Assignment:
    """Give each sequence its place: a separate step, since only this one grows with the number of sequences.

    Args:
        plan: a plan for these lengths.
        lengths: tokens of each sequence, [sequences].
        seed: draws which of the sequences of equal length goes where, and the order of the packs, so that packs of one
            strategy do not follow each other. None: sequences of equal length in their order, packs in the plan's.

    Returns:
        Each row number, 0 to sequences - 1, in exactly one pack; within a pack, the longest sequence first.

    Raises:
        DataError: the plan was made for other lengths.
        UsageError: a negative seed.
    """
    _check_whole("seed", 0 if seed is None else seed, least=0)
    return assign_rows(plan.strategies, plan.repeats, plan.max_length, lengths, seed)


def _plan(counts: np.ndarray, max_length: int, max_sequences: int, algorithm: str, seed: int) -> Plan:
    limits = max_length, min(max_sequences, max_length)
    if algorithm == "best":
        packs, bound = fewest_packs(counts, *limits, np.random.Generator(np.random.PCG64(seed)))
    else:
        fill = longest_pack_first if algorithm == "lpfhp" else shortest_pack_first
        packs, bound = fill(counts, *limits), lower_bound(counts, *limits)
    ordered = sorted(packs.items(), reverse=True)
    strategies, repeats = tuple(pack for pack, _ in ordered), tuple(times for _, times in ordered)
    return Plan(int(max_length), int(max_sequences), algorithm, strategies, repeats, bound)


def _check(max_length: int, max_sequences: int, algorithm: str, seed: int) -> None:
    _check_whole("max_length", max_length, least=1)
    _check_whole("max_sequences", max_sequences, least=1)
    _check_whole("seed", seed, least=0)
    if algorithm not in ALGORITHMS:
        raise UsageError(f"unknown packing algorithm {algorithm!r}{did_you_mean(str(algorithm), ALGORITHMS)}")


def _check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}; got {value!r}")
