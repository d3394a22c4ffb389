# SPDX-License-Identifier: Apache-2.0
"""A task's features as packs: what a model is given, how its outputs become those of the features again."""

import hashlib
import json
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from torch import nn

from ipu_finetune.packing import leak, losses
from ipu_finetune.packing.isolation import PackedModel
from ipu_finetune.packing.packs import Packs, Settings, pack, unpack_tokens
from ipu_finetune.packing.store import Found
from ipu_finetune.packing.stream import pack_stream

__all__ = ["PACKED_INPUTS", "PackedRows", "fingerprint_of"]

#: What a packed model is given, besides token types where its tokenizer has some.
PACKED_INPUTS = ("input_ids", "sequence_ids", "position_ids", "slot_starts", "slot_lengths")

# What a token outside of a sequence scores; nothing that reads the logits of a sequence looks there.
_OUTSIDE = -1e4


def fingerprint_of(tokenizer: Any) -> str:
    """Return the SHA-256 of what decides a fast tokenizer's output."""
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    text = json.dumps([type(tokenizer).__name__, tokenizer.padding_side, special], sort_keys=True)
    return hashlib.sha256((text + tokenizer.backend_tokenizer.to_str()).encode("utf-8")).hexdigest()


def _settings(task: Any, max_length: int, max_sequences: int, algorithm: str, seed: int) -> Settings:
    return Settings(
        task.settings.kind,
        max_length,
        max_sequences,
        algorithm,
        seed,
        task.tokenizer.pad_token_id,
        task.tokenizer.pad_token_type_id,
    )


class PackedRows:
    """Features of one split, packed.

    Args:
        task: gives kind and label names.
        packs: of its features.
        length: tokens of a feature, padding included.

    Attributes:
        packs: what lies where.
        columns: inputs and labels, each [packs, ...].
        valid: bool: the elements that the loss is a mean of; None without labels.
        sequences: [packs], how many sequences a pack holds.
        tokens: [packs], how many real tokens.
        element_loss: called with outputs and batch, returns the loss of each element.
    """

    def __init__(self, task: Any, packs: Packs, length: int) -> None:
        self.kind = task.settings.kind
        self.length = length
        self.packs = packs
        self.columns: Dict[str, np.ndarray] = dict(packs.columns)
        self.sequences = np.asarray(self.columns.pop("slot_valid")).sum(axis=1)
        self.tokens = np.asarray(self.columns["slot_lengths"]).sum(axis=1)
        labelled = all(name in self.columns for name in task.label_names)
        self.valid: Optional[np.ndarray] = losses.valid(self.kind, packs.columns) if labelled else None
        self.element_loss = losses.element_loss(self.kind)

    @classmethod
    def of(
        cls,
        task: Any,
        columns: Mapping[str, np.ndarray],
        max_length: int,
        max_sequences: int,
        algorithm: str = "best",
        seed: int = 0,
    ) -> "PackedRows":
        """Pack features that are in memory.

        Args:
            task: gives kind, label names and tokenizer.
            columns: of the features, each [features, ...], with `attention_mask`.
            max_length: positions of a pack.
            max_sequences: most sequences in a pack.
            algorithm: how packs are filled.
            seed: of which sequences of one length go where.
        """
        settings = _settings(task, max_length, max_sequences, algorithm, seed)
        packs = pack(
            columns,
            settings.kind,
            max_length,
            max_sequences,
            algorithm=algorithm,
            seed=seed,
            pad_token_id=settings.pad_token_id,
            pad_token_type_id=settings.pad_token_type_id,
        )
        return cls(task, packs, columns["input_ids"].shape[1])

    @classmethod
    def streamed(
        cls,
        task: Any,
        chunks: Iterable[Mapping[str, np.ndarray]],
        data: str,
        max_length: int,
        max_sequences: int,
        algorithm: str = "best",
        seed: int = 0,
        progress: Optional[Callable[[int], None]] = None,
    ) -> Tuple["PackedRows", Found]:
        """Pack features as they are made, onto disk; or find the packs there, and make no features at all.

        Args:
            task: gives kind, label names and tokenizer.
            chunks: columns of some features at a time; read only where there are no packs yet.
            data: fingerprint of the features: of their source and of how they are made from it.
            max_length: as for `of`, like all that follow.
            progress: called with the number of features that are packed.
        """
        settings = _settings(task, max_length, max_sequences, algorithm, seed)
        found = pack_stream(chunks, settings, data=data, tokenizer=fingerprint_of(task.tokenizer), progress=progress)
        return cls(task, found.packs, max_length), found

    def __len__(self) -> int:
        return len(self.sequences)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what runs packs through a model of the task."""
        return PackedModel(model, self.kind, self.packs.slots)

    def restore(self, outputs: Sequence[np.ndarray]) -> List[np.ndarray]:
        """Return the outputs of each feature, [features, tokens, ...], in the features' order."""
        return [unpack_tokens(self.packs, output, self.length, _OUTSIDE) for output in outputs]

    def verify(self, model: nn.Module, packs: int = 2) -> leak.LeakReport:
        """Prove on a model, plain and in float32, that nothing leaks within the fullest packs (`leak.verify`)."""
        fullest = np.argsort(-self.sequences, kind="stable")[:packs]
        with PackedModel(model, self.kind, self.packs.slots) as packed:
            return leak.verify(packed, {name: column[fullest] for name, column in self.packs.columns.items()})

    def facts(self) -> Dict[str, Any]:
        """Return what a run's record says of the packing."""
        plan = self.packs.plan
        assert plan is not None
        return {
            "algorithm": plan.algorithm,
            "max_sequences": plan.max_sequences,
            "packs": plan.packs,
            "sequences": plan.sequences,
            "sequences_per_pack": round(plan.sequences_per_pack, 4),
            "efficiency": round(plan.efficiency, 6),
            "wasted_positions": plan.wasted_positions,
            "expected_speed_up": round(plan.speed_up, 4),
            "isolation": "block-diagonal",
        }
