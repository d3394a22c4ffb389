# SPDX-License-Identifier: Apache-2.0
"""A first forecast of the memory that each pipeline stage of a float16 training job needs, from closed formulas.

With P weights on stage s of S, hidden size h, feed-forward size f, vocabulary V, `a` attention heads, micro-batch B,
sequence length T, R replicas and an IPU's memory C, a stage needs this many bytes:

- **weights** 2 P, in float16. A layer has 4h² + 2hf + 9h + f: its matrices, biases and two norms; the word table V·h.
- **gradients** 2 P: a float16 accumulator for each weight, on the chip (what optimum-graphcore chooses).
- **optimizer** 0 off-chip, else 6 P for Adam, whose first moment is float16 and second float32; over R when sharded.
- **activations** (2(S−1−s)+1) · layers · 2BTh. A micro-batch's forward and backward pass on stage s are 2(S−1−s) steps
  of the pipeline apart; for each of them the inputs of the stage's layers are kept, and the rest is recomputed. Without
  recomputation a layer keeps BT(34h + 5aT) instead of 2BTh (Korthikanti et al. 2022, arXiv 2205.05198, equation 1).
- **temporary** p·C + max(BT(34h + 5aT), 2Vh / factor). The available-memory proportion p is for matrix products,
  lookups and indexing (optimum-graphcore, `matmul_proportion`); beside it there is a layer that runs backwards, or the
  gradient of the word table, made in `factor` pieces.

Not counted: code and control, exchange and I/O buffers, the task's head, position tables. So what is over does not fit,
and what is not over may fit. Layout search, other families and an error band are not part of this.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

from ipu_finetune.hardware import GC200

__all__ = ["Lever", "StageMemory", "TrainingJob", "forecast", "levers", "report"]

_HALF, _MB, _MIB = 2, 10**6, 2**20
_SRAM = GC200.tiles * GC200.sram_kib_per_tile * 1024


@dataclass(frozen=True)
class TrainingJob:
    """An encoder or decoder stack, trained in float16 over a pipeline.

    Attributes:
        layers_per_ipu: transformer layers of each stage.
        hidden: hidden size.
        vocab_size: rows of the word table.
        sequence_length: tokens of a row.
        micro_batch: rows that a replica sees at once.
        heads: attention heads; None for one per 64 hidden.
        intermediate: size of the feed-forward part; None for 4 × hidden.
        embedding_serialization_factor: pieces in which the table's gradient is made.
        embedding_splits_per_ipu: how the table is divided over the stages; None: all of it on stage 0.
        recompute: keep only the layers' inputs between the passes.
        optimizer_state_offchip: keep the moments in the host-attached memory.
        replicated_tensor_sharding: divide what the optimizer keeps on the chip over the replicas.
        replicas: copies of the pipeline.
        matmul_proportion: share of an IPU's memory that one operation may take for itself.
        bytes_per_ipu: memory of one stage.
    """

    layers_per_ipu: Tuple[int, ...]
    hidden: int
    vocab_size: int
    sequence_length: int
    micro_batch: int
    heads: Optional[int] = None
    intermediate: Optional[int] = None
    embedding_serialization_factor: int = 1
    embedding_splits_per_ipu: Optional[Tuple[int, ...]] = None
    recompute: bool = True
    optimizer_state_offchip: bool = True
    replicated_tensor_sharding: bool = False
    replicas: int = 1
    matmul_proportion: float = 0.2
    bytes_per_ipu: int = _SRAM

    @property
    def layer_weights(self) -> int:
        """Weights of one layer."""
        h, f = self.hidden, self.intermediate or 4 * self.hidden
        return 4 * h * h + 2 * h * f + 9 * h + f

    def table_weights(self, stage: int) -> int:
        """Weights of the word table that lie on a stage."""
        splits = self.embedding_splits_per_ipu or (1, *[0] * (len(self.layers_per_ipu) - 1))
        return self.vocab_size * self.hidden * splits[stage] // sum(splits)


class StageMemory(NamedTuple):
    """The forecast of one stage.

    Attributes:
        stage: its number, from 0.
        categories: bytes by category.
        table: bytes of the word table's float16 weights, which are part of them.
        capacity: bytes of the IPU.
    """

    stage: int
    categories: Dict[str, int]
    table: int
    capacity: int

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories.values())

    @property
    def over(self) -> int:
        """Bytes too many; negative: bytes to spare."""
        return self.total - self.capacity


def forecast(job: TrainingJob) -> List[StageMemory]:
    """Return the forecast of each stage; see the module for the formulas."""
    rows = job.micro_batch * job.sequence_length
    heads = job.heads or max(1, job.hidden // 64)
    inside = rows * (34 * job.hidden + 5 * heads * job.sequence_length)
    kept = _HALF * rows * job.hidden if job.recompute else inside
    stages = len(job.layers_per_ipu)
    result = []
    for stage, layers in enumerate(job.layers_per_ipu):
        table = job.table_weights(stage)
        weights = layers * job.layer_weights + table
        moments = 0 if job.optimizer_state_offchip else 6 * weights
        in_flight = 2 * (stages - 1 - stage) + 1
        working = max(inside if layers else 0, _HALF * table // job.embedding_serialization_factor)
        categories = {
            "weights": _HALF * weights,
            "gradients": _HALF * weights,
            "optimizer": moments // (job.replicas if job.replicated_tensor_sharding else 1),
            "activations": in_flight * layers * kept,
            "temporary": round(job.matmul_proportion * job.bytes_per_ipu) + working,
        }
        result.append(StageMemory(stage, categories, _HALF * table, job.bytes_per_ipu))
    return result


class Lever(NamedTuple):
    """One change of the job and what it should bring.

    Attributes:
        name: what to change, as the user would say it.
        job: the job with it.
        saving: bytes on the fullest stage.
        fits: whether all stages fit with it alone.
    """

    name: str
    job: TrainingJob
    saving: int
    fits: bool


def _fullest(job: TrainingJob) -> StageMemory:
    return max(forecast(job), key=lambda stage: stage.over)


def _changes(job: TrainingJob) -> List[Tuple[str, Dict[str, object]]]:
    stages = len(job.layers_per_ipu)
    changes: List[Tuple[str, Dict[str, object]]] = []
    factor = _useful_factor(job)
    if factor > job.embedding_serialization_factor:
        changes.append((f"factor ≥ {factor}", {"embedding_serialization_factor": factor}))
    if job.embedding_splits_per_ipu is None and stages > 1 and job.vocab_size % stages == 0:
        changes.append((f"the table over {stages} stages", {"embedding_splits_per_ipu": (1,) * stages}))
    if job.micro_batch > 1:
        changes.append((f"micro {job.micro_batch // 2}", {"micro_batch": job.micro_batch // 2}))
    if not job.recompute:
        changes.append(("recompute", {"recompute": True}))
    if not job.optimizer_state_offchip:
        changes.append(("optimizer state off-chip", {"optimizer_state_offchip": True}))
    if job.matmul_proportion > 0.1:
        changes.append(("memory proportion 0.1", {"matmul_proportion": 0.1}))
    layers = _spread(sum(job.layers_per_ipu), 2 * stages)
    splits = job.embedding_splits_per_ipu
    wider = (*splits, *[0] * stages) if splits else None
    changes.append((f"{2 * stages} stages", {"layers_per_ipu": layers, "embedding_splits_per_ipu": wider}))
    return changes


def _useful_factor(job: TrainingJob) -> int:
    """Return the smallest power of two at which the table's gradient is no longer what the temporary space is for.

    A factor has to divide the vocabulary; the largest power of two that does is returned where none is enough.
    """
    factor = job.embedding_serialization_factor
    while job.vocab_size % (2 * factor) == 0:
        now = forecast(dataclasses.replace(job, embedding_serialization_factor=factor))
        half = forecast(dataclasses.replace(job, embedding_serialization_factor=2 * factor))
        if now == half:
            break
        factor *= 2
    return factor


def _spread(layers: int, stages: int) -> Tuple[int, ...]:
    # The first stage has the table, so where the layers do not divide it gets fewer.
    return tuple(math.floor(layers * (i + 1) / stages) - math.floor(layers * i / stages) for i in range(stages))


def levers(job: TrainingJob) -> List[Lever]:
    """Return the single changes that save memory on the fullest stage, the largest saving first."""
    before = _fullest(job).over
    found = []
    for name, fields in _changes(job):
        changed = dataclasses.replace(job, **fields)  # type: ignore[arg-type]
        after = _fullest(changed).over
        if after < before:
            found.append(Lever(name, changed, before - after, after <= 0))
    return sorted(found, key=lambda lever: -lever.saving)


def _together(job: TrainingJob) -> Tuple[List[str], TrainingJob]:
    """Take the largest lever of what is left, again and again, until the job fits or nothing helps."""
    names: List[str] = []
    while _fullest(job).over > 0:
        best = next(iter(levers(job)), None)
        if best is None:
            break
        names.append(best.name)
        job = best.job
    return names, job


def _advice(job: TrainingJob) -> str:
    found = levers(job)
    if not found:
        return "nothing here saves memory"
    ranked = [f"{lever.name} (−{lever.saving / _MB:,.1f} MB{', enough' if lever.fits else ''})" for lever in found]
    advice = "try " + " or ".join(ranked)
    if any(lever.fits for lever in found):
        return advice
    names, last = _together(job)
    over = _fullest(last).over
    outcome = "fits" if over <= 0 else f"is still over by {over / _MB:,.1f} MB"
    return f"{advice}; none is enough alone, {' + '.join(names)} {outcome}"


def report(job: TrainingJob) -> str:
    """Return the table of all stages, and of a job that does not fit which is over, by how much, and what to change."""
    stages = forecast(job)
    names = list(stages[0].categories)
    lines = [
        f"forecast, not measured: MB per stage of {job.bytes_per_ipu / _MB:,.1f} MB; without code, exchange and I/O",
        " ".join(["stage", *(f"{name:>11}" for name in names), f"{'total':>11}", f"{'to spare':>11}"]),
    ]
    for stage in stages:
        figures = [*(stage.categories[name] for name in names), stage.total, -stage.over]
        lines.append(" ".join([f"{stage.stage:>5}", *(f"{figure / _MB:>11,.1f}" for figure in figures)]))
    worst = _fullest(job)
    if worst.over <= 0:
        return "\n".join([*lines, "fits (forecast)"])
    name, size = max(worst.categories.items(), key=lambda item: item[1])
    largest = f"embedding {worst.table / _MIB:,.0f} MiB fp16" if worst.table * 2 > worst.categories["weights"] else name
    if largest == name:
        largest = f"{name} {size / _MIB:,.0f} MiB"
    lines.append(f"stage {worst.stage} over by {worst.over / _MB:,.1f} MB (forecast): {largest}; {_advice(job)}")
    return "\n".join(lines)
