# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802 - PopDist's own names are camelCase
"""A look-alike of PopDist: where this process stands among those that PopRun started.

Everything is read from the environment that PopRun and Open MPI set; without it there is one instance with one replica.
"""

import os
from typing import Any, Callable, Iterable

from ..device.errors import Error
from . import _peers

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
    """Connect to the other instances, if there are any; waits until all have called it.

    They meet at MASTER_ADDR and MASTER_PORT. Instances on one host find each other without these variables.

    Raises:
        Error: the instances are on several hosts and their meeting point is not named, or it cannot be reached.
    """
    _peers.join("popdist", getInstanceIndex(), getNumInstances())


def getNumTotalReplicas() -> int:
    """Replicas of all instances."""
    return _number("POPDIST_NUM_TOTAL_REPLICAS", 1)


def getNumLocalReplicas() -> int:
    """Replicas of this instance."""
    total = getNumTotalReplicas()
    return _number("POPDIST_NUM_LOCAL_REPLICAS", total // _number("OMPI_COMM_WORLD_SIZE", 1) or 1)


def getNumIpusPerReplica() -> int:
    """IPUs of one replica."""
    return _number("POPDIST_NUM_IPUS_PER_REPLICA", 1)


def getReplicaIndexOffset() -> int:
    """Index of this instance's first replica among all."""
    return _number("POPDIST_REPLICA_INDEX_OFFSET", getNumLocalReplicas() * _number("OMPI_COMM_WORLD_RANK", 0))


def _check_uniform() -> None:
    if _number("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", 1) == 0:
        raise Error(
            "The instances have different numbers of replicas, so they cannot be counted: start them with a "
            "--num-replicas that --num-instances divides."
        )


def getNumInstances() -> int:
    """How many processes run together.

    Raises:
        Error: their numbers of replicas differ.
    """
    _check_uniform()
    return _number("OMPI_COMM_WORLD_SIZE", getNumTotalReplicas() // getNumLocalReplicas())


def getInstanceIndex() -> int:
    """This process's index among all.

    Raises:
        Error: the instances' numbers of replicas differ.
    """
    _check_uniform()
    return _number("OMPI_COMM_WORLD_RANK", getReplicaIndexOffset() // getNumLocalReplicas())


def getLocalInstanceIndex() -> int:
    """This process's index among those on the same host."""
    return _number("POPDIST_LOCAL_INSTANCE_INDEX", _number("OMPI_COMM_WORLD_LOCAL_RANK", 0))


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the number of the device that this instance uses: on each host, one device per instance."""
    return getLocalInstanceIndex()


def checkNumIpusPerReplica(number: int) -> bool:
    """Whether a model that needs `number` IPUs per replica fits what PopRun was told; without PopRun that is 1."""
    return number == getNumIpusPerReplica()


def execute_on_instances(instances: Iterable[int], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func(*args, **kwargs)` on the instances named; all instances must call this.

    What `func` synchronises, such as `hvd.allreduce`, spans these instances only.

    Returns:
        What `func` returns, None on the other instances.
    """
    chosen = set(instances).intersection(range(getNumInstances()))
    with _peers.only(chosen):
        return func(*args, **kwargs) if getInstanceIndex() in chosen else None
