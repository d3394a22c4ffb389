# SPDX-License-Identifier: Apache-2.0
"""The parts of `Options` that have their own name: `Training`, `Precision`, `TensorLocations` and so on."""

import os
import warnings
from typing import Any, Dict, Optional

import torch

from ._logging import logger
from ._options_base import OptionsDict
from .enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType

__all__ = [
    "TensorLocationSettings",
    "_DistributedOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise AssertionError unless `value` is a `kind`; a bool is not an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        expected = kind.__name__ if isinstance(kind, type) else kind
        raise AssertionError(f"{name} must be of type {expected}, got {value!r} ({type(value).__name__})")


class _JitOptions(OptionsDict):
    """Options of the tracer that PopTorch no longer has."""

    def traceModel(self, trace_model: bool) -> "_JitOptions":
        """Deprecated; only False is possible.

        Raises:
            ValueError: tracing with torch.jit is asked for.
        """
        warnings.warn("Options.Jit.traceModel is deprecated and has no effect", DeprecationWarning, stacklevel=2)
        if trace_model:
            raise ValueError("Options.Jit.traceModel(True): tracing with torch.jit is no longer supported")
        return self


class _PrecisionOptions(OptionsDict):
    """Options about number formats, `Options.Precision`."""

    def __init__(self) -> None:
        super().__init__(
            enable_stochastic_rounding=False,
            half_partials=False,
            enable_floating_point_exceptions=False,
        )

    def enableStochasticRounding(self, enabled: bool) -> "_PrecisionOptions":
        """Round fp16 results at random so that their mean is exact. The emulator rounds weight updates so."""
        check_type("enableStochasticRounding", enabled, bool)
        self.set(enable_stochastic_rounding=enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> "_PrecisionOptions":
        """Set the dtype of partial sums in matrix products and convolutions.

        Raises:
            ValueError: neither torch.float nor torch.half.
        """
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"setPartialsType({dtype}): only torch.float and torch.half are possible")
        self.set(half_partials=dtype == torch.half)
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> "_PrecisionOptions":
        """Stop with an Error when a value is not finite."""
        check_type("enableFloatingPointExceptions", enabled, bool)
        self.set(enable_floating_point_exceptions=enabled)
        return self

    def halfFloatCasting(self, behavior: HalfFloatCastingBehavior) -> "_PrecisionOptions":
        """Deprecated: mixed operations follow PyTorch's own promotion."""
        check_type("halfFloatCasting", behavior, HalfFloatCastingBehavior)
        warnings.warn("Options.Precision.halfFloatCasting is deprecated", DeprecationWarning, stacklevel=2)
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> "_PrecisionOptions":
        """Deprecated: running statistics have the dtype of their buffers."""
        check_type("runningStatisticsAlwaysFloat", value, bool)
        warnings.warn("Options.Precision.runningStatisticsAlwaysFloat is deprecated", DeprecationWarning, stacklevel=2)
        return self


class _TrainingOptions(OptionsDict):
    """Options that only a training model has, `Options.Training`."""

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
            auto_loss_scaling=False,
            convolution_dithering=False,
        )
        self.__dict__["_strategy_was_set"] = False

    def gradientAccumulation(self, gradient_accumulation: int) -> "_TrainingOptions":
        """Set A, the micro-batches per weight update."""
        check_type("gradientAccumulation", gradient_accumulation, int)
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction: ReductionType) -> "_TrainingOptions":
        """Set how gradients are reduced over accumulation and replicas: Mean (default) or Sum.

        Raises:
            ValueError: any other reduction.
        """
        check_type("accumulationAndReplicationReductionType", reduction, ReductionType)
        if reduction not in (ReductionType.Mean, ReductionType.Sum):
            raise ValueError(
                f"accumulationAndReplicationReductionType({reduction.name}): expected ReductionType.Mean or .Sum"
            )
        self.set(accumulation_and_replication_reduction_type=reduction)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(self, strategy: MeanReductionStrategy) -> "_TrainingOptions":
        """Set whether a mean is kept running or divided once at the end."""
        check_type("setMeanAccumulationAndReplicationReductionStrategy", strategy, MeanReductionStrategy)
        self.set(meanAccumulationAndReplicationReductionStrategy=strategy)
        self._strategy_was_set = True
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> "_TrainingOptions":
        """Let the loss scale follow the gradients."""
        check_type("setAutomaticLossScaling", enabled, bool)
        self.set(auto_loss_scaling=enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> "_TrainingOptions":
        """Spread convolutions over the tiles; no effect on results."""
        check_type("setConvolutionDithering", enabled, bool)
        self.set(convolution_dithering=enabled)
        return self


class TensorLocationSettings(OptionsDict):
    """Where a kind of tensors lies: on or off the chip, whole or sharded over replicas."""

    def __init__(self) -> None:
        super().__init__(
            minElementsForOffChip=None,
            minElementsForReplicatedTensorSharding=None,
            onChip=None,
            useReplicatedTensorSharding=None,
            useIOTilesToLoad=None,
            useIOTilesToStore=None,
        )

    def _set(self, name: str, value: Any, kind: type) -> "TensorLocationSettings":
        check_type(name, value, kind)
        self._check_open()
        self._values[name] = value
        return self

    def minElementsForOffChip(self, elements: int) -> "TensorLocationSettings":
        """Smaller tensors stay on the chip."""
        return self._set("minElementsForOffChip", elements, int)

    def minElementsForReplicatedTensorSharding(self, elements: int) -> "TensorLocationSettings":
        """Smaller tensors are not sharded."""
        return self._set("minElementsForReplicatedTensorSharding", elements, int)

    def useOnChipStorage(self, use: Optional[bool] = True) -> "TensorLocationSettings":
        """True for on chip, False for off chip, None for the default."""
        if use is None:
            self._check_open()
            self._values["onChip"] = None
            return self
        return self._set("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> "TensorLocationSettings":
        """Spread the tensors over the replicas."""
        return self._set("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> "TensorLocationSettings":
        """Load through the tiles reserved for input and output."""
        return self._set("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> "TensorLocationSettings":
        """Store through the tiles reserved for input and output."""
        return self._set("useIOTilesToStore", use, bool)


class _TensorLocationOptions(OptionsDict):
    """Locations per kind of tensor, `Options.TensorLocations`. They do not change results."""

    def __init__(self) -> None:
        super().__init__(numIOTiles=0)
        for kind in ("activation", "weight", "optimizer", "accumulator"):
            self.__dict__[f"location_{kind}"] = TensorLocationSettings()

    def _locate(self, kind: str, location: TensorLocationSettings) -> "_TensorLocationOptions":
        check_type(f"set{kind.title()}Location", location, TensorLocationSettings)
        self._check_open()
        self.__dict__[f"location_{kind}"] = location
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        """Place activations."""
        return self._locate("activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        """Place weights."""
        return self._locate("weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        """Place optimizer state."""
        return self._locate("optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> "_TensorLocationOptions":
        """Place gradient accumulators."""
        return self._locate("accumulator", location)

    def numIOTiles(self, num_tiles: int) -> "_TensorLocationOptions":
        """Reserve tiles for input and output."""
        check_type("numIOTiles", num_tiles, int)
        if not (32 <= num_tiles <= 192 and num_tiles % 2 == 0):
            raise AssertionError(f"numIOTiles must be an even number between 32 and 192, got {num_tiles}.")
        self.set(numIOTiles=num_tiles)
        return self

    def toDict(self) -> Dict[str, Any]:
        """Return the locations by kind."""
        return {**super().toDict(), **{name: child.toDict() for name, child in self._children().items()}}


class _PopartOptions(OptionsDict):
    """Session options handed to PopART as they are, `Options._Popart`. None of them changes results."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["options"] = {}
        self.__dict__["patterns"] = {}
        self.__dict__["patterns_level"] = 2

    def set(self, key: str, value: Any) -> "_PopartOptions":  # type: ignore[override]
        """Set one session option; PopART's own names."""
        self._check_open()
        check_type("_Popart.set: key", key, str)
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> "_PopartOptions":
        """Set options of the Poplar engine."""
        check_type("setEngineOptions", engine_options, dict)
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> "_PopartOptions":
        """Switch graph patterns on or off."""
        self._check_open()
        check_type("setPatterns", patterns, dict)
        check_type("setPatterns: level", level, int)
        self.__dict__["patterns"] = dict(patterns)
        self.__dict__["patterns_level"] = level
        return self

    def toDict(self) -> Dict[str, Any]:
        """Return options and patterns."""
        return {**self.options, "patterns": self.patterns, "patterns_level": self.patterns_level}


class _DistributedOptions(OptionsDict):
    """This process among those that train together, `Options.Distributed`."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0)
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> "_DistributedOptions":
        """Read the number of processes and this one's index from these environment variables, where set."""
        number, index = os.environ.get(var_num_processes), os.environ.get(var_process_id)
        self.configureProcessId(int(index or 0), int(number or 1))
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> "_DistributedOptions":
        """State the number of processes and this one's index."""
        check_type("configureProcessId: process_id", process_id, int)
        check_type("configureProcessId: num_processes", num_processes, int)
        if not 0 <= process_id < num_processes:
            raise AssertionError(f"process_id must lie in 0..{num_processes - 1}, got {process_id}")
        if num_processes > 1:
            logger.info("Process %d of %d", process_id, num_processes)
        self.set(num_distributed_processes=num_processes, distributed_process_id=process_id)
        return self

    def disable(self) -> "_DistributedOptions":
        """Ignore the environment: one process."""
        return self.configureProcessId(0, 1)

    @property
    def processId(self) -> int:
        """This process's index."""
        return self._values["distributed_process_id"]

    @property
    def numProcesses(self) -> int:
        """How many processes train together."""
        return self._values["num_distributed_processes"]
