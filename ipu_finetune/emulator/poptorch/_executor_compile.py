# SPDX-License-Identifier: Apache-2.0
"""How an executor compiles: options become a plan, the model becomes a program, IPUs are taken, the cache is asked."""

import contextlib
import hashlib
import time
from typing import Any, ContextManager, Dict, List, Mapping

import torch

from ...errors import did_you_mean
from ..device.cache import CacheAnswer, ExecutableCache
from ..device.enums import MeanReductionStrategy, OutputMode, ReductionType
from ..device.errors import Error
from ..device.layout import reserve_ipus
from ..device.plan import Anchor, Plan
from ..device.program import Program
from ..device.size import check_graph_size, weight_bytes
from ._args_parser import shapes_of
from ._executable_key import parts_of
from ._executor_base import tensor_leaves
from ._executor_device import ExecutorDevice
from ._hooks import run_hooks
from ._logging import logger
from ._session_options import check_session_options, note_device_only_options
from ._stages import Stages
from .enums import CommGroupType
from .optim._base import Optimizer, Pending
from .optim._reading import read_optimizer
from .options import Options

__all__ = ["LARGE_OUTPUT", "ExecutorCompile", "check_return_period"]

#: bytes that one step may return to the host before it is remarked on
LARGE_OUTPUT = 64 * 2**20


_dictionaries_noted = False


class ExecutorCompile(ExecutorDevice):
    """The part of an executor that makes a program of a model."""

    # ---- the plan

    def _choose_reduction(self) -> None:
        """Let an fp16 gradient accumulator keep a running mean, which cannot overflow where a sum would."""
        strategy = self._asked_strategy
        image = self._image
        if image is not None and not image.combined and image.type_of("gradient") == torch.float16:
            strategy = MeanReductionStrategy.Running
        # Of this executor's own copy of the options.
        training = self._options.Training
        training._unfreeze()
        training.set(meanAccumulationAndReplicationReductionStrategy=strategy)
        training._freeze()

    def _plan(self) -> Plan:
        options = self._options
        training = options.Training
        self._choose_reduction()
        running = training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running
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
            half_partials=options.Precision.half_partials,
            io_tiles=options.TensorLocations.toDict().get("numIOTiles", 0),
            seed=options.random_seed,
            updatable_buffers=tuple(options.updatable_named_buffers),
            anchors=self._anchors(),
            groupings=tuple(sorted(self._groupings.items())),
            strategy=options._execution_strategy.rule(),
        )

    def _anchors(self) -> Any:
        anchors = []
        for long_name, by_default, mode, period in self._options.anchored_tensors.values():
            mode = OutputMode(self._options.output_mode if by_default else mode)
            anchors.append(Anchor(long_name, mode, self._options.output_return_period if by_default else period))
            logger.debug("Anchoring %s %s/%d", long_name, *_spelled(mode, period))
        return tuple(anchors)

    # ---- compiling

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for arguments of a whole combined batch, without running it.

        Raises:
            Error: no loss, a layout that breaks a rule, a model that an IPU would refuse, or IPUs that are in use.
        """
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(self._parser.bind(args, kwargs))

    def isCompiled(self) -> bool:
        """Whether there is something to run."""
        return self._program is not None

    def _compile(self, arguments: Dict[str, Any]) -> None:
        """Make the program and take the IPUs; nothing is held when it fails."""
        started = time.perf_counter()
        stages = Stages()
        self.emulation.stages = stages.seconds
        self._check_target()
        check_session_options(self._options)
        note_device_only_options(self._options)
        self._check_size()
        plan = self._plan()
        self._fetch_from_trainers()
        run_hooks("pre")
        self._note_oddities(arguments)
        if self._training:
            self._wrap()
        with self._alone(plan):
            with stages.stage("tracing"):
                program = Program(self._model, self._parser.call, arguments, plan, self._image, self.emulation)
            with stages.stage("placing"):
                self._place(program, plan)
            with stages.stage("looking up the executable"):
                answer = self._look_up(program, plan, arguments)
        self._note_large_outputs(program, plan)
        self._acquire_for_compilation()
        self.emulation.executable_cache = answer.outcome
        self.emulation.cache_answer = answer
        self._program = program
        self._compiled_for = shapes_of(arguments)
        self._executable_inputs = self._parser.split(self._compiled_for)
        self._attach_when_compiled()
        try:
            if isinstance(self._optimizer, Optimizer):
                self._optimizer._link(self)
                self._load_optimizer_state(with_parameters=False)
            run_hooks("post")
        except BaseException:
            self._forget_program()
            raise
        self._compilation_seconds = time.perf_counter() - started
        logger.info(
            "Compiled in %.1f s: %d forward stages on %d IPUs",
            self._compilation_seconds,
            program.trace.layout.forward_stages,
            self.emulation.ipus,
        )

    def destroy(self) -> None:
        """Copy the weights back, let the IPUs go and drop the compiled model.

        The user's module gets its own classes back, and can be wrapped again.
        """
        if self._program is not None:
            if self._attached:
                self.copyWeightsToHostIfNeeded()
            self._keep_optimizer_state()
        if self._training:
            self._unwrap()
        self._forget_program()
        self._dirty_host_weights = False
        self._compilation_seconds = None
        self._seen_versions = {}

    def _forget_program(self) -> None:
        self._program = None
        self._compiled_for = self._executable_inputs = None
        self._attached = False
        self._give_back()

    def _keep_optimizer_state(self) -> None:
        # The state stays with the optimizer, so that a model compiled anew goes on from it.
        device, optimizer = self._device_optimizer(), self._optimizer
        if device is None or self._offline() or not isinstance(optimizer, Optimizer):
            return
        if optimizer._pending is None:
            optimizer._pending = Pending(device.export_state(copy=False), device.export_parameters())

    def _check_target(self) -> None:
        if self._on_ipu_model() and self._offline():
            raise Error("ConnectionType.Never / useOfflineIpuTarget not supported for the IPU model")
        if self._options.log_cycle_count and not self._offline() and not self._needs_ipus():
            raise Error("Cycle count logging is only supported on actual IPU hardware.")

    def _check_size(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        outside = self._options._Popart.options.get("saveInitializersToFile")
        note = check_graph_size(weight_bytes(tensors), outside)
        if note is not None:
            logger.info(note)

    def _place(self, program: Program, plan: Plan) -> None:
        layout = program.trace.layout
        self.emulation.ipus = reserve_ipus(
            layout.ipus, plan.replicas, self._options.auto_round_num_ipus, enforce=self._needs_ipus()
        )
        if plan.strategy.pipelined:
            layout.check_pipeline(plan)
        loss = program.trace.graph.loss
        if program.optimizer is not None and loss is not None:
            program.optimizer.scale.fit(loss)
            self.emulation.loss_scale = program.optimizer.scale.value
        names = program.tensor_names()
        for short_name, (long_name, *_) in self._options.anchored_tensors.items():
            if long_name not in names:
                raise Error(
                    f"anchorTensor('{short_name}', '{long_name}'): there is no such tensor"
                    f"{did_you_mean(long_name, names)}. The emulator records the gradients (Gradient___<weight>), "
                    "updated weights (UpdatedVar___<weight>) and the loss scale of a training model; "
                    "getTensorNames() lists them."
                )

    # ---- the executable cache

    def _cache(self) -> ExecutableCache:
        return ExecutableCache(self._options._Popart.options.get("cachePath"))

    def _alone(self, plan: Plan) -> ContextManager[Any]:
        """Return what makes the processes of one job compile one after the other: the first for all."""
        if plan.processes == 1:
            return contextlib.nullcontext()
        if not self._options._Popart.options.get("cachePath"):
            logger.warning(
                "Each of %d processes compiles the model for itself: give them a folder with "
                "Options.enableExecutableCaching() and the first one compiles for all.",
                plan.processes,
            )
            return contextlib.nullcontext()
        return self._cache().compilation_lock(hashlib.md5(repr(self._model).encode()).hexdigest())

    def _look_up(self, program: Program, plan: Plan, arguments: Dict[str, Any]) -> CacheAnswer:
        parts = parts_of(program, plan, arguments, self._options, self._model, self._image)
        return self._cache().look_up(parts, model=self._model_name())

    # ---- remarks

    def _note_oddities(self, arguments: Dict[str, Any]) -> None:
        global _dictionaries_noted
        if not _dictionaries_noted and any(_has_dictionary(value) for value in arguments.values()):
            _dictionaries_noted = True
            logger.warning(
                "Dicts as inputs have only partial support on an IPU: their keys are fixed when the model is compiled. "
                "A tuple says the same."
            )
        if self._training and not any(module.training for module in self._model.modules()):
            logger.warning(
                "The training model is in evaluation mode, so dropout and the like are compiled out: call train() on "
                "the module first unless that is wanted."
            )

    def _note_large_outputs(self, program: Program, plan: Plan) -> None:
        several = plan.output_mode in (OutputMode.All, OutputMode.EveryN)
        micro_batches = plan.replicas * (plan.accumulation if several else 1)
        size = micro_batches * sum(_host_bytes(tensor) for tensor in tensor_leaves(program.trace.graph.structure))
        if size >= LARGE_OUTPUT:
            logger.warning(
                "output to host %.0f MiB per step: return only the loss, or the logits that are needed? Each of them "
                "is streamed to the host and held there in full.",
                size / 2**20,
            )

    # ---- the optimizer's state

    def _load_optimizer_state(self, with_parameters: bool = True) -> None:
        """Upload what was loaded into the optimizer.

        Args:
            with_parameters: also the streamed settings. Not where the optimizer's own settings have just been read,
                which are newer.
        """
        optimizer, device = self._optimizer, self._device_optimizer()
        if not isinstance(optimizer, Optimizer) or optimizer._pending is None or device is None:
            return
        self.copyWeightsToHostIfNeeded()
        pending = optimizer._take_pending()
        assert pending is not None
        logger.debug("Writing optimiser state tensors from host to IPU memory")
        device.replace(read_optimizer(optimizer))
        device.import_state(pending.state or {})
        if with_parameters and pending.parameters:
            device.import_parameters(pending.parameters)
        self.emulation.loss_scale = device.scale.value


def check_return_period(options: Options) -> None:
    """Raise Error if `EveryN` would return a part of the device iterations."""
    if OutputMode(options.output_mode) != OutputMode.EveryN:
        return
    period, iterations = options.output_return_period, options.device_iterations
    if period > iterations:
        raise Error(f"Return period ({period}) must be <= to the number of batches per step ({iterations})")
    if iterations % period:
        raise Error(f"Return period ({period}) must be a factor of the number of batches per step ({iterations})")


def _has_dictionary(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and any(_has_dictionary(item) for item in value)


def _spelled(mode: OutputMode, period: int) -> List[Any]:
    # As PopART writes them.
    return ["Sum" if mode == OutputMode.Sum else mode.name.upper(), period if mode == OutputMode.EveryN else 1]


def _host_bytes(tensor: torch.Tensor) -> int:
    wide = tensor.dtype in (torch.int64, torch.float64)
    return tensor.numel() * (4 if wide else tensor.element_size())
