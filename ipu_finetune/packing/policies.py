# SPDX-License-Identifier: Apache-2.0
"""What becomes of sequences that are longer than a pack; nothing is cut that nobody asked to cut, and all is counted.

```
error      the first such sequence stops everything, with its number
drop       they are left out
truncate   their first tokens are kept
split      they become several sequences; for language models only, whose labels belong to tokens
```

Five, two, three and one tokens in packs of 4: ``drop`` keeps 3 sequences and 6 tokens, ``truncate`` 10 of 11 tokens,
``split`` all 11.
"""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from ipu_finetune.errors import DataError, UsageError, did_you_mean
from ipu_finetune.packing._counting import whole_numbers
from ipu_finetune.packing._kinds import kind_named

__all__ = ["POLICIES", "Fit", "allowed", "cut", "fit"]

POLICIES = ("error", "drop", "truncate", "split")


@dataclass(frozen=True, eq=False)
class Fit:
    """Pieces of sequences, each short enough for a pack; in the order of the sequences.

    Attributes:
        policy: one of `POLICIES`.
        max_length: positions of a pack.
        rows: [pieces] int64, the number of the sequence that each is of.
        starts: [pieces], its first token within the sequence.
        lengths: [pieces], its tokens.
        sequences: how many there were.
        tokens: how many they had.
        too_long: how many sequences were longer than a pack.
    """

    policy: str
    max_length: int
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    sequences: int
    tokens: int
    too_long: int

    @property
    def sequences_kept(self) -> int:
        """Sequences of which at least a part is kept."""
        return self.sequences - self.sequences_dropped

    @property
    def sequences_dropped(self) -> int:
        """Sequences of which nothing is kept."""
        return self.too_long if self.policy == "drop" else 0

    @property
    def tokens_kept(self) -> int:
        """Tokens in all pieces."""
        return int(self.lengths.sum())

    @property
    def tokens_lost(self) -> int:
        """Tokens in none."""
        return self.tokens - self.tokens_kept

    def report(self) -> Dict[str, Any]:
        """Return the numbers for a record."""
        return {
            "policy": self.policy,
            "max_length": self.max_length,
            "sequences": self.sequences,
            "sequences_kept": self.sequences_kept,
            "sequences_dropped": self.sequences_dropped,
            "sequences_too_long": self.too_long,
            "pieces": len(self.rows),
            "tokens": self.tokens,
            "tokens_kept": self.tokens_kept,
            "tokens_lost": self.tokens_lost,
        }

    def __str__(self) -> str:
        done = {
            "error": "",
            "drop": f", {self.too_long:,} dropped",
            "truncate": f", {self.too_long:,} truncated",
            "split": f", {self.too_long:,} split, {len(self.rows):,} pieces in all",
        }
        return (
            f"{self.policy}: {self.sequences_kept:,} of {self.sequences:,} sequences and {self.tokens_kept:,} of "
            f"{self.tokens:,} tokens kept, {self.tokens_lost:,} tokens lost; {self.too_long:,} longer than "
            f"{self.max_length}{done[self.policy]}"
        )


def allowed(kind: str) -> Tuple[str, ...]:
    """Return the policies that a kind of task may use.

    Only language models split: the label of a classified text, an answer or a choice belongs to the whole.

    Raises:
        UsageError: an unknown kind.
    """
    return kind_named(kind).policies


def fit(lengths: Any, max_length: int, policy: str, kind: Optional[str] = None) -> Fit:
    """Make sequences fit into packs.

    Args:
        lengths: tokens of each sequence, [sequences].
        max_length: positions of a pack.
        policy: one of `POLICIES`.
        kind: of the task; refuses what it does not allow. None allows all.

    Raises:
        DataError: under ``error``, a sequence is too long: names it; or lengths that are negative or not whole.
        UsageError: an unknown policy, one that the kind does not allow, or a `max_length` below 1.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r}{did_you_mean(str(policy), POLICIES)}")
    if kind is not None and policy not in allowed(kind):
        raise UsageError(f"{kind} cannot {policy} sequences that are too long; use {' or '.join(allowed(kind))}")
    if max_length < 1:
        raise UsageError(f"max_length must be at least 1; got {max_length}")
    given = whole_numbers(lengths, "lengths").astype(np.int64)
    if given.size and int(given.min()) < 0:
        raise DataError(f"a length cannot be negative; that of sequence {int(given.argmin())} is {int(given.min())}")
    long = np.flatnonzero(given > max_length)
    tokens = int(given.sum())
    if policy == "error" and len(long):
        row = int(long[0])
        others = [other for other in (POLICIES if kind is None else allowed(kind)) if other != "error"]
        raise DataError(
            f"sequence {row} is too long for a pack ({int(given[row])} > {max_length}), as are {len(long) - 1:,} of "
            f"the other {len(given) - 1:,} ({tokens:,} tokens in all): raise max_length to {int(given.max())}, or "
            f"choose the policy {' or '.join(others)}"
        )
    rows = np.arange(len(given))
    starts = np.zeros(len(given), np.int64)
    if policy == "drop":
        rows = rows[given <= max_length]
        starts = starts[rows]
    elif policy == "split":
        # full pieces first: each fills a pack, or leaves its tail to share one
        pieces = np.maximum(-(-given // max_length), 1)
        rows = np.repeat(rows, pieces)
        starts = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * max_length
    kept = np.minimum(given[rows] - starts, max_length)
    return Fit(policy, int(max_length), rows, starts, kept, len(given), tokens, len(long))


def cut(columns: Mapping[str, Any], kind: str, max_length: int, policy: str) -> Tuple[Dict[str, np.ndarray], Fit]:
    """Return the columns of the pieces, as `packs.pack` takes them, and what became of the rows.

    A piece keeps the columns of its row; only its `attention_mask` is 1 on its own tokens alone, so that a value
    unpacked lies where its token was. Under ``split``, several rows of the result are of one source row, which
    `Fit.rows` names.

    Args:
        columns: source columns of `packs.pack`; of multiple choice, items are measured with all their choices.
        kind: of the task.
        max_length: positions of a pack.
        policy: one of `allowed(kind)`.

    Raises:
        DataError, UsageError: as `fit`; a row whose answer is cut off is refused when it is packed.
    """
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    mask = arrays["attention_mask"].astype(bool)
    result = fit(np.count_nonzero(mask, axis=tuple(range(1, mask.ndim))), max_length, policy, kind)
    cut_columns = {name: column[result.rows] for name, column in arrays.items()}
    if policy in ("truncate", "split"):
        rank = mask[result.rows].cumsum(axis=1) - 1 - result.starts[:, None]
        kept = mask[result.rows] & (rank >= 0) & (rank < result.lengths[:, None])
        cut_columns["attention_mask"] = kept.astype(arrays["attention_mask"].dtype)
    return cut_columns, result
