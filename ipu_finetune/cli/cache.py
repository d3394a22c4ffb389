# SPDX-License-Identifier: Apache-2.0
"""List (ls) or remove (clean) what is in a folder of the executable cache."""

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Dict, List

from ipu_finetune.emulator.device import cache_entries
from ipu_finetune.errors import UsageError, did_you_mean

__all__ = ["configure", "default_folder", "run"]

# What the built-in IPU configs set as executable_cache_dir.
_RUNS_USE = "exe_cache"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_ACTIONS = ("ls", "clean")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("action", metavar="ls|clean", help="ls lists the executables, clean removes them")
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help=f"the cache (default: POPTORCH_CACHE_DIR, else ./{_RUNS_USE})"
    )
    parser.add_argument("--older-than", metavar="AGE", help="clean: only those not used for this long: 30d, 12h, 45m")
    parser.add_argument("--dry-run", action="store_true", help="clean: say what would be removed, remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """List or remove."""
    if arguments.action not in _ACTIONS:
        raise UsageError(f"cannot {arguments.action} a cache{did_you_mean(arguments.action, _ACTIONS)}")
    if arguments.action == "ls" and (arguments.older_than or arguments.dry_run):
        raise UsageError("--older-than and --dry-run belong to cache clean; cache ls only lists")
    folder = Path(arguments.folder).expanduser() if arguments.folder else default_folder()
    if arguments.folder and not folder.is_dir():
        raise UsageError(f"cache {arguments.action} {arguments.folder}: there is no such folder")
    return _ls(folder, arguments.json) if arguments.action == "ls" else _clean(folder, arguments)


def default_folder() -> Path:
    """Return the cache of this shell: POPTORCH_CACHE_DIR, else the folder that runs make where they are started."""
    return Path(os.environ.get("POPTORCH_CACHE_DIR") or _RUNS_USE).expanduser()


def _ls(folder: Path, as_json: bool) -> int:
    found = cache_entries.survey(folder) if folder.is_dir() else []
    now = time.time()
    rows: List[Dict[str, Any]] = [
        {
            "key": entry.key,
            "model": entry.model,
            "age_seconds": round(max(0.0, now - entry.created)),
            "bytes": entry.size,
            "hits": entry.hits,
            "shapes": entry.parts.get("shapes"),
            "damage": entry.damage,
        }
        for entry in found
    ]
    if as_json:
        print(json.dumps({"folder": str(folder), "executables": rows}))
        return 0
    if not rows:
        print(f"{folder}: no executables")
        return 0
    cells = [["key", "model", "age", "bytes", "hits", "input shapes"]]
    for row in rows:
        shapes = f"damaged: {row['damage']}" if row["damage"] else _shapes_text(row["shapes"])
        age, size = _age_text(row["age_seconds"]), f"{row['bytes']:,}"
        cells.append([row["key"][:12], row["model"] or "-", age, size, str(row["hits"]), shapes])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    return 0


def _clean(folder: Path, arguments: argparse.Namespace) -> int:
    older_than = _seconds(arguments.older_than) if arguments.older_than else 0.0
    removed = cache_entries.clean(folder, older_than, arguments.dry_run) if folder.is_dir() else []
    total = sum(size for _, size in removed)
    if arguments.json:
        names = [path.name for path, _ in removed]
        print(json.dumps({"folder": str(folder), "removed": names, "bytes": total, "dry_run": arguments.dry_run}))
    else:
        verb = "would remove" if arguments.dry_run else "removed"
        for path, size in removed:
            print(f"{verb} {path.name} ({size:,} bytes)")
        print(f"{folder}: {verb} {len(removed)} executables, {total:,} bytes")
    return 0


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise UsageError(f"--older-than {text}: write a number and a unit, such as 30d, 12h or 45m (s, m, h, d, w)")
    return float(match.group(1)) * _UNITS[match.group(2)]


def _age_text(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"


def _shapes_text(shapes: Any) -> str:
    return "-" if shapes is None else json.dumps(shapes, separators=(",", ":"))
