# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802 - PopDist's own names are camelCase
"""`popdist.poptorch.Options`: options whose replicas and processes come from PopRun."""

from typing import Any, NoReturn, Optional

from .. import popdist
from ..device.errors import Error
from ..poptorch import Options as _Options
from ..poptorch.options import _DistributedOptions

__all__ = ["Options"]


def _refuse(name: str, flag: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options: poprun decides it, use {flag}")


class _Distributed(_DistributedOptions):
    """The process numbers that PopRun gave; they cannot be changed."""

    def disable(self) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.disable", "poptorch.Options for a model that runs in one process only")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.setEnvVarNames", "poprun's --num-instances")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        _refuse("Distributed.configureProcessId", "poprun's --num-instances")


class Options(_Options):
    """Options for one of PopRun's instances: its replicas, its index and the number of instances.

    Args:
        ipus_per_replica: how many IPUs the model needs.

    Raises:
        Error: PopRun was told another number of IPUs per replica.
    """

    def __init__(self, ipus_per_replica: Optional[int] = None) -> None:
        told = popdist.getNumIpusPerReplica() if popdist.isPopdistEnvSet() else ipus_per_replica
        if ipus_per_replica not in (None, told):
            raise Error(
                f"The model uses {ipus_per_replica} IPUs per replica, but poprun was started with "
                f"--ipus-per-replica {told}."
            )
        super().__init__()
        self.set(replication_factor=popdist.getNumLocalReplicas())
        self.Distributed._configure(popdist.getInstanceIndex(), popdist.getNumInstances())
        self.Distributed.__class__ = _Distributed

    def useIpuId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: each instance gets its own device."""
        _refuse("useIpuId", "poprun's --vipu-partition")

    def replicationFactor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the replicas are divided over the instances."""
        _refuse("replicationFactor", "poprun's --num-replicas")
