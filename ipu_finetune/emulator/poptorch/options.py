# SPDX-License-Identifier: Apache-2.0
"""`poptorch.Options`: everything that can be asked of a compiled model, checked as it is set."""

import copy
import json
import os
import warnings
from typing import Any, Dict, List, Optional

import torch

from ..device.errors import Error
from . import enums
from ._logging import logger
from ._option_groups import (
    TensorLocationSettings,
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
    check_type,
)
from ._options_base import OptionsDict
from .blocks import PipelinedExecution, _ExecutionStrategy
from .enums import CommGroupType, ConnectionType, OutputMode, SyncPattern

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings", "_DistributedOptions", "_TensorLocationOptions"]


class ConfigFileError(Error):
    """A line of an options file that cannot be applied."""


class Options(OptionsDict):
    """Options of a training or inference model. They freeze when a model or DataLoader first uses them.

    ```
    options = poptorch.Options()
    options.deviceIterations(4).replicationFactor(2)
    options.Training.gradientAccumulation(8)
    ```
    """

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            device_iterations=1,
            log_dir=".",
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=OutputMode.Default,
            output_return_period=1,
            connection_type=ConnectionType.Always,
            sync_pattern=SyncPattern.Full,
            available_memory_proportion={},
            random_seed=None,
            input_group_size=1,
            input_group_type=CommGroupType.Consecutive,
            ipu_id=None,
            use_model=None,
            ipu_version=None,
            broadcast_buffers=True,
            stable_norm=False,
            log_cycle_count=False,
            max_repeat_logs=4,
            model_name=None,
            show_compilation_progress_bar=True,
            module_namescope_enabled=True,
            updatable_named_buffers=[],
            source_location_excludes=[],
            relax_optimizer_checks=False,
            synthetic_data_mode=None,
        )
        parts = self.__dict__
        parts["Jit"] = _JitOptions()
        parts["Precision"] = _PrecisionOptions()
        parts["Training"] = _TrainingOptions()
        parts["TensorLocations"] = _TensorLocationOptions()
        parts["Distributed"] = _DistributedOptions()
        parts["_Popart"] = _PopartOptions()
        parts["_execution_strategy"] = PipelinedExecution()
        if os.environ.get("POPTORCH_CACHE_DIR"):
            self.enableExecutableCaching(os.environ["POPTORCH_CACHE_DIR"])
        if os.environ.get("POPTORCH_DEFAULT_OPTIONS"):
            self.from_json(os.environ["POPTORCH_DEFAULT_OPTIONS"])

    @property
    def _popart(self) -> _PopartOptions:
        return self._Popart

    # ---- batch arithmetic

    def deviceIterations(self, device_iterations: int) -> "Options":
        """Set D, the steps that one call runs on the device."""
        check_type("deviceIterations", device_iterations, int)
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> "Options":
        """Set R, the copies of the pipeline."""
        check_type("replicationFactor", replication_factor, int)
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> "Options":
        """Let groups of replicas receive the same input.

        Raises:
            ValueError: the size does not divide the replication factor, or the type is All.
        """
        if input_group_type == CommGroupType.All:
            raise ValueError(
                "inputReplicaGrouping: CommGroupType.All is not possible, all replicas would see one input"
            )
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        if input_group_size > self.replication_factor:
            raise ValueError(
                f"inputReplicaGrouping: size {input_group_size} is above the replication factor "
                f"{self.replication_factor}"
            )
        if self.replication_factor % input_group_size:
            raise ValueError(
                f"inputReplicaGrouping: size {input_group_size} is not a factor of the replication factor "
                f"{self.replication_factor}"
            )
        self.set(input_group_size=input_group_size, input_group_type=input_group_type)
        return self

    def outputMode(self, output_mode: OutputMode, output_return_period: Optional[int] = None) -> "Options":
        """Set which micro-batches' outputs a call returns; `EveryN` needs a period."""
        check_type("outputMode", output_mode, OutputMode)
        if output_mode == OutputMode.EveryN:
            if not isinstance(output_return_period, int) or output_return_period <= 0:
                raise AssertionError(
                    f"EveryN output mode requires a positive output_return_period, got {output_return_period}"
                )
        elif output_return_period is not None:
            logger.info("output_return_period is only used by OutputMode.EveryN: ignored")
        self.set(output_mode=output_mode, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        """Whether no output mode has been chosen."""
        return self.output_mode == OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[OutputMode] = None,
        output_return_period: int = 1,
    ) -> "Options":
        """Keep an inner tensor so that `getAnchoredTensor(short_name)` can return it."""
        self._check_open()
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, output_return_period]
        return self

    # ---- devices and layout

    def setExecutionStrategy(self, strategy: _ExecutionStrategy) -> "Options":
        """Set how blocks become stages: PipelinedExecution, ShardedExecution or a phased one."""
        check_type("setExecutionStrategy", strategy, _ExecutionStrategy)
        self._check_open()
        self.__dict__["_execution_strategy"] = strategy
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> "Options":
        """Reserve the next power of two if the model needs another number of IPUs."""
        check_type("autoRoundNumIPUs", auto_round_num_ipus, bool)
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: Dict[str, float]) -> "Options":
        """Set the share of each IPU's memory that matrix products and convolutions may use."""
        for name in available_memory_proportion:
            if not name.startswith("IPU"):
                raise AssertionError(f"setAvailableMemoryProportion: '{name}' must be of the form 'IPU0'")
        self.set(available_memory_proportion=dict(available_memory_proportion))
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
        self.set(connection_type=ConnectionType.Never, ipu_version=ipu_version)
        return self

    def connectionType(self, connection_type: ConnectionType) -> "Options":
        """Set when the model attaches to a device."""
        check_type("connectionType", connection_type, ConnectionType)
        self.set(connection_type=connection_type)
        return self

    def syncPattern(self, sync_pattern: SyncPattern) -> "Options":
        """Set which IPUs wait for each other; no effect on results."""
        check_type("syncPattern", sync_pattern, SyncPattern)
        self.set(sync_pattern=sync_pattern)
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
        check_type("updatableNamedBuffers", buffers, list)
        if not all(isinstance(name, str) for name in buffers):
            raise AssertionError(f"updatableNamedBuffers: names must be strings, got {buffers}")
        self.set(updatable_named_buffers=list(buffers))
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
        """Ask Poplar for a profile; the emulator has none to write."""
        if "POPLAR_ENGINE_OPTIONS" in os.environ:
            warnings.warn("POPLAR_ENGINE_OPTIONS overrides Options.enableProfiling", UserWarning, stacklevel=2)
        engine = dict(self._Popart.options.get("engineOptions", {}))
        engine.update({"debug.allowOutOfMemory": "true", "autoReport.all": "true"})
        engine["autoReport.directory"] = os.fspath(profile_dir) if profile_dir else "."
        self._Popart.set("engineOptions", engine)
        return self

    def loadFromFile(self, filepath: str) -> "Options":
        """Apply a file with one call per line, as `deviceIterations(4)` or `Training.gradientAccumulation(8)`.

        Raises:
            ConfigFileError: a line cannot be read or applied; the message names it.
        """
        with open(filepath, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.strip()
                if text and not text.startswith("#"):
                    self._apply_line(text, number, filepath)
        return self

    def _apply_line(self, text: str, number: int, filepath: str) -> None:
        from .. import poptorch

        try:
            exec(f"options.{text}", {"poptorch": poptorch, "torch": torch, "options": self, **vars(enums)})
        except Exception as error:
            raise ConfigFileError(f"{type(error).__name__} at line {number} of {filepath}: {error}") from error

    def from_json(self, string: str) -> "Options":
        """Apply a JSON object of setters, as `{"deviceIterations": 4, "Training.gradientAccumulation": 8}`."""
        for name, value in json.loads(string).items():
            target: Any = self
            for part in name.split("."):
                target = getattr(target, part)
            target(_from_text(value))
        return self

    # ---- others

    def enableSyntheticData(self, synthetic_data_enabled: bool) -> "Options":
        """Generate inputs on the device; the emulator goes on reading the host's."""
        check_type("enableSyntheticData", synthetic_data_enabled, bool)
        if synthetic_data_enabled:
            logger.warning("enableSyntheticData has no effect on the emulator: inputs are read as they are")
        self._values["synthetic_data_mode"] = 2 if synthetic_data_enabled else 0
        return self

    def enableStableNorm(self, enabled: bool) -> "Options":
        """Compute norms in a stable way, as PyTorch's kernels do."""
        check_type("enableStableNorm", enabled, bool)
        self.set(stable_norm=enabled)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> "Options":
        """Count cycles; only real hardware has any."""
        check_type("logCycleCount", log_cycle_count, bool)
        self.set(log_cycle_count=log_cycle_count)
        return self

    def logDir(self, log_dir: str) -> "Options":
        """Set the folder for logs."""
        self.set(log_dir=os.fspath(log_dir))
        return self

    def maxRepeatLogs(self, max_lines: Optional[int]) -> "Options":
        """Limit repeated log lines."""
        self._check_open()
        self._values["max_repeat_logs"] = max_lines
        return self

    def modelName(self, name: str) -> "Options":
        """Name the model for profiles."""
        check_type("modelName", name, str)
        self.set(model_name=name)
        return self

    def showCompilationProgressBar(self, show: bool = True) -> "Options":
        """Show the progress of a compilation."""
        check_type("showCompilationProgressBar", show, bool)
        self.set(show_compilation_progress_bar=show)
        return self

    def disableModuleNamescope(self) -> "Options":
        """Leave module names out of operation names."""
        self.set(module_namescope_enabled=False)
        return self

    def sourceLocationExcludes(self, excludes: List[str]) -> "Options":
        """Set which source files are skipped when an operation's origin is recorded."""
        self.set(source_location_excludes=list(excludes))
        return self

    def appendToLocationExcludes(self, *excludes: str) -> "Options":
        """Add to `sourceLocationExcludes`."""
        self.set(source_location_excludes=[*self.source_location_excludes, *excludes])
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> "Options":
        """Report unexpected optimizer attributes at debug level only."""
        check_type("relaxOptimizerAttributesChecks", relax, bool)
        self.set(relax_optimizer_checks=relax)
        return self

    # ---- copies

    def clone(self) -> "Options":
        """Return a copy that is not frozen."""
        return copy.deepcopy(self)

    def toDict(self) -> Dict[str, Any]:
        """Return all values, nested by part.

        Raises:
            AssertionError: no output mode was chosen.
        """
        if self.defaultOutputMode():
            raise AssertionError("An output mode must have been picked before the options can be listed")
        parts = {name: child.toDict() for name, child in self._children().items()}
        return {**super().toDict(), **parts, "execution_strategy": type(self._execution_strategy).__name__}


def _from_text(value: Any) -> Any:
    """Turn "OutputMode.All" into the enumeration's member; leave everything else."""
    if isinstance(value, str) and value.count(".") == 1:
        kind, member = value.split(".")
        if kind in enums.__all__:
            return getattr(enums, kind)[member]
    return value
