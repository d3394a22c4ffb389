# SPDX-License-Identifier: Apache-2.0
"""The file that the processes of one user share: a record for each IPU, and a lock of the operating system on each.

The lock is the lease; the record only says whose it is. Record locks (`fcntl.lockf`) fit three needs at once: the
kernel drops them when a process ends in any way, a forked child does not inherit them, and a range is locked in one
step, so that a group of IPUs is had as a whole or not at all. Their one trap is that closing any descriptor of the file
drops every lock that the process has on it: the descriptor is therefore opened once and never closed.
"""

import contextlib
import json
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Any, Dict, Optional

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["PodFile", "state_folder"]

_RECORD = 1024
# struct flock of F_GETLK: Linux has type and whence first, macOS and the BSDs have them last.
_LINUX = sys.platform.startswith("linux")
_FLOCK = "hhqqi4x" if _LINUX else "qqihh"


def state_folder() -> Path:
    """Return the folder for the state of this user's emulated pod."""
    base = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.join("~", ".local", "state")
    return Path(base).expanduser() / "ipu-finetune"


class PodFile:
    """The open file.

    Args:
        folder: made where it does not exist; the file is named after the machine, for a home that several share.

    Raises:
        OSError: the folder or the file cannot be written, or its file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise OSError("this operating system has no record locks")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        host = "".join(letter if letter.isalnum() else "-" for letter in platform.node())
        self.path = folder / f"pod-{host}"
        self._descriptor = -1
        self._open()
        self.locks_elsewhere(0)

    def _open(self) -> None:
        self._descriptor = os.open(str(self.path), os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)

    def renew(self) -> bool:
        """Open the file again if it was deleted or replaced by another one; return whether that was so."""
        ours = os.fstat(self._descriptor)
        with contextlib.suppress(OSError):
            theirs = os.stat(str(self.path))
            if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
                return False
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open()
        return True

    def try_lock(self, first: int, count: int) -> bool:
        """Lock the records of `count` IPUs from `first` on, all or none; return whether it succeeded."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count * _RECORD, first * _RECORD)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody has one of them
            return False
        return True

    def unlock(self, first: int, count: int) -> None:
        """Drop the locks."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, count * _RECORD, first * _RECORD)

    def locks_elsewhere(self, ipu: int) -> Optional[int]:
        """Return the id of another process that has the IPU (0 where it cannot be known), or None; takes no lock."""
        start = ipu * _RECORD
        if _LINUX:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, _RECORD, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        else:
            asked = struct.pack(_FLOCK, start, _RECORD, 0, fcntl.F_WRLCK, os.SEEK_SET)
            _, _, process, kind, _ = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(0, process)

    def write(self, first: int, count: int, record: Dict[str, Any]) -> None:
        """Say who has these IPUs."""
        content = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")[: _RECORD - 1]
        os.pwrite(self._descriptor, (content.ljust(_RECORD - 1) + b"\n") * count, first * _RECORD)

    def read(self, ipu: int) -> Dict[str, Any]:
        """Return what was written about an IPU last; empty where that cannot be read."""
        try:
            record = json.loads(os.pread(self._descriptor, _RECORD, ipu * _RECORD).decode("utf-8"))
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}
