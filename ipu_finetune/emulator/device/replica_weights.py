# SPDX-License-Identifier: Apache-2.0
"""Parameters that differ between replicas.

The host holds one value per group of replicas in dimension 0 of the parameter: `[groups, ...]`. On the device each
replica sees the `[...]` of its own group. Gradients are summed within a group; the update and the optimizer's state
keep dimension 0.

| kind | groups | group of replica r |
|---|---|---|
| All | 1 | 0 |
| Consecutive of k | R / k | r // k |
| Orthogonal of k | R / k | r % (R / k) |
| NoGrouping | R | r |
"""

import contextlib
import dataclasses
from typing import Any, Iterable, Iterator, List

import torch

from . import wrappers
from .enums import CommGroupType, VariableRetrievalMode
from .errors import Error

__all__ = ["ReplicaGrouping", "stripped", "widened"]


@dataclasses.dataclass(frozen=True)
class ReplicaGrouping:
    """How one parameter is spread over the replicas.

    Attributes:
        kind: which replicas share a value.
        size: replicas per group; of no meaning for All and NoGrouping.
        retrieval: whose values are copied back to the host.
    """

    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup

    def groups(self, replicas: int) -> int:
        """Return the number of different values.

        Raises:
            Error: the replicas cannot be divided like this.
        """
        if self.kind == CommGroupType.All:
            return 1
        if self.kind == CommGroupType.NoGrouping:
            return replicas
        if self.size < 1 or replicas % self.size:
            raise Error(
                f"replicaGrouping: groups of {self.size} replicas ({self.kind.name}) do not divide the replication "
                f"factor {replicas}"
            )
        return replicas // self.size

    def index(self, replica: int, replicas: int) -> int:
        """Return the group of a replica."""
        groups = self.groups(replicas)
        return replica // self.size if self.kind == CommGroupType.Consecutive else replica % groups

    def check(self, name: str, shape: Any, replicas: int) -> None:
        """Raise Error unless dimension 0 of the parameter is the number of groups."""
        if len(shape) == 0:
            raise Error(f"Scalars cannot be passed as per-replica weight tensor values ('{name}' has no dimension 0).")
        groups = self.groups(replicas)
        if shape[0] != groups:
            raise Error(
                f"Per-replica parameter '{name}' has shape {tuple(shape)}: dimension 0 must be the number of groups, "
                f"which is {groups} for {self.kind.name} with {replicas} replicas."
            )
        if self.retrieval == VariableRetrievalMode.AllReplicas and groups != replicas:
            raise Error(
                f"Per-replica parameter '{name}': VariableRetrievalMode.AllReplicas returns {replicas} values, but the "
                f"parameter has room for {groups}. Use OnePerGroup: the replicas of a group hold the same value."
            )

    def views(self, device: torch.Tensor, replicas: int) -> List[torch.Tensor]:
        """Return what each replica sees of the device's tensor; writes go through."""
        return [device[self.index(replica, replicas)] for replica in range(replicas)]


@contextlib.contextmanager
def stripped(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within the block the parameters look as to one replica: without dimension 0. For tracing."""
    full = []
    kept = list(tensors)
    with wrappers.all_plain(kept):
        for tensor in kept:
            full.append(tensor.data)
            tensor.grad = None
            tensor.data = tensor.data[0]
        try:
            yield
        finally:
            for tensor, data in zip(kept, full):
                tensor.data = data


def widened(gradient: torch.Tensor, grouping: ReplicaGrouping, replica: int, replicas: int) -> torch.Tensor:
    """Return one replica's gradient in the parameter's own shape: zero for every other group."""
    wide = gradient.new_zeros((grouping.groups(replicas), *gradient.shape))
    wide[grouping.index(replica, replicas)] = gradient
    return wide
