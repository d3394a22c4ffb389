# SPDX-License-Identifier: Apache-2.0
"""What does the emulator cost over a hand-written PyTorch loop, and how long does it trace BERT-large?

    python -m benchmarks.emulator_overhead [--rounds 15]

The step is a MiniLM-size BERT (6 layers, hidden 384) for question answering: micro-batch 8 at length 256, two
micro-batches per weight update, AdamW, fp32, without dropout (its random numbers would have to be drawn from the same
state in both). Both sides compute the same loss from the same weights, which is checked; they take turns step by step
in one process. Writes `results/emulator_overhead.json`.
"""

import argparse
import copy
import statistics
import time

import torch
import transformers

from benchmarks._common import write_result
from ipu_finetune.emulator import poptorch

LENGTH, BATCH, ACCUMULATION = 256, 8, 2


class Answers(torch.nn.Module):
    """Returns the loss of question answering."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, start_positions, end_positions):
        """Compute the loss."""
        mask = torch.ones_like(input_ids)
        loss = self.model(
            input_ids, attention_mask=mask, start_positions=start_positions, end_positions=end_positions
        ).loss
        return poptorch.identity_loss(loss, "none")


def _config(**sizes):
    return transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)


def _batch(count, vocabulary):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (count, LENGTH), generator=generator)
    starts = torch.randint(0, LENGTH - 8, (count,), generator=generator)
    return ids, starts, starts + 4


def overhead(rounds):
    """Return the milliseconds of one weight update on both sides, and their ratio."""
    config = _config(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    torch.manual_seed(0)
    plain = Answers(transformers.BertForQuestionAnswering(config))
    wrapped = copy.deepcopy(plain)
    options = poptorch.Options()
    options.Training.gradientAccumulation(ACCUMULATION)
    options.outputMode(poptorch.OutputMode.Sum)
    emulated = poptorch.trainingModel(wrapped, options, torch.optim.AdamW(wrapped.parameters(), lr=1e-5))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
    batch = _batch(BATCH * ACCUMULATION, config.vocab_size)

    def plain_step():
        losses = []
        for part in zip(*[tensor.split(BATCH) for tensor in batch]):
            loss = plain(*part)
            (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    def emulated_step():
        return emulated(*batch)

    sides = {"plain": plain_step, "emulated": emulated_step}
    first = {name: float(step()) for name, step in sides.items()}
    assert abs(first["plain"] - first["emulated"]) < 1e-4, first
    seconds = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sorted(sides, reverse=bool(turn % 2)):
            started = time.perf_counter()
            last = float(sides[name]())
            seconds[name].append(time.perf_counter() - started)
            first[name] = last
    assert abs(first["plain"] - first["emulated"]) < 1e-2, first
    ratios = [mine / theirs for mine, theirs in zip(seconds["emulated"], seconds["plain"])]
    return {
        "plain_ms": round(1e3 * statistics.median(seconds["plain"]), 1),
        "emulated_ms": round(1e3 * statistics.median(seconds["emulated"]), 1),
        "ratio_of_medians": round(statistics.median(seconds["emulated"]) / statistics.median(seconds["plain"]), 4),
        "median_of_ratios": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
        "rounds": rounds,
    }


def trace_bert_large():
    """Return the seconds that compiling BERT-large for training takes, without running it."""
    model = Answers(
        transformers.BertForQuestionAnswering(
            _config(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        )
    )
    emulated = poptorch.trainingModel(model, optimizer=torch.optim.AdamW(model.parameters()))
    started = time.perf_counter()
    emulated.compile(*_batch(1, 30522))
    seconds = time.perf_counter() - started
    graph = emulated._program.trace.graph
    return {"compile_seconds": round(seconds, 2), "operators": sum(1 for _ in graph.operations())}


def main():
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    result = {
        "what": "one weight update of a MiniLM-size BERT, 2 micro-batches of 8 at length 256, fp32, AdamW",
        "threads": torch.get_num_threads(),
        "step": overhead(arguments.rounds),
        "bert_large": trace_bert_large(),
    }
    print(result)
    write_result("emulator_overhead", result)


if __name__ == "__main__":
    main()
