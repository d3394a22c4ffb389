# SPDX-License-Identifier: Apache-2.0
"""The IPU configurations that optimum-graphcore's tests name, for models of a few layers.

Each has what the real ones have (recomputation per layer, optimizer state off-chip, for mT5 a serialised embedding)
on as many IPUs as the layers suffice for; `layers_per_ipu` and what depends on it follow `models.py`.
"""

import json
from pathlib import Path
from typing import Any, Dict

__all__ = ["LAYOUTS", "write_layout"]

_COMMON: Dict[str, Any] = dict(
    enable_half_partials=True,
    executable_cache_dir="./exe_cache",
    optimizer_state_offchip=True,
    recompute_checkpoint_every_layer=True,
    replicated_tensor_sharding=True,
)


def _over(*layers: int, **more: Any) -> Dict[str, Any]:
    return dict(_COMMON, layers_per_ipu=list(layers), ipus_per_replica=len(layers), matmul_proportion=0.2, **more)


LAYOUTS: Dict[str, Dict[str, Any]] = {
    # Encoders: as many entries as there are transformer layers.
    "Graphcore/bert-base-ipu": _over(1, 1),
    "Graphcore/deberta-base-ipu": _over(1, 1),
    "Graphcore/distilbert-base-ipu": _over(1, 1),
    "Graphcore/gpt2-small-ipu": _over(1, 1),
    "Graphcore/groupbert-base-uncased": _over(1, 1),
    "Graphcore/hubert-base-ipu": _over(1, 1),
    "Graphcore/mpnet-base-ipu": _over(1, 1),
    "Graphcore/roberta-base-ipu": _over(1, 1),
    "Graphcore/sentence-t5-base": _over(1, 1),
    "Graphcore/vit-base-ipu": _over(1, 1),
    # One layer for each of ConvNeXt's four depths.
    "Graphcore/convnext-base-ipu": _over(1, 1, 1, 1),
    # LXMERT places its layers itself, on four IPUs.
    "Graphcore/lxmert-base-ipu": _over(-1, -1, -1, -1),
    # Encoder layers, then decoder layers.
    "Graphcore/bart-base-ipu": _over(1, 1, 1, 1),
    "Graphcore/t5-small-ipu": _over(1, 1, 1, 1),
    "Graphcore/mt5-small-ipu": _over(
        1, 1, 1, 1, embedding_serialization_factor=2, projection_serialization_factor=2, inference_layers_per_ipu=[2, 2]
    ),
    "Graphcore/whisper-tiny-ipu": _over(1, 1, 1, 1, inference_layers_per_ipu=[2, 2]),
    # Three convolutions, positions, two layers, then the head (CTC) or projection, quantizer and its projection.
    "Graphcore/wav2vec2-ctc-base-ipu": _over(4, 3),
    "Graphcore/wav2vec2-base-ipu": _over(5, 4),
    "Graphcore/internal-testing-tiny-ipu": _over(-1, -1),
}
"""The fields of each `ipu_config.json`."""


def write_layout(name: str, folder: Path) -> None:
    """Write the `ipu_config.json` of the repository `name` into `folder`."""
    text = json.dumps(LAYOUTS[name], indent=2, sort_keys=True) + "\n"
    (folder / "ipu_config.json").write_text(text, encoding="utf-8")
