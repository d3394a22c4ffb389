# SPDX-License-Identifier: Apache-2.0
"""The enumerations of PopART whose numbers scripts put into session options by `options._Popart.set`.

Names and numbers are those of `python/popart/popart_core/popart.cpp` and `willow/include/popart/sessionoptions.hpp` of
graphcore/popart.
"""

import enum

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AutodiffStitchStrategy",
    "BatchSerializationBatchSchedule",
    "BatchSerializationMethod",
    "BatchSerializationTransformContext",
    "GradientTensorTrackingMethod",
    "Instrumentation",
    "MeanReductionStrategy",
    "MergeVarUpdateType",
    "PatternsLevel",
    "RecomputationType",
    "ReductionType",
    "SubgraphCopyingStrategy",
    "SyntheticDataMode",
    "VirtualGraphMode",
]


class AccumulateOuterFragmentSchedule(enum.IntEnum):
    """How the operations outside of the accumulation loop are ordered."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class AutodiffStitchStrategy(enum.IntEnum):
    """Where a backward graph gets the forward values that it needs."""

    RecomputeMinimal = 0
    RecomputeAllNonInputs = 1
    AddFwdOutputs = 2
    SafeAddFwdOutputs = 3


class BatchSerializationBatchSchedule(enum.IntEnum):
    """How the parts of a batch that is cut up are ordered."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationMethod(enum.IntEnum):
    """How a batch is cut up."""

    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class BatchSerializationTransformContext(enum.IntEnum):
    """Whether a batch is cut up before or after the backward graph is made."""

    Fwd = 0
    Bwd = 1


class GradientTensorTrackingMethod(enum.IntEnum):
    """Which gradients automatic loss scaling looks at."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2


class Instrumentation(enum.IntEnum):
    """Which loop's cycles are counted."""

    Outer = 0
    Inner = 1


class MeanReductionStrategy(enum.IntEnum):
    """When a sum of gradients becomes their mean."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class MergeVarUpdateType(enum.IntEnum):
    """Which weight updates become one operation."""

    Off = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class PatternsLevel(enum.IntEnum):
    """Which graph patterns are on unless named."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


class RecomputationType(enum.IntEnum):
    """Which activations are computed again in the backward pass."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class ReductionType(enum.IntEnum):
    """How several values become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SubgraphCopyingStrategy(enum.IntEnum):
    """When the inputs of a subgraph are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(enum.IntEnum):
    """What stands in for the host's data."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class VirtualGraphMode(enum.IntEnum):
    """What decides the IPU of an operation."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3
