# SPDX-License-Identifier: Apache-2.0
"""Packs of a data set that is larger than memory, made as it is read, and used again by the next run.

Rows are packed in windows of a bounded number of sequences. Of a window only the tokens are held, without their
padding; its packs go to disk in blocks. The packs do not depend on the chunks in which rows arrive.
"""

import contextlib
from collections import Counter
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional

import numpy as np

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing._best_fit import Pack
from ipu_finetune.packing._merging import plan_of
from ipu_finetune.packing._sequences import Sequences, join, read_sequences
from ipu_finetune.packing.packs import Settings, lay_out
from ipu_finetune.packing.store import Content, Found, Store

__all__ = ["WINDOW", "pack_stream"]

#: Sequences of a window, unless another number is given; at 512 tokens some 0.5 GB at most.
WINDOW = 65_536

_STACKED = 1024  # single rows that are read together

Columns = Mapping[str, Any]


def pack_stream(
    rows: Iterable[Columns],
    settings: Settings,
    *,
    data: str,
    tokenizer: str,
    window: int = WINDOW,
    store: Optional[Store] = None,
    progress: Optional[Callable[[int], None]] = None,
) -> Found:
    """Return packs of a stream, from the store if they are there; the stream is then not read at all.

    Args:
        rows: columns as of `packs.pack`, of one row ([L]; multiple choice [choices, L]) or of several ([rows, …]) at
            a time; L may change from one to the next.
        settings: of the packing.
        data: fingerprint of the stream, for example of its files and of how rows are made from them.
        tokenizer: fingerprint of the tokenizer.
        window: sequences that are packed together; memory grows with it, and packs are a little fuller.
        store: where packs are written; None is the default one.
        progress: called with the number of rows (for multiple choice: items) that are in packs on disk.

    Returns:
        Packs whose columns are memory maps; `Packs.rows` count through the whole stream.

    Raises:
        DataError: a stream without rows, or one whose packs cannot be written; and as `packs.pack`.
        UsageError: as `packs.pack`, or a window below 1.
    """
    if window < 1:
        raise UsageError(f"window must be at least 1; got {window}")
    store = Store() if store is None else store
    content = Content(data, tokenizer, settings, window)
    packs, why = store.read(content)
    if packs is not None:
        return Found(packs, True, why, store.entry(content))
    strategies: Counter[Pack] = Counter()
    items = choices = 0
    with contextlib.ExitStack() as stack:
        with _on_disk(store):
            writer = stack.enter_context(store.writer(content))
        for sequences in _windows(rows, settings, window):
            plan, layout = lay_out(sequences, settings)
            strategies.update(dict(zip(plan.strategies, plan.repeats)))
            choices = sequences.choices
            for _, block in layout.blocks():
                with _on_disk(store):
                    writer.append(block)
                items += int(block["slot_valid"].sum()) // choices
                if progress is not None:
                    progress(items)
        if not items:
            raise DataError("the stream has no rows; check where it reads from")
        facts = {"sequences": items * choices, "kind": settings.kind, "choices": choices}
        merged = plan_of(strategies, settings.max_length, settings.max_sequences // choices, settings.algorithm)
        with _on_disk(store):
            packs = store.publish(writer, content, facts, merged)
    return Found(packs, False, why, store.entry(content))


@contextlib.contextmanager
def _on_disk(store: Store) -> Iterator[None]:
    """Tell errors of writing packs apart from those of reading the stream, which stay as they are."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"packs cannot be written to {store.folder} ({error}); make room there, or set XDG_CACHE_HOME to a "
            "folder that has some"
        ) from error


def _windows(rows: Iterable[Columns], settings: Settings, window: int) -> Iterator[Sequences]:
    """Yield compact sequences, `window` of them or, the last time, fewer; an item is never divided."""
    parts: List[Sequences] = []
    held = read = 0
    for columns in _chunks(rows, settings):
        chunk = {name: np.asarray(column) for name, column in columns.items()}
        different = {name: len(column) for name, column in chunk.items() if len(column) != len(chunk["input_ids"])}
        if different:
            raise DataError(
                f"a chunk of the stream, from row {read:,} on, has {len(chunk['input_ids']):,} rows of 'input_ids' and "
                f"other numbers of others: {different}"
            )
        shape = chunk["input_ids"].shape
        per_window = max(1, window // shape[1]) if settings.kind == "multiple-choice" and len(shape) == 3 else window
        begin = 0
        while begin < len(chunk["input_ids"]):
            end = begin + per_window - held
            piece = {name: column[begin:end] for name, column in chunk.items()}
            parts.append(read_sequences(piece, settings.kind, settings.choices, read).compact())
            held += parts[-1].items
            read += parts[-1].items
            begin = end
            if held >= per_window:
                whole = join(parts)
                parts, held = [], 0
                yield whole
    if parts:
        yield join(parts)


def _chunks(rows: Iterable[Columns], settings: Settings) -> Iterator[Columns]:
    """Yield chunks as they come, and single rows stacked, as long as they have the same shapes."""
    single: List[Dict[str, np.ndarray]] = []
    dimensions = 3 if settings.kind == "multiple-choice" else 2
    for columns in rows:
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        if "input_ids" not in arrays:
            raise DataError(f"packing needs the column 'input_ids'; there are {sorted(arrays)}")
        is_row = arrays["input_ids"].ndim < dimensions
        if single and (not is_row or len(single) == _STACKED or _shapes(arrays) != _shapes(single[0])):
            yield {name: np.stack([one[name] for one in single]) for name in single[0]}
            single = []
        if is_row:
            single.append(arrays)
        else:
            yield arrays
    if single:
        yield {name: np.stack([one[name] for one in single]) for name in single[0]}


def _shapes(arrays: Mapping[str, np.ndarray]) -> Dict[str, Any]:
    return {name: array.shape for name, array in arrays.items()}
