# SPDX-License-Identifier: Apache-2.0
"""Packs as a folder: one .npy file for each column, written block by block, and a manifest that says what they must be.

```
<key>/manifest.json     sha256 of the body, and the body: format, key, content, packs, plan, and of each file dtype,
                        shape, bytes and sha256
<key>/input_ids.npy     and so on
```

A file's SHA-256 is that of its values, without the .npy header: that holds the number of packs, which is known last.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Tuple

import numpy as np

from ipu_finetune.packing._layout import FIRSTS, ROWS
from ipu_finetune.packing.packs import Packs
from ipu_finetune.packing.plan import Plan

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FORMAT_VERSION", "DamagedError", "Writer", "read_entry", "remove_abandoned"]

#: Raised by one whenever packs of the same content would be written in another way.
FORMAT_VERSION = 1

_MANIFEST = "manifest.json"
_LOCK = ".lock"
_ASIDE = ".writing-"
_HEADER = 256  # bytes of a .npy header, room for any shape
_READ = 1 << 24
_OLD = 3600.0  # seconds: a folder is locked long before this age, or its writer has died


class DamagedError(Exception):
    """An entry is not what its manifest says; the message tells where."""


class Writer:
    """Writes an entry aside; nobody sees it before `publish`, and nothing of it is left after `abandon`.

    Args:
        folder: of the store.
        key: of the entry, its name there.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._key = key
        self._files: Dict[str, BinaryIO] = {}
        self._digests: Dict[str, Any] = {}
        self._types: Dict[str, Tuple[np.dtype, Tuple[int, ...]]] = {}
        self._packs: Dict[str, int] = {}
        self._final = folder / key
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_ASIDE}{key[:16]}-", dir=str(folder)))
        self._lock = os.open(str(self.folder / _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        if fcntl is not None:
            # some network file systems have no locks; an abandoned folder then stays
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, block: Mapping[str, np.ndarray]) -> None:
        """Append packs: each column, and the arrays named `ROWS` and `FIRSTS`, [packs of the block, ...]."""
        for name, column in block.items():
            values = np.ascontiguousarray(column)
            if name not in self._files:
                self._files[name] = open(self.folder / f"{name}.npy", "wb")  # noqa: SIM115 - closed by publish, abandon
                self._files[name].write(bytes(_HEADER))
                self._digests[name] = hashlib.sha256()
                self._types[name] = values.dtype, values.shape[1:]
                self._packs[name] = 0
            if self._types[name] != (values.dtype, values.shape[1:]):
                raise TypeError(f"{name} was {self._types[name]} and is now {values.dtype}, {values.shape[1:]}")
            if values.size:
                self._files[name].write(values.data)
                self._digests[name].update(values.data)
            self._packs[name] += len(values)

    def publish(self, content: Mapping[str, Any], facts: Mapping[str, Any], plan: Plan) -> bool:
        """Give the entry its name; False where one that is not damaged has it already, which is then as good.

        Args:
            content: what the key is made of, for who reads the manifest.
            facts: `sequences`, `kind` and `choices` of the packs.
            plan: of the packs.
        """
        files = {}
        for name, file in self._files.items():
            dtype, rest = self._types[name]
            shape = (self._packs[name], *rest)
            size = file.tell()
            file.seek(0)
            file.write(_header(dtype, shape))
            file.close()
            files[name] = {
                "dtype": dtype.str,
                "shape": shape,
                "bytes": size,
                "sha256": self._digests[name].hexdigest(),
            }
        body = {
            "format": FORMAT_VERSION,
            "key": self._key,
            "content": content,
            "packs": facts,
            "plan": dataclasses.asdict(plan),
            "files": files,
        }
        manifest = {"sha256": _digest(body), "body": body}
        (self.folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        self._unlock()
        while True:
            try:
                os.rename(self.folder, self._final)
                return True
            except OSError:
                if not self._final.is_dir():
                    raise
            with contextlib.suppress(DamagedError, FileNotFoundError):
                read_entry(self._final)
                self.abandon()
                return False
            _remove(self._final)

    def abandon(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            file.close()
        self._unlock()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                (self.folder / _LOCK).unlink()
            os.close(self._lock)
            self._lock = -1


def read_entry(folder: Path, verify: bool = True) -> Packs:
    """Return the packs of an entry, memory-mapped and read-only.

    Args:
        folder: of the entry.
        verify: compare the values with their SHA-256; False compares sizes, types and shapes only.

    Raises:
        DamagedError: something is missing or is not as it was written.
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(str(folder))
    body = _manifest(folder)
    arrays = {name: _array(folder / f"{name}.npy", entry, verify) for name, entry in body["files"].items()}
    plan = dict(body["plan"])
    plan["strategies"] = tuple(tuple(pack) for pack in plan["strategies"])
    plan["repeats"] = tuple(plan["repeats"])
    rows, firsts = arrays.pop(ROWS), arrays.pop(FIRSTS)
    return Packs(columns=arrays, rows=rows, firsts=firsts, plan=Plan(**plan), **body["packs"])


def remove_abandoned(folder: Path) -> None:
    """Remove what writers left behind that were killed: a living one holds a lock."""
    if fcntl is None:
        return
    for aside in folder.glob(f"{_ASIDE}*"):
        with contextlib.suppress(OSError), _held(aside / _LOCK) as free:
            if free and time.time() - aside.stat().st_mtime > _OLD:
                shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    if not path.exists():  # killed before it had one, or when it was about to be published
        yield True
        return
    descriptor = os.open(str(path), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    """Take an entry out of sight at once, then remove it."""
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=str(entry.parent)))
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(entry, aside / "entry")
    shutil.rmtree(aside, ignore_errors=True)


def _manifest(folder: Path) -> Dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        body = manifest["body"]
        intact = manifest["sha256"] == _digest(body)
    except FileNotFoundError:
        raise DamagedError(f"{_MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{_MANIFEST} cannot be read ({error!r})") from error
    if not intact or body["key"] != folder.name or body["format"] != FORMAT_VERSION:
        raise DamagedError(f"{_MANIFEST} is not as it was written")
    return dict(body)


def _array(path: Path, entry: Mapping[str, Any], verify: bool) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise DamagedError(f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}")
        if verify and _digest_of_values(path) != entry["sha256"]:
            raise DamagedError(f"{path.name} holds other values than were written")
        # numpy maps no array without values
        array = np.load(str(path), mmap_mode="r" if size > _HEADER else None, allow_pickle=False)
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path.name} cannot be read ({error})") from error
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise DamagedError(f"{path.name} holds {array.dtype.str} {array.shape} instead of what was written")
    return array


def _digest_of_values(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(_HEADER)
        for part in iter(lambda: file.read(_READ), b""):
            digest.update(part)
    return digest.hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _header(dtype: np.dtype, shape: Tuple[int, ...]) -> bytes:
    """Return a .npy header, version 1.0, of `_HEADER` bytes."""
    start: List[bytes] = [np.lib.format.magic(1, 0), struct.pack("<H", _HEADER - 10)]
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    return b"".join(start) + text.ljust(_HEADER - 11).encode("latin1") + b"\n"
