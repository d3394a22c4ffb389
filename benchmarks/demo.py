# SPDX-License-Identifier: Apache-2.0
"""How good is the demo, and how long does it take? Writes `results/demo.json`.

    python -m benchmarks.demo

Runs `ipu-finetune minilm squad-sample` from start to exit, as `make demo` does after installing.
"""

import tempfile
import time
from pathlib import Path

from benchmarks._common import run_command, write_result


def main():
    """Run it and write the figures."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result, record = run_command("minilm", "squad-sample", "--output", Path(folder) / "run")
        seconds = time.perf_counter() - started
    write_result(
        "demo",
        {
            "what": "ipu-finetune minilm squad-sample, from start to exit, emulated",
            "seconds": round(seconds, 1),
            "metrics": result["metrics"],
            "batch": record["batch"],
            "phases": record["seconds"],
            "throughput": record["throughput"],
            "peak_memory_gib": round(record["peak_memory_bytes"] / 2**30, 2),
        },
    )


if __name__ == "__main__":
    main()
