# SPDX-License-Identifier: Apache-2.0
"""Source rows as sequences: where the tokens of each begin, and how many there are; a row that is none is refused."""

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ipu_finetune.errors import DataError, UsageError, did_you_mean
from ipu_finetune.packing._kinds import Kind, kind_named

__all__ = ["Sequences", "join", "read_sequences"]

_SHOWN = 3  # rows named in an error


@dataclass(frozen=True)
class Sequences:
    """Sequences of a data set, or of a window of it.

    Attributes:
        kind: of the task.
        choices: sequences of one item, which stay together; 1 where each sequence is alone.
        first_item: number of the first item in the whole data set.
        tokens: for each column with one value per token, a flat array of all rows, with or without their padding.
        begins: [sequences], where in the flat arrays the tokens of each sequence begin.
        lengths: [sequences], how many they are.
        firsts: [sequences], in which column of its source row the first token was; 0 unless it is padded on the left.
        labels: label columns that do not belong to tokens, each [items, ...]; positions count within the sequence.
    """

    kind: str
    choices: int
    first_item: int
    tokens: Dict[str, np.ndarray]
    begins: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray
    labels: Dict[str, np.ndarray]

    @property
    def items(self) -> int:
        """Number of what is placed in packs as one: sequences, or all choices of a question together."""
        return len(self.lengths) // self.choices

    @property
    def item_lengths(self) -> np.ndarray:
        """Tokens of each item, int64 of shape [items]."""
        return self.lengths.reshape(-1, self.choices).sum(axis=1)

    def check_fit(self, max_length: int) -> None:
        """Refuse items that are longer than a pack.

        Raises:
            DataError: names the first ones.
        """
        lengths = self.item_lengths
        long = np.flatnonzero(lengths > max_length)
        if len(long):
            named = [f"{self.first_item + row} ({lengths[row]} tokens)" for row in long[:_SHOWN].tolist()]
            more = f" and {len(long) - _SHOWN:,} more" if len(long) > _SHOWN else ""
            others = [policy for policy in kind_named(self.kind).policies if policy != "error"]
            rows, are = ("row", "is") if len(long) == 1 else ("rows", "are")
            raise DataError(
                f"{rows} {', '.join(named)}{more} {are} longer "
                f"than a pack of {max_length}, and packing cuts nothing: raise max_length to {int(lengths.max())}, or "
                f"{' or '.join(others)} such rows first (packing.policies)"
            )

    def compact(self) -> "Sequences":
        """Return the same in less memory: no padding, no view of the source, 32 bits for numbers that need no more."""
        keep = np.repeat(self.begins - _offsets(self.lengths)[:-1], self.lengths)
        keep += np.arange(len(keep))
        tokens = {name: _narrow(column[keep]) for name, column in self.tokens.items()}
        labels = {name: column.copy() for name, column in self.labels.items()}
        begins = _offsets(self.lengths)[:-1]
        return Sequences(self.kind, self.choices, self.first_item, tokens, begins, self.lengths, self.firsts, labels)


def read_sequences(
    columns: Mapping[str, Any], kind: str, choices: Optional[int] = None, first_item: int = 0
) -> Sequences:
    """Take source rows apart.

    Args:
        columns: `input_ids` and `attention_mask`, perhaps `token_type_ids`, each [N, L] (multiple choice: [N, choices,
            L]), padded on the right or on the left; and the labels of the kind, or none of them.
        kind: of the task.
        choices: for multiple choice, sequences of one item; needed where the rows come as [N × choices, L].
        first_item: number of the first item in the whole data set, for errors.

    Raises:
        DataError: columns that are missing, unknown, or of other shapes; a row without tokens, with padding in the
            midst of them, or with a label that is not one of its positions.
        UsageError: an unknown kind, or `choices` where there are none or that are others.
    """
    entry = kind_named(kind)
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    per_token = ("input_ids", "attention_mask", "token_type_ids", *(entry.labels if entry.per == "token" else ()))
    _check_names(arrays, kind, entry)
    choices = _choices(arrays["input_ids"], kind, choices)
    shape = arrays["input_ids"].shape
    for name in per_token:
        if name in arrays and arrays[name].shape != shape:
            raise DataError(f"column {name!r} has the shape {arrays[name].shape}; that of 'input_ids' is {shape}")
        if name in arrays and arrays[name].dtype.kind not in "iub":
            raise DataError(f"column {name!r} must hold whole numbers; its type is {arrays[name].dtype}")
    length = shape[-1]
    mask = arrays["attention_mask"].reshape(-1, length).astype(bool)
    lengths, firsts = _extents(mask, choices, first_item)
    tokens = {name: arrays[name].reshape(-1) for name in per_token if name in arrays and name != "attention_mask"}
    labels = {name: arrays[name] for name in entry.labels if name in arrays and name not in tokens}
    for name, column in labels.items():
        _check_labels(name, column, len(lengths) // choices, kind, entry)
        if entry.per == "position":
            labels[name] = _within(name, column, lengths, firsts, first_item)
    begins = np.arange(len(lengths), dtype=np.int64) * length + firsts
    return Sequences(kind, choices, first_item, tokens, begins, lengths, firsts, labels)


def join(parts: List[Sequences]) -> Sequences:
    """Return compact sequences that follow each other as one.

    Raises:
        DataError: their columns differ.
    """
    head = parts[0]
    for part in parts[1:]:
        names = [sorted([*one.tokens, *one.labels]) for one in (head, part)]
        if names[0] != names[1] or part.choices != head.choices:
            raise DataError(
                f"the rows from number {part.first_item:,} on have other columns than those from {head.first_item:,} "
                f"on: {names[1]}, choices {part.choices}; not {names[0]}, choices {head.choices}"
            )
    lengths = np.concatenate([part.lengths for part in parts])
    return Sequences(
        head.kind,
        head.choices,
        head.first_item,
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in head.tokens},
        _offsets(lengths)[:-1],
        lengths,
        np.concatenate([part.firsts for part in parts]),
        {name: np.concatenate([part.labels[name] for part in parts]) for name in head.labels},
    )


def _narrow(values: np.ndarray) -> np.ndarray:
    limits = np.iinfo(np.int32)
    fits = values.size and values.min() >= limits.min and values.max() <= limits.max
    return values.astype(np.int32) if fits else values


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _check_names(arrays: Mapping[str, np.ndarray], kind: str, entry: Kind) -> None:
    known = ["input_ids", "attention_mask", "token_type_ids", *entry.labels]
    for name in known[:2]:
        if name not in arrays:
            raise DataError(
                f"packing needs the column {name!r}: it tells tokens from padding; there are {sorted(arrays)}"
            )
    for name in arrays:
        if name not in known:
            raise DataError(
                f"packing does not know the column {name!r} of {kind}{did_you_mean(name, known)}; leave it out, since "
                "it would no longer belong to its tokens"
            )
    given = [name for name in entry.labels if name in arrays]
    if given and len(given) < len(entry.labels):
        raise DataError(f"{kind} needs all of the columns {entry.labels}, or none; there is {given}")


def _choices(ids: np.ndarray, kind: str, choices: Optional[int]) -> int:
    if kind != "multiple-choice":
        if choices not in (None, 1):
            raise UsageError(f"choices={choices} is for multiple-choice; {kind} has one sequence in each row")
        if ids.ndim != 2:
            raise DataError(f"'input_ids' of {kind} must have the shape [rows, tokens]; it has {ids.shape}")
        return 1
    if ids.ndim == 3 and choices in (None, ids.shape[1]):
        return int(ids.shape[1])
    if ids.ndim == 2 and choices is not None and choices > 0 and len(ids) % choices == 0:
        return int(choices)
    raise DataError(
        f"'input_ids' of multiple-choice must have the shape [items, choices, tokens], or [items × choices, tokens] "
        f"with choices=…; it has {ids.shape}, with choices={choices}"
    )


def _extents(mask: np.ndarray, choices: int, first_item: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens of each row and the column of the first."""
    lengths = np.count_nonzero(mask, axis=1).astype(np.int64)
    if not mask.size:
        firsts = np.zeros(len(mask), np.int64)
    else:
        firsts = mask.argmax(axis=1).astype(np.int64)
        past = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
        torn = np.flatnonzero((past - firsts != lengths) & (lengths > 0))
        if len(torn):
            row = int(torn[0])
            raise DataError(
                f"row {first_item + row // choices} has padding between its tokens (attention_mask is 0 there); "
                "positions in a pack run without a gap, so pad rows on the right or on the left only"
            )
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        row = int(empty[0])
        raise DataError(
            f"row {first_item + row // choices} has no token (attention_mask is 0 throughout), {len(empty):,} such in "
            "all; leave these rows out"
        )
    return lengths, firsts


def _check_labels(name: str, column: np.ndarray, items: int, kind: str, entry: Kind) -> None:
    if column.ndim not in entry.dimensions or len(column) != items:
        shape = " or ".join("[items]" if dimensions == 1 else "[items, values]" for dimensions in entry.dimensions)
        raise DataError(
            f"column {name!r} of {kind} must have the shape {shape}, {items:,} items; it has {column.shape}"
        )
    if entry.dtype is np.int64 and column.dtype.kind not in "iub":
        raise DataError(f"column {name!r} of {kind} must hold whole numbers; its type is {column.dtype}")


def _within(name: str, positions: np.ndarray, lengths: np.ndarray, firsts: np.ndarray, first_item: int) -> np.ndarray:
    """Return positions in rows as positions in their sequences."""
    inside = positions.astype(np.int64) - firsts
    outside = np.flatnonzero((inside < 0) | (inside >= lengths))
    if len(outside):
        row = int(outside[0])
        raise DataError(
            f"row {first_item + row}: {name} {int(positions[row])} is none of its tokens, which are at "
            f"{int(firsts[row])} to {int(firsts[row] + lengths[row]) - 1}; label a row without the answer with the "
            "position of its class token"
        )
    return inside
