# SPDX-License-Identifier: Apache-2.0
"""The names of PopART that optimum-graphcore reads: two enumerations whose numbers go into the session options."""

import enum

__all__ = ["AccumulateOuterFragmentSchedule", "SubgraphCopyingStrategy"]


class SubgraphCopyingStrategy(enum.IntEnum):
    """When the inputs of a subgraph are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class AccumulateOuterFragmentSchedule(enum.IntEnum):
    """How the operations outside of the accumulation loop are ordered."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3
