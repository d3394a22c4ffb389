# SPDX-License-Identifier: Apache-2.0
"""A Transformers model that computes several sequences in one row as if each were alone.

```
input_ids      5 6 7 8 9 . . .        who sees whom: 1 where both are of one sequence (0 is padding)
sequence_ids   1 1 1 2 2 0 0 0        1 1 1 . . . . .     . . . . . 1 1 1
position_ids   0 1 2 0 1 0 0 0        1 1 1 . . . . .     . . . . . 1 1 1
slot_starts    0 3 0                  1 1 1 . . . . .     . . . . . 1 1 1
slot_lengths   3 2 0                  . . . 1 1 . . .
                                      . . . 1 1 . . .
```

Padding sees padding, so no row of the mask is empty and no softmax is without an entry.
"""

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipu_finetune.errors import IpuFinetuneError, RecipeError
from ipu_finetune.models.families import family_of
from ipu_finetune.models.family import Undo

__all__ = ["KINDS", "PackedModel", "check_kind", "output_names"]

# The end of the names of Transformers' task models, by the kind of task that they have a head for.
KINDS: Mapping[str, Tuple[str, ...]] = {
    "question-answering": ("ForQuestionAnswering",),
    "classification": ("ForSequenceClassification",),
    "multi-label": ("ForSequenceClassification",),
    "regression": ("ForSequenceClassification",),
    "token-classification": ("ForTokenClassification",),
    "multiple-choice": ("ForMultipleChoice",),
    "masked-lm": ("ForMaskedLM",),
    "causal-lm": ("LMHeadModel", "ForCausalLM"),
}
LANGUAGE = ("masked-lm", "causal-lm")
PER_TOKEN = ("question-answering", "token-classification")


def check_kind(kind: str) -> None:
    """Raise RecipeError unless packing knows this kind of task."""
    if kind not in KINDS:
        raise RecipeError([f"tasks of kind {kind!r} cannot be packed; kinds that can: {', '.join(KINDS)}"], "packing")


def output_names(kind: str) -> List[str]:
    """Return the names of a packed model's outputs, in order."""
    check_kind(kind)
    return ["start_logits", "end_logits"] if kind == "question-answering" else ["logits"]


class PackedModel(nn.Module):
    """Runs a task model on packs.

    The model's own instance is prepared for it with hooks, never its class, and its weights keep their names. It still
    answers unpacked calls as before; `release` (or leaving the `with` block) takes the hooks away.

    Args:
        model: a Transformers task model, plain or laid out by optimum-graphcore.
        kind: of the task, one of `KINDS`.
        slots: sequences that a pack has room for, S.
        choices: for multiple choice, how many consecutive slots make an item, C.

    Raises:
        RecipeError: this model cannot be packed for this kind of task.
    """

    model: Any  # its attributes depend on the family

    def __init__(self, model: nn.Module, kind: str, slots: int, choices: Optional[int] = None) -> None:
        super().__init__()
        check_kind(kind)
        self.family = family_of(model.config)
        self.model = model
        self.kind, self.slots, self.choices = kind, slots, choices
        problems = self._problems()
        if problems:
            raise RecipeError(problems, where="packing")
        self._undo: Optional[List[Undo]] = self.family.install(model)

    def _problems(self) -> List[str]:
        found = []
        names = [base.__name__ for base in type(self.model).__mro__]
        if not any(name.endswith(KINDS[self.kind]) for name in names):
            found.append(f"{names[0]} has no head for {self.kind}: it takes a model …{' or …'.join(KINDS[self.kind])}")
        if self.kind == "causal-lm" and not self.family.causal(self.model.config):
            found.append(f"{names[0]} sees the future, so it is no causal-lm: set is_decoder=true in its config")
        if self.slots < 1:
            found.append(f"slots={self.slots}: a pack holds at least one sequence")
        if self.kind == "multiple-choice" and (not self.choices or self.slots % self.choices):
            found.append(f"slots={self.slots} must be a multiple of choices={self.choices}: an item is not split")
        if self.kind != "multiple-choice" and self.choices is not None:
            found.append(f"choices={self.choices} has no meaning for {self.kind}; leave it out")
        return found

    def release(self) -> None:
        """Take away what was put into the model, which is then as it was; this object computes nothing any more."""
        for undo in self._undo or []:
            undo()
        self._undo = None

    def __enter__(self) -> "PackedModel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def visible(self, sequence_ids: torch.Tensor) -> torch.Tensor:
        """Return who sees whom: [B, L] to bool [B, L, L]."""
        same = sequence_ids.unsqueeze(2) == sequence_ids.unsqueeze(1)
        if not self.family.causal(self.model.config):
            return same
        places = torch.arange(sequence_ids.shape[1], device=sequence_ids.device)
        return same & (places.unsqueeze(0) <= places.unsqueeze(1))

    def forward(
        self,
        input_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        position_ids: torch.Tensor,
        slot_starts: torch.Tensor,
        slot_lengths: torch.Tensor,
        token_type_ids: Optional[torch.Tensor] = None,
    ) -> Dict[str, torch.Tensor]:
        """Compute the logits of each sequence.

        Args:
            input_ids: int [B, L].
            sequence_ids: int [B, L]; slot number + 1, 0 on padding.
            position_ids: int [B, L]; from 0 in each sequence.
            slot_starts: int [B, S]; where each slot's sequence begins, 0 for an empty slot.
            slot_lengths: int [B, S]; 0 for an empty slot.
            token_type_ids: int [B, L].

        Returns:
            `start_logits` and `end_logits` [B, L]; or `logits`: [B, L, V] for a kind with an answer per token,
            [B, S, C] for one with an answer per sequence, [B, S/C, C] for multiple choice. An empty slot has finite
            logits that mean nothing.

        Raises:
            RecipeError: a pack is longer than the model can be given, or has columns that the model does not take.
            IpuFinetuneError: the model was released.
        """
        self._check(input_ids, slot_starts, token_type_ids)
        inputs = self.family.inputs(self.model, self.visible(sequence_ids), position_ids, sequence_ids, token_type_ids)
        if self.kind in PER_TOKEN:
            answer = self.model(input_ids=input_ids, return_dict=True, **inputs)
            return {name: answer[name] for name in output_names(self.kind)}
        hidden = self.model.base_model(input_ids=input_ids, return_dict=True, **inputs)[0]
        if self.kind in LANGUAGE:
            return {"logits": self.family.predict_tokens(self.model, hidden)}
        vectors = _take(hidden, self.family.summary(slot_starts, slot_lengths))
        if self.kind == "multiple-choice":
            return {"logits": self.family.choose(self.model, vectors).reshape(len(input_ids), -1, self.choices or 1)}
        return {"logits": self.family.classify(self.model, vectors).reshape(len(input_ids), self.slots, -1)}

    def _check(self, input_ids: torch.Tensor, starts: torch.Tensor, token_types: Optional[torch.Tensor]) -> None:
        # Shapes only: they are known while a static graph is traced.
        if self._undo is None:
            raise IpuFinetuneError("this PackedModel was released: without its hooks, sequences would see each other")
        longest = self.family.longest_pack(self.model.config)
        found = []
        if longest is not None and input_ids.shape[1] > longest:
            found.append(
                f"packs of {input_ids.shape[1]} positions, but {self.family.model_type} takes {longest}: set a "
                "shorter pack length"
            )
        if starts.shape[1] != self.slots:
            found.append(f"packs of {starts.shape[1]} slots, but the model was prepared for {self.slots}")
        if token_types is not None and not self.family.takes_token_types:
            found.append(f"token_type_ids, which {self.family.model_type} has no use for: leave them out")
        if found:
            raise RecipeError(found, where="packing")


def _take(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Take one vector per slot: [B, L, H] and [B, S] to [B·S, 1, H].

    One look-up over all rows, since embedding-like gathers are what an IPU does well.
    """
    rows, length, width = hidden.shape
    first = torch.arange(rows, device=places.device, dtype=places.dtype).unsqueeze(1) * length
    flat = (places.clamp(0, length - 1) + first).reshape(-1)
    return hidden.reshape(rows * length, width).index_select(0, flat).unsqueeze(1)
