# SPDX-License-Identifier: Apache-2.0
"""The rows of a run's splits, one sequence each or packed, as the training loop and the engines take them."""

import dataclasses
import hashlib
import json
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from torch import nn

from ipu_finetune.packing.rows import PackedRows
from ipu_finetune.training.order import TrainingRows

__all__ = ["Rows"]

# Questions whose features are made at a time: enough to keep a tokenizer's threads busy, few enough for memory.
_CHUNK = 4096


class Rows:
    """One split.

    Attributes:
        data: columns, valid elements and counts.
        packed: what is in which row; None without packing.
        features: how many features there are.
        fingerprint: SHA-256 of what the engine is given.
        real_tokens: of all features.
        label_names: columns that are labels.
        element_loss: of the task, over these rows.
        counts: what the task counted while it made the features; empty where packs were read from the disk.
    """

    def __init__(
        self,
        task: Any,
        columns: Mapping[str, np.ndarray],
        packed: Optional[PackedRows],
        fingerprint: str,
        counts: Mapping[str, int],
    ) -> None:
        self.label_names: Tuple[str, ...] = tuple(task.label_names)
        self.packed = packed
        self.fingerprint = fingerprint
        self.counts = dict(counts)
        if packed is None:
            self.element_loss: Callable[..., Any] = task.row_loss
            self.data = TrainingRows(columns)
            self.features = len(next(iter(columns.values())))
            self.real_tokens = int(columns["attention_mask"].sum())
        else:
            self.element_loss = packed.element_loss
            self.data = TrainingRows(packed.columns, packed.valid, packed.sequences, packed.tokens)
            self.features = int(packed.sequences.sum())
            self.real_tokens = int(packed.tokens.sum())

    @classmethod
    def of(cls, task: Any, features: Any, packing: Any, max_length: int, seed: int) -> "Rows":
        """Return features that are in memory as rows, or as packs where the recipe's packing section says so."""
        packed = None
        if packing.enabled:
            packed = PackedRows.of(task, features.columns, max_length, packing.max_sequences, packing.algorithm, seed)
        return cls(task, features.columns, packed, features.fingerprint, _counts(features))

    @classmethod
    def streamed(
        cls,
        task: Any,
        questions: Sequence[Any],
        source: str,
        packing: Any,
        seed: int,
        progress: Optional[Callable[[int], None]] = None,
    ) -> Tuple["Rows", str]:
        """Return packs to train on, made chunk by chunk onto the disk or found there, and which of the two.

        Args:
            task: makes the features.
            questions: to train on.
            source: SHA-256 of the data that they are from.
            packing: the recipe's packing section.
            seed: of the packing.
            progress: called with the number of questions whose features are made.
        """
        counts: Dict[str, int] = {}

        def chunks() -> Iterator[Mapping[str, np.ndarray]]:
            for begin in range(0, len(questions), _CHUNK):
                features = task.features(questions[begin : begin + _CHUNK], training=True)
                for name, value in _counts(features).items():
                    counts[name] = counts.get(name, 0) + value
                if progress is not None:
                    progress(min(begin + _CHUNK, len(questions)))
                yield features.columns

        made_of = {"source": source, "questions": len(questions), "task": _without_paths(task.settings)}
        packed, found = PackedRows.streamed(
            task,
            chunks(),
            hashlib.sha256(json.dumps(made_of, sort_keys=True).encode("utf-8")).hexdigest(),
            task.settings.max_length,
            packing.max_sequences,
            packing.algorithm,
            seed,
        )
        kept = f"{'read from' if found.hit else 'kept in'} {found.folder}"
        return cls(task, {}, packed, packed.packs.fingerprint, counts), kept

    def __len__(self) -> int:
        return len(next(iter(self.data.columns.values())))

    @property
    def sequences(self) -> Optional[int]:
        """Sequences in all packs; None without packing."""
        return None if self.packed is None else self.features

    @property
    def wrap(self) -> Optional[Callable[[nn.Module], nn.Module]]:
        """What makes the module that runs packs of a model; None without packing."""
        return None if self.packed is None else self.packed.wrap

    def restore(self, outputs: Sequence[np.ndarray]) -> List[np.ndarray]:
        """Return the outputs of each feature, in the features' order."""
        return list(outputs) if self.packed is None else self.packed.restore(outputs)


def _counts(features: Any) -> Dict[str, int]:
    return {
        "answers_outside_their_window": features.answers_outside,
        "questions_whose_answer_no_window_holds": features.unanswerable_by_windows,
    }


def _without_paths(settings: Any) -> Dict[str, Any]:
    # The same data are the same wherever they lie; what they are is in their hash.
    return {key: value for key, value in dataclasses.asdict(settings).items() if key not in ("data", "validation_data")}
