# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: running the command, and writing a result file that says where it came from."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ipu_finetune.evaluation.record import environment

RESULTS = Path(__file__).resolve().parent / "results"


def run_command(*arguments, threads=None):
    """Run `ipu-finetune` with --json in a process of its own; return its JSON object and the run's record."""
    environ = dict(os.environ)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "ipu_finetune", *map(str, arguments), "--json"]
    answer = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(answer.stdout)
    return result, json.loads(Path(result["record"]).read_text())


def write_result(name, content):
    """Write `results/<name>.json` with versions and machine beside the figures."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    facts = {key: value for key, value in environment().items() if key != "command"}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": facts, **content}, indent=1) + "\n", encoding="utf-8")
    print(path)
    return path
