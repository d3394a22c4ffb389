# SPDX-License-Identifier: Apache-2.0
"""RoBERTa: BERT's encoder with positions that start past the padding index, and another classification head."""

from typing import Any, Dict, Optional

import torch

from ipu_finetune.models.bert import Bert

__all__ = ["Roberta", "positions_past_padding"]


def positions_past_padding(position_ids: torch.Tensor, sequence_ids: torch.Tensor, padding_index: int) -> torch.Tensor:
    """Count from ``padding_index + 1`` in each sequence; padding keeps the padding index."""
    real = (sequence_ids > 0).to(position_ids.dtype)
    return (position_ids + 1) * real + padding_index


class Roberta(Bert):
    """Takes a 3-D mask; its position table has a row for padding."""

    model_type = "roberta"

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """As BERT, with the offset of the positions."""
        positions = positions_past_padding(position_ids, sequence_ids, model.base_model.embeddings.padding_idx)
        return super().inputs(model, visible, positions, sequence_ids, token_type_ids)

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """The head has its own dense layer and takes the first vector itself."""
        return model.classifier(vectors)

    def choose(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """Multiple choice alone goes through the pooler."""
        return model.classifier(model.dropout(model.base_model.pooler(vectors)))

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head with its transform."""
        return model.lm_head(hidden)
