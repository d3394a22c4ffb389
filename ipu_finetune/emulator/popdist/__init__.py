# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802 - PopDist's own names are camelCase
"""A look-alike of PopDist: where this process stands among those that PopRun started.

Everything is read from the environment that PopRun sets; without it there is one instance with one replica.
"""

import os
from typing import Any, Callable, Iterable

from ..device.errors import Error

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
]


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise Error(f"{name}={text!r} is not a number: it is set by poprun, start the program with it.") from None


def isPopdistEnvSet() -> bool:
    """Whether PopRun started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def init() -> None:
    """Join the other instances, over gloo, if there are any and their address is known."""
    import torch

    instances = getNumInstances()
    if instances == 1 or torch.distributed.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise Error(
            f"This is instance {getInstanceIndex()} of {instances}, but MASTER_ADDR and MASTER_PORT are not set, so "
            "the emulated instances cannot find each other."
        )
    torch.distributed.init_process_group("gloo", rank=getInstanceIndex(), world_size=instances)


def getNumTotalReplicas() -> int:
    """Replicas of all instances."""
    return _number("POPDIST_NUM_TOTAL_REPLICAS", 1)


def getNumLocalReplicas() -> int:
    """Replicas of this instance."""
    return _number("POPDIST_NUM_LOCAL_REPLICAS", getNumTotalReplicas())


def getNumIpusPerReplica() -> int:
    """IPUs of one replica."""
    return _number("POPDIST_NUM_IPUS_PER_REPLICA", 1)


def getReplicaIndexOffset() -> int:
    """Index of this instance's first replica among all."""
    return _number("POPDIST_REPLICA_INDEX_OFFSET", 0)


def getNumInstances() -> int:
    """How many processes run together."""
    return _number("OMPI_COMM_WORLD_SIZE", 1)


def getInstanceIndex() -> int:
    """This process's index among all."""
    return _number("OMPI_COMM_WORLD_RANK", 0)


def getLocalInstanceIndex() -> int:
    """This process's index among those on the same host."""
    return _number("POPDIST_LOCAL_INSTANCE_INDEX", 0)


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the number of the device that this instance uses."""
    return getLocalInstanceIndex()


def checkNumIpusPerReplica(number: int) -> None:
    """Raise if a model needs another number of IPUs per replica than PopRun was told.

    Raises:
        Error: the numbers differ.
    """
    if isPopdistEnvSet() and number != getNumIpusPerReplica():
        raise Error(
            f"The model uses {number} IPUs per replica, but poprun was started with --ipus-per-replica "
            f"{getNumIpusPerReplica()}."
        )


def execute_on_instances(instances: Iterable[int], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function if this instance is one of those named; otherwise return None."""
    return function(*args, **kwargs) if getInstanceIndex() in set(instances) else None
