# SPDX-License-Identifier: Apache-2.0
"""DeBERTa: its encoder takes a 3-D mask, its embeddings do not."""

from typing import Any, Dict, List, Tuple

import torch
from torch import nn

from ipu_finetune.models.family import Family, Undo, replace_argument

__all__ = ["Deberta"]


class Deberta(Family):
    """Gets a 3-D mask that a hook keeps from its embeddings."""

    model_type = "deberta"

    def install(self, model: Any) -> List[Undo]:
        """Hook the embeddings."""
        return [model.base_model.embeddings.register_forward_pre_hook(_without_mask, with_kwargs=True).remove]

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """Pooler of the task model, dropout, classifier."""
        return model.classifier(model.dropout(model.pooler(vectors)))

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head with its transform."""
        return model.cls(hidden)


def _without_mask(
    module: nn.Module, arguments: Tuple[Any, ...], keywords: Dict[str, Any]
) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    """Leave a 3-D mask out: it would zero the embeddings of padding, which no sequence sees anyway."""

    def change(mask: Any) -> Any:
        return None if mask is not None and mask.dim() == 3 else mask

    return replace_argument(arguments, keywords, "mask", 3, change)
