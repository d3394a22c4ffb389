# SPDX-License-Identifier: Apache-2.0
"""IPUs of an executor: taken when it attaches, given back when it detaches, is destroyed or forgotten."""

import os
import weakref
from typing import List

from ..device import pod
from ..device.errors import Error
from ._executor_weights import ExecutorWeights
from ._hardware import VARIABLE, uses_ipu_model
from ._logging import logger
from .enums import ConnectionType
from .optim._base import Optimizer

__all__ = ["ExecutorDevice"]


class ExecutorDevice(ExecutorWeights):
    """The part of an executor that holds IPUs."""

    # ---- which device

    def _on_ipu_model(self) -> bool:
        """Whether the software model of an IPU is asked for, of which there are as many as anybody wants."""
        chosen = self._options.use_model
        return uses_ipu_model() if chosen is None else bool(chosen)

    def _needs_ipus(self) -> bool:
        return not self._on_ipu_model() and not self._offline() and _ipus_are_claimed()

    def _acquire(self, announced: bool = False) -> None:
        """Take the IPUs that the compiled model needs, unless they are held or none are needed."""
        if self._lease is not None or not self._needs_ipus():
            return
        count = self.emulation.ipus
        assert count is not None
        lease = pod.acquire(count, ipu_id=self._options.ipu_id, holder=self._model_name())
        self._lease, self._release = lease, weakref.finalize(self, lease.release)
        if not announced:
            logger.debug("Acquired %d IPU(s): running on device Id %d", count, lease.device_id)
        logger.debug("Attached to device %d", lease.device_id)

    def _acquire_for_compilation(self) -> None:
        """Take the IPUs of a model that has just been compiled, in the order in which its connection type does it."""
        count = self.emulation.ipus
        on_demand = self._options.connection_type == ConnectionType.OnDemand and self._needs_ipus()
        if on_demand and count is not None and self._options.ipu_id is None:
            # Compiled for the first device of that size; which one it runs on is found out afterwards.
            logger.debug("Acquired %d IPU(s): running on device Id %d", count, pod.first_device(count))
        if not on_demand:
            self._acquire()
        logger.debug("Finished Poplar compilation (emulated)")
        self._acquire(announced=on_demand)

    def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        if self._release is not None:
            self._release.detach()
            self._release = None
        if lease is not None:
            lease.release()
            logger.debug("Detached from device %d", lease.device_id)

    # ---- attaching

    def isAttachedToDevice(self) -> bool:
        """Whether the model is loaded on an IPU."""
        return self._attached

    def attachToDevice(self) -> None:
        """Take IPUs and upload weights, random state and optimizer state.

        Raises:
            Error: not compiled, attached already, an offline target, or the IPUs are in use.
        """
        program = self._compiled()
        if self._attached:
            raise Error("Device is already attached")
        if self._offline():
            raise Error("An offline device (ConnectionType.Never) cannot be attached to")
        self._acquire()
        self._fetch_from_trainers()
        self._upload(program)
        if isinstance(self._optimizer, Optimizer):
            logger.debug("Writing optimiser state tensors from host to IPU memory")
        self._log_random_upload()
        self._attached = True

    def _log_random_upload(self) -> None:
        logger.debug("Setting random seed to %d", self._compiled().random.seed)
        logger.debug("Setting RNG state")

    def detachFromDevice(self) -> None:
        """Copy weights, random state and optimizer state back and let the IPUs go.

        Raises:
            Error: not compiled, or not attached.
        """
        program = self._compiled()
        if not self._attached:
            raise Error("Device is not attached")
        if not self.copyWeightsToHostIfNeeded() and self._training:
            logger.debug("Writing weights from IPU to host: they are up to date")
        if isinstance(self._optimizer, Optimizer):
            logger.debug("Writing optimiser state tensors from IPU to host.")
        logger.debug("Reading random seed")
        logger.debug("Reading RNG state")
        program.weights.release()
        self._attached = False
        self._give_back()

    def _attach_when_compiled(self) -> None:
        self._attached = self._options.connection_type != ConnectionType.Never

    # ---- random numbers

    @property
    def rng_state(self) -> List[int]:
        """The device's random state: the seed and every replica's state, as integers."""
        return self._compiled().random.state

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        self._compiled().random.state = [int(word) for word in state]


def _ipus_are_claimed() -> bool:
    return os.environ.get(VARIABLE, "2") != "0"
