# SPDX-License-Identifier: Apache-2.0
"""From lengths to a histogram, one chunk at a time; what could not be packed is refused here, with its numbers."""

import warnings
from itertools import chain, islice
from typing import Any, Iterable, Iterator

import numpy as np

from ipu_finetune.errors import DataError

__all__ = ["checked_counts", "count_lengths", "whole_numbers"]

_CHUNK = 1 << 18


def whole_numbers(values: Any, what: str) -> np.ndarray:
    """Return the values as an array of one dimension and an integer type; nothing is rounded.

    Raises:
        DataError: other dimensions, or other than whole numbers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy before 1.24 only warns where numbers and arrays are mixed
        try:
            array = np.asarray(values)
        except (ValueError, Warning):
            raise DataError(f"{what} must be numbers in one row; these are numbers and arrays mixed") from None
    if array.ndim != 1:
        raise DataError(f"{what} must be numbers in one row; these have the shape {array.shape}")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise DataError(f"{what} must be whole numbers; these are of the type {array.dtype} (first: {array[0]!r})")
    return array


def count_lengths(lengths: Iterable[Any], max_length: int) -> np.ndarray:
    """Count how many sequences have each length, holding one chunk of them at a time.

    Args:
        lengths: tokens of each sequence: an array, or an iterable (which may be a generator) of numbers or of arrays.
        max_length: the longest that is allowed.

    Returns:
        int64 of shape [max_length + 1]; entry l is the number of sequences of l tokens.

    Raises:
        DataError: lengths below 1, above `max_length`, or no whole numbers.
    """
    counts = np.zeros(max_length + 1, np.int64)
    sequences = too_long = too_short = 0
    longest, shortest = max_length, 1
    for part in _chunks(lengths):
        low, high = int(part.min()), int(part.max())
        sequences += len(part)
        if low < 1 or high > max_length:
            longest, shortest = max(longest, high), min(shortest, low)
            too_long += int(np.count_nonzero(part > max_length))
            too_short += int(np.count_nonzero(part < 1))
        else:
            counts += np.bincount(part.astype(np.int64, copy=False), minlength=max_length + 1)
    if too_short:
        raise DataError(
            f"{too_short:,} of {sequences:,} sequences have a length below 1 (the lowest: {shortest}); leave out empty "
            "sequences before planning"
        )
    if too_long:
        raise _too_long(too_long, sequences, longest, max_length)
    return counts


def checked_counts(counts: Any, max_length: int) -> np.ndarray:
    """Return a histogram, whose first entry counts the sequences of one token, in the form of `count_lengths`.

    Raises:
        DataError: negative or broken counts, or sequences longer than `max_length`.
    """
    given = whole_numbers(counts, "the counts of a histogram")
    if given.size and int(given.min()) < 0:
        length = int(given.argmin()) + 1
        raise DataError(f"a count cannot be negative; there are {int(given[length - 1])} sequences of {length} tokens")
    too_long = int(given[max_length:].sum())
    if too_long:
        longest = int(np.flatnonzero(given)[-1]) + 1
        raise _too_long(
            too_long,
            int(given.sum()),
            longest,
            max_length,
            "; the first count is that of one token, so leave out the first entry of numpy.bincount(lengths)",
        )
    result = np.zeros(max_length + 1, np.int64)
    result[1 : len(given) + 1] = given[:max_length]
    return result


def _too_long(number: int, sequences: int, longest: int, max_length: int, hint: str = "") -> DataError:
    return DataError(
        f"{number:,} of {sequences:,} sequences are longer than max_length={max_length} (the longest: {longest}); a "
        f"plan never cuts one: use max_length={longest}, or drop, truncate or split them before planning{hint}"
    )


def _chunks(lengths: Iterable[Any]) -> Iterator[np.ndarray]:
    """Yield pieces that are not empty and not large."""
    if hasattr(lengths, "__array__"):
        pieces: Iterator[Any] = iter([lengths])
    else:
        rest = iter(lengths)
        first = list(islice(rest, 1))
        rest = chain(first, rest)
        pieces = rest if first and _is_row(first[0]) else iter(lambda: list(islice(rest, _CHUNK)), [])
    for piece in pieces:
        array = whole_numbers(piece, "lengths")
        for start in range(0, len(array), _CHUNK):
            yield array[start : start + _CHUNK]


def _is_row(value: Any) -> bool:
    return bool(getattr(value, "ndim", hasattr(value, "__len__") and not isinstance(value, str)))
