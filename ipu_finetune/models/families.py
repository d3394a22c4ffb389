# SPDX-License-Identifier: Apache-2.0
"""The families of models that can be packed, by the `model_type` of their config."""

from typing import Any, Dict, Type

from ipu_finetune.errors import RecipeError
from ipu_finetune.models.bert import Bert
from ipu_finetune.models.deberta import Deberta
from ipu_finetune.models.distilbert import DistilBert
from ipu_finetune.models.family import Family
from ipu_finetune.models.gpt2 import GPT2
from ipu_finetune.models.mpnet import MPNet
from ipu_finetune.models.roberta import Roberta

__all__ = ["FAMILIES", "family_of"]

FAMILIES: Dict[str, Type[Family]] = {
    family.model_type: family for family in (Bert, Deberta, DistilBert, GPT2, MPNet, Roberta)
}


def family_of(config: Any) -> Family:
    """Return a new instance of the family that a model's config belongs to.

    Raises:
        RecipeError: the family cannot be packed.
    """
    name = getattr(config, "model_type", None) or type(config).__name__
    if name not in FAMILIES:
        raise RecipeError(
            [
                f"a model of type {name} cannot be packed; families that can: "
                f"{', '.join(sorted(FAMILIES))}. Use one of them, or set packing.enabled=false"
            ],
            where="packing",
        )
    return FAMILIES[name]()
