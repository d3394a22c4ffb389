# SPDX-License-Identifier: Apache-2.0
"""What does packing bring on the emulator, in speed and in quality? MiniLM on XQuAD, packed and padded, several seeds.

    python -m benchmarks.packing_xquad /path/to/xquad.en.json --seeds 1 2 3 --epochs 2

The recipe is `minilm squad` with its settings; the sides differ in `packing.enabled`, and in the global batch of the
padded side, which is set to the sequences that an update of packs sees. They take turns, seed by seed. A speed is the
median over the host calls of one run; the ratio is of the two sides' medians over seeds. Writes
`results/packing_xquad.json`; finished runs are kept in `--work` and not made again.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks._common import run_command, write_result

SIDES = ("packed", "padded")


def one_run(arguments, side, seed, batch):
    """Make one run, or read it where it was made before; return its record."""
    output = arguments.work / f"{side}-{seed}"
    if not (output / "record.json").exists():
        settings = [f"training.epochs={arguments.epochs}", f"training.global_batch_size={batch}"]
        settings += [f"packing.enabled={str(side == 'packed').lower()}", "training.eval_batch_size=8"]
        words = ["minilm", "squad", "--data", arguments.data, "--target", "emulator", "--seed", seed]
        words += ["--output", output, "--overwrite", "--quiet"]
        run_command(*words, *(part for setting in settings for part in ("--set", setting)), threads=2)
    return json.loads((output / "record.json").read_text())


def figures(side, seed, record):
    """Return what the result file keeps of a run."""
    return {
        "side": side,
        "seed": seed,
        "f1": round(record["metrics"]["f1"], 3),
        "exact_match": round(record["metrics"]["exact_match"], 3),
        "examples": record["metrics"]["examples"],
        "sequences_per_update": record["batch"]["sequences_per_update"],
        "updates": record["batch"]["updates"],
        "sequences": record["batch"]["sequences"],
        "train_seconds": record["seconds"]["train"],
        "real_tokens_per_second": record["throughput"]["real_tokens_per_second"],
        "packing": record["packing"],
    }


def main():
    """Run both sides for each seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="the recipe's global batch of the packed side")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "packing_xquad")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in arguments.seeds:
        record = one_run(arguments, "packed", seed, arguments.batch)
        runs.append(figures("packed", seed, record))
        even = 2 * round(record["batch"]["sequences_per_update"] / 2)  # the recipe's micro-batch is 2 rows
        runs.append(figures("padded", seed, one_run(arguments, "padded", seed, even)))
        print(*runs[-2:], sep="\n", flush=True)
    speeds = {
        side: statistics.median(run["real_tokens_per_second"]["median"] for run in runs if run["side"] == side)
        for side in SIDES
    }
    quality = {side: statistics.mean(run["f1"] for run in runs if run["side"] == side) for side in SIDES}
    write_result(
        "packing_xquad",
        {
            "what": "minilm squad on XQuAD (en) at 384, emulated: real tokens per second and F1, packed and padded",
            "epochs": arguments.epochs,
            "seeds": arguments.seeds,
            "median_real_tokens_per_second": speeds,
            "speed_ratio": round(speeds["packed"] / speeds["padded"], 3),
            "mean_f1": {side: round(value, 3) for side, value in quality.items()},
            "f1_packed_minus_padded": round(quality["packed"] - quality["padded"], 3),
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
