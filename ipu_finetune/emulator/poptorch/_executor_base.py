# SPDX-License-Identifier: Apache-2.0
"""What the parts of `PoplarExecutor` share: the model, its options and the compiled program."""

import weakref
from typing import Any, Dict, List, Optional

import torch
from torch import nn

from ..device import nested, wrappers
from ..device.errors import Error
from ..device.pod import Lease
from ..device.program import Emulation, Program
from ..device.updates import DeviceOptimizer, OptimizerImage
from ._args_parser import ArgsParser, InputArgs
from ._replica_grouping import ReplicaGrouping
from .enums import ConnectionType, MeanReductionStrategy
from .optim._reading import OptimizerReader
from .options import Options

__all__ = ["ExecutorBase", "tensor_leaves"]


class ExecutorBase:
    """Attributes of an executor.

    Attributes:
        emulation: figures that only the emulator has; PopTorch has no such attribute.
    """

    _model: nn.Module
    _user_model: nn.Module
    _options: Options
    _training: bool
    _optimizer: Optional[torch.optim.Optimizer]
    _reader: OptimizerReader
    _image: Optional[OptimizerImage]
    _parser: ArgsParser
    _program: Optional[Program]
    _compiled_for: Optional[Dict[str, Any]]
    _executable_inputs: Optional[InputArgs]
    _attached: bool
    _lease: Optional[Lease]
    _release: Optional["weakref.finalize[Any, Any]"]
    _dirty_host_weights: bool
    _host_weights_version: int
    _seen_versions: Dict[int, int]
    _asked_strategy: MeanReductionStrategy
    _groupings: Dict[str, ReplicaGrouping]
    _compilation_seconds: Optional[float]
    emulation: Emulation

    def _compiled(self) -> Program:
        if self._program is None:
            raise Error("Model has not been compiled or has been destroyed.")
        return self._program

    def _offline(self) -> bool:
        return self._options.connection_type == ConnectionType.Never

    def _device_optimizer(self) -> Optional[DeviceOptimizer]:
        return self._program.optimizer if self._program is not None else None

    def _model_name(self) -> str:
        return wrappers.plain_class_of(type(self._user_model)).__name__


def tensor_leaves(value: Any) -> List[torch.Tensor]:
    """Return the tensors in nested arguments or results, in order."""
    return [leaf for _, leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor)]
