# SPDX-License-Identifier: Apache-2.0
"""The executable cache: one small file for each graph that was compiled with the same options before.

Compiling for the emulator is quick, so there is nothing slow to keep. What an entry tells is what people ask of a cache
on a pod: would this run compile again, or find its executable?
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Optional

__all__ = ["ExecutableCache", "key_of"]

FORMAT = 1


def key_of(graph: str, options: Dict[str, Any], version: str) -> str:
    """Return the SHA-256 of a traced graph, the options that shape it and the version that compiled it."""
    content = {"graph": graph, "options": options, "version": version, "format": FORMAT}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class ExecutableCache:
    """A folder of executables.

    Args:
        folder: made when the first entry is stored; None switches the cache off.
    """

    def __init__(self, folder: Optional[str]) -> None:
        self._folder = Path(folder) if folder else None

    def look_up(self, key: str, summary: Dict[str, Any]) -> str:
        """Return ``hit`` where the key is known; else store it with `summary` and return ``miss``, or ``off``.

        An entry that is damaged counts as a miss and is written again. Entries are written aside and renamed, so
        several processes may share the folder.
        """
        if self._folder is None:
            return "off"
        entry = self._folder / f"{key}.emulated.json"
        try:
            if json.loads(entry.read_text(encoding="utf-8"))["key"] == key:
                return "hit"
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or damaged: either way it is written below
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = entry.with_name(f".{entry.name}-{os.getpid()}")
        aside.write_text(json.dumps({"key": key, **summary}), encoding="utf-8")
        os.replace(aside, entry)
        return "miss"
