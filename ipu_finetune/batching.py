# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic: how the rows of a data set become weight updates.

The words are DESIGN's: a *micro-batch* is what a replica sees at once, the *global batch* is what one weight update
sees, the *combined batch* is what one host call consumes.

```
combined batch = micro-batch × device iterations × gradient accumulation × replicas
global batch   = micro-batch × gradient accumulation × replicas
```

The host hands a combined batch over as ``[device iterations, gradient accumulation, replicas, micro-batch]``, so each
run of ``global batch`` consecutive rows is one weight update.
"""

import math
from dataclasses import dataclass
from typing import List, Optional

from ipu_finetune.errors import DataError, RecipeError

__all__ = ["BatchPlan", "gradient_accumulation"]

# A recipe states its global batch in sequences. A pod may not be able to make exactly that number; above this
# relative difference the run would no longer be the same optimisation, so it is refused instead of rounded.
ROUNDING_LIMIT = 0.1
# How many sequences share a pack is up to the data, so the nearest number can be further away.
PACKED_ROUNDING_LIMIT = 0.2


def gradient_accumulation(
    global_batch_size: int, micro_batch_size: int, replicas: int, sequences_per_pack: Optional[float] = None
) -> int:
    """Return the micro-batches per replica and update that make `global_batch_size`, rounded to the nearest.

    Args:
        global_batch_size: sequences of one update.
        micro_batch_size: rows, or packs, that a replica sees at once.
        replicas: copies of the pipeline.
        sequences_per_pack: mean number of sequences in a pack; None where each row is one sequence.

    Raises:
        RecipeError: the nearest possible global batch differs by more than 10 %, or 20 % with packing.
    """
    if sequences_per_pack is not None:
        return _packed_accumulation(global_batch_size, micro_batch_size, replicas, sequences_per_pack)
    per_accumulation = micro_batch_size * replicas
    accumulation = max(1, round(global_batch_size / per_accumulation))
    possible = accumulation * per_accumulation
    if abs(possible - global_batch_size) > ROUNDING_LIMIT * global_batch_size:
        fixes = [f"a global batch that is a multiple of {per_accumulation}"]
        if global_batch_size % replicas == 0:
            fixes.append(f"training.micro_batch_size={global_batch_size // replicas}")
        if replicas > 1 and global_batch_size % micro_batch_size == 0:
            fewer = max(n for n in range(1, replicas) if global_batch_size % (micro_batch_size * n) == 0)
            fixes.append(f"fewer replicas (ipu.replication_factor={fewer})")
        raise RecipeError(
            [
                f"training.global_batch_size={global_batch_size} cannot be made from micro-batch {micro_batch_size} × "
                f"{replicas} replicas (nearest: {possible}); use {', or '.join(fixes)}"
            ]
        )
    return accumulation


def _packed_accumulation(
    global_batch_size: int, micro_batch_size: int, replicas: int, sequences_per_pack: float
) -> int:
    per_accumulation = micro_batch_size * replicas * sequences_per_pack
    accumulation = max(1, round(global_batch_size / per_accumulation))
    possible = accumulation * per_accumulation
    if abs(possible - global_batch_size) <= PACKED_ROUNDING_LIMIT * global_batch_size:
        return accumulation
    fixes = [f"training.global_batch_size={max(1, round(possible))}"]
    if micro_batch_size > 1:
        fixes.append(f"training.micro_batch_size={micro_batch_size // 2}")
    if replicas > 1:
        fixes.append("fewer replicas (ipu.replication_factor)")
    raise RecipeError(
        [
            f"training.global_batch_size={global_batch_size} cannot be made from micro-batch {micro_batch_size} packs "
            f"× {replicas} replicas × {sequences_per_pack:.2f} sequences per pack (nearest: {possible:.1f}); use "
            f"{', or '.join(fixes)}, or packing.enabled=false"
        ]
    )


@dataclass(frozen=True)
class BatchPlan:
    """Every factor between a data set and its weight updates.

    Attributes:
        rows: rows (features, or packs) in one epoch.
        micro_batch_size: rows that a replica sees at once.
        gradient_accumulation: micro-batches per replica and weight update.
        replicas: copies of the pipeline.
        device_iterations: weight updates per host call.
        drop_last: leave the rows that do not fill a combined batch unused (they are counted); False fills the last
            combined batch with rows that have no weight in the loss.
        epochs: passes over the data that the schedule is planned for; may be a fraction.
        max_steps: stop after that many weight updates; the schedule stays planned over `epochs`.
        sequences: sequences in all rows, where rows are packs; None where each row is one sequence.
    """

    rows: int
    micro_batch_size: int
    gradient_accumulation: int = 1
    replicas: int = 1
    device_iterations: int = 1
    drop_last: bool = True
    epochs: float = 1.0
    max_steps: Optional[int] = None
    sequences: Optional[int] = None

    @property
    def global_batch(self) -> int:
        """Rows that one weight update sees."""
        return self.micro_batch_size * self.gradient_accumulation * self.replicas

    @property
    def packed(self) -> bool:
        """Whether a row can hold several sequences."""
        return self.sequences is not None

    @property
    def sequences_per_row(self) -> float:
        """Mean number of sequences in a row; 1 without packing."""
        return 1.0 if self.sequences is None else self.sequences / max(1, self.rows)

    @property
    def sequences_per_update(self) -> float:
        """Mean number of sequences that one weight update sees."""
        return self.global_batch * self.sequences_per_row

    @property
    def combined_batch(self) -> int:
        """Rows that one host call consumes."""
        return self.global_batch * self.device_iterations

    @property
    def host_batches(self) -> int:
        """Host calls in one epoch."""
        if self.drop_last:
            return self.rows // self.combined_batch
        return math.ceil(self.rows / self.combined_batch)

    @property
    def updates_per_epoch(self) -> int:
        """Weight updates in one epoch."""
        return self.host_batches * self.device_iterations

    @property
    def unused_rows(self) -> int:
        """Rows of each epoch that no update sees (others each epoch, since every epoch has its own order)."""
        return self.rows % self.combined_batch if self.drop_last else 0

    @property
    def filler_rows(self) -> int:
        """Rows without weight that fill the last combined batch of an epoch."""
        return 0 if self.drop_last else -self.rows % self.combined_batch

    @property
    def planned_updates(self) -> int:
        """Weight updates that the learning-rate schedule is planned for."""
        return math.ceil(round(self.epochs * self.updates_per_epoch, 6))

    @property
    def total_updates(self) -> int:
        """Weight updates that the run makes; a whole number of host calls."""
        wanted = self.planned_updates if self.max_steps is None else min(self.max_steps, self.planned_updates)
        return math.ceil(wanted / self.device_iterations) * self.device_iterations

    def check(self) -> None:
        """Stop, before anything is compiled, where these factors cannot train.

        Raises:
            DataError: the data set is smaller than one combined batch.
            RecipeError: filling the last batch would make updates without a single real row.
        """
        if self.rows < self.combined_batch and (self.drop_last or self.rows == 0):
            raise DataError(self._too_small())
        empty = self.filler_rows // self.global_batch
        if empty:
            raise RecipeError(
                [
                    f"training.drop_last=false: the last combined batch has {self.rows % self.combined_batch} real and "
                    f"{self.filler_rows} filler rows, so {empty} of its {self.device_iterations} updates would hold no "
                    "real row, and an optimizer with momentum moves the weights even then; use "
                    "ipu.device_iterations=1 or training.drop_last=true"
                ]
            )

    def _too_small(self) -> str:
        per_accumulation = self.micro_batch_size * self.replicas * self.device_iterations
        product = (
            f"{self.micro_batch_size}×{self.replicas}×{self.gradient_accumulation}×{self.device_iterations}"
            f"={self.combined_batch} > {self.rows}"
        )
        accumulation = self.rows // per_accumulation
        if accumulation:
            batch = accumulation * self.micro_batch_size * self.replicas
            fix = f"use accumulation ≤ {accumulation} (training.global_batch_size ≤ {batch})"
        else:
            fix = (
                f"even accumulation 1 needs {per_accumulation} rows: use fewer replicas, a smaller micro-batch or "
                "ipu.device_iterations=1"
            )
        return (
            "the data set is smaller than one combined batch "
            f"(micro-batch × replicas × accumulation × device iterations): {product}; {fix}"
        )

    def lines(self, asked_global_batch: Optional[int] = None) -> List[str]:
        """Describe the plan, factor by factor, in the words of the documentation."""
        counted = (
            f"{self.rows:,} features"
            if self.sequences is None
            else f"{self.sequences:,} features in {self.rows:,} packs"
        )
        seen = f"{self.global_batch:,}" if self.sequences is None else f"{self.sequences_per_update:,.1f}"
        unit = "packs" if self.packed else "rows"
        first = (
            f"{counted} · combined batch {self.micro_batch_size} × {self.device_iterations} × "
            f"{self.gradient_accumulation} × {self.replicas} = {self.combined_batch:,} {unit} (micro-batch × device "
            f"iterations × accumulation × replicas) · {seen} sequences per update"
        )
        if asked_global_batch is not None and asked_global_batch != self.sequences_per_update:
            first += f" (recipe: {asked_global_batch:,}, rounded)"
        rest = f"{self.host_batches:,} host batches ({self.updates_per_epoch:,} optimizer updates) per epoch"
        if self.drop_last:
            unit = "packs" if self.packed else "records"
            rest += f", {self.unused_rows:,} of {self.rows:,} {unit} unused per epoch"
        else:
            rest += f", {self.filler_rows:,} filler rows without weight in the last"
        planned = f"{self.planned_updates:,} updates planned over {self.epochs:g} epochs"
        if self.total_updates != self.planned_updates:
            planned += f", stopping after {self.total_updates:,}"
        return [first, rest, planned]
