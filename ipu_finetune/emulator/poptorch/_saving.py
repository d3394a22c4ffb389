# SPDX-License-Identifier: Apache-2.0
"""Saving a compiled model and loading it again, with or without its Python code."""

import contextlib
import dataclasses
import os
from typing import Any, Callable, Dict, Iterator, Optional, Union

import torch

from ..device import nested
from ..device.errors import Error
from . import _impl
from ._executable_file import ExecutableFile, write_file
from ._executor_compile import ExecutorCompile
from ._logging import logger
from .enums import ConnectionType
from .optim._base import Optimizer
from .options import Options

__all__ = ["ExecutorSaving", "Saved", "read_saved"]

PathLike = Union[str, "os.PathLike[str]"]

# Streamed at run time, or objects that say the same as the layout in the fingerprint.
_NOT_COMPARED = ("seed", "strategy", "anchors")


@dataclasses.dataclass
class Saved:
    """What a file with a model holds.

    Attributes:
        model: the user's module.
        options: not frozen.
        optimizer: None in inference.
        training: forward, backward and updates, or forward only.
        executable: the section of that name.
    """

    model: Any
    options: Options
    optimizer: Optional[torch.optim.Optimizer]
    training: bool
    executable: Dict[str, Any]


class ExecutorSaving(ExecutorCompile):
    """The part of an executor that is kept in files."""

    def compileAndExport(self, filename: PathLike, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """Compile, unless that has been done, and `save`.

        Args:
            filename: a file, or a folder that gets `model.poptorch`.
            args: arguments of a whole combined batch.
            export_model: with the module, the options and the optimizer, so that `poptorch.load` needs nothing else.
            kwargs: arguments by name.
        """
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
        else:
            self._compile(self._parser.bind(args, kwargs))
        self.save(filename, export_model)

    def save(self, filename: PathLike, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model to a file, with weights and optimizer state as they are on the device.

        Args:
            filename: a file, or a folder that gets `model.poptorch`.
            export_model: with the module, the options and the optimizer, so that `poptorch.load` needs nothing else.
            save_rng_state: with the state of the device's random numbers.

        Raises:
            Error: not compiled, or the model cannot be pickled.
        """
        program = self._compiled()
        executable: Dict[str, Any] = {
            "arguments": self._compiled_for,
            "training": self._training,
            "fingerprint": program.trace.fingerprint,
            "plan": {name: value for name, value in vars(program.plan).items() if name not in _NOT_COMPARED},
            "rng_state": None,
            "optimizer_state": None,
            "optimizer_parameters": None,
        }
        self.copyWeightsToHostIfNeeded()
        if not self._offline():
            if save_rng_state:
                logger.debug("Reading random seed")
                logger.debug("Reading RNG state")
                executable["rng_state"] = self.rng_state
            if program.optimizer is not None:
                if isinstance(self._optimizer, Optimizer):
                    logger.debug("Writing optimiser state tensors from IPU to host.")
                executable["optimizer_state"] = program.optimizer.export_state()
                executable["optimizer_parameters"] = program.optimizer.export_parameters()
        sections = {"executable": executable}
        with contextlib.ExitStack() as stack:
            if export_model:
                stack.enter_context(_impl.unwrapIfWrapped(self._user_model))
                stack.enter_context(_without_state(self._optimizer))
                sections["model"] = {
                    "model": self._model,
                    "options": self._options.clone(),
                    "optimizer": self._optimizer if self._training else None,
                }
            path = write_file(filename, sections)
        logger.info("Saved the compiled model to %s", path)

    def loadExecutable(self, filename: PathLike) -> None:
        """Take the executable of a file instead of compiling; the model's Python code and options are this executor's.

        Args:
            filename: a file, or a folder that has `model.poptorch`. It is unpickled, so it must come from somebody whom
                you trust to run code on your machine.

        Raises:
            AssertionError: the file is missing, damaged, foreign, or of another version.
            Error: it was made from another model or with other options.
        """
        if self.isCompiled():
            logger.warning("Call to loadExecutable() ignored: the executable is already compiled")
            return
        self._restore(ExecutableFile(filename).read("executable"), str(filename))

    def _restore(self, executable: Dict[str, Any], name: str) -> None:
        """Build the program that was saved; refuse if it turns out to be another one."""
        if executable["training"] != self._training:
            kinds = {True: "a training model", False: "an inference model"}
            raise Error(
                f"{name} holds the executable of {kinds[executable['training']]}, and this is {kinds[self._training]}."
            )
        plan = vars(self._plan())
        different = [
            f"{key} {value} (here {plan[key]})" for key, value in executable["plan"].items() if plan.get(key) != value
        ]
        if different:
            raise Error(
                f"{name} was compiled with other options: {', '.join(different)}. Use the options that it was compiled "
                "with, or poptorch.load(), which takes them from the file."
            )
        self._compile(nested.rebuild(executable["arguments"], _zeros))
        program = self._compiled()
        if program.trace.fingerprint != executable["fingerprint"]:
            self.destroy()
            raise Error(
                f"{name} was compiled from another model: the operations of this one are different. Export the model "
                "again after its code has changed."
            )
        if self._offline():
            return
        logger.debug("Writing weights from host to IPU memory")
        logger.debug("Setting random seed to %d", program.random.seed)
        if executable["rng_state"] is not None:
            logger.debug("Setting RNG state")
            self.rng_state = executable["rng_state"]
        if executable["optimizer_state"] is not None and program.optimizer is not None:
            logger.debug("Writing optimiser state tensors from host to IPU memory")
            program.optimizer.import_state(executable["optimizer_state"])


def read_saved(filename: PathLike, edit_opts_fn: Optional[Callable[[Options], None]] = None) -> Saved:
    """Read a file that holds a model; the arguments and errors are those of `poptorch.load`."""
    file = ExecutableFile(filename)
    if not file.has("model"):
        raise AssertionError(
            f"{file.path} was made with export_model=False and holds no model: wrap the model in Python and use "
            "PoplarExecutor.loadExecutable() instead of poptorch.load()."
        )
    executable, parts = file.read("executable"), file.read("model")
    options = parts["options"].clone()
    if options.connection_type == ConnectionType.Never:
        # What was compiled for a target that was not there is loaded where there is one.
        options.connectionType(ConnectionType.Always)
        options.deleteIfExists("ipu_version")
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    return Saved(parts["model"], options, parts["optimizer"], executable["training"], executable)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@contextlib.contextmanager
def _without_state(optimizer: Any) -> Iterator[None]:
    """Within the block the optimizer is pickled without the device's state, which the executable holds."""
    if not isinstance(optimizer, Optimizer):
        yield
        return
    link, pending = optimizer._executor, optimizer._pending
    optimizer._executor = optimizer._pending = None
    try:
        yield
    finally:
        optimizer._executor, optimizer._pending = link, pending
