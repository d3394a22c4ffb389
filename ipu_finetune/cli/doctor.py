# SPDX-License-Identifier: Apache-2.0
"""Report the environment, for a bug report or to find out what is wrong; with --ipus, who holds which emulated IPU."""

import argparse
import json
import os
import shutil
import sys
import time
from typing import Any, Dict, List

from ipu_finetune import __version__, _environment
from ipu_finetune._versions import TESTED, Finding, check_versions
from ipu_finetune.cli.cache import default_folder
from ipu_finetune.emulator.device import cache_entries, pod
from ipu_finetune.errors import IpuFinetuneError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("--ipus", action="store_true", help="list the IPUs of the emulated pod and who holds them")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 where something is broken."""
    if arguments.ipus:
        rows = [row._asdict() for row in pod.listing()]
        print(json.dumps({"ipus": rows}) if arguments.json else "\n".join(_ipu_table(rows)))
        if shutil.which("gc-monitor"):
            print("real IPUs are on this machine as well: gc-monitor lists them", file=sys.stderr)
        return 0
    report = _report()
    print(json.dumps(report) if arguments.json else "\n".join(_lines(report)))
    return 0 if report["ok"] else 1


def _report() -> Dict[str, Any]:
    versions = _environment.find_versions()
    findings = check_versions(versions)
    report: Dict[str, Any] = {
        "ipu_finetune": __version__,
        "versions": {name: {"found": versions[name], "tested": str(TESTED[name])} for name in TESTED},
        "poptorch": _environment.poptorch_kind(),
        "targets": _environment.available_targets(findings),
        "machine": _environment.machine(),
        "pod": _pod(findings),
        "cache": _cache(findings),
        "environment": _environment.variables(os.environ),
    }
    report["findings"] = [vars(finding) for finding in findings]
    report["ok"] = not any(finding.level == "error" for finding in findings)
    return report


def _pod(findings: List[Finding]) -> Dict[str, Any]:
    try:
        rows = pod.listing()
    except IpuFinetuneError as error:
        findings.append(Finding("error", "pod", str(error)))
        return {"ipus": None, "in_use": None}
    return {"ipus": len(rows), "in_use": sum(1 for row in rows if row.pid is not None)}


def _cache(findings: List[Finding]) -> Dict[str, Any]:
    folder = default_folder()
    state: Dict[str, Any] = {"folder": str(folder), "entries": 0, "bytes": 0, "damaged": 0, "state": "not there yet"}
    if folder.is_dir():
        found = cache_entries.survey(folder)
        state.update(entries=len(found), bytes=sum(entry.size for entry in found))
        state.update(damaged=sum(1 for entry in found if entry.damage), state="ready")
        if not os.access(str(folder), os.W_OK | os.X_OK):
            state["state"] = "not writable"
    elif folder.is_symlink():
        state["state"] = "a broken symbolic link"
    elif folder.exists():
        state["state"] = "not a folder"
    if state["state"] not in ("ready", "not there yet"):
        findings.append(Finding("warning", "cache", f"executable cache off: {folder} is {state['state']}"))
    return state


def _lines(report: Dict[str, Any]) -> List[str]:
    lines = [f"ipu-finetune {report['ipu_finetune']}", "", "[versions]"]
    for name, version in report["versions"].items():
        lines.append(f"{name:18} {version['found'] or '-':24} tested with {version['tested']}")
    lines.append(f"{'import poptorch':18} {report['poptorch']}")
    lines += ["", "[targets]"]
    for name, target in report["targets"].items():
        lines.append(f"{name:18} {'yes' if target['available'] else 'no ':3}  {target['says']}")
    machine, pod_state, cache = report["machine"], report["pod"], report["cache"]
    memory = machine["memory_bytes"]
    lines += [
        *("", "[machine]"),
        f"{'system':18} {machine['system']}",
        f"{'processor':18} {machine['processor'] or '?'}, {machine['cores']} of {machine['cores_of_machine']} cores",
        f"{'memory':18} {memory / 2**30:.1f} GiB" if memory else f"{'memory':18} ?",
        f"{'features':18} {' '.join(machine['cpu_features']) or '-'}",
        f"{'emulated pod':18} {pod_state['ipus']} IPUs, {pod_state['in_use']} in use",
        f"{'executable cache':18} {cache['folder']}: {cache['state']}, {cache['entries']} entries, "
        f"{cache['bytes']:,} bytes",
        *("", "[environment]"),
    ]
    lines += [f"{name}={value}" for name, value in report["environment"].items()] or ["(nothing that matters is set)"]
    lines += ["", "[findings]"]
    lines += [f"{each['level']}: {each['message']}" for each in report["findings"]] or ["nothing is wrong"]
    return lines


def _ipu_table(rows: List[Dict[str, Any]]) -> List[str]:
    used = sum(1 for row in rows if row["pid"] is not None)
    head = f"emulated pod, partition {rows[0]['partition']}: {len(rows)} IPUs, {used} in use"
    cells = [["partition", "id", "type", "pid", "program", "model", "since"]]
    for row in rows:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since"])) if row["since"] else None
        values = [*(row[name] for name in cells[0][:-1]), since]
        cells.append(["-" if value is None else str(value) for value in values])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [head, *("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)]
