# SPDX-License-Identifier: Apache-2.0
"""Packs: rows of features placed side by side, and the way back from a model's outputs to the features.

Three sequences in two packs of 8 positions and 2 slots, as the columns of classification:

```
input_ids       a0 a1 a2 b0 b1  ·  ·  ·     c0 c1 c2 c3  ·  ·  ·  ·
sequence_ids     1  1  1  2  2  0  0  0      1  1  1  1  0  0  0  0     which slot a position belongs to, 0: padding
position_ids     0  1  2  0  1  0  0  0      0  1  2  3  0  0  0  0     restarted in each sequence
slot_starts      0  3                        0  0
slot_lengths     3  2                        4  0
slot_valid       1  1                        1  0
labels          la lb                       lc -100                     per sequence; of token kinds, per position
```
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing._kinds import KINDS, kind_named
from ipu_finetune.packing._layout import FIRSTS, ROWS, Layout
from ipu_finetune.packing._merging import plan_of, strategies_of
from ipu_finetune.packing._sequences import Sequences, read_sequences
from ipu_finetune.packing.plan import Plan, assign, from_lengths

__all__ = ["KINDS", "Packs", "Settings", "lay_out", "pack", "unpack_slots", "unpack_tokens"]

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Settings:
    """Everything that decides what packs are made of given rows.

    Attributes:
        kind: of the task, one of `KINDS`.
        max_length: positions of a pack that may hold tokens.
        max_sequences: slots of a pack.
        algorithm: of the plan.
        seed: of the plan, of which of the sequences of one length goes where, and of the order of the packs.
        pad_token_id: what `input_ids` hold on padding.
        pad_token_type_id: what `token_type_ids` hold on padding.
        pad_to_multiple_of: the packs' length is raised to a multiple of it, with padding.
        choices: for multiple choice, sequences of one item; needed only where rows come as [N × choices, L].
    """

    kind: str
    max_length: int
    max_sequences: int
    algorithm: str = "best"
    seed: int = 0
    pad_token_id: int = 0
    pad_token_type_id: int = 0
    pad_to_multiple_of: Optional[int] = None
    choices: Optional[int] = None

    def __post_init__(self) -> None:
        kind_named(self.kind)
        for name in ("max_length", "max_sequences", "pad_to_multiple_of", "choices"):
            value = getattr(self, name)
            if value is None and name in ("pad_to_multiple_of", "choices"):
                continue
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1; got {value!r}")

    @property
    def length(self) -> int:
        """Positions of a pack, those of `pad_to_multiple_of` included."""
        multiple = self.pad_to_multiple_of or 1
        return -(-self.max_length // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Packs:
    """Sequences in packs; a map-style data set over arrays that may be memory-mapped.

    Attributes:
        columns: name -> [P, ...], P packs of L positions and S slots. int64 [P, L]: `input_ids`, `sequence_ids`,
            `position_ids`, perhaps `token_type_ids`; [P, S]: `slot_starts`, `slot_lengths` and the bool `slot_valid`;
            and labels: [P, L] where they belong to tokens, [P, S, ...] to sequences, [P, S / choices] to items.
        rows: int64 [P, S], the number of the source row in each slot, -1 in an empty one. For multiple choice a row is
            one choice: number of the item × choices + number of the choice.
        firsts: int64 [P, S], the column of the source row where the slot's first token was.
        sequences: N, source rows in all.
        kind: of the task.
        choices: sequences of one item; 1 but for multiple choice.
        plan: what was planned, in items; of a stream, all windows together.
    """

    columns: Dict[str, np.ndarray]
    rows: np.ndarray
    firsts: np.ndarray
    sequences: int
    kind: str
    choices: int
    plan: Plan

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, pack: int) -> Dict[str, Any]:
        return {name: column[pack] for name, column in self.columns.items()}

    @property
    def slots(self) -> int:
        """S, the most sequences that a pack may hold."""
        return int(self.rows.shape[1])

    @property
    def length(self) -> int:
        """L, the positions of a pack."""
        return int(self.columns["input_ids"].shape[1])

    @property
    def tokens(self) -> int:
        """Positions that hold a token of a sequence."""
        return int(self.columns["slot_lengths"].sum())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the columns and of the rows in them: names, shapes and values."""
        digest = hashlib.sha256()
        for name, column in sorted({**self.columns, ROWS: self.rows}.items()):
            digest.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
            for begin in range(0, len(column), _ROWS_AT_ONCE):
                digest.update(np.ascontiguousarray(column[begin : begin + _ROWS_AT_ONCE]).tobytes())
        return digest.hexdigest()

    def figures(self) -> Dict[str, Any]:
        """Return numbers for a record: of the packs on the device, each choice of an item being a sequence."""
        packs, tokens = len(self), self.tokens
        positions = packs * self.length
        per_pack = self.sequences / packs if packs else 1.0
        return {
            "kind": self.kind,
            "algorithm": self.plan.algorithm,
            "packs": packs,
            "packs_at_least": self.plan.lower_bound,
            "length": self.length,
            "max_sequences": self.slots,
            "sequences": self.sequences,
            "sequences_per_pack": per_pack,
            "efficiency": tokens / positions if positions else 1.0,
            "tokens": tokens,
            "wasted_positions": positions - tokens,
            "speed_up": per_pack,
        }

    def describe(self) -> str:
        """Return one line for a report."""
        figures = self.figures()
        return (
            f"{self.sequences:,} sequences in {len(self):,} packs of {self.length} "
            f"({figures['sequences_per_pack']:.2f} in a pack, at most {self.slots}): "
            f"{100 * figures['efficiency']:.2f} % of the positions hold a token ({self.plan.algorithm})"
        )

    def __str__(self) -> str:
        return self.describe()


def pack(
    columns: Mapping[str, Any],
    kind: str,
    max_length: int,
    max_sequences: int,
    *,
    algorithm: str = "best",
    seed: int = 0,
    pad_token_id: int = 0,
    pad_token_type_id: int = 0,
    pad_to_multiple_of: Optional[int] = None,
    choices: Optional[int] = None,
    assignment: Any = None,
) -> Packs:
    """Pack rows.

    Args:
        columns: `input_ids` and `attention_mask` (1 on tokens, which lie together), perhaps `token_type_ids`, each
            [N, L], or [N, choices, L] for multiple choice; and labels, which may be absent:
            question-answering `start_positions` and `end_positions` [N], columns of the row; classification `labels`
            [N] int; multi-label [N, classes] float; regression [N] or [N, values] float; token-classification,
            masked-lm and causal-lm [N, L] int (causal-lm without: `input_ids`); multiple-choice [N] int.
        kind: of the task, one of `KINDS`.
        max_length: see `Settings`, as all that follow.
        max_sequences: slots of a pack.
        algorithm: of the plan.
        seed: the same arguments give the same packs.
        pad_token_id: fills `input_ids`.
        pad_token_type_id: fills `token_type_ids`.
        pad_to_multiple_of: of the packs' length.
        choices: of an item.
        assignment: which items share a pack, with `indices` and `offsets` as `plan.assign` returns them; None plans it.

    Raises:
        DataError: columns that are not as above, a row longer than `max_length` (nothing is cut; see `policies.fit`),
            or an assignment that is for other rows.
        UsageError: limits below 1, an unknown kind or algorithm, or slots that the choices of an item do not fill.
    """
    settings = Settings(
        kind, max_length, max_sequences, algorithm, seed, pad_token_id, pad_token_type_id, pad_to_multiple_of, choices
    )
    sequences = read_sequences(columns, kind, choices)
    plan, layout = lay_out(sequences, settings, assignment)
    whole: Dict[str, np.ndarray] = {}
    for begin, block in layout.blocks():
        for name, column in block.items():
            if name not in whole:
                whole[name] = np.empty((layout.packs, *column.shape[1:]), column.dtype)
            whole[name][begin : begin + len(column)] = column
    rows, firsts = whole.pop(ROWS), whole.pop(FIRSTS)
    return Packs(whole, rows, firsts, len(sequences.lengths), kind, sequences.choices, plan)


def lay_out(sequences: Sequences, settings: Settings, assignment: Any = None) -> Tuple[Plan, Layout]:
    """Plan packs and place the sequences in them; the columns are made from the layout, block by block.

    Raises:
        DataError, UsageError: as `pack`.
    """
    choices = sequences.choices
    if settings.max_sequences % choices:
        below = settings.max_sequences // choices * choices
        raise UsageError(
            f"max_sequences={settings.max_sequences} counts sequences, and an item is {choices} of them: use "
            f"{f'{below} or ' if below else ''}{below + choices}"
        )
    sequences.check_fit(settings.max_length)
    lengths, items_per_pack = sequences.item_lengths, settings.max_sequences // choices
    fills = {"input_ids": settings.pad_token_id, "token_type_ids": settings.pad_token_type_id}
    plan = None
    if assignment is None:
        plan = from_lengths(lengths, settings.max_length, items_per_pack, settings.algorithm, settings.seed)
        assignment = assign(plan, lengths, settings.seed)
    layout = Layout(sequences, assignment, settings.max_length, settings.length, settings.max_sequences, fills)
    if plan is None:
        plan = plan_of(strategies_of(assignment, lengths), settings.max_length, items_per_pack, "given")
    return plan, layout


def unpack_tokens(packs: Packs, values: Any, length: int, fill: Any) -> np.ndarray:
    """Return one row of token values for each source row, in their order.

    Args:
        packs: what the values belong to.
        values: [P, L, ...], a value for each position of the packs.
        length: columns of a result row; that of the source rows, so that each value is where its token was.
        fill: value of the padding.

    Returns:
        [N, length, ...], of the type of `values`.

    Raises:
        DataError: `values` are of other packs, a source row is in no pack or in two, or `length` cuts one.
    """
    array = np.asarray(values)
    _check_values(packs, array, (packs.length,))
    _check_complete(packs)
    needed = int((packs.firsts + packs.columns["slot_lengths"]).max()) if packs.rows.size else 0
    if needed > length:
        raise DataError(
            f"length={length} cuts rows whose tokens reach up to {needed}; give the length of the source rows"
        )
    result = np.full((packs.sequences, length, *array.shape[2:]), fill, array.dtype)
    for begin in range(0, len(packs), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        ids = packs.columns["sequence_ids"][part]
        pack_, position = np.nonzero(ids)
        slot = ids[pack_, position] - 1
        column = packs.firsts[part][pack_, slot] + packs.columns["position_ids"][part][pack_, position]
        result[packs.rows[part][pack_, slot], column] = array[part][pack_, position]
    return result


def unpack_slots(packs: Packs, values: Any) -> np.ndarray:
    """Return one value for each source row, or, for multiple choice, for each item, in their order.

    Args:
        packs: what the values belong to.
        values: [P, S, ...], a value for each slot; or [P, S / choices, ...], one for each item.

    Returns:
        [N, ...], of the type of `values`; of items, [N / choices, ...].

    Raises:
        DataError: `values` are of other packs, or a source row is in no pack or in two.
    """
    array = np.asarray(values)
    _check_values(packs, array, (packs.slots, packs.slots // packs.choices))
    _check_complete(packs)
    step = packs.slots // array.shape[1]
    rows = packs.rows[:, ::step]
    used = rows >= 0
    result = np.empty((packs.sequences // step, *array.shape[2:]), array.dtype)
    result[rows[used] // step] = array[used]
    return result


def _check_values(packs: Packs, array: np.ndarray, widths: Tuple[int, ...]) -> None:
    if array.ndim < 2 or array.shape[0] != len(packs) or array.shape[1] not in widths:
        expected = " or ".join(f"[{len(packs)}, {width}, …]" for width in dict.fromkeys(widths))
        raise DataError(f"these are not values of the packs: the shape is {array.shape}; they have {expected}")


def _check_complete(packs: Packs) -> None:
    counts = np.bincount(packs.rows[packs.rows >= 0], minlength=packs.sequences)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{len(wrong):,} of {packs.sequences:,} rows are not in exactly one slot: the first is row {row}, in "
            f"{int(counts[row])}; take back the outputs of all packs together"
        )
