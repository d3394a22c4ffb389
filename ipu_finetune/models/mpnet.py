# SPDX-License-Identifier: Apache-2.0
"""MPNet: RoBERTa's positions and heads, no token types, and a relative bias that depends on distance alone."""

from typing import Any, Dict, Optional

import torch

from ipu_finetune.models.family import Family, half_hidden
from ipu_finetune.models.roberta import Roberta, positions_past_padding

__all__ = ["MPNet"]


class MPNet(Roberta):
    """Takes a 3-D mask. Distances within a sequence are the same in a pack as alone, so its bias needs no care."""

    model_type = "mpnet"
    takes_token_types = False

    def causal(self, config: Any) -> bool:
        """Never."""
        return False

    def longest_pack(self, config: Any) -> Optional[int]:
        """Distances are put into buckets, so any will do."""
        return None

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """The mask, and positions with their offset."""
        positions = positions_past_padding(position_ids, sequence_ids, model.base_model.embeddings.padding_idx)
        return Family.inputs(self, model, half_hidden(model, visible), positions, sequence_ids, None)
