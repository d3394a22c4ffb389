# SPDX-License-Identifier: Apache-2.0
"""How long do the commands take that load nothing heavy? Writes `results/startup.json`.

python -m benchmarks.startup
"""

import statistics
import subprocess
import sys
import time

from benchmarks._common import write_result

COMMANDS = {"--help": ["--help"], "ls": ["ls"], "show bert-large squad": ["show", "bert-large", "squad"]}
ROUNDS = 11


def main():
    """Time each command in turn, several times."""
    times = {name: [] for name in [*COMMANDS, "python -c pass"]}
    for _ in range(ROUNDS):
        for name in times:
            tail = ["-m", "ipu_finetune", *COMMANDS[name]] if name in COMMANDS else ["-c", "pass"]
            started = time.perf_counter()
            subprocess.run([sys.executable, *tail], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started)
    write_result(
        "startup",
        {
            "what": f"seconds from start to exit, median of {ROUNDS}, the commands in turn",
            "median_seconds": {name: round(statistics.median(values), 3) for name, values in times.items()},
            "max_seconds": {name: round(max(values), 3) for name, values in times.items()},
        },
    )


if __name__ == "__main__":
    main()
