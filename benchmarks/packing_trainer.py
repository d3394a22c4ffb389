# SPDX-License-Identifier: Apache-2.0
"""How fast is packed training on the cpu target beside transformers' own Trainer at its best settings?

    python -m benchmarks.packing_trainer /path/to/xquad.en.json [--updates 12 --rounds 3]

MiniLM (6 layers, hidden 384, weights drawn from the config) for question answering on XQuAD's windows of at most 384
tokens, 8 sequences per update, AdamW, no dropout. The installed transformers' Trainer runs with `group_by_length` and
padding to the longest of a batch, in fp32 and, where the processor has it, in bf16; ours on packs, in fp32. All take
turns in one process. A rate is real tokens over the seconds of the updates, without evaluation and checkpoints: median
of the rounds. Writes `results/packing_trainer.json`.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from benchmarks._common import write_result
from ipu_finetune import load_recipe
from ipu_finetune._overrides import apply
from ipu_finetune.batching import BatchPlan, gradient_accumulation
from ipu_finetune.models import pretrained
from ipu_finetune.packing.rows import PackedRows
from ipu_finetune.tasks import create
from ipu_finetune.training.order import TrainingRows, host_batches, read_batch
from ipu_finetune.training.reference import ReferenceEngine

BATCH = 8


def prepare(path):
    """Return recipe, task and features."""
    recipe, _ = apply(load_recipe("minilm", "squad"), [f"task.data={path}"])
    source = pretrained.find_checkpoint(recipe.model.checkpoint)
    task = create(recipe.task, pretrained.load_tokenizer(source))
    features = task.features(task.load().train, training=True)
    return recipe, source, task, features


def model_of(recipe, source):
    """Return a new model with the same drawn weights as any other."""
    torch.manual_seed(0)
    config = pretrained.load_config(source, 0.0)
    return transformers.BertForQuestionAnswering(config)


def trainer_round(recipe, source, task, features, updates, bf16):
    """Return the real tokens per second of some updates of transformers' Trainer."""
    rows = []
    for row in range(len(features)):
        each = features[row]
        length = int(each["attention_mask"].sum())
        names = ("input_ids", "attention_mask", "token_type_ids")
        rows.append(
            {
                **{name: each[name][:length].tolist() for name in names},
                "start_positions": int(each["start_positions"]),
                "end_positions": int(each["end_positions"]),
                "length": length,
            }
        )
    seen = {"tokens": 0, "seconds": 0.0}

    class Timed(transformers.TrainerCallback):
        def on_step_begin(self, *arguments, **others):
            self.started = time.perf_counter()

        def on_step_end(self, *arguments, **others):
            seen["seconds"] += time.perf_counter() - self.started

    collator = transformers.DataCollatorWithPadding(task.tokenizer)

    def collate(items):
        batch = collator([{k: v for k, v in item.items() if k != "length"} for item in items])
        seen["tokens"] += int(batch["attention_mask"].sum())
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            group_by_length=True,
            length_column_name="length",
            bf16=bf16,
            no_cuda=True,
            max_steps=updates,
            learning_rate=2e-4,
            save_strategy="no",
            logging_steps=10**6,
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model_of(recipe, source), arguments, data_collator=collate, train_dataset=rows, callbacks=[Timed()]
        )
        started = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - started
    # Collating, and what the trainer does between steps, is part of its work.
    return seen["tokens"] / whole


def our_round(recipe, source, task, features, updates):
    """Return the real tokens per second of some updates on packs."""
    packing = recipe.packing
    packed = PackedRows.of(task, features.columns, recipe.task.max_length, packing.max_sequences, packing.algorithm)
    per_pack = len(features) / len(packed)
    plan = BatchPlan(
        rows=len(packed),
        micro_batch_size=recipe.training.micro_batch_size,
        gradient_accumulation=gradient_accumulation(BATCH, recipe.training.micro_batch_size, 1, per_pack),
        sequences=len(features),
    )
    engine = ReferenceEngine(
        model_of(recipe, source),
        plan,
        packed.element_loss,
        task.label_names,
        task.output_names,
        recipe.training,
        "cpu",
        packed.wrap,
    )
    rows = TrainingRows(packed.columns, packed.valid, packed.sequences, packed.tokens)
    tokens = 0
    started = time.perf_counter()
    for chosen in itertools.islice(host_batches(plan, 0, 0), updates):
        engine.step(*read_batch(rows, chosen, plan), 2e-4)
        tokens += rows.counts(chosen)[1]
    return tokens / (time.perf_counter() - started)


def main():
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    recipe, source, task, features = prepare(arguments.data)
    given = (recipe, source, task, features, arguments.updates)
    sides = {
        "ours, packed, fp32": lambda: our_round(*given),
        "Trainer, group_by_length, fp32": lambda: trainer_round(*given, bf16=False),
    }
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    has_bf16 = any(name in flags for name in ("avx512_bf16", "amx_bf16"))
    if has_bf16:
        sides["Trainer, group_by_length, bf16"] = lambda: trainer_round(*given, bf16=True)
    rates = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name in sorted(sides, reverse=bool(turn % 2)):
            rates[name].append(sides[name]())
            print(turn, name, round(rates[name][-1], 1), flush=True)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    best = max(value for name, value in medians.items() if name.startswith("Trainer"))
    write_result(
        "packing_trainer",
        {
            "what": "real training tokens per second, MiniLM QA on XQuAD at 384, 8 sequences per update, cpu target",
            "threads": torch.get_num_threads(),
            "bf16_arithmetic": has_bf16,
            "updates": arguments.updates,
            "rounds": arguments.rounds,
            "real_tokens_per_second": {name: [round(rate, 1) for rate in each] for name, each in rates.items()},
            "medians": {name: round(value, 1) for name, value in medians.items()},
            "ratio_to_the_best_trainer": round(medians["ours, packed, fp32"] / best, 3),
        },
    )


if __name__ == "__main__":
    main()
