# SPDX-License-Identifier: Apache-2.0
"""Weights of an executor: between the user's module and the device, and between executors of one module."""

from typing import Any, Dict, Iterator

from torch import nn

from ..device import wrappers
from ..device.errors import Error
from ..device.replica_weights import ReplicaGrouping
from ._executor_base import ExecutorBase
from ._logging import logger
from ._replica_grouping import ReplicaGroupingWrapper

__all__ = ["ExecutorWeights"]


class ExecutorWeights(ExecutorBase):
    """The part of an executor that moves weights."""

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

    # ---- copies

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights into the user's module.

        Raises:
            Error: not compiled, or destroyed.
        """
        program = self._compiled()
        # Cleared before the copy, which itself looks at the weights.
        self._dirty_host_weights = False
        logger.debug("copyWeightsToHost(): Writing weights from IPU to host")
        program.weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights back if the device's are newer; return whether that was so."""
        if not self._dirty_host_weights or self._program is None:
            return False
        self._dirty_host_weights = False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Copy the user's weights to the device; what was trained since the last copy back is lost.

        Raises:
            Error: not compiled, or destroyed.
        """
        program = self._compiled()
        self._dirty_host_weights = False
        self._host_weights_version += 1
        self._upload(program)

    def _upload(self, program: Any) -> None:
        logger.debug("Writing weights from host to IPU memory")
        program.weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers named by `updatableNamedBuffers` to the device.

        Raises:
            AssertionError: the option names none.
            Error: not compiled, or destroyed.
        """
        names = self._options.updatable_named_buffers
        if not names:
            raise Error("No named buffers marked as updatable via updatableNamedBuffers option")
        self._compiled().weights.upload_named(names)

    # ---- executors that share a module

    def _trainers(self) -> Iterator["ExecutorWeights"]:
        """Yield the training executors whose module shares tensors with this one's."""
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
            self._upload(self._compiled())

    # ---- weights that differ between replicas

    def _as_attribute(self, name: str, value: Any) -> Any:
        """Return an attribute of the user's module as the executor gives it."""
        if not isinstance(value, nn.Parameter):
            return value
        return ReplicaGroupingWrapper(value, lambda grouping: self._group_replicas(name, grouping))

    def _group_replicas(self, name: str, grouping: ReplicaGrouping) -> None:
        if self._program is not None:
            raise Error(f"replicaGrouping of '{name}' comes after the compilation: call destroy() first")
        self._groupings[name] = grouping
