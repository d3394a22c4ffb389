# SPDX-License-Identifier: Apache-2.0
"""`PoplarExecutor`: a model that is compiled at its first call and runs on the emulated IPU."""

import dataclasses
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

from ..device import nested, wrappers
from ..device.cache import ExecutableCache, key_of
from ..device.enums import ConnectionType, MeanReductionStrategy, OutputMode, ReductionType
from ..device.errors import Error
from ..device.layout import reserve_ipus
from ..device.plan import Plan
from ..device.program import Emulation, Program
from ..device.updates import DeviceOptimizer
from ._args_parser import ArgsParser, InputArgs, shapes_of, validate
from ._hardware import uses_ipu_model
from ._hooks import run_hooks
from ._logging import logger
from ._options_base import OptionsDict
from ._version import __version__
from .enums import CommGroupType
from .optim._base import Optimizer
from .optim._reading import read_optimizer
from .options import Options

__all__ = ["PoplarExecutor"]


class PoplarExecutor:
    """Runs a model; made by `trainingModel` and `inferenceModel`.

    Args:
        model: the user's module; a training model changes its class and its parameters' classes.
        options: a clone is kept, with the output mode resolved.
        training: forward, backward and weight updates, or forward only.
        optimizer: only for training.

    Attributes:
        emulation: figures that only the emulator has; PopTorch has no such attribute.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Optional[Options],
        training: bool,
        optimizer: Optional[torch.optim.Optimizer] = None,
    ) -> None:
        if options is None:
            options = Options()
        if not isinstance(options, Options):
            raise Error(f"Invalid type: 'options' must be of type poptorch.Options, got {type(options).__name__}")
        options._freeze()
        self._options = options.clone()
        if self._options.defaultOutputMode():
            self._options.outputMode(OutputMode.Final if training else OutputMode.All)
        _check_return_period(self._options)
        self._options._freeze()
        self._user_model = model
        self._training = training
        self._optimizer = optimizer
        self._parser = ArgsParser(_forward_of(model))
        self._program: Optional[Program] = None
        self._compiled_for: Optional[Dict[str, Any]] = None
        self._executable_inputs: Optional[InputArgs] = None
        self._attached = False
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._seen_versions: Dict[int, int] = {}
        self._compilation_seconds: Optional[float] = None
        self._image = read_optimizer(optimizer, self._options.relax_optimizer_checks) if training else None
        self.emulation = Emulation()
        if training:
            self._wrap()

    # ---- the user's module

    def _wrap(self) -> None:
        for tensor in [*self._user_model.parameters(), *self._user_model.buffers()]:
            wrappers.wrap(tensor, self)
        wrappers.wrap_model(self._user_model, self)

    def _unwrap(self) -> None:
        tensors = [*self._user_model.parameters(), *self._user_model.buffers()]
        if self._program is not None:
            tensors += [weight.tensor for weight in self._program.weights.weights]
        for tensor in tensors:
            wrappers.unwrap(tensor, self)
        wrappers.unwrap_model(self._user_model, self)

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> OptionsDict:
        """The options in force; frozen."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user_model, name)

    def __repr__(self) -> str:
        kind = "trainingModel" if self._training else "inferenceModel"
        return f"PoplarExecutor({kind}): {self._user_model!r}"

    def state_dict(self, *args: Any, **kwargs: Any) -> Dict[str, Any]:
        """Return the module's state, fetched from the device if it is newer there."""
        self.copyWeightsToHostIfNeeded()
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Dict[str, Any], strict: bool = True) -> Any:
        """Load weights into the module and onto the device."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._attached:
            self.copyWeightsToDevice()
        return result

    # ---- compiling

    def _plan(self) -> Plan:
        options = self._options
        training = options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        running = strategy == MeanReductionStrategy.Running
        if not training._strategy_was_set and self._image is not None:
            combined = getattr(self._optimizer, "use_combined_accum", False)
            running = self._image.type_of("gradient") == torch.float16 and not combined
        mean = training.accumulation_and_replication_reduction_type == ReductionType.Mean
        return Plan(
            training=self._training,
            device_iterations=options.device_iterations,
            accumulation=training.gradient_accumulation,
            replicas=options.replication_factor,
            group_size=options.input_group_size,
            consecutive_groups=options.input_group_type != CommGroupType.Orthogonal,
            output_mode=OutputMode(options.output_mode),
            output_period=options.output_return_period,
            reduction=training.accumulation_and_replication_reduction_type,
            running_mean=running and mean,
            processes=options.Distributed.numProcesses,
            broadcast_buffers=options.broadcast_buffers,
            auto_loss_scaling=training.auto_loss_scaling and self._training,
            stochastic_rounding=options.Precision.enable_stochastic_rounding,
            float_exceptions=options.Precision.enable_floating_point_exceptions,
            seed=options.random_seed,
            updatable_buffers=tuple(options.updatable_named_buffers),
            strategy=options._execution_strategy.rule(),
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments of a whole combined batch, without running it.

        Raises:
            Error: no loss, a layout that breaks a rule, or a model that an IPU would refuse.
        """
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(self._parser.bind(args, kwargs))

    def _compile(self, arguments: Dict[str, Any]) -> None:
        started = time.perf_counter()
        plan = self._plan()
        self._fetch_from_trainers()
        run_hooks("pre")
        self._note_oddities()
        if self._training:
            self._wrap()
        program = Program(self._user_model, self._parser.call, arguments, plan, self._image, self.emulation)
        layout = program.trace.layout
        if plan.strategy.pipelined:
            layout.check_pipeline(plan)
        options = self._options
        on_model = uses_ipu_model() if options.use_model is None else options.use_model
        if on_model and options.connection_type == ConnectionType.Never:
            raise Error("ConnectionType.Never / useOfflineIpuTarget not supported for the IPU model")
        self.emulation.ipus = reserve_ipus(
            layout.ipus, plan.replicas, options.auto_round_num_ipus, enforce=not on_model
        )
        self.emulation.executable_cache = self._look_up(program, plan)
        self._program = program
        self._compiled_for = shapes_of(arguments)
        self._executable_inputs = self._parser.split(self._compiled_for)
        self._attached = options.connection_type != ConnectionType.Never
        if isinstance(self._optimizer, Optimizer):
            self._optimizer._link(self)
            self._load_optimizer_state()
        run_hooks("post")
        self._compilation_seconds = time.perf_counter() - started
        logger.info(
            "Compiled in %.1f s: %d forward stages on %d IPUs",
            self._compilation_seconds,
            layout.forward_stages,
            self.emulation.ipus,
        )

    def _look_up(self, program: Program, plan: Plan) -> str:
        layout, settings = program.trace.layout, self._options._Popart.options
        # What is streamed to the device at run time, and where files lie on the way, does not change what is compiled.
        numbers = {name: value for name, value in vars(plan).items() if name not in ("seed", "strategy")}
        popart = {key: value for key, value in settings.items() if key not in ("cachePath", "saveInitializersToFile")}
        segments = [dataclasses.asdict(segment) for segment in layout.segments]
        key = key_of(program.trace.fingerprint, {"plan": numbers, "popart": popart, "layout": segments}, __version__)
        summary = {"ipus": self.emulation.ipus, "forward_stages": layout.forward_stages}
        return ExecutableCache(settings.get("cachePath")).look_up(key, summary)

    def _note_oddities(self) -> None:
        if self._training and not any(module.training for module in self._user_model.modules()):
            logger.warning(
                "The training model is in evaluation mode, so dropout and the like are compiled out: call train() on "
                "the module first unless that is wanted."
            )
        if self._options.anchored_tensors:
            logger.warning(
                "anchorTensor has no effect on the emulator: %s will not be recorded.",
                ", ".join(sorted(self._options.anchored_tensors)),
            )

    def isCompiled(self) -> bool:
        """Whether there is something to run."""
        return self._program is not None

    def compilationTime(self) -> float:
        """Return how long compilation took, in seconds.

        Raises:
            Error: not compiled.
        """
        if not self._options.show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar option to obtain compilation time.")
        if self._compilation_seconds is None:
            raise Error("Please compile the model before obtaining compilation time.")
        return self._compilation_seconds

    def destroy(self) -> None:
        """Copy the weights back, drop the compiled model and give the user's module its own classes back."""
        if self._program is not None:
            if self._attached:
                self.copyWeightsToHostIfNeeded()
            if self._training:
                self._unwrap()
            self._detach_optimizer()
        elif self._training:
            self._unwrap()
        self._program = None
        self._compiled_for = self._executable_inputs = None
        self._attached = False
        self._dirty_host_weights = False
        self._compilation_seconds = None
        self._seen_versions = {}

    def _detach_optimizer(self) -> None:
        # The state stays with the optimizer, so that a model compiled anew goes on from it.
        device = self._device_optimizer()
        if device is not None and isinstance(self._optimizer, Optimizer) and self._optimizer._pending is None:
            self._optimizer._pending = device.export_state()

    # ---- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one combined batch, compiling first if need be, and return what the output mode asks for."""
        arguments = self._parser.bind(args, kwargs)
        if self._program is None:
            self._compile(arguments)
        elif self._compiled_for is not None:
            validate(self._compiled_for, arguments)
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): use another connection type, or "
                "compileAndExport()"
            )
        if not self._attached:
            self.attachToDevice()
        program = self._compiled()
        if self._training:
            self._load_optimizer_state()
        else:
            self._follow_trainers()
        if self._training:
            # Marked first: a call that fails half way has moved the device's weights as well.
            self._dirty_host_weights = True
            self._host_weights_version += 1
        result = program.run(arguments)
        if self._training:
            _note_steps(self._optimizer, program.plan.device_iterations)
        return result

    def _compiled(self) -> Program:
        if self._program is None:
            raise AssertionError("Model has not been compiled or has been destroyed.")
        return self._program

    # ---- weights

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights into the user's module."""
        program = self._compiled()
        # Cleared before the copy, which itself looks at the weights.
        self._dirty_host_weights = False
        program.weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights back if the device's are newer; return whether that was so."""
        if not self._dirty_host_weights or self._program is None:
            return False
        self._dirty_host_weights = False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Copy the user's weights to the device; what was trained since the last copy back is lost."""
        program = self._compiled()
        self._dirty_host_weights = False
        self._host_weights_version += 1
        program.weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers named by `updatableNamedBuffers` to the device."""
        names = self._options.updatable_named_buffers
        if not names:
            raise AssertionError("No named buffers marked as updatable via updatableNamedBuffers option")
        self._compiled().weights.upload_named(names)

    def _trainers(self) -> Iterator["PoplarExecutor"]:
        """Training executors whose module shares tensors with this one's."""
        seen = set()
        tensors = (
            [weight.tensor for weight in self._program.weights.weights]
            if self._program is not None
            else [*self._user_model.parameters(), *self._user_model.buffers()]
        )
        for thing in [self._user_model, *tensors]:
            owner = wrappers.owner_of(thing)
            if owner is not None and owner is not self and id(owner) not in seen:
                seen.add(id(owner))
                yield owner

    def _fetch_from_trainers(self) -> None:
        for trainer in self._trainers():
            trainer.copyWeightsToHostIfNeeded()
            self._seen_versions[id(trainer)] = trainer._host_weights_version

    def _follow_trainers(self) -> None:
        behind = False
        for trainer in self._trainers():
            if self._seen_versions.get(id(trainer)) != trainer._host_weights_version:
                trainer.copyWeightsToHostIfNeeded()
                self._seen_versions[id(trainer)] = trainer._host_weights_version
                behind = True
        if behind:
            self._compiled().weights.upload()

    # ---- the device

    def isAttachedToDevice(self) -> bool:
        """Whether the model holds an IPU."""
        return self._attached

    def attachToDevice(self) -> None:
        """Take an IPU and upload weights and optimizer state.

        Raises:
            AssertionError: not compiled, or attached already.
        """
        program = self._compiled()
        if self._attached:
            raise AssertionError("Device is already attached")
        self._fetch_from_trainers()
        program.weights.upload()
        self._attached = True

    def detachFromDevice(self) -> None:
        """Copy the weights back and let the IPU go.

        Raises:
            AssertionError: not compiled, or not attached.
        """
        program = self._compiled()
        if not self._attached:
            raise AssertionError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        program.weights.release()
        self._attached = False

    @property
    def rng_state(self) -> List[int]:
        """The device's random state: the seed and every replica's state, as integers."""
        return self._compiled().random.state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        self._compiled().random.state = [int(word) for word in state]

    # ---- the optimizer

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the settings of an optimizer to the device; until then, changes to it have no effect.

        Raises:
            ValueError: an accumulator type that changes how gradients are reduced.
            Error: another setting that is compiled in.
        """
        image = read_optimizer(optimizer, self._options.relax_optimizer_checks)
        previous = self._optimizer
        self._optimizer = optimizer
        if self._program is None or self._program.optimizer is None:
            self._image = image
            return
        device = self._program.optimizer
        if image.type_of("gradient") != device.image.type_of("gradient"):
            self._optimizer = previous
            raise ValueError(
                f"Invalid optimizer: accum_type {image.type_of('gradient')} differs from "
                f"{device.image.type_of('gradient')}, with which the model is already compiled."
            )
        device.replace(image)
        self._image = image
        self._program.rebind_gradients()
        if isinstance(optimizer, Optimizer):
            optimizer._link(self)
        self._load_optimizer_state()

    def _load_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if not isinstance(optimizer, Optimizer) or optimizer._pending is None:
            return
        device = self._device_optimizer()
        assert device is not None
        state = optimizer._take_pending()
        assert state is not None
        device.replace(read_optimizer(optimizer, quiet=True))
        device.import_state(state)
        self.emulation.loss_scale = device.scale.value

    def _device_optimizer(self) -> Optional[DeviceOptimizer]:
        return self._program.optimizer if self._program is not None else None

    # ---- figures

    def cycleCount(self) -> int:
        """Refuse: only IPU hardware counts cycles."""
        if not self._options.log_cycle_count:
            raise Error("Cycle count logging is disabled. Please set option logCycleCount to True to enable.")
        if self._program is None or not self._program.times:
            raise Error("Please run the model at least once before obtaining cycle count.")
        raise Error("Cycle count logging is only supported on actual IPU hardware.")

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return when each input was read and each output written in the last call, in seconds."""
        names = ("input", "input_complete", "output", "output_complete")
        if self._program is None or not self._program.times:
            return {name: [[]] for name in names}
        assert self._compiled_for is not None
        inputs = len(_tensor_leaves(self._compiled_for))
        times = self._program.times
        counts = {"input": inputs, "input_complete": inputs}
        return {
            name: [list(times[name]) for _ in range(counts.get(name, self._program.trace.outputs))] for name in names
        }

    def _latency(self, first: str, last: str) -> Tuple[float, float, float]:
        if self._program is None or not self._program.times:
            return (0.0, 0.0, 0.0)
        starts, ends = self._program.times[first], self._program.times[last]
        if not starts or not ends:
            return (0.0, 0.0, 0.0)
        step = max(1, len(starts) // len(ends))
        spans = [end - start for start, end in zip(starts[step - 1 :: step], ends)]
        return (min(spans), max(spans), sum(spans) / len(spans))

    def getHostIpuLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean of the time from reading an input to having it on the device."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean of the time from having an input to having its output."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean of the time from having an output to having it on the host."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean of the time from reading an input to having its output on the host."""
        return self._latency("input", "output_complete")


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    own = model.__dict__.get("forward")
    if own is not None:
        return own
    kind: Any = wrappers.plain_class_of(type(model))
    return kind.forward.__get__(model, kind)


def _check_return_period(options: Options) -> None:
    if OutputMode(options.output_mode) != OutputMode.EveryN:
        return
    period, iterations = options.output_return_period, options.device_iterations
    if period > iterations:
        raise Error(f"Return period ({period}) must be <= to the number of batches per step ({iterations})")
    if iterations % period:
        raise Error(f"Return period ({period}) must be a factor of the number of batches per step ({iterations})")


def _tensor_leaves(value: Any) -> List[torch.Tensor]:
    return [leaf for _, leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor)]


def _note_steps(optimizer: Any, updates: int) -> None:
    # PyTorch's schedulers warn when step() of the optimizer never ran, which on an IPU it never does.
    optimizer._step_count = getattr(optimizer, "_step_count", 0) + updates
    optimizer._opt_called = True
