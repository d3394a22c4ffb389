# SPDX-License-Identifier: Apache-2.0
"""A look-alike of PopTorch that runs on an emulated IPU.

Scripts see it as `poptorch` after `ipu_finetune.emulator.install()`. Names and behaviour are those of PopTorch 3.3; the
arithmetic is PyTorch's on the CPU. `PoplarExecutor.emulation` and `registerCustomOpReplacement` exist only here.

The environment variable IPU_FINETUNE_EMULATED_HARDWARE names the IPU generation that is claimed: 2 (the default), 21
for Bow, 1, or 0 for a machine without an IPU.
"""

import os
from typing import Any, Callable, Optional, Union

import torch
from torch import nn

from ..device import wrappers as _wrappers
from ..device.errors import Error, RecoverableError, UnrecoverableError
from . import _impl as _impl
from . import enums, optim, options, poptorch_core, profiling
from ._args_parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ._hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from ._hooks import registerPostCompileHook, registerPreCompileHook
from ._logging import setLogLevel
from ._poplar_executor import PoplarExecutor
from ._printing import module_repr, print
from ._saving import read_saved as _read_saved
from ._utils import accessAttributes, createPoptorchError, getIpuTensorId
from ._version import __version__ as __version__
from .blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    removeBlocks,
)
from .custom_ops import custom_op, registerCustomOpReplacement
from .data import AsynchronousDataAccessor, DataLoader
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .multiconv import MultiConv
from .ops import (
    CPU,
    Attribute,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    isRunningOnIpu,
    nearest,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .options import Options, TensorLocationSettings

#: the name of `OutputMode` before PopTorch 3
AnchorMode = OutputMode

__all__ = [
    "CPU",
    "AnchorMode",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CommGroupType",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "accessAttributes",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "module_repr",
    "nearest",
    "nop",
    "optim",
    "options",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerCustomOpReplacement",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]


class _FunctionModule(nn.Module):
    """Lets a plain function be run as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def trainingModel(
    model: Union[nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module whose `forward` computes its loss for training.

    The module's class and those of its parameters change, so that looking at a weight fetches it from the device;
    `destroy()` changes them back.

    Args:
        model: the module.
        options: defaults to `Options()`.
        optimizer: defaults to SGD with a learning rate of 0.01.

    Raises:
        RuntimeError: the module is being trained by another executor already.
        AssertionError: an optimizer that does not run on an IPU.
    """
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    owner = _wrappers.owner_of(model)
    if owner is not None:
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to unwrap "
            "before wrapping again."
        )
    if optimizer is None:
        optimizer = optim.SGD(model.parameters(), lr=0.01)
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


def inferenceModel(
    model: Union[nn.Module, PoplarExecutor, Callable[..., Any]],
    options: Optional[Options] = None,
) -> PoplarExecutor:
    """Wrap a module, an executor's module, or a function for inference.

    Raises:
        Error: the options ask for gradient accumulation.
    """
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise Error(f"inferenceModel takes a torch.nn.Module or a function, got {type(model).__name__}")
        model = _FunctionModule(model)
    if isinstance(options, Options):
        accumulation = options.Training.gradient_accumulation
        if accumulation != 1:
            text = (
                "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value "
                "(1) when running a poptorch.inferenceModel()."
            )
            if options._execution_strategy.pipelined:
                text += (
                    " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run for "
                    "pipelined execution instead."
                )
            raise Error(f"{text} It is {accumulation}.")
    return PoplarExecutor(model, options, training=False)


def load(
    filename: Union[str, "os.PathLike[str]"], edit_opts_fn: Optional[Callable[[Options], None]] = None
) -> PoplarExecutor:
    """Return the compiled model that `PoplarExecutor.compileAndExport` or `save` wrote.

    Module, options and optimizer come from the file, with weights, optimizer state and random state. A model that was
    compiled for an offline target gets `ConnectionType.Always`.

    The file holds the user's module as a pickle, and unpickling runs code: load only files from people whom you trust
    to run code on your machine. Classes of the model must be importable.

    Args:
        filename: a file, or a folder that has `model.poptorch`.
        edit_opts_fn: called with the options before the model is wrapped, to change them.

    Raises:
        AssertionError: the file is missing, damaged, foreign, of another version, or has no model in it.
        Error: the module's code has changed since the file was written.
    """
    saved = _read_saved(filename, edit_opts_fn)
    executor = PoplarExecutor(saved.model, saved.options, saved.training, saved.optimizer)
    executor._restore(saved.executable, str(filename))
    return executor
