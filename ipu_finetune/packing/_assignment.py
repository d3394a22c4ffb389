# SPDX-License-Identifier: Apache-2.0
"""From a plan to row numbers: which sequences share which pack."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import numpy as np

from ipu_finetune.errors import DataError
from ipu_finetune.packing._best_fit import Pack
from ipu_finetune.packing._counting import count_lengths, whole_numbers

__all__ = ["Assignment", "assign_rows"]


@dataclass(frozen=True, eq=False)
class Assignment:
    """The sequences of each pack, as a sequence of arrays; read-only.

    Attributes:
        indices: row numbers, pack after pack, int64 of shape [sequences].
        offsets: pack p holds ``indices[offsets[p]:offsets[p + 1]]``; int64 of shape [packs + 1].
    """

    indices: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        """Return the row numbers of one pack, int64 of shape [sequences in it]."""
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        pack %= len(self)
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]


def assign_rows(
    strategies: Sequence[Pack], repeats: Sequence[int], max_length: int, lengths: Any, seed: Optional[int]
) -> Assignment:
    """Do the work of `plan.assign`, whose documentation holds here."""
    rows_of = whole_numbers(lengths, "lengths")
    counts = count_lengths(rows_of, max_length)
    _check_plan_is_for(counts, strategies, repeats)
    # 16 bits, where they are enough, are sorted in linear time
    keys = rows_of.astype(np.uint16 if max_length < 1 << 16 else np.int64)
    rng = None if seed is None else np.random.Generator(np.random.PCG64(seed))
    if rng is None:
        by_length = np.argsort(keys, kind="stable")
    else:
        by_length = rng.permutation(len(keys))
        by_length = by_length[np.argsort(keys[by_length], kind="stable")]
    indices = _in_packs(by_length, counts, strategies, repeats)
    sizes = np.repeat(np.array([len(pack) for pack in strategies], np.int64), np.array(repeats, np.int64))
    offsets = _offsets(sizes)
    if rng is not None:
        order = rng.permutation(len(sizes))
        shuffled = _offsets(sizes[order])
        indices = indices[np.repeat(offsets[order] - shuffled[:-1], sizes[order]) + np.arange(len(indices))]
        offsets = shuffled
    indices.setflags(write=False)
    offsets.setflags(write=False)
    return Assignment(indices, offsets)


def _in_packs(
    by_length: np.ndarray, counts: np.ndarray, strategies: Sequence[Pack], repeats: Sequence[int]
) -> np.ndarray:
    """Return row numbers in the order of the packs; a strategy's packs are a block [repeats, sequences in a pack]."""
    indices = np.empty(len(by_length), np.int64)
    following = (np.cumsum(counts) - counts).tolist()  # where in `by_length` the next sequence of each length is
    begin = 0
    for pack, packs in zip(strategies, repeats):
        block = indices[begin : begin + packs * len(pack)].reshape(packs, len(pack))
        for place, length in enumerate(pack):
            block[:, place] = by_length[following[length] : following[length] + packs]
            following[length] += packs
        begin += block.size
    return indices


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _check_plan_is_for(counts: np.ndarray, strategies: Sequence[Pack], repeats: Sequence[int]) -> None:
    planned = np.zeros_like(counts)
    for pack, packs in zip(strategies, repeats):
        for length in pack:
            planned[length] += packs
    different = np.flatnonzero(planned != counts)
    if len(different):
        length = int(different[0])
        raise DataError(
            f"the plan is for other sequences: it has {int(planned[length]):,} of {length} tokens, and there are "
            f"{int(counts[length]):,} (in all {int(planned.sum()):,} and {int(counts.sum()):,}); plan again from these "
            "lengths"
        )
