# SPDX-License-Identifier: Apache-2.0
"""The place of each sequence in its pack, and the columns of packs, a block of them at a time."""

from typing import Any, Dict, Iterator, Tuple

import numpy as np

from ipu_finetune.errors import DataError
from ipu_finetune.packing._kinds import IGNORED, kind_named
from ipu_finetune.packing._sequences import Sequences

__all__ = ["FIRSTS", "ROWS", "Layout"]

#: Names, in a block, of what is no column of the packs: source rows of the slots, and where their tokens began.
ROWS, FIRSTS = "rows", "firsts"

_BLOCK = 1 << 20  # positions: arrays of this size are still in reach of the processor's caches


class Layout:
    """Where everything goes.

    Args:
        sequences: what is packed.
        assignment: has `indices`, items in the order of the packs, and `offsets`, where each pack begins in them.
        max_length: positions of a pack that may be used.
        length: positions of a pack; those over `max_length` are padding.
        slots: of a pack.
        fills: padding of `input_ids` and `token_type_ids`.

    Raises:
        DataError: the assignment leaves out or repeats an item, or a pack does not hold its own.
    """

    def __init__(
        self, sequences: Sequences, assignment: Any, max_length: int, length: int, slots: int, fills: Dict[str, int]
    ) -> None:
        self.length, self.slots = length, slots
        self._sequences, self._fills = sequences, fills
        choices = sequences.choices
        items = np.asarray(assignment.indices, np.int64)
        offsets = np.asarray(assignment.offsets, np.int64)
        _check_assignment(items, offsets, sequences, max_length, slots)
        self.packs = len(offsets) - 1
        self._items = items
        self._order = (items[:, None] * choices + np.arange(choices)).reshape(-1)
        self._offsets = offsets * choices
        sizes = np.diff(self._offsets)
        before = np.cumsum(sequences.lengths[self._order]) - sequences.lengths[self._order]
        heads = np.repeat(self._offsets[:-1], sizes)  # for each sequence, the first of its pack
        self._pack = np.repeat(np.arange(self.packs), sizes)
        self._slot = np.arange(len(self._order)) - heads
        self._start = before - before[heads]

    def blocks(self) -> Iterator[Tuple[int, Dict[str, np.ndarray]]]:
        """Yield (number of the first pack, columns of a block of packs); one block at least, though it be empty."""
        step = max(1, _BLOCK // self.length)
        for begin in range(0, max(self.packs, 1), step):
            yield begin, self._block(begin, min(begin + step, self.packs))

    def _block(self, begin: int, end: int) -> Dict[str, np.ndarray]:
        source = self._sequences
        part = slice(self._offsets[begin], self._offsets[end])
        order, slot, start = self._order[part], self._slot[part], self._start[part]
        pack = self._pack[part] - begin
        lengths = source.lengths[order]
        position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        target = np.repeat(pack * self.length + start, lengths) + position
        taken = np.repeat(source.begins[order], lengths) + position

        def per_token(values: Any, fill: int) -> np.ndarray:
            # the only place that makes a column of the pack's length: all are padded alike
            column = np.full((end - begin, self.length), fill, np.int64)
            column.reshape(-1)[target] = values
            return column

        def per_slot(values: Any, fill: int, dtype: Any = np.int64, slots: int = self.slots) -> np.ndarray:
            column = np.full((end - begin, slots, *np.shape(values)[1:]), fill, dtype)
            column[pack[:: self.slots // slots], slot[:: self.slots // slots] // (self.slots // slots)] = values
            return column

        columns = {
            name: per_token(flat[taken], self._fills[name])
            for name, flat in source.tokens.items()
            if name in self._fills
        }
        columns["sequence_ids"] = per_token(np.repeat(slot + 1, lengths), 0)
        columns["position_ids"] = per_token(position, 0)
        columns["slot_starts"] = per_slot(start, 0)
        columns["slot_lengths"] = per_slot(lengths, 0)
        columns["slot_valid"] = per_slot(np.ones(len(order), bool), 0, bool)
        kind = kind_named(source.kind)
        if kind.per == "token" and ("labels" in source.tokens or source.kind == "causal-lm"):
            labels = source.tokens.get("labels", source.tokens["input_ids"])[taken].astype(np.int64, copy=False)
            if source.kind == "causal-lm":
                labels = np.where(position == 0, IGNORED, labels)
            columns["labels"] = per_token(labels, IGNORED)
        items = self._items[self._offsets[begin] // source.choices : self._offsets[end] // source.choices]
        for name, values in source.labels.items():
            packed = values[items] + start if kind.per == "position" else values[items]
            columns[name] = per_slot(packed, kind.fill, kind.dtype, self.slots // source.choices)
        columns[ROWS] = per_slot(source.first_item * source.choices + order, -1)
        columns[FIRSTS] = per_slot(source.firsts[order], 0)
        return columns


def _check_assignment(
    items: np.ndarray, offsets: np.ndarray, sequences: Sequences, max_length: int, slots: int
) -> None:
    if offsets[0] != 0 or offsets[-1] != len(items) or (np.diff(offsets) < 0).any():
        raise DataError(f"the offsets of an assignment must rise from 0 to its {len(items):,} items")
    if not np.array_equal(np.sort(items), np.arange(sequences.items)):
        raise DataError(f"the assignment does not hold each of the {sequences.items:,} rows once; plan again for them")
    sizes = np.diff(offsets) * sequences.choices
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sequences.item_lengths[items])])[offsets]
    for what, values, limit in (("sequences", sizes, slots), ("tokens", np.diff(ends), max_length)):
        if len(values) and values.max() > limit:
            raise DataError(
                f"the assignment puts {int(values.max())} {what} into pack {int(values.argmax())}; it holds {limit}"
            )
