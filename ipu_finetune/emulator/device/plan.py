# SPDX-License-Identifier: Apache-2.0
"""What a compiled model was asked to do: the numbers of the batch arithmetic and the switches of the device."""

import dataclasses
from typing import Any, Optional, Tuple

from .enums import OutputMode, ReductionType
from .replica_weights import ReplicaGrouping

__all__ = ["Anchor", "Plan"]


@dataclasses.dataclass(frozen=True)
class Anchor:
    """An inner tensor that a call keeps.

    Attributes:
        name: the tensor's, as `Gradient___fc.weight`.
        mode: which micro-batches' values are kept.
        period: N of `EveryN`.
    """

    name: str
    mode: OutputMode
    period: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resolved options of one compiled model.

    Attributes:
        device_iterations: D, weight updates (or inference steps) per host call.
        accumulation: A, micro-batches per weight update; 1 in inference.
        replicas: R, copies of the pipeline in this process.
        group_size: how many replicas receive the same input.
        consecutive_groups: replicas 0..g-1 form the first group; otherwise they are `index % groups`.
        output_period: N of `EveryN`.
        processes: instances that train together; the reduction spans `processes * replicas`.
        groupings: parameters that differ between replicas, by name.
        io_tiles: tiles of each IPU that are kept for input and output.
        running_mean: keep the mean while accumulating rather than dividing once at the end.
    """

    training: bool
    device_iterations: int = 1
    accumulation: int = 1
    replicas: int = 1
    group_size: int = 1
    consecutive_groups: bool = True
    output_mode: OutputMode = OutputMode.All
    output_period: int = 1
    reduction: ReductionType = ReductionType.Mean
    running_mean: bool = False
    processes: int = 1
    broadcast_buffers: bool = True
    auto_loss_scaling: bool = False
    stochastic_rounding: bool = False
    float_exceptions: bool = False
    half_partials: bool = False
    io_tiles: int = 0
    seed: Optional[int] = None
    updatable_buffers: Tuple[str, ...] = ()
    anchors: Tuple[Anchor, ...] = ()
    groupings: Tuple[Tuple[str, ReplicaGrouping], ...] = ()
    strategy: Any = None

    @property
    def groups(self) -> int:
        """G, the number of different inputs among the replicas of one step."""
        return self.replicas // self.group_size

    @property
    def micro_batches(self) -> int:
        """How many micro-batches one combined batch holds: D * A * G."""
        return self.device_iterations * self.accumulation * self.groups

    def group(self, replica: int) -> int:
        """The input group that a replica belongs to."""
        return replica // self.group_size if self.consecutive_groups else replica % self.groups
