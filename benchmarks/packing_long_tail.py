# SPDX-License-Identifier: Apache-2.0
"""How much faster is masked-language-model training on packs than on padded rows, for texts of very unequal length?

    python -m benchmarks.packing_long_tail [--rounds 5]

2,000 texts are split into pieces of at most 512 tokens; nothing is cut off. Two sets, both with half of the texts below
some 160 tokens and 1 % about 1,800 or more: short texts among which one in 60 is a long document, and lengths that are
lognormal throughout, where so many texts are somewhat longer than 512 that padding costs less.
The model is BERT of MiniLM's size with a small vocabulary, fp32, AdamW, on the cpu target's engine. Both sides train on
4 rows of 512 per update; they take turns update by update in one process. A rate is the mean real tokens of the set's
updates over the median seconds. Writes `results/packing_long_tail.json`.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import transformers

from benchmarks._common import write_result
from ipu_finetune.batching import BatchPlan
from ipu_finetune.packing import losses
from ipu_finetune.packing.isolation import PackedModel
from ipu_finetune.packing.packs import pack
from ipu_finetune.packing.policies import cut
from ipu_finetune.recipe import Training
from ipu_finetune.training.order import TrainingRows, host_batches, read_batch
from ipu_finetune.training.reference import ReferenceEngine

LENGTH, ROWS, TEXTS, VOCABULARY = 512, 4, 2000, 4000


def lengths_of(name, rng):
    """Return the tokens of each text."""
    if name == "lognormal":  # exp(ln 160 + 2.326 × 1.05) = 1,840 tokens at the 99th percentile
        drawn = rng.lognormal(np.log(160), 1.05, TEXTS)
    else:
        long = rng.random(TEXTS) < 1 / 60
        drawn = np.where(long, rng.lognormal(np.log(2500), 0.4, TEXTS), rng.lognormal(np.log(155), 0.6, TEXTS))
    return np.maximum(8, drawn).astype(int)


def texts(name):
    """Return the rows of all pieces, and the quantiles of the texts' lengths."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(name, rng)
    width = lengths.max()
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    ids = rng.integers(5, VOCABULARY, (TEXTS, width)) * mask
    labels = np.where((rng.random((TEXTS, width)) < 0.15) & (mask > 0), ids, losses.IGNORED)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    pieces, report = cut(columns, "masked-lm", LENGTH, "split")
    quantiles = {f"p{q}": int(np.percentile(lengths, q)) for q in (50, 90, 99)}
    return pieces, {**quantiles, "pieces": len(report.rows), "tokens": int(lengths.sum())}


def padded_rows(pieces):
    """Return the pieces moved to the left of rows of their own."""
    count = len(pieces["input_ids"])
    rows = {
        "input_ids": np.zeros((count, LENGTH), np.int64),
        "attention_mask": np.zeros((count, LENGTH), np.int64),
        "labels": np.full((count, LENGTH), losses.IGNORED, np.int64),
    }
    for row, kept in enumerate(pieces["attention_mask"].astype(bool)):
        length = kept.sum()
        for name, column in rows.items():
            column[row, :length] = pieces[name][row][kept]
    return TrainingRows(rows, valid=rows["labels"] != losses.IGNORED)


def packed_rows(pieces, max_sequences):
    """Return the pieces as packs, and their plan."""
    packs = pack(pieces, "masked-lm", LENGTH, max_sequences)
    columns = dict(packs.columns)
    valid = losses.valid("masked-lm", columns)
    sequences = columns.pop("slot_valid").sum(axis=1)
    return TrainingRows(columns, valid, sequences, columns["slot_lengths"].sum(axis=1)), packs


def token_loss(outputs, batch):
    """Return the cross entropy of each token, [rows, tokens]."""
    labels = batch["labels"]
    flat = torch.nn.functional.cross_entropy(
        outputs["logits"].float().flatten(0, 1), labels.flatten(), ignore_index=losses.IGNORED, reduction="none"
    )
    return flat.reshape(labels.shape)


def side(rows, wrap, loss):
    """Return a function that makes the next update and returns its real tokens."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    plan = BatchPlan(rows=len(rows.columns["input_ids"]), micro_batch_size=ROWS, epochs=100)
    training = Training(global_batch_size=ROWS, learning_rate=1e-4, micro_batch_size=ROWS)
    engine = ReferenceEngine(
        transformers.BertForMaskedLM(config), plan, loss, ("labels",), ("logits",), training, "cpu", wrap
    )
    batches = host_batches(plan, 0, 0)

    def update():
        chosen = next(batches)
        engine.step(*read_batch(rows, chosen, plan), 1e-4)
        return rows.counts(chosen)[1]

    return update


def measure(name, rounds, max_sequences):
    """Return the figures of one set."""
    pieces, facts = texts(name)
    packed, packs = packed_rows(pieces, max_sequences)
    rows = {"padded": padded_rows(pieces), "packed": packed}
    sides = {
        "padded": side(rows["padded"], None, token_loss),
        "packed": side(
            packed, lambda model: PackedModel(model, "masked-lm", packs.slots), losses.element_loss("masked-lm")
        ),
    }
    seconds = {which: [] for which in sides}
    for update in sides.values():
        update()  # warm-up
    for turn in range(rounds):
        for which in sorted(sides, reverse=bool(turn % 2)):
            started = time.perf_counter()
            sides[which]()
            seconds[which].append(time.perf_counter() - started)
    medians = {which: statistics.median(each) for which, each in seconds.items()}
    rates = {which: facts["tokens"] * ROWS / len(rows[which].columns["input_ids"]) / medians[which] for which in sides}
    return {
        "texts": facts,
        "packing": str(packs),
        "efficiency_packed": round(packs.plan.efficiency, 5),
        "efficiency_padded": round(facts["tokens"] / (facts["pieces"] * LENGTH), 5),
        "median_seconds_per_update": {which: round(each, 4) for which, each in medians.items()},
        "real_tokens_per_second": {which: round(rate, 1) for which, rate in rates.items()},
        "ratio": round(rates["packed"] / rates["padded"], 3),
    }


def main():
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-sequences", type=int, default=12)
    arguments = parser.parse_args()
    sets = {}
    for name in ("documents", "lognormal"):
        sets[name] = measure(name, arguments.rounds, arguments.max_sequences)
        print(name, sets[name], flush=True)
    write_result(
        "packing_long_tail",
        {
            "what": "real tokens per second of masked-LM updates at 512, padded and packed, cpu target, fp32",
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "sets": sets,
        },
    )


if __name__ == "__main__":
    main()
