# SPDX-License-Identifier: Apache-2.0
"""How well, and how fast, are packs planned? Writes `results/packing_plan.json`.

    python -m benchmarks.packing_plan /path/to/length_histograms.json [--rounds 7]

The file holds the published histograms of arXiv 2107.02027 under `wikipedia_512` and `squad11_384`; entry i is the
number of sequences of i + 1 tokens. Every algorithm plans each of them at several limits of sequences per pack. Then
ten million lengths, drawn from the Wikipedia histogram, are planned and assigned to packs. Peak memory is what Python
and numpy allocate on top of what there was before, measured in a run of its own.
"""

import argparse
import json
import statistics
import time
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks._common import write_result
from ipu_finetune.packing.plan import ALGORITHMS, assign, from_histogram, from_lengths

LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 512)
LENGTHS, CHUNK = 10_000_000, 100_000


def timed(rounds, function):
    """Return what the function returns, and its median seconds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - started)
    return result, round(statistics.median(seconds), 4)


def peak_megabytes(function):
    """Return the most memory that the function holds at once."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / 1e6, 1)


def plans_of(name, counts, rounds):
    """Plan one histogram with each algorithm at each limit."""
    rows = []
    for max_sequences in LIMITS:
        for algorithm in ALGORITHMS:
            plan, seconds = timed(
                rounds, lambda a=algorithm, m=max_sequences: from_histogram(counts, len(counts), m, a)
            )
            row = {
                "histogram": name,
                "max_sequences": max_sequences,
                "algorithm": algorithm,
                "efficiency_percent": round(100 * plan.efficiency, 4),
                "possible_percent": round(100 * plan.tokens / (plan.lower_bound * plan.max_length), 4),
                "packs": plan.packs,
                "sequences_per_pack": round(plan.sequences_per_pack, 5),
                "strategies": len(plan.strategies),
                "median_seconds": seconds,
            }
            print("{histogram} {max_sequences} {algorithm}: {efficiency_percent} % in {median_seconds} s".format(**row))
            rows.append(row)
    return rows


def ten_million(counts, rounds):
    """Plan and assign ten million lengths that come in chunks."""
    rng = np.random.default_rng(0)
    lengths = rng.choice(np.arange(1, len(counts) + 1, dtype=np.int16), LENGTHS, p=counts / counts.sum())

    def chunks():
        return (lengths[start : start + CHUNK] for start in range(0, LENGTHS, CHUNK))

    def plan_all():
        return from_lengths(chunks(), len(counts), 3)

    plan, seconds = timed(rounds, plan_all)
    _, numbers_seconds = timed(1, lambda: from_lengths((int(length) for length in lengths), len(counts), 3))
    packs, assign_seconds = timed(rounds, lambda: assign(plan, lengths, seed=0))
    result = {
        "lengths": LENGTHS,
        "max_sequences": 3,
        "efficiency_percent": round(100 * plan.efficiency, 4),
        "packs": len(packs),
        "strategies": len(plan.strategies),
        "plan_median_seconds": seconds,
        "plan_peak_megabytes": peak_megabytes(plan_all),
        "plan_from_single_numbers_seconds": numbers_seconds,
        "assign_median_seconds": assign_seconds,
        "assign_peak_megabytes": peak_megabytes(lambda: assign(plan, lengths, seed=0)),
    }
    print(json.dumps(result, indent=1))
    return result


def main():
    """Plan the published histograms and ten million lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("histograms", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    histograms = json.loads(arguments.histograms.read_text())
    rows = []
    for name in ("wikipedia_512", "squad11_384"):
        rows += plans_of(name, np.array(histograms[name]), arguments.rounds)
    large = ten_million(np.array(histograms["wikipedia_512"]), min(arguments.rounds, 3))
    write_result(
        "packing_plan",
        {
            "what": "efficiency of packing plans, and median seconds of "
            f"{arguments.rounds} (ten million lengths: of {min(arguments.rounds, 3)})",
            "ten_million_lengths": large,
            "plans": rows,
        },
    )


if __name__ == "__main__":
    main()
