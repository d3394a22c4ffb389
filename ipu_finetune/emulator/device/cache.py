# SPDX-License-Identifier: Apache-2.0
"""The executable cache: what was compiled once for the same graph, options and version is not compiled again.

A pod keeps executables there, the emulator keeps traced graphs. Each entry also has what its key was made of, so that
a miss can say what is different from the most similar entry. A folder that cannot be used switches the cache off, with
one warning, and work goes on without it.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Set, Tuple

from . import cache_entries as entries
from .cache_reasons import nearest, why

__all__ = ["CacheAnswer", "ExecutableCache", "key_of"]

logger = logging.getLogger("ipu_finetune.emulator")

# A miss is compared with no more entries than these, so that a folder of thousands costs no more than one of hundreds.
_COMPARED = 200

_warned: Set[str] = set()


class CacheAnswer(NamedTuple):
    """What the cache knows.

    Attributes:
        outcome: ``hit``, ``miss`` or ``off``.
        reason: why.
        key: SHA-256 of the parts.
        path: file of the entry; None where there is none.
        payload: what was stored, or has just been made; None where nothing was to be stored.
    """

    outcome: str
    reason: str
    key: str
    path: Optional[Path]
    payload: Optional[bytes]

    def __str__(self) -> str:
        return f"{self.outcome} {self.key[:12]} ({self.reason})"


def key_of(parts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what decides whether an executable can be used: graph, shapes, options, version.

    Raises:
        TypeError: something in it has no JSON form, and so no value that two runs agree on.
    """
    content = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{entries.FORMAT}\n{content}".encode()).hexdigest()


class ExecutableCache:
    """A folder of executables.

    Args:
        folder: made when the first entry is stored; None or an empty string switches the cache off.
    """

    def __init__(self, folder: Optional[str]) -> None:
        self._folder = Path(folder).expanduser() if folder else None

    def look_up(
        self,
        parts: Mapping[str, Any],
        payload_factory: Optional[Callable[[], bytes]] = None,
        *,
        model: str = "",
    ) -> CacheAnswer:
        """Return the entry of `parts`, which is made and stored where there is none.

        Of several processes that miss at once, one calls `payload_factory`; the others wait and hit.

        Args:
            parts: what the key is made of: JSON-able, the same in each run that may use the executable.
            payload_factory: makes what is stored; what it raises is passed on.
            model: label of the entry; a miss is compared with entries of this label first.
        """
        key = key_of(parts)
        if self._folder is None:
            return self._off("no folder is set: enableExecutableCaching or POPTORCH_CACHE_DIR", key, payload_factory)
        answer, damage = self._find(key, payload_factory is not None)
        if answer is not None:
            return self._told(answer)
        unusable = _why_unusable(self._folder)
        if unusable is not None:
            _warn_once(str(self._folder), f"executable cache off: {unusable}")
            return self._off(unusable, key, payload_factory)
        with entries.locked(self._folder / f"{key}.lock"):
            answer, damage = self._find(key, payload_factory is not None)
            if answer is not None:  # made by the process that had the lock before
                return self._told(answer)
            reason = damage or self._why_missing(parts, model)
            payload = payload_factory() if payload_factory is not None else None
            path = self._write(key, parts, payload or b"", model)
        return self._told(CacheAnswer("miss", reason, key, path, payload))

    def store(self, parts: Mapping[str, Any], payload: bytes = b"", *, model: str = "") -> CacheAnswer:
        """Write or replace the entry of `parts`, for example where what was stored turned out to be unusable."""
        key = key_of(parts)
        unusable = "no folder is set" if self._folder is None else _why_unusable(self._folder)
        if unusable is not None:
            return CacheAnswer("off", unusable, key, None, payload)
        return CacheAnswer("miss", "written again", key, self._write(key, parts, payload, model), payload)

    @contextlib.contextmanager
    def compilation_lock(self, name: str) -> Iterator[None]:
        """Let one process at a time compile what has this name; nothing where the cache is off."""
        if self._folder is None or _why_unusable(self._folder) is not None:
            yield
            return
        path = self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.lock"
        with entries.locked(path) as has_lock:
            logger.debug("Executable cache file locked" if has_lock else "The executable cache cannot be locked")
            yield
        if has_lock:
            logger.debug("This process released the cache lock")

    def _find(self, key: str, needs_payload: bool) -> Tuple[Optional[CacheAnswer], Optional[str]]:
        """Return (the hit or None, what is wrong with the entry or None)."""
        assert self._folder is not None
        path = entries.entry_path(self._folder, key)
        try:
            description, payload = entries.read(path, key)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except entries.Damaged as damage:
            logger.warning("The executable cache's entry %s is damaged and is made again: %s.", path, damage)
            return None, f"the entry was damaged: {damage}"
        if needs_payload and not payload:
            return None, "the entry was stored without an executable"
        entries.count_hit(self._folder, key)
        reason = f"same graph, options and version; compiled {_age(description.get('created'))} ago"
        return CacheAnswer("hit", reason, key, path, payload or None), None

    def _why_missing(self, parts: Mapping[str, Any], model: str) -> str:
        assert self._folder is not None
        found = [entry for entry in entries.survey(self._folder, _COMPARED) if entry.damage is None]
        same = [entry for entry in found if entry.model == model]
        if not found:
            return f"the first executable in {self._folder}"
        if model and not same:
            return f"no executable of model {model} in {self._folder} yet"
        before = nearest(parts, [entry.parts for entry in same or found])
        return why(before or {}, json.loads(json.dumps(parts)))

    def _write(self, key: str, parts: Mapping[str, Any], payload: bytes, model: str) -> Optional[Path]:
        assert self._folder is not None
        description: Dict[str, Any] = {"model": model, "created": round(time.time(), 3), "parts": dict(parts)}
        try:
            return entries.write(self._folder, key, description, payload)
        except OSError as error:
            _warn_once(str(self._folder), f"executable cache: the entry could not be stored in {self._folder}: {error}")
            return None

    def _off(self, reason: str, key: str, payload_factory: Optional[Callable[[], bytes]]) -> CacheAnswer:
        payload = payload_factory() if payload_factory is not None else None
        return self._told(CacheAnswer("off", reason, key, None, payload))

    def _told(self, answer: CacheAnswer) -> CacheAnswer:
        logger.info("executable cache: %s, %s", answer, answer.path or self._folder or "no folder")
        return answer


def _why_unusable(folder: Path) -> Optional[str]:
    """Make the folder; return None, or why executables cannot be stored in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if folder.is_symlink():
            return f"{folder} is a symbolic link to {os.readlink(str(folder))}, which does not exist"
        return f"{folder} is a file, and a folder is needed"
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return None if os.access(str(folder), os.W_OK | os.X_OK) else f"{folder} cannot be written (permission denied)"


def _warn_once(folder: str, message: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        logger.warning("%s", message)


def _age(created: Any) -> str:
    seconds = max(0.0, time.time() - float(created or 0))
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
