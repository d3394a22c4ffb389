# SPDX-License-Identifier: Apache-2.0
"""The files of the executable cache: how an entry is written, read and told from files that are not the cache's.

`<key>.emulated` is one line with a name and the SHA-256 of the rest, one line of JSON that describes the entry, and the
payload. `<key>.hits` has one byte for each time that it was used. `<key>.lock` is there while somebody compiles.
"""

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Pattern, Tuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Damaged", "Found", "clean", "count_hit", "entry_path", "locked", "read", "survey", "write"]

FORMAT = 2
_MAGIC = "ipu-finetune executable"
_ENTRY = re.compile(r"([0-9a-f]{64})\.emulated")
# What this cache leaves beside its entries when a process is killed, and what its first format was.
_LOCK = re.compile(r"[0-9a-f]{64}\.lock")
_HITS = re.compile(r"([0-9a-f]{64})\.hits")
_ASIDE = re.compile(r"\.[0-9a-f]{64}\.emulated-\d+-\d+")
_FIRST_FORMAT = re.compile(r"([0-9a-f]{64})\.emulated\.json")
_ABANDONED_SECONDS = 3600.0


class Damaged(Exception):  # noqa: N818 - what the entry is; the message says how
    """An entry that is not what was written."""


class Found(NamedTuple):
    """An entry as it is listed.

    Attributes:
        key: of the entry.
        path: of its file.
        model: whose executable it is.
        created: seconds since the epoch.
        used: when it was made or used last.
        hits: how often it was used.
        size: of the file, in bytes.
        parts: what the key was made of; empty where the entry is damaged.
        damage: what is wrong with its description, or None.
    """

    key: str
    path: Path
    model: str
    created: float
    used: float
    hits: int
    size: int
    parts: Dict[str, Any]
    damage: Optional[str]


def entry_path(folder: Path, key: str) -> Path:
    """Return the file of an entry."""
    return folder / f"{key}.emulated"


def write(folder: Path, key: str, description: Dict[str, Any], payload: bytes) -> Path:
    """Write an entry aside and rename it, so that nobody ever reads half of one.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    line = (json.dumps({**description, "key": key, "payload": len(payload)}, sort_keys=True) + "\n").encode("ascii")
    digest = hashlib.sha256(line + payload).hexdigest()
    path = entry_path(folder, key)
    aside = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        with aside.open("wb") as file:
            file.write(f"{_MAGIC} {FORMAT} {digest}\n".encode("ascii"))
            file.write(line)
            file.write(payload)
        os.replace(str(aside), str(path))
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path


def read(path: Path, key: str) -> Tuple[Dict[str, Any], bytes]:
    """Return an entry's description and payload, having compared their hash.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        Damaged: it is there, and is not what was written.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise Damaged(f"cannot be read ({error.strerror})") from error
    first, _, rest = content.partition(b"\n")
    digest = _digest(first)
    if hashlib.sha256(rest).hexdigest() != digest:
        raise Damaged("its content does not have the hash that was written with it: truncated or changed")
    line, _, payload = rest.partition(b"\n")
    description = json.loads(line)
    if description.get("key") != key:
        raise Damaged(f"it is the entry of {str(description.get('key'))[:12]}, copied or renamed")
    return description, payload


def _digest(first: bytes) -> str:
    words = first.decode("ascii", "replace").rsplit(" ", 2)
    if len(words) != 3 or words[0] != _MAGIC:
        raise Damaged("it does not begin as an entry does")
    if words[1] != str(FORMAT):
        raise Damaged(f"it has format {words[1]}, this version writes {FORMAT}")
    return words[2]


def _describe(path: Path) -> Dict[str, Any]:
    """Return an entry's description without reading its payload, and so without comparing the hash."""
    with path.open("rb") as file:
        _digest(file.readline(256).rstrip(b"\n"))
        try:
            description = json.loads(file.readline())
            size = os.fstat(file.fileno()).st_size - file.tell()
        except ValueError as error:
            raise Damaged("its description is truncated or changed") from error
    if not isinstance(description, dict) or not isinstance(description.get("parts"), dict):
        raise Damaged("its description is truncated or changed")
    if description.get("payload") != size:
        raise Damaged(f"it has {size} bytes of payload, {description.get('payload')} were written")
    return description


def count_hit(folder: Path, key: str) -> None:
    """Note that an entry was used; a folder that cannot be written keeps no count."""
    with contextlib.suppress(OSError), (folder / f"{key}.hits").open("ab", buffering=0) as file:
        file.write(b".")


def survey(folder: Path, newest: Optional[int] = None) -> List[Found]:
    """Return the entries of a folder, the newest first, with the damage that can be seen without their payload.

    Args:
        folder: of the cache.
        newest: read no more than this many.

    Raises:
        OSError: the folder cannot be read.
    """
    files: List[Tuple[float, str, int]] = []
    with os.scandir(str(folder)) as listed:
        for item in listed:
            if _ENTRY.fullmatch(item.name):
                with contextlib.suppress(FileNotFoundError):  # removed in between
                    status = item.stat()
                    files.append((status.st_mtime, item.name, status.st_size))
    found = []
    for written, name, size in sorted(files, reverse=True)[:newest]:
        path = folder / name
        key = path.stem
        try:
            description, damage = _describe(path), None
        except FileNotFoundError:
            continue
        except OSError as error:
            description, damage = {}, f"cannot be read ({error.strerror})"
        except Damaged as error:
            description, damage = {}, str(error)
        hits, used = _use(folder, key)
        model = str(description.get("model") or "?")
        created = float(description.get("created") or written)
        found.append(
            Found(key, path, model, created, max(written, used), hits, size, description.get("parts", {}), damage)
        )
    return found


def _use(folder: Path, key: str) -> Tuple[int, float]:
    try:
        status = (folder / f"{key}.hits").stat()
    except OSError:
        return 0, 0.0
    return status.st_size, status.st_mtime


def clean(folder: Path, older_than: float = 0.0, dry_run: bool = False) -> List[Tuple[Path, int]]:
    """Remove entries, and what killed processes left beside them; no file that this cache did not write.

    Args:
        folder: of the cache.
        older_than: keep entries that were made or used within so many seconds.
        dry_run: remove nothing.

    Returns:
        The entries (with those of the first format) that were or would be removed, and their bytes.

    Raises:
        OSError: the folder cannot be read, or a file of it cannot be removed.
    """
    now = time.time()
    doomed = [
        (entry.path, entry.size)
        for entry in survey(folder)
        if now - entry.used >= older_than and _is_own(entry.path, _ENTRY)
    ]
    with os.scandir(str(folder)) as listed:
        names = sorted(item.name for item in listed if item.is_file(follow_symlinks=False))
    for name in names:
        if _FIRST_FORMAT.fullmatch(name) and _is_own(folder / name, _FIRST_FORMAT):
            status = (folder / name).stat()
            if now - status.st_mtime >= older_than:
                doomed.append((folder / name, status.st_size))
    if not dry_run:
        for path, _ in doomed:
            _remove(path)
        for name in names:
            _tidy(folder / name, now)
    return doomed


def _is_own(path: Path, pattern: Pattern[str]) -> bool:
    """Whether a file with the name of an entry begins as one; an empty one was one, before the disk was full."""
    match = pattern.fullmatch(path.name)
    if match is None or path.is_symlink():
        return False
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError:
        return False
    if pattern is _FIRST_FORMAT:
        return f'"key": "{match.group(1)}"'.encode() in start
    return not start or start.startswith(_MAGIC.encode())


def _tidy(path: Path, now: float) -> None:
    """Remove a lock that nobody holds, a half-written entry that nobody finishes, hits of an entry that has gone."""
    hits = _HITS.fullmatch(path.name)
    if hits is not None and not entry_path(path.parent, hits.group(1)).exists():
        _remove(path)
    elif _LOCK.fullmatch(path.name):
        with locked(path, blocking=False):
            pass  # removes it
    elif _ASIDE.fullmatch(path.name):
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime > _ABANDONED_SECONDS:
                _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


@contextlib.contextmanager
def locked(path: Path, blocking: bool = True) -> Iterator[bool]:
    """Hold the lock file `path`, and remove it afterwards; yields False where that is not possible.

    The kernel drops the lock of a process that dies. Threads of one process exclude each other as well.
    """
    descriptor = _lock(path, blocking)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        # Removed while it is held: who waits for it sees that the file is another one now, and asks for that.
        with contextlib.suppress(OSError):
            path.unlink()
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(path: Path, blocking: bool) -> Optional[int]:
    while fcntl is not None:
        descriptor = None
        try:
            descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(str(path))):
                return descriptor
        except FileNotFoundError:
            if descriptor is None:  # the folder has gone; otherwise the last holder has removed the file
                return None
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            return None
        if descriptor is not None:
            os.close(descriptor)
    return None
