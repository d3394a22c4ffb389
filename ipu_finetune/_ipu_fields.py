# SPDX-License-Identifier: Apache-2.0
"""The `ipu` section of a recipe: a config folder, a pod, and every field of optimum-graphcore 0.7.1's `IPUConfig`.

The same declarations tell which keys an `ipu_config.json` may hold.
"""

# ruff: noqa: RUF009 (field() returns a dataclasses.field, as the rule wants; it cannot see that)

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

from ipu_finetune._fields import field

__all__ = ["DERIVED", "Ipu"]

# Keys of IPUConfig that a recipe does not set, because the recipe already says them in another way.
DERIVED = {
    "gradient_accumulation_steps": (
        "follows from training.global_batch_size, training.micro_batch_size and the replicas; set "
        "training.global_batch_size"
    )
}

_SPLITS = "sub-layers per IPU, on consecutive IPUs, e.g. [3,1,0,0]"


@dataclass(frozen=True)
class Ipu:
    """How the model lies on the IPUs. None means: as the config folder says.

    `config` and `pod` are ours; every other field is `IPUConfig`'s field of that name.
    """

    config: str = field(help="a folder of ipu_configs/, a path, or auto: the built-in one that fits the model")
    pod: Optional[str] = field(None, help="IPUs that the job may use; decides the replicas", flag="--pod")

    layers_per_ipu: Optional[List[int]] = field(
        None, help="encoder layers on each IPU in training; -1 shares what is left", low=-1
    )
    inference_layers_per_ipu: Optional[List[int]] = field(None, help="the same for inference", low=-1)
    ipus_per_replica: Optional[int] = field(None, help="IPUs of one replica in training", low=1)
    inference_ipus_per_replica: Optional[int] = field(None, help="IPUs of one replica in inference", low=1)
    replication_factor: Optional[int] = field(None, help="replicas in training; without it the pod decides", low=1)
    inference_replication_factor: Optional[int] = field(
        None, help="replicas in inference; without it the pod decides", low=1
    )
    device_iterations: Optional[int] = field(None, help="training steps per host call", low=1)
    inference_device_iterations: Optional[int] = field(None, help="inference steps per host call", low=1)
    output_mode: Optional[str] = field(
        None, help="which training outputs return to the host", choices=("all", "sum", "final", "default")
    )

    matmul_proportion: Optional[Union[float, List[float]]] = field(
        None, help="share of an IPU's memory for temporaries: one value, or one per IPU", above=0, high=1
    )
    inference_matmul_proportion: Optional[Union[float, List[float]]] = field(
        None, help="the same for inference", above=0, high=1
    )
    optimizer_state_offchip: Optional[bool] = field(None, help="keep the optimizer's state in streaming memory")
    replicated_tensor_sharding: Optional[bool] = field(None, help="share the optimizer's state among the replicas")
    recompute_checkpoint_every_layer: Optional[bool] = field(None, help="keep each layer's output, recompute the rest")
    enable_half_partials: Optional[bool] = field(None, help="partial results of matrix products in float16")
    embedding_serialization_factor: Optional[int] = field(
        None, help="parts that the embedding is looked up in; must divide the vocabulary", low=1
    )
    inference_embedding_serialization_factor: Optional[int] = field(None, help="the same for inference", low=1)
    serialized_embedding_splits_per_ipu: Optional[List[int]] = field(None, help=f"embedding: {_SPLITS}", low=0)
    inference_serialized_embedding_splits_per_ipu: Optional[List[int]] = field(
        None, help="the same for inference", low=0
    )
    projection_serialization_factor: Optional[int] = field(None, help="parts of the output projection", low=1)
    inference_projection_serialization_factor: Optional[int] = field(None, help="the same for inference", low=1)
    serialized_projection_splits_per_ipu: Optional[List[int]] = field(None, help=f"projection: {_SPLITS}", low=0)
    inference_serialized_projection_splits_per_ipu: Optional[List[int]] = field(
        None, help="the same for inference", low=0
    )

    seed: Optional[int] = field(None, help="of the device's random numbers; without it training.seed", low=0)
    auto_loss_scaling: Optional[bool] = field(None, help="let the device choose the loss scale (training only)")
    executable_cache_dir: Optional[str] = field(None, help="folder of compiled executables")
    explicit_ir_inference: Optional[bool] = field(None, help="PopART's explicit IR for inference")
    parallelize_kwargs: Optional[Dict[str, Any]] = field(None, help="arguments of the model's parallelize()")
    inference_parallelize_kwargs: Optional[Dict[str, Any]] = field(None, help="the same for inference")
