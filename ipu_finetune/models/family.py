# SPDX-License-Identifier: Apache-2.0
"""What packing needs to know of a family of models, and nothing else: the seam that each family's module fills."""

from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Tuple

import torch

__all__ = ["Family", "Undo", "half_hidden", "replace_argument"]

Undo = Callable[[], None]


class Family:
    """One instance belongs to one packed model.

    It is handed the model at each call and never holds it: an executor may run a copy of the module, whose submodules
    and weights are the ones that count.

    Attributes:
        model_type: of the config.
        takes_token_types: whether the model has a use for `token_type_ids`.
    """

    model_type: ClassVar[str]
    takes_token_types: ClassVar[bool] = True

    def causal(self, config: Any) -> bool:
        """Whether a position sees only itself and what comes before it."""
        return False

    def longest_pack(self, config: Any) -> Optional[int]:
        """Return the most positions that a pack can have; None where a sequence's length is limited, not a pack's."""
        return None

    def install(self, model: Any) -> List[Undo]:
        """Prepare this model instance to be isolated; return what undoes it. Weights and their names stay."""
        return []

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """Return what the model is called with beside `input_ids`.

        Args:
            model: the task model.
            visible: bool [B, L, L]; whether the position of the second axis sees the one of the third.
            position_ids: [B, L], from 0 in each sequence, 0 on padding.
            sequence_ids: [B, L], 0 on padding.
            token_type_ids: [B, L] or None.
        """
        inputs = {"attention_mask": visible, "position_ids": position_ids}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        return inputs

    def summary(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the position of the token that stands for each sequence, of the shape of `starts`."""
        return starts

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the classification head to summary vectors: [N, 1, H] to [N, C]."""
        raise NotImplementedError

    def choose(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the multiple-choice head to summary vectors: [N, 1, H] to [N, 1]."""
        return self.classify(model, vectors)

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the language-model head: [B, L, H] to [B, L, V].

        The model's own forward will not do: while training, optimum-graphcore's forms answer with a loss only.
        """
        raise NotImplementedError


def half_hidden(model: Any, visible: torch.Tensor) -> torch.Tensor:
    """Return a mask of 1 where visible and 1/2 where not, of the shape of `visible`.

    Transformers adds ``(1 - mask) × smallest number`` to the scores. In float16 the smallest number and a negative
    score make minus infinity; half of it hides as well, and no score can push it over.
    """
    return (visible.to(model.dtype) + 1.0) / 2.0


def replace_argument(
    arguments: Tuple[Any, ...], keywords: Mapping[str, Any], name: str, place: int, change: Callable[[Any], Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Return a call's arguments with one changed, whether it was given by name or by place."""
    if name in keywords:
        return arguments, {**keywords, name: change(keywords[name])}
    if place < len(arguments):
        return (*arguments[:place], change(arguments[place]), *arguments[place + 1 :]), dict(keywords)
    return arguments, dict(keywords)
