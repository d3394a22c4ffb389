# SPDX-License-Identifier: Apache-2.0
"""`PoplarExecutor`: a model that is compiled at its first call and runs on the emulated IPU."""

import copy
from typing import Any, Callable, Optional

import torch
from torch import nn

from ..device import wrappers
from ..device.enums import OutputMode
from ..device.errors import Error
from ..device.program import Emulation
from ._args_parser import ArgsParser
from ._executor_compile import check_return_period
from ._executor_figures import ExecutorFigures
from ._options_base import OptionsDict
from ._printing import module_repr
from ._saving import ExecutorSaving
from .optim._base import Optimizer
from .optim._reading import OptimizerReader
from .options import Options

__all__ = ["PoplarExecutor"]


class PoplarExecutor(ExecutorSaving, ExecutorFigures):
    """Runs a model; made by `trainingModel` and `inferenceModel`.

    Its methods live in its bases: compiling, weights, the device, files, figures.

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
        check_return_period(self._options)
        self._options._freeze()
        self._asked_strategy = self._options.Training.meanAccumulationAndReplicationReductionStrategy
        # A shallow copy is what runs: it shares parameters and submodules, and keeps its own attributes, so that
        # `model.eval()` after wrapping does not reach a training model, nor `model.train()` an inference model.
        self._model = copy.copy(model)
        self._model.__class__ = wrappers.plain_class_of(type(model))
        self._user_model = model if training else self._model
        self._training = training
        self._optimizer = optimizer
        self._parser = ArgsParser(_forward_of(model))
        self._program = None
        self._compiled_for = None
        self._executable_inputs = None
        self._attached = False
        self._lease = None
        self._release = None
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._seen_versions = {}
        self._groupings = {}
        self._compilation_seconds = None
        self._reader = OptimizerReader(self._options.relax_optimizer_checks)
        self._image = self._reader.read(optimizer) if training else None
        self.emulation = Emulation()
        if training:
            self._wrap()

    # ---- what it stands for

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
        return self._as_attribute(name, getattr(self._user_model, name))

    def __repr__(self) -> str:
        kind = "trainingModel" if self._training else "inferenceModel"
        return f"PoplarExecutor({kind}): {module_repr(self._user_model)}"

    # ---- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one combined batch, compiling first if need be, and return what the output mode asks for."""
        arguments = self._parser.bind(args, kwargs)
        if self._offline():
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): use another connection type, or "
                "compileAndExport()"
            )
        if self._program is None:
            self._compile(arguments)
        elif self._compiled_for is not None:
            arguments = self._parser.validate(self._compiled_for, arguments)
        if not self._attached:
            self.attachToDevice()
        program = self._compiled()
        if self._training:
            self._load_optimizer_state()
            if isinstance(self._optimizer, Optimizer):
                self._optimizer._forget_snapshot()
            # Marked first: a call that fails half way has moved the device's weights as well.
            self._dirty_host_weights = True
            self._host_weights_version += 1
        else:
            self._follow_trainers()
        result = program.run(arguments)
        if self._training:
            _note_steps(self._optimizer, program.plan.device_iterations)
        return result

    # ---- the optimizer

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the settings of an optimizer to the device; until then, changes to it have no effect.

        Raises:
            ValueError: an accumulator type that changes how gradients are reduced.
            Error: another setting that is compiled in.
        """
        image = self._reader.read(optimizer)
        if self._program is None or self._program.optimizer is None:
            self._optimizer, self._image = optimizer, image
            return
        device = self._program.optimizer
        if image.type_of("gradient") != device.image.type_of("gradient"):
            raise ValueError(
                f"Invalid optimizer: accum_type {image.type_of('gradient')} differs from "
                f"{device.image.type_of('gradient')}, with which the model is already compiled."
            )
        device.replace(image)
        self._optimizer, self._image = optimizer, image
        self._program.rebind_gradients()
        if isinstance(optimizer, Optimizer):
            optimizer._link(self)
        self._load_optimizer_state(with_parameters=False)


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    own = model.__dict__.get("forward")
    if own is not None:
        return own
    kind: Any = wrappers.plain_class_of(type(model))
    return kind.forward.__get__(model, kind)


def _note_steps(optimizer: Any, updates: int) -> None:
    # PyTorch's schedulers warn when step() of the optimizer never ran, which on an IPU it never does.
    optimizer._step_count = getattr(optimizer, "_step_count", 0) + updates
    optimizer._opt_called = True
