# SPDX-License-Identifier: Apache-2.0
"""The session options that PopTorch knows, by the type of value that each takes.

Facts from `popart_compiler/source/SessionOptions.cpp` of graphcore/poptorch, tag sdk/poptorch/3.4.0. A "set / vector"
takes a set, list or tuple of names; a map takes a dictionary. Everything else is refused when a model is compiled.
"""

import enum
from typing import Dict, FrozenSet, Tuple, Type

from . import (
    AccumulateOuterFragmentSchedule,
    AutodiffStitchStrategy,
    BatchSerializationBatchSchedule,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    GradientTensorTrackingMethod,
    Instrumentation,
    MeanReductionStrategy,
    MergeVarUpdateType,
    RecomputationType,
    ReductionType,
    SubgraphCopyingStrategy,
    SyntheticDataMode,
    VirtualGraphMode,
)

__all__ = ["EFFECTIVE", "ENUMERATIONS", "NUMBERED_ITEMS", "POPTORCH", "TYPES"]

#: type as it is named in errors -> options that `_Popart.set` takes
_POPART: Dict[str, Tuple[str, ...]] = {
    "bool": (
        "aliasZeroCopy",
        "automaticLossScalingSettings.enabled",
        "batchSerializationSettings.concatOnExecutionPhaseChange",
        "batchSerializationSettings.concatOnPipelineStageChange",
        "batchSerializationSettings.concatOnVirtualGraphChange",
        "compileEngine",
        "constantWeights",
        "decomposeGradSum",
        "delayVarUpdates",
        "disableGradAccumulationTensorStreams",
        "disableOptimizerStateTensorStreams",
        "dotOpNames",
        "enableDistributedReplicatedGraphs",
        "enableEngineCaching",
        "enableExplicitIR",
        "enableExplicitMainLoops",
        "enableFloatingPointChecks",
        "enableFullyConnectedPass",
        "enableGradientAccumulation",
        "enableInplaceAmbiguityChecking",
        "enableLoadAndOffloadRNGState",
        "enableMergeExchange",
        "enableNonStableSoftmax",
        "enableOutlining",
        "enableOutliningCopyCostPruning",
        "enablePipelining",
        "enablePrefetchDatastreams",
        "enableReplicatedGraphs",
        "enableSerializedMatmuls",
        "enableStableNorm",
        "enableStochasticRounding",
        "enableSupportedDataTypeCasting",
        "ensureFp32LossScaleTensor",
        "explicitRecomputation",
        "exportPoplarComputationGraph",
        "exportPoplarVertexGraph",
        "groupHostSync",
        "groupNormStridedChannelGrouping",
        "instrumentWithHardwareCycleCounter",
        "opxAliasChecking",
        "opxModifyChecking",
        "rearrangeAnchorsOnHost",
        "rearrangeStreamsOnHost",
        "replicatedCollectivesSettings.mergeAllReduceCollectives",
        "replicatedCollectivesSettings.prepareScheduleForMergingCollectives",
        "scheduleNonWeightUpdateGradientConsumersEarly",
        "separateCallOpPdfs",
        "strictOpVersions",
        "useHostCopyOps",
    ),
    "uint64": (
        "accumulateOuterFragmentSettings.schedule",
        "accumulationAndReplicationReductionType",
        "accumulationFactor",
        "autoRecomputation",
        "autodiffSettings.stitchStrategy",
        "automaticLossScalingSettings.gradientTensorTrackingMethod",
        "automaticLossScalingSettings.updatePeriod",
        "batchSerializationSettings.batchSchedule",
        "batchSerializationSettings.factor",
        "batchSerializationSettings.method",
        "batchSerializationSettings.transformContext",
        "compilationProgressTotal",
        "defaultBufferingDepth",
        "defaultPrefetchBufferingDepth",
        "executionPhaseSettings.phases",
        "executionPhaseSettings.stages",
        "finalDotOp",
        "firstDotOp",
        "globalReplicaOffset",
        "globalReplicationFactor",
        "looseThresholdAtPeak",
        "meanAccumulationAndReplicationReductionStrategy",
        "mergeVarUpdate",
        "mergeVarUpdateMemThreshold",
        "numIOTiles",
        "subgraphCopyingStrategy",
        "swapLimitScheduler",
        "syntheticDataMode",
        "transitiveClosureOptimizationThreshold",
        "virtualGraphMode",
    ),
    "floating point": (
        "automaticLossScalingSettings.binEdgeLocation",
        "automaticLossScalingSettings.thresholdUpperCountProportion",
        "outlineSequenceBreakCost",
        "outlineThreshold",
        "timeLimitScheduler",
    ),
    "string": (
        "cachePath",
        "customCodeletCompileFlags",
        "kahnTieBreaker",
        "logDir",
        "partialsTypeMatMuls",
        "saveInitializersToFile",
        "serializedPoprithmsShiftGraphsDir",
    ),
    "set / vector": (
        "accumulateOuterFragmentSettings.excludedVirtualGraphs",
        "customCodelets",
        "dotChecks",
        "hardwareInstrumentations",
        "updatableNamedBuffers",
    ),
    "map": (
        "convolutionOptions",
        "engineOptions",
        "gclOptions",
        "lstmOptions",
        "matmulOptions",
        "reportOptions",
    ),
}

#: type -> options that `poptorch.Options` sets through its own methods
POPTORCH: Dict[str, Tuple[str, ...]] = {
    "bool": (
        "auto_round_num_ipus",
        "broadcast_buffers",
        "separate_backward_phase",
        "serial_phases_execution",
        "use_model",
    ),
    "uint64": (
        "accumulation_and_replication_reduction_type",
        "connection_type",
        "device_iterations",
        "distributed_process_id",
        "execution_mode",
        "gradient_accumulation",
        "input_cgt",
        "input_group_size",
        "ipu_id",
        "ipu_version",
        "max_repeat_logs",
        "num_distributed_processes",
        "output_mode",
        "output_return_period",
        "random_seed",
        "replication_factor",
        "sync_pattern",
        "tensors_liveness",
    ),
    "string": ("log_dir", "model_name"),
}

#: option -> type of value
TYPES: Dict[str, str] = {name: kind for table in (_POPART, POPTORCH) for kind, names in table.items() for name in names}

#: option -> the enumeration whose numbers it takes
ENUMERATIONS: Dict[str, Type[enum.IntEnum]] = {
    "accumulateOuterFragmentSettings.schedule": AccumulateOuterFragmentSchedule,
    "accumulationAndReplicationReductionType": ReductionType,
    "autoRecomputation": RecomputationType,
    "autodiffSettings.stitchStrategy": AutodiffStitchStrategy,
    "automaticLossScalingSettings.gradientTensorTrackingMethod": GradientTensorTrackingMethod,
    "batchSerializationSettings.batchSchedule": BatchSerializationBatchSchedule,
    "batchSerializationSettings.method": BatchSerializationMethod,
    "batchSerializationSettings.transformContext": BatchSerializationTransformContext,
    "hardwareInstrumentations": Instrumentation,
    "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy,
    "mergeVarUpdate": MergeVarUpdateType,
    "subgraphCopyingStrategy": SubgraphCopyingStrategy,
    "syntheticDataMode": SyntheticDataMode,
    "virtualGraphMode": VirtualGraphMode,
}

#: containers whose items are numbers
NUMBERED_ITEMS: FrozenSet[str] = frozenset(
    {"accumulateOuterFragmentSettings.excludedVirtualGraphs", "hardwareInstrumentations"}
)

#: PopART options that change what the emulator does; all others only say how a real IPU does it
EFFECTIVE: FrozenSet[str] = frozenset(
    {
        "automaticLossScalingSettings.enabled",
        "cachePath",
        "enableEngineCaching",
        "enableFloatingPointChecks",
        "enableStochasticRounding",
        "instrumentWithHardwareCycleCounter",
        "partialsTypeMatMuls",
        "syntheticDataMode",
        "updatableNamedBuffers",
    }
)
