# SPDX-License-Identifier: Apache-2.0
"""The parts of `Options` that have their own name: `Training`, `Precision`, `TensorLocations` and so on."""

import os
from typing import Any, Dict, Optional

import torch

from ._logging import logger
from ._options_base import OptionsDict, check_count, check_type
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


class _PopartOptions(OptionsDict):
    """Session options handed to PopART as they are, `Options._Popart`.

    They are checked when a model is compiled, see `_session_options.py`.

    Attributes:
        options: every option by PopART's name; some are set by methods of the other parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["options"] = {}

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
        """Switch graph patterns on or off; `level` is one of `popart.PatternsLevel`."""
        self._check_open()
        check_type("setPatterns", patterns, dict)
        check_type("setPatterns: level", level, int)
        return self.set("patterns_level", level).set("patterns", patterns)

    def _merge(self, key: str, **items: Any) -> None:
        self.set(key, {**self.options.get(key, {}), **items})

    def toDict(self) -> Dict[str, Any]:
        """Return every option that is set."""
        return dict(self.options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


class _JitOptions(OptionsDict):
    """Options of the tracer that PopTorch no longer has."""

    def traceModel(self, trace_model: bool) -> "_JitOptions":
        """Deprecated; only False is possible.

        Raises:
            ValueError: tracing with torch.jit is asked for.
        """
        logger.warning("[Deprecated] Options.Jit.traceModel has no effect: leave it out")
        if trace_model:
            raise ValueError("options.Jit.traceModel(True) is no longer supported: models are not traced by torch.jit")
        return self


class _PrecisionOptions(OptionsDict):
    """Options about number formats, `Options.Precision`; they are PopART's options under clearer names."""

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_popart"] = popart

    def _children(self) -> Dict[str, OptionsDict]:
        return {}  # the PopART options are a part of `Options` already

    @property
    def enable_stochastic_rounding(self) -> bool:
        """Whether fp16 results are rounded at random."""
        return bool(self._popart.options.get("enableStochasticRounding", False))

    @property
    def enable_floating_point_exceptions(self) -> bool:
        """Whether a value that is not finite is an error."""
        return bool(self._popart.options.get("enableFloatingPointChecks", False))

    @property
    def half_partials(self) -> bool:
        """Whether matrix products sum up in fp16."""
        return bool(self._popart.options.get("partialsTypeMatMuls") == "half")

    def enableStochasticRounding(self, enabled: bool) -> "_PrecisionOptions":
        """Round fp16 results at random so that their mean is exact. The emulator rounds weight updates so."""
        check_type("enableStochasticRounding", enabled, bool)
        self._popart.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> "_PrecisionOptions":
        """Set the dtype of partial sums in matrix products and convolutions.

        Raises:
            ValueError: neither torch.float nor torch.half.
        """
        if dtype not in (torch.float, torch.half):
            raise ValueError(f"parameter to setPartialsType should be either torch.float or torch.half, got {dtype!r}")
        name = "half" if dtype == torch.half else "float"
        self._popart.set("partialsTypeMatMuls", name)
        self._popart._merge("convolutionOptions", partialsType=name)
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> "_PrecisionOptions":
        """Stop with an Error when a value is not finite."""
        check_type("enableFloatingPointExceptions", enabled, bool)
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> "_PrecisionOptions":
        """Deprecated: mixed operations follow PyTorch's own promotion."""
        logger.warning(
            "[Deprecated] Options.Precision.halfFloatCasting has no effect, half and float promote to float as in "
            "PyTorch: leave it out"
        )
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> "_PrecisionOptions":
        """Deprecated: running statistics have the dtype of their buffers.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(f"runningStatisticsAlwaysFloat needs to be set to a bool, got {value!r}")
        logger.warning(
            "[Deprecated] Options.Precision.runningStatisticsAlwaysFloat has no effect, running statistics have the "
            "dtype of their buffers: leave it out"
        )
        return self


class _TrainingOptions(OptionsDict):
    """Options that only a training model has, `Options.Training`."""

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
        )
        self.__dict__["_popart"] = popart
        self.__dict__["_strategy_was_set"] = False

    def _children(self) -> Dict[str, OptionsDict]:
        return {}

    @property
    def auto_loss_scaling(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return bool(self._popart.options.get("automaticLossScalingSettings.enabled", False))

    @property
    def convolution_dithering(self) -> bool:
        """Whether convolutions are spread over the tiles."""
        return bool(self._popart.options.get("convolutionOptions", {}).get("enableConvDithering", False))

    def gradientAccumulation(self, gradient_accumulation: int) -> "_TrainingOptions":
        """Set A, the micro-batches per weight update."""
        check_count("gradientAccumulation", gradient_accumulation)
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> "_TrainingOptions":
        """Set how gradients are reduced over accumulation and replicas: Mean (default) or Sum.

        Raises:
            ValueError: anything else.
        """
        if not isinstance(reduction_type, ReductionType) or reduction_type == ReductionType.NoReduction:
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to poptorch.ReductionType.Mean or "
                f"poptorch.ReductionType.Sum, got {reduction_type!r}"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> "_TrainingOptions":
        """Set whether a mean is kept running or divided once at the end."""
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        self._strategy_was_set = True
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> "_TrainingOptions":
        """Let the loss scale follow the gradients."""
        check_type("setAutomaticLossScaling", enabled, bool)
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> "_TrainingOptions":
        """Spread convolutions over the tiles; no effect on results."""
        check_type("setConvolutionDithering", enabled, bool)
        self._popart._merge("convolutionOptions", enableConvDithering=enabled)
        return self


class TensorLocationSettings(OptionsDict):
    """Where a kind of tensors lies: on or off the chip, whole or sharded over replicas."""

    def __init__(self) -> None:
        names = ("onChip", "useReplicatedTensorSharding", "useIOTilesToLoad", "useIOTilesToStore")
        sizes = ("minElementsForOffChip", "minElementsForReplicatedTensorSharding")
        super().__init__(optional={name: int for name in (*sizes, *names)})

    def _put(self, name: str, value: Any, kind: type) -> "TensorLocationSettings":
        check_type(name, value, kind)
        self.set(**{name: int(value)})
        return self

    # Methods have the names of the options, and are found before them.
    def minElementsForOffChip(self, min_elements: int) -> "TensorLocationSettings":
        """Smaller tensors stay on the chip."""
        return self._put("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> "TensorLocationSettings":
        """Smaller tensors are not sharded."""
        return self._put("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: Optional[bool] = True) -> "TensorLocationSettings":
        """True for on chip, False for off chip, None for the default."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._put("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> "TensorLocationSettings":
        """Spread the tensors over the replicas."""
        return self._put("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> "TensorLocationSettings":
        """Load through the tiles reserved for input and output."""
        return self._put("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> "TensorLocationSettings":
        """Store through the tiles reserved for input and output."""
        return self._put("useIOTilesToStore", use, bool)


class _TensorLocationOptions(OptionsDict):
    """Locations per kind of tensor, `Options.TensorLocations`. They do not change results."""

    def __init__(self) -> None:
        kinds = ("activation", "weight", "optimizer", "accumulator")
        super().__init__(optional={"numIOTiles": int, **{f"location_{kind}": dict for kind in kinds}})

    def _locate(self, kind: str, location: TensorLocationSettings) -> "_TensorLocationOptions":
        check_type(f"set{kind.title()}Location", location, TensorLocationSettings)
        # As they are now: what is set later on the same object has no effect.
        self.set(**{f"location_{kind}": location.toDict()})
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
            raise AssertionError(f"numIOTiles must be an even number between 32 and 192. Got {num_tiles}")
        self.set(numIOTiles=num_tiles)
        return self


class _DistributedOptions(OptionsDict):
    """This process among those that train together, `Options.Distributed`."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0)
        self._read_environment("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def _read_environment(self, var_num_processes: str, var_process_id: str) -> None:
        numbers = []
        for variable, default in ((var_process_id, "0"), (var_num_processes, "1")):
            text = os.environ.get(variable, default)
            try:
                numbers.append(int(text))
            except ValueError:
                raise ValueError(f"{variable}={text!r} is not a number: a launcher such as mpirun sets it") from None
        self._configure(*numbers)

    def _configure(self, process_id: int, num_processes: int) -> None:
        check_type("configureProcessId: process_id", process_id, int)
        check_type("configureProcessId: num_processes", num_processes, int)
        if not 0 <= process_id < num_processes:
            raise AssertionError(
                f"configureProcessId: process_id must lie in 0..num_processes - 1 = {num_processes - 1}, "
                f"got {process_id}"
            )
        self.set(num_distributed_processes=num_processes, distributed_process_id=process_id)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> "_DistributedOptions":
        """Read the number of processes and this one's index from these environment variables, where set."""
        self._read_environment(var_num_processes, var_process_id)
        return self

    def configureProcessId(self, process_id: int, num_processes: int) -> "_DistributedOptions":
        """State the number of processes and this one's index."""
        self._configure(process_id, num_processes)
        return self

    def disable(self) -> "_DistributedOptions":
        """Ignore the environment: one process."""
        self._configure(0, 1)
        return self

    @property
    def processId(self) -> int:
        """This process's index."""
        return int(self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """How many processes train together."""
        return int(self._values["num_distributed_processes"])
