# SPDX-License-Identifier: Apache-2.0
"""The loss of each element of packed outputs, and which elements count.

An *element* is what has a label of its own: a slot, an item of slots (multiple choice), or a position (token kinds).
The training loop weighs elements so that an update's loss is their mean (`training/order.py`); one that does not count
has weight 0, and since its loss is finite, its gradient is exactly 0.
"""

from typing import Callable, Dict, Mapping

import numpy as np
import torch
from torch.nn import functional

from ipu_finetune.packing.isolation import check_kind

__all__ = ["IGNORED", "LABELS", "element_loss", "valid"]

Tensors = Mapping[str, torch.Tensor]

IGNORED = -100  # Transformers' label of a position without one
# In place of logits outside of a sequence. Far below any logit, and finite in float16 too.
OUTSIDE = -30000.0

# The label columns of each kind.
LABELS: Dict[str, tuple] = {
    "question-answering": ("start_positions", "end_positions"),
    "classification": ("labels",),
    "multi-label": ("labels",),
    "regression": ("labels",),
    "token-classification": ("labels",),
    "multiple-choice": ("labels",),
    "masked-lm": ("labels",),
    "causal-lm": ("labels",),
}


def element_loss(kind: str) -> Callable[[Tensors, Tensors], torch.Tensor]:
    """Return the function from a packed model's outputs and the batch to the loss of each element, float32.

    The shape is [B, S] for kinds with a label per slot, [B, S/C] for multiple choice, [B, L] for kinds with a label per
    token. The element of a causal language model is the token that is predicted, not the one that predicts it.

    Raises:
        RecipeError: packing does not know this kind.
    """
    check_kind(kind)
    return _LOSSES[kind]


def valid(kind: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which elements of packs count, bool of the shape that `element_loss` has.

    As in Transformers, a label of -100 does not count, nor does an answer that lies outside of its sequence.

    Args:
        kind: of the task.
        columns: of the packs, with their labels.

    Raises:
        RecipeError: packing does not know this kind.
    """
    check_kind(kind)
    if kind == "question-answering":
        starts, lengths = columns["slot_starts"], columns["slot_lengths"]
        inside = columns["slot_valid"].astype(bool)
        for name in LABELS[kind]:
            inside = inside & (columns[name] >= starts) & (columns[name] < starts + lengths)
        return inside
    if kind in ("multi-label", "regression"):
        return columns["slot_valid"].astype(bool)
    labelled = columns["labels"] != IGNORED
    if kind == "causal-lm":
        # A first token has nothing in its own sequence that could predict it.
        labelled = labelled & (columns["position_ids"] > 0)
    return labelled


def _answer_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Mean of the start's and the end's cross-entropy, each over the positions of its own sequence only."""
    slots = batch["start_positions"].shape[1]
    sequence_ids = batch["sequence_ids"].unsqueeze(1)
    numbers = torch.arange(1, slots + 1, device=sequence_ids.device, dtype=sequence_ids.dtype)
    outside = sequence_ids != numbers.view(1, slots, 1)
    losses = []
    for logits, labels in (
        (outputs["start_logits"], batch["start_positions"]),
        (outputs["end_logits"], batch["end_positions"]),
    ):
        per_slot = logits.float().unsqueeze(1).expand(-1, slots, -1).masked_fill(outside, OUTSIDE)
        losses.append(_cross_entropy(per_slot, labels.clamp(max=logits.shape[1] - 1)))
    return (losses[0] + losses[1]) / 2


def _class_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Cross-entropy of a class per slot, per item or per token."""
    return _cross_entropy(outputs["logits"].float(), batch["labels"])


def _next_token_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Cross-entropy of each token under the logits of the position before it."""
    # Labels are rolled there and losses back: both are small beside logits. The last element wraps round to the first
    # position, which is the first token of a sequence and so never counts.
    losses = _cross_entropy(outputs["logits"].float(), torch.roll(batch["labels"], -1, 1))
    return torch.roll(losses, 1, 1)


def _multi_label_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Binary cross-entropy, mean over a slot's labels."""
    logits, labels = outputs["logits"].float(), batch["labels"].float()
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=-1)


def _squared_loss(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """Squared error, mean over a slot's values."""
    logits = outputs["logits"].float()
    difference = logits - batch["labels"].float().reshape(logits.shape)
    return (difference * difference).mean(dim=-1)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # An ignored label is taken for class 0: its loss is finite, and its weight is 0.
    flat = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).clamp(min=0), reduction="none"
    )
    return flat.reshape(labels.shape)


_LOSSES: Dict[str, Callable[[Tensors, Tensors], torch.Tensor]] = {
    "question-answering": _answer_loss,
    "classification": _class_loss,
    "multi-label": _multi_label_loss,
    "regression": _squared_loss,
    "token-classification": _class_loss,
    "multiple-choice": _class_loss,
    "masked-lm": _class_loss,
    "causal-lm": _next_token_loss,
}
