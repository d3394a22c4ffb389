# SPDX-License-Identifier: Apache-2.0
"""Packs on disk, under a hash of what they are made of: data, tokenizer and settings; used again by the next run.

An entry is written aside and renamed into place, so that several processes, and one that is killed, leave a whole entry
or none. One that is damaged is noticed by its SHA-256, reported, and made again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

from ipu_finetune.packing._entry import FORMAT_VERSION, DamagedError, Writer, read_entry, remove_abandoned
from ipu_finetune.packing._layout import FIRSTS, ROWS
from ipu_finetune.packing.packs import Packs, Settings, pack
from ipu_finetune.packing.plan import Plan

__all__ = ["Content", "Found", "Store", "default_folder", "packed"]

_NEW = "no packs of this data, tokenizer and settings yet"
_KNOWN = "packed before from the same data and tokenizer with the same settings"
_PACKS_AT_ONCE = 4096


@dataclass(frozen=True)
class Content:
    """What packs are made of; equal contents are one entry.

    Attributes:
        data: fingerprint of the rows, or of what they are made from together with how (lengths, strides, policies).
        tokenizer: fingerprint of the tokenizer.
        settings: of the packing.
        window: sequences that are packed together in a stream; None where all are.
    """

    data: str
    tokenizer: str
    settings: Settings
    window: Optional[int] = None

    def describe(self) -> Dict[str, Any]:
        """Return everything that the key is made of, ready for JSON."""
        settings = {
            name: value if value is None or isinstance(value, str) else int(value)
            for name, value in dataclasses.asdict(self.settings).items()
        }
        window = None if self.window is None else int(self.window)
        return {
            "format": FORMAT_VERSION,
            "data": self.data,
            "tokenizer": self.tokenizer,
            "window": window,
            "settings": settings,
        }

    @property
    def key(self) -> str:
        """SHA-256 of the description, the name of the entry."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Found:
    """Packs, and where they are from.

    Attributes:
        packs: memory-mapped, unless they could not be written.
        hit: whether they were there already.
        why: the reason, in words, for either.
        folder: of the entry.
    """

    packs: Packs
    hit: bool
    why: str
    folder: Path


def default_folder() -> Path:
    """Return ``ipu-finetune/packs`` in XDG_CACHE_HOME, else in ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "ipu-finetune" / "packs"


class Store:
    """A folder of packs.

    Args:
        folder: made when something is written; None is `default_folder()`.
        verify: compare what is read with its SHA-256, which costs a pass over it; sizes are compared in any case.
    """

    def __init__(self, folder: Optional[Path] = None, verify: bool = True) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._verify = verify

    def entry(self, content: Content) -> Path:
        """Return the folder of an entry, which need not be there."""
        return self.folder / content.key

    def read(self, content: Content) -> Tuple[Optional[Packs], str]:
        """Return the packs, None where they are to be made (again), and why; warns where they are damaged."""
        try:
            return read_entry(self.entry(content), self._verify), _KNOWN
        except FileNotFoundError:
            return None, _NEW
        except DamagedError as damage:
            # a hint for people whose disk or other programs change files; the packs themselves are made again
            warnings.warn(f"the packs in {self.entry(content)} are damaged and made again: {damage}", stacklevel=3)
            return None, f"damaged: {damage}"
        except OSError as error:
            return None, f"cannot be read: {error}"

    @contextlib.contextmanager
    def writer(self, content: Content) -> Iterator[Writer]:
        """Open a new entry, which is removed unless it is published in the block.

        Raises:
            OSError: there is no room, or no right to write there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder)
        writer = Writer(self.folder, content.key)
        try:
            yield writer
        finally:
            writer.abandon()

    def publish(self, writer: Writer, content: Content, facts: Mapping[str, Any], plan: Plan) -> Packs:
        """Finish a new entry, and return its packs; those of another process if that was faster.

        Raises:
            OSError: as `writer`, or another process has removed or changed the entry meanwhile.
        """
        writer.publish(content.describe(), facts, plan)
        try:
            return read_entry(self.entry(content), verify=False)
        except DamagedError as damage:
            raise OSError(f"{self.entry(content)} was changed while it was written: {damage}") from damage

    def write(self, content: Content, packs: Packs) -> Packs:
        """Write packs, and return them memory-mapped.

        Raises:
            OSError: as `writer`.
        """
        arrays = {**packs.columns, ROWS: packs.rows, FIRSTS: packs.firsts}
        facts = {"sequences": packs.sequences, "kind": packs.kind, "choices": packs.choices}
        with self.writer(content) as writer:
            for begin in range(0, max(len(packs), 1), _PACKS_AT_ONCE):
                writer.append({name: array[begin : begin + _PACKS_AT_ONCE] for name, array in arrays.items()})
            return self.publish(writer, content, facts, packs.plan)


def packed(
    columns: Mapping[str, Any], settings: Settings, *, data: str, tokenizer: str, store: Optional[Store] = None
) -> Found:
    """Return packs of rows: from the store, else made and put there.

    A store that cannot be written to costs the next run its time, not this one its result: it warns.

    Args:
        columns: as of `pack`.
        settings: of the packing.
        data: fingerprint of the columns.
        tokenizer: fingerprint of the tokenizer.
        store: None is the default one.

    Raises:
        DataError, UsageError: as `pack`.
    """
    store = Store() if store is None else store
    content = Content(data, tokenizer, settings)
    folder = store.entry(content)
    packs, why = store.read(content)
    if packs is not None:
        return Found(packs, True, why, folder)
    fields = dataclasses.asdict(settings)
    packs = pack(columns, fields.pop("kind"), fields.pop("max_length"), fields.pop("max_sequences"), **fields)
    try:
        packs = store.write(content, packs)
    except OSError as error:
        warnings.warn(f"packs cannot be kept in {store.folder} for the next run: {error}", stacklevel=2)
        why = f"{why}; not kept: {error}"
    return Found(packs, False, why, folder)
