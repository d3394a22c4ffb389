# SPDX-License-Identifier: Apache-2.0
"""DistilBERT: neither its attention nor its embeddings take what packing has to give, so both are adapted in place."""

import functools
import math
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ipu_finetune.models.family import Family, Undo

__all__ = ["DistilBert"]


class DistilBert(Family):
    """Gets attention that takes a 3-D mask, and its positions from a hook on the position table."""

    model_type = "distilbert"
    takes_token_types = False

    def __init__(self) -> None:
        self._positions: Optional[torch.Tensor] = None

    def install(self, model: Any) -> List[Undo]:
        """Exchange the class of each attention (weights stay as they are) and hook the position table."""
        undo = [model.base_model.embeddings.position_embeddings.register_forward_pre_hook(self._feed).remove]
        for layer in model.base_model.transformer.layer:
            plain: Any = type(layer.attention)
            layer.attention.__class__ = _isolated(plain)
            undo.append(functools.partial(_restore, layer.attention, plain))
        return undo

    def inputs(
        self,
        model: Any,
        visible: torch.Tensor,
        position_ids: torch.Tensor,
        sequence_ids: torch.Tensor,
        token_type_ids: Optional[torch.Tensor],
    ) -> Dict[str, torch.Tensor]:
        """The mask; the positions wait for the one look-up in the table that follows."""
        self._positions = position_ids
        return {"attention_mask": visible}

    def _feed(self, table: nn.Module, arguments: Tuple[Any, ...]) -> Optional[Tuple[Any, ...]]:
        positions, self._positions = self._positions, None
        return None if positions is None else (positions,)

    def classify(self, model: Any, vectors: torch.Tensor) -> torch.Tensor:
        """A dense layer with ReLU, dropout, classifier."""
        return model.classifier(model.dropout(torch.relu(model.pre_classifier(vectors[:, 0]))))

    def predict_tokens(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Transform, activation, norm, projection."""
        hidden = model.activation(model.vocab_transform(hidden))
        return model.vocab_projector(model.vocab_layer_norm(hidden))


class _IsolatedAttention:
    """A 3-D mask goes through the attention here; any other, through the class that this one is mixed into."""

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        head_mask: Optional[torch.Tensor] = None,
        output_attentions: bool = False,
    ) -> Tuple[torch.Tensor, ...]:
        """Attend where `mask` [B, L, L] is true; returns the context, and the probabilities if asked for."""
        if mask.dim() != 3:
            return super().forward(query, key, value, mask, head_mask, output_attentions)  # type: ignore[misc]
        rows, length, _ = query.shape
        size = self.dim // self.n_heads

        def heads(states: torch.Tensor) -> torch.Tensor:
            return states.view(rows, length, self.n_heads, size).transpose(1, 2)

        scores = heads(self.q_lin(query)) / math.sqrt(size)
        scores = torch.matmul(scores, heads(self.k_lin(key)).transpose(2, 3))
        # Half of the smallest number hides as well as the whole, and no score can push it over into minus infinity.
        hidden = (1.0 - mask.unsqueeze(1).to(scores.dtype)) * (torch.finfo(scores.dtype).min / 2)
        weights = self.dropout(nn.functional.softmax(scores + hidden, dim=-1))
        if head_mask is not None:
            weights = weights * head_mask
        context = torch.matmul(weights, heads(self.v_lin(value))).transpose(1, 2).reshape(rows, length, self.dim)
        context = self.out_lin(context)
        return (context, weights) if output_attentions else (context,)


@functools.lru_cache(maxsize=None)
def _isolated(plain: Any) -> Any:
    return type(f"Isolated{plain.__name__}", (_IsolatedAttention, plain), {})


def _restore(attention: nn.Module, plain: type) -> None:
    # Whoever exchanged the class in the meantime, as optimum-graphcore does when it undoes a layout, is right.
    if type(attention) is _isolated(plain):
        attention.__class__ = plain
