# SPDX-License-Identifier: Apache-2.0
"""GPT-2: causal by itself, a mask for keys only, and the last token as summary."""

from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ipu_finetune.models.family import Family, Undo, half_hidden, replace_argument

__all__ = ["GPT2"]


class GPT2(Family):
    """Its mask reaches the blocks flattened, and a hook on each block gives it its square shape back.

    The model views any mask as [B, 1, 1, keys], so [B, L, L] arrives at the blocks as an additive [B, 1, 1, L·L]. A
    hook that only reshapes needs no memory of the batch, so it also holds where a block is run again for its gradients.
    """

    model_type = "gpt2"

    def causal(self, config: Any) -> bool:
        """Always."""
        return True

    def longest_pack(self, config: Any) -> Optional[int]:
        """The causal mask is a buffer of fixed size."""
        return int(config.max_position_embeddings)

    def install(self, model: Any) -> List[Undo]:
        """Hook each block."""
        return [block.register_forward_pre_hook(_square_mask, with_kwargs=True).remove for block in model.base_model.h]

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """The mask leaves the future to the model's own: two finite minima on one score would be minus infinity."""
        places = torch.arange(position_ids.shape[1], device=visible.device)
        future = places.unsqueeze(0) > places.unsqueeze(1)
        return super().inputs(model, half_hidden(model, visible | future), position_ids, sequence_ids, token_type_ids)

    def summary(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The last token, which has seen all others; the first position for an empty slot."""
        return (starts + lengths - 1).clamp(min=0)

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """One projection."""
        return model.score(vectors[:, 0])

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The tied projection, without the rows that optimum-graphcore adds to split it evenly."""
        logits = model.lm_head(hidden)
        size = getattr(model, "actual_vocab_size", None)
        return logits if size is None or size == logits.shape[-1] else logits[..., :size]


def _square_mask(
    block: nn.Module, arguments: Tuple[Any, ...], keywords: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    hidden = arguments[0] if arguments else keywords["hidden_states"]
    rows, length = hidden.shape[0], hidden.shape[1]

    def change(mask: Any) -> Any:
        flattened = mask is not None and mask.shape[-2] == 1 and mask.shape[-1] == length * length
        return mask.reshape(rows, 1, length, length) if flattened else mask

    return replace_argument(arguments, keywords, "attention_mask", 2, change)
