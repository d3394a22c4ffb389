# SPDX-License-Identifier: Apache-2.0
"""BERT, and MiniLM, which is a small BERT."""

from typing import Any, Dict, Optional

import torch

from ipu_finetune.models.family import Family, half_hidden

__all__ = ["Bert"]


class Bert(Family):
    """Takes a 3-D mask and positions as they are."""

    model_type = "bert"

    def causal(self, config: Any) -> bool:
        """Whether the config makes it a decoder."""
        return bool(config.is_decoder)

    def longest_pack(self, config: Any) -> Optional[int]:
        """Relative positions are looked up by distance in the row, in a table of fixed size."""
        absolute = getattr(config, "position_embedding_type", "absolute") == "absolute"
        return None if absolute else int(config.max_position_embeddings)

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """Left to itself, the model cuts default token types from a buffer that is only as long as a sequence."""
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        return super().inputs(model, half_hidden(model, visible), position_ids, sequence_ids, token_type_ids)

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """Pooler, dropout, classifier."""
        return model.classifier(model.dropout(model.base_model.pooler(vectors)))

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head with its transform."""
        return model.cls(hidden)
