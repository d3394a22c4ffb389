# SPDX-License-Identifier: Apache-2.0
"""Does the emulator reach the F1 of plain PyTorch? MiniLM on XQuAD, both targets, several seeds.

    python -m benchmarks.xquad_parity /path/to/xquad.en.json --seeds 1 2 3 --epochs 3

The recipe is `minilm squad` at the settings of the published figures (batch 8, peak learning rate 2e-4, 10 % warm-up,
decay planned over 8 epochs); each run stops after `--epochs` and is evaluated after each of them. The two targets run
side by side with one thread each, seed by seed. Writes `results/xquad_parity.json`; finished runs are kept in `--work`
and not made again.
"""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks._common import run_command, write_result

PLANNED_EPOCHS = 8
TARGETS = ("cpu", "emulator")


def one_run(arguments, target, seed, work):
    """Make one run, or read it where it was made before; return F1 after each epoch."""
    output = work / f"{target}-{seed}"
    if not (output / "record.json").exists():
        run_command(
            "minilm",
            "squad",
            "--data",
            arguments.data,
            "--target",
            target,
            "--seed",
            seed,
            "--output",
            output,
            "--overwrite",
            "--max-steps",
            arguments.epochs * arguments.updates,
            *(part for setting in settings(arguments) for part in ("--set", setting)),
            threads=1,
        )
    record = json.loads((output / "record.json").read_text())
    epochs = [*record["evaluations"], {"step": record["batch"]["updates"], **record["metrics"]}]
    assert [row["step"] for row in epochs] == [(i + 1) * arguments.updates for i in range(arguments.epochs)]
    return {
        "target": target,
        "seed": seed,
        "f1": [round(row["f1"], 3) for row in epochs],
        "exact_match": [round(row["exact_match"], 3) for row in epochs],
        "examples": record["metrics"]["examples"],
        "train_seconds": record["seconds"]["train"],
        "features_sha256": record["features_sha256"],
        "order_sha256": record["order_sha256"],
    }


def settings(arguments):
    """Return the --set options of every run."""
    return [
        f"training.epochs={PLANNED_EPOCHS}",
        f"training.eval_steps={arguments.updates}",
        "training.learning_rate=2e-4",
        "training.eval_batch_size=8",
        *arguments.set,
    ]


def main():
    """Run both targets for each seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--updates", type=int, required=True, help="updates per epoch, as the run prints them")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "xquad_parity")
    parser.add_argument("--name", default="xquad_parity")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in arguments.seeds:
        with ThreadPoolExecutor(len(TARGETS)) as pool:
            runs += pool.map(partial(one_run, arguments, seed=seed, work=arguments.work), TARGETS)
    means = {
        target: [
            round(statistics.mean(run["f1"][epoch] for run in runs if run["target"] == target), 3)
            for epoch in range(arguments.epochs)
        ]
        for target in TARGETS
    }
    difference = [round(emulated - plain, 3) for plain, emulated in zip(means["cpu"], means["emulator"])]
    write_result(
        arguments.name,
        {
            "what": "F1 on XQuAD (en), minilm squad, after each epoch; mean over seeds",
            "settings": settings(arguments),
            "planned_epochs": PLANNED_EPOCHS,
            "seeds": arguments.seeds,
            "mean_f1": means,
            "emulator_minus_cpu": difference,
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
