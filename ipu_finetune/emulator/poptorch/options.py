# SPDX-License-Identifier: Apache-2.0
"""`poptorch.Options`: everything that can be asked of a compiled model, checked as it is set."""

import copy
import os
from typing import Any, Dict, List, Optional

import torch

from ._logging import logger
from ._option_groups import (
    TensorLocationSettings,
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)
from ._options_base import OptionsDict, check_count, check_type
from ._options_files import ConfigFileError, apply_file, apply_json
from ._session_options import strategy_values
from .blocks import PipelinedExecution, _ExecutionStrategy
from .enums import CommGroupType, ConnectionType, OutputMode, SyncPattern

__all__ = [
    "ConfigFileError",
    "Options",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]

_NO_LIMIT = 2**64 - 1


class Options(OptionsDict):
    """Options of a training or inference model. They freeze when a model or DataLoader first uses them.

    ```
    options = poptorch.Options()
    options.deviceIterations(4).replicationFactor(2)
    options.Training.gradientAccumulation(8)
    ```

    The environment variables POPTORCH_CACHE_DIR and POPTORCH_DEFAULT_OPTIONS (a JSON object, see `from_json`) apply to
    every new object.
    """

    def __init__(self) -> None:
        super().__init__(
            optional={"ipu_id": int, "ipu_version": int, "model_name": str, "random_seed": int, "use_model": bool},
            replication_factor=1,
            input_group_size=1,
            input_cgt=CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            # As numbers, which is what scripts compare with and what goes to PopART.
            output_mode=OutputMode.Default.value,
            output_return_period=1,
            connection_type=ConnectionType.Always.value,
            sync_pattern=SyncPattern.Full.value,
            available_memory_proportion={},
        )
        popart = _PopartOptions()
        self.__dict__.update(
            Jit=_JitOptions(),
            Precision=_PrecisionOptions(popart),
            Training=_TrainingOptions(popart),
            TensorLocations=_TensorLocationOptions(),
            Distributed=_DistributedOptions(),
            _Popart=popart,
            _execution_strategy=PipelinedExecution(),
            _module_namescope_enabled=True,
            _relax_optimizer_checks=False,
            _show_compilation_progress_bar=True,
            _source_location_excludes=["site-packages/torch", "emulator/poptorch", "emulator/device"],
        )
        if os.environ.get("POPTORCH_CACHE_DIR"):
            logger.info("POPTORCH_CACHE_DIR is set: setting cache path to %s", os.environ["POPTORCH_CACHE_DIR"])
            self.enableExecutableCaching(os.environ["POPTORCH_CACHE_DIR"])
        if os.environ.get("POPTORCH_DEFAULT_OPTIONS"):
            apply_json(self, os.environ["POPTORCH_DEFAULT_OPTIONS"], "POPTORCH_DEFAULT_OPTIONS")

    def _keep(self, name: str, value: Any) -> "Options":
        self._check_open()
        self.__dict__[name] = value
        return self

    # ---- what other modules read under a plain name

    @property
    def _popart(self) -> _PopartOptions:
        return self._Popart

    @property
    def input_group_type(self) -> CommGroupType:
        """Which replicas receive the same input."""
        return CommGroupType(self.input_cgt)

    @property
    def log_cycle_count(self) -> bool:
        """Whether cycles are to be counted."""
        return bool(self._Popart.options.get("instrumentWithHardwareCycleCounter", False))

    @property
    def module_namescope_enabled(self) -> bool:
        """Whether operations are named after the module that they are in."""
        return bool(self._module_namescope_enabled)

    @property
    def relax_optimizer_checks(self) -> bool:
        """Whether unexpected optimizer attributes are only reported at debug level."""
        return bool(self._relax_optimizer_checks)

    @property
    def show_compilation_progress_bar(self) -> bool:
        """Whether the progress of a compilation is shown."""
        return bool(self._show_compilation_progress_bar)

    @property
    def source_location_excludes(self) -> List[str]:
        """Which source files are skipped when an operation's origin is looked for."""
        return list(self._source_location_excludes)

    @property
    def stable_norm(self) -> bool:
        """Whether norms are to be computed in a stable way."""
        return bool(self._Popart.options.get("enableStableNorm", False))

    @property
    def synthetic_data_mode(self) -> int:
        """One of `popart.SyntheticDataMode`."""
        return int(self._Popart.options.get("syntheticDataMode", 0))

    @property
    def updatable_named_buffers(self) -> List[str]:
        """The buffers that `copyNamedBuffersToDevice` uploads."""
        return list(self._Popart.options.get("updatableNamedBuffers", []))

    # ---- batch arithmetic

    def deviceIterations(self, device_iterations: int) -> "Options":
        """Set D, the steps that one call runs on the device."""
        check_count("deviceIterations", device_iterations)
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> "Options":
        """Set R, the copies of the pipeline."""
        check_count("replicationFactor", replication_factor)
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> "Options":
        """Let groups of replicas receive the same input.

        Raises:
            ValueError: the size does not divide the replication factor, or the type is All.
        """
        check_type("inputReplicaGrouping", input_group_type, CommGroupType)
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        if input_group_type == CommGroupType.All:
            raise ValueError("input_group_type cannot be All: all replicas would see one input")
        check_count("inputReplicaGrouping", input_group_size)
        if self.replication_factor < input_group_size:
            raise ValueError(
                "input_group_size cannot be larger than replication_factor, which must be set first: "
                f"{input_group_size} is above {self.replication_factor}"
            )
        if self.replication_factor % input_group_size:
            raise ValueError(
                "input_group_size must be a factor of replication_factor: "
                f"{input_group_size} does not divide {self.replication_factor}"
            )
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def outputMode(self, output_mode: OutputMode, output_return_period: Optional[int] = None) -> "Options":
        """Set which micro-batches' outputs a call returns; `EveryN` needs a period."""
        check_type("outputMode", output_mode, OutputMode)
        period = output_return_period
        if output_mode == OutputMode.EveryN:
            if not isinstance(period, int) or period <= 0:
                raise AssertionError(
                    "EveryN anchor must have output_return_period set to valid positive integer: outputMode("
                    f"OutputMode.EveryN, output_return_period) got {period!r}"
                )
        elif period:
            logger.info("output_return_period %s is ignored: only OutputMode.EveryN uses it", period)
            period = 1
        self.set(output_mode=output_mode.value, output_return_period=period or 1)
        return self

    def anchorMode(self, anchor_mode: OutputMode, anchor_return_period: Optional[int] = None) -> "Options":
        """Deprecated: the name of `outputMode` before PopTorch 3."""
        logger.warning("[Deprecated] Options.anchorMode is now Options.outputMode")
        return self.outputMode(anchor_mode, anchor_return_period)

    def defaultOutputMode(self) -> bool:
        """Whether no output mode has been chosen."""
        return bool(self.output_mode == OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[OutputMode] = None,
        output_return_period: int = 1,
    ) -> "Options":
        """Keep an inner tensor so that `getAnchoredTensor(short_name)` can return it."""
        self._check_open()
        check_type("anchorTensor: short_name", short_name, str)
        check_type("anchorTensor: long_name", long_name, str)
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, period]
        return self

    # ---- devices and layout

    def setExecutionStrategy(self, strategy: _ExecutionStrategy) -> "Options":
        """Set how blocks become stages: PipelinedExecution, ShardedExecution or a phased one."""
        check_type("setExecutionStrategy", strategy, _ExecutionStrategy)
        return self._keep("_execution_strategy", strategy)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> "Options":
        """Reserve the next power of two if the model needs another number of IPUs."""
        check_type("autoRoundNumIPUs", auto_round_num_ipus, bool)
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: Dict[str, float]) -> "Options":
        """Set the share of each IPU's memory that matrix products and convolutions may use, as `{"IPU0": 0.5}`."""
        check_type("setAvailableMemoryProportion", available_memory_proportion, dict)
        for name in available_memory_proportion:
            if not (isinstance(name, str) and name.startswith("IPU") and name[3:].isdigit()):
                raise AssertionError(
                    f'setAvailableMemoryProportion takes a dictionary as {{"IPU0": 0.5}}. Invalid key: {name!r}'
                )
        by_number = {int(name[3:]): share for name, share in available_memory_proportion.items()}
        self.set(available_memory_proportion=by_number)
        return self

    def useIpuModel(self, use_model: bool) -> "Options":
        """Run on Graphcore's software model of an IPU, where any number of IPUs can be had."""
        check_type("useIpuModel", use_model, bool)
        self.set(use_model=use_model)
        return self

    def useIpuId(self, ipu_id: int) -> "Options":
        """Choose a device by its number."""
        check_type("useIpuId", ipu_id, int)
        self.set(ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> "Options":
        """Compile without a device; the model cannot be called."""
        check_type("useOfflineIpuTarget", ipu_version, int)
        self.connectionType(ConnectionType.Never)
        self.set(ipu_version=ipu_version)
        return self

    def connectionType(self, connection_type: ConnectionType) -> "Options":
        """Set when the model attaches to a device."""
        check_type("connectionType", connection_type, ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self, sync_pattern: SyncPattern) -> "Options":
        """Set which IPUs wait for each other; no effect on results."""
        check_type("syncPattern", sync_pattern, SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    # ---- state

    def randomSeed(self, random_seed: int) -> "Options":
        """Seed the device, and PyTorch's generator on the host with it."""
        check_type("randomSeed", random_seed, int)
        self.set(random_seed=random_seed)
        torch.manual_seed(random_seed)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> "Options":
        """With False, each replica has its own copy of the buffers that the model changes."""
        check_type("broadcastBuffers", broadcast_buffers, bool)
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def updatableNamedBuffers(self, buffers: List[str]) -> "Options":
        """Name the buffers that `copyNamedBuffersToDevice` uploads."""
        if not isinstance(buffers, (list, tuple)) or not all(isinstance(name, str) for name in buffers):
            raise AssertionError(f"updatableNamedBuffers takes a list of names, got {buffers!r}")
        self._Popart.set("updatableNamedBuffers", list(buffers))
        return self

    # ---- files

    def enableExecutableCaching(self, path: Optional[str]) -> "Options":
        """Keep compiled models in a folder; None switches it off."""
        if path is None:
            self._Popart.set("enableEngineCaching", False)
            self._Popart.options.pop("cachePath", None)
        else:
            self._Popart.set("cachePath", os.fspath(path))
            self._Popart.set("enableEngineCaching", True)
        return self

    def enableProfiling(self, profile_dir: Optional[str] = None) -> "Options":
        """Ask Poplar for a profile; the emulator writes none, as nothing here takes an IPU's time or memory."""
        given = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        if any(name in given for name in ("debug.allowOutOfMemory", "autoReport.directory", "autoReport.all")):
            logger.warning("Profiling setting overridden by environment variable POPLAR_ENGINE_OPTIONS: %s", given)
        folder = os.fspath(profile_dir) if profile_dir else "."
        engine = {"debug.allowOutOfMemory": "true", "autoReport.directory": folder, "autoReport.all": "true"}
        self._Popart.setEngineOptions({**self._Popart.options.get("engineOptions", {}), **engine})
        logger.warning("enableProfiling: the emulator writes no profile.pop to %s, only a real IPU does", folder)
        return self

    def loadFromFile(self, filepath: str) -> "Options":
        """Apply a file with one call per line, as `deviceIterations(4)` or `Training.gradientAccumulation(8)`.

        Raises:
            ConfigFileError: a line cannot be read, so none was applied.
            Exception: what a call raised; the message names its line.
        """
        apply_file(self, os.fspath(filepath))
        return self

    def from_json(self, string: str) -> "Options":
        """Apply a JSON object of calls, as `{"deviceIterations": 4, "_Popart.set": ["outlineThreshold", 10.0]}`.

        Enumerations are written as "OutputMode.All".
        """
        apply_json(self, string, "Options.from_json")
        return self

    # ---- others

    def enableSyntheticData(self, enabled: bool) -> "Options":
        """Generate inputs on the device; the emulator goes on reading the host's."""
        check_type("enableSyntheticData", enabled, bool)
        if enabled:
            logger.warning("enableSyntheticData has no effect on the emulator: inputs are read as they are")
        self._Popart.set("syntheticDataMode", 2 if enabled else 0)
        return self

    def enableStableNorm(self, enabled: bool) -> "Options":
        """Compute norms in a stable way, as PyTorch's kernels do."""
        check_type("enableStableNorm", enabled, bool)
        self._Popart.set("enableStableNorm", enabled)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> "Options":
        """Count cycles; only real hardware has any."""
        check_type("logCycleCount", log_cycle_count, bool)
        self._Popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def logDir(self, log_dir: str) -> "Options":
        """Set the folder for logs."""
        self.set(log_dir=os.fspath(log_dir))
        return self

    def maxRepeatLogs(self, max_lines: Optional[int]) -> "Options":
        """Limit repeated log lines; None for no limit."""
        if max_lines is not None:
            check_type("maxRepeatLogs", max_lines, int)
        self.set(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)
        return self

    def modelName(self, name: str) -> "Options":
        """Name the model for profiles."""
        check_type("modelName", name, str)
        self.set(model_name=name)
        return self

    def showCompilationProgressBar(self, show: bool = True) -> "Options":
        """Show the progress of a compilation, and let `compilationTime` be asked for."""
        check_type("showCompilationProgressBar", show, bool)
        return self._keep("_show_compilation_progress_bar", show)

    def disableModuleNamescope(self) -> "Options":
        """Leave module names out of operation names."""
        return self._keep("_module_namescope_enabled", False)

    def sourceLocationExcludes(self, excludes: List[str]) -> "Options":
        """Set which source files are skipped when an operation's origin is recorded."""
        return self._keep("_source_location_excludes", list(excludes))

    def appendToLocationExcludes(self, *excludes: str) -> "Options":
        """Add to `sourceLocationExcludes`."""
        return self._keep("_source_location_excludes", [*self._source_location_excludes, *excludes])

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> "Options":
        """Report unexpected optimizer attributes at debug level only."""
        check_type("relaxOptimizerAttributesChecks", relax, bool)
        return self._keep("_relax_optimizer_checks", relax)

    # ---- copies

    def clone(self) -> "Options":
        """Return a copy that is not frozen."""
        return copy.deepcopy(self)

    def toDict(self) -> Dict[str, Any]:
        """Return all values in one dictionary, under the names that PopART is given.

        Raises:
            AssertionError: no output mode was picked, or `_Popart.set` names an option that there is a method for.
        """
        if self.defaultOutputMode():
            raise AssertionError("An output mode must be picked before serialisation: call outputMode()")
        values = {**strategy_values(self._execution_strategy), **self._Popart.options}
        super().update(values)
        for part in (self.Training, self.Distributed, self.TensorLocations):
            part.update(values)
        return values
