# SPDX-License-Identifier: Apache-2.0
"""How much memory does the emulator need for BERT-large at its real size?

    python -m benchmarks.bert_large_memory

Two weight updates of `bert-large squad` at sequence length 384 with the recipe's 4-stage pipeline, weights drawn from
the config, on the embedded question-answering data. Writes `results/bert_large_memory.json`.
"""

import tempfile
from pathlib import Path

from benchmarks._common import run_command, write_result

DATA = Path(__file__).resolve().parents[1] / "ipu_finetune" / "tasks" / "samples" / "squad_sample.json"


def main():
    """Run it and write the figures."""
    with tempfile.TemporaryDirectory() as folder:
        _, record = run_command(
            "bert-large",
            "squad",
            "--data",
            DATA,
            "--target",
            "emulator",
            "--set",
            "model.init=config",
            "--set",
            "training.global_batch_size=8",
            "--set",
            "task.validate_every=40",
            "--max-steps",
            2,
            "--output",
            Path(folder) / "run",
        )
    write_result(
        "bert_large_memory",
        {
            "what": "bert-large squad, drawn weights, 2 weight updates of 8 sequences at length 384, emulated",
            "peak_memory_gib": round(record["peak_memory_bytes"] / 2**30, 2),
            "hardware": record["hardware"],
            "batch": record["batch"],
            "seconds": record["seconds"],
            "loss": record["loss"],
            "metrics_examples": record["metrics"]["examples"],
        },
    )


if __name__ == "__main__":
    main()
