# SPDX-License-Identifier: Apache-2.0
"""Which encoder layers lie on which IPU, checked against the model before anything is built."""

from typing import List, Optional, Sequence

from ipu_finetune.errors import RecipeError

__all__ = ["WILDCARD", "expand_layers", "layer_table"]

WILDCARD = -1


def expand_layers(
    layers_per_ipu: Sequence[int],
    model_layers: int,
    ipus_per_replica: Optional[int] = None,
    name: str = "layers_per_ipu",
) -> List[int]:
    """Return the layers on each IPU, with every wildcard replaced.

    A wildcard (-1) takes an equal share of the layers that the other entries leave, the last one also the remainder.
    A single ``[-1]`` stands for one wildcard on each of `ipus_per_replica` IPUs.

    ```
    [-1, -1, -1, -1] of 13 layers  ->  [3, 3, 3, 4]
    [ 1,  1, -1, -1] of 12 layers  ->  [1, 1, 5, 5]
    ```

    Raises:
        RecipeError: the entries and the model do not go together, in either direction.
    """
    layers = list(layers_per_ipu)
    problem = length_problem(layers, ipus_per_replica, name)
    if problem is None and any(each < WILDCARD for each in layers):
        problem = f"{name}={layers}: every element must be at least -1 (-1 shares the layers that are left)"
    if problem:
        raise RecipeError([problem], where="ipu config")
    if layers == [WILDCARD] and ipus_per_replica is not None:
        layers = layers * ipus_per_replica
    placed = sum(each for each in layers if each != WILDCARD)
    wildcards = [index for index, each in enumerate(layers) if each == WILDCARD]
    if placed > model_layers or (not wildcards and placed != model_layers):
        sign = ">" if wildcards else "≠"
        problem = (
            f"{name}={layers} places {placed} layers, but the model has {model_layers} ({placed}{sign}{model_layers}); "
            f"make them add up to {model_layers}, or write [{', '.join(['-1'] * len(layers))}] to share them evenly"
        )
        raise RecipeError([problem], where="ipu config")
    if wildcards:
        share, remainder = divmod(model_layers - placed, len(wildcards))
        for index in wildcards:
            layers[index] = share
        layers[wildcards[-1]] += remainder
    return layers


def length_problem(layers: Sequence[int], ipus_per_replica: Optional[int], name: str) -> Optional[str]:
    """Say what is wrong with the number of entries, or return None."""
    if not layers:
        return f"{name}=[]: needs an entry for each IPU, e.g. [-1]"
    if ipus_per_replica is None or len(layers) == ipus_per_replica or list(layers) == [WILDCARD]:
        return None
    count = name.replace("layers_per_ipu", "ipus_per_replica")
    return (
        f"{name}={list(layers)} is for {len(layers)} IPUs, but {count}={ipus_per_replica} ({ipus_per_replica} vs "
        f"{len(layers)}); give one entry per IPU, or leave {count} out"
    )


def layer_table(layers: Sequence[int]) -> List[str]:
    """Describe, a line per IPU, which layers it holds."""
    lines = []
    first = 0
    for ipu, count in enumerate(layers):
        held = (
            "no encoder layer"
            if count == 0
            else f"layers {first} to {first + count - 1}"
            if count > 1
            else (f"layer {first}")
        )
        lines.append(f"IPU {ipu}: {held}")
        first += count
    return lines
