# SPDX-License-Identifier: Apache-2.0
"""Which rows each host call reads: a pure function of the seed and the epoch, so that a resumed run reads the same."""

import hashlib
from dataclasses import dataclass
from typing import Dict, Iterator, Mapping, Optional, Tuple, Union

import numpy as np
import torch

from ipu_finetune.batching import BatchPlan

__all__ = ["FILLER", "TrainingRows", "epoch_order", "host_batches", "loss_weights", "order_hash", "read_batch"]

FILLER = -1  # stands for a row without weight that fills the last combined batch


@dataclass(frozen=True)
class TrainingRows:
    """What is trained on: one sequence in each row, or packs.

    Attributes:
        columns: inputs and labels, each [rows, ...].
        valid: bool, [rows, ...]: the elements that the loss is a mean of; None: each row is one.
        sequences: [rows], how many sequences a row holds; None: one.
        tokens: [rows], how many real tokens; None: the sum of the column `attention_mask`, where there is one.
    """

    columns: Mapping[str, np.ndarray]
    valid: Optional[np.ndarray] = None
    sequences: Optional[np.ndarray] = None
    tokens: Optional[np.ndarray] = None

    @classmethod
    def of(cls, data: Union["TrainingRows", Mapping[str, np.ndarray]]) -> "TrainingRows":
        """Return `data`, or the rows that plain columns are."""
        return data if isinstance(data, TrainingRows) else cls(data)

    def counts(self, rows: np.ndarray) -> Tuple[int, int]:
        """Return the sequences and the real tokens of some rows; fillers have neither."""
        real = rows[rows != FILLER]
        sequences = len(real) if self.sequences is None else int(self.sequences[real].sum())
        if self.tokens is not None:
            return sequences, int(self.tokens[real].sum())
        mask = self.columns.get("attention_mask")
        return sequences, 0 if mask is None else int(mask[real].sum())


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of ``range(rows)`` that an epoch reads, int64 of shape [rows]."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(rows).astype(np.int64)


def host_batches(plan: BatchPlan, seed: int, epoch: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yield the row numbers of each host call of an epoch, [combined batch], from call number `first` on.

    With ``drop_last=False`` the last call is filled up with `FILLER`.
    """
    order = epoch_order(plan.rows, seed, epoch)
    for call in range(first, plan.host_batches):
        rows = order[call * plan.combined_batch : (call + 1) * plan.combined_batch]
        if len(rows) < plan.combined_batch:
            rows = np.concatenate([rows, np.full(plan.combined_batch - len(rows), FILLER, dtype=np.int64)])
        yield rows


def order_hash(plan: BatchPlan, seed: int) -> str:
    """Return the SHA-256 of the first epoch's order: equal where two runs read the same rows in the same order."""
    return hashlib.sha256(epoch_order(plan.rows, seed, 0).tobytes()).hexdigest()


def loss_weights(valid: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
    """Weigh each element of a combined batch so that an update's loss is the mean over its valid elements.

    A device averages its micro-batches; where they hold different numbers of valid elements, a mean of means is not the
    mean. Each micro-batch's loss is therefore the weighted *sum* of its elements, with the weight
    ``micro-batches per update / valid elements per update``.

    Args:
        valid: bool, [combined batch] or [combined batch, ...] (for a loss per token); False has no part in the loss.
        plan: the batch arithmetic.

    Returns:
        float32 of the same shape; 0 where not valid.
    """
    per_update = valid.reshape(plan.device_iterations, -1)
    counts = per_update.sum(dim=1, keepdim=True).clamp(min=1)
    weights = per_update.float() * (plan.gradient_accumulation * plan.replicas) / counts
    return weights.reshape(valid.shape)


def read_batch(
    data: Union[TrainingRows, Mapping[str, np.ndarray]], rows: np.ndarray, plan: BatchPlan
) -> Tuple[Dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a host call, each [combined batch, ...], and the weight of each element of the loss.

    Elements are rows, unless the data says otherwise. A filler row repeats row 0, with weight 0.
    """
    data = TrainingRows.of(data)
    valid = rows != FILLER
    index = np.where(valid, rows, 0)
    if data.valid is not None:
        elements = data.valid[index]
        valid = elements & valid.reshape(-1, *[1] * (elements.ndim - 1))
    batch = {name: torch.from_numpy(np.ascontiguousarray(column[index])) for name, column in data.columns.items()}
    return batch, loss_weights(torch.from_numpy(valid), plan)
