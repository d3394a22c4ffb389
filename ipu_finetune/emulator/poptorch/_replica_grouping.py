# SPDX-License-Identifier: Apache-2.0
"""`executor.weight.replicaGrouping(...)`: parameters that differ between replicas."""

from typing import Any, Callable

import torch

from ..device.errors import Error
from ..device.replica_weights import ReplicaGrouping
from .enums import CommGroupType, VariableRetrievalMode

__all__ = ["ReplicaGrouping", "ReplicaGroupingWrapper"]


class ReplicaGroupingWrapper:
    """A parameter of the user's model as an attribute of its executor: acts as the parameter itself.

    Args:
        parameter: the user's parameter.
        set_grouping: called with what `replicaGrouping` was asked for.
    """

    def __init__(self, parameter: torch.nn.Parameter, set_grouping: Callable[[ReplicaGrouping], None]) -> None:
        self.__dict__["_parameter"] = parameter
        self.__dict__["_set_grouping"] = set_grouping

    def replicaGrouping(
        self, comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """Let groups of replicas have values of their own; dimension 0 of the parameter is the group.

        Args:
            comm_group_type: which replicas share a value.
            shards: replicas per group; of no meaning for All and NoGrouping.
            variable_retrieval_mode: whose values are copied back to the host.

        Raises:
            Error: an argument of another type, or the model is compiled already.
        """
        if not isinstance(comm_group_type, CommGroupType):
            raise Error(f"replicaGrouping: comm_group_type must be a poptorch.CommGroupType, got {comm_group_type!r}")
        if not isinstance(shards, int) or isinstance(shards, bool):
            raise Error(f"replicaGrouping: shards must be a number of replicas, got {shards!r}")
        if not isinstance(variable_retrieval_mode, VariableRetrievalMode):
            raise Error(
                "replicaGrouping: variable_retrieval_mode must be a poptorch.VariableRetrievalMode, got "
                f"{variable_retrieval_mode!r}"
            )
        self._set_grouping(ReplicaGrouping(comm_group_type, shards, variable_retrieval_mode))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_parameter"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_parameter"], name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_open(args), **_open(kwargs or {}))

    def __repr__(self) -> str:
        return repr(self.__dict__["_parameter"])

    def __len__(self) -> int:
        return len(self.__dict__["_parameter"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.__dict__["_parameter"][index]

    def __float__(self) -> float:
        return float(self.__dict__["_parameter"])


def _open(value: Any) -> Any:
    if isinstance(value, ReplicaGroupingWrapper):
        return value.__dict__["_parameter"]
    if isinstance(value, (list, tuple)):
        return type(value)(_open(item) for item in value)
    if isinstance(value, dict):
        return {key: _open(item) for key, item in value.items()}
    return value
