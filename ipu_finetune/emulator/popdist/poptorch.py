# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N802 - PopDist's own names are camelCase
"""`popdist.poptorch.Options`: options whose replicas and processes come from PopRun."""

from typing import Any, Dict, Optional

from .. import popdist
from ..poptorch import Options as _Options

__all__ = ["Options"]


def _refuse(name: str) -> None:
    raise RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options: PopRun decides it")


class _Distributed:
    """Keeps the process numbers but refuses to change them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("disable", "setEnvVarNames", "configureProcessId"):
            _refuse(f"Distributed.{name}")
        return getattr(self.__dict__["_inner"], name)


class Options(_Options):
    """Options for one of PopRun's instances.

    Args:
        ipus_per_replica: checked against what PopRun was told.
    """

    def __init__(self, ipus_per_replica: Optional[int] = None) -> None:
        if ipus_per_replica is not None:
            popdist.checkNumIpusPerReplica(ipus_per_replica)
        super().__init__()
        self.set(replication_factor=popdist.getNumLocalReplicas())
        self.Distributed.configureProcessId(popdist.getInstanceIndex(), popdist.getNumInstances())
        self.__dict__["_locked"] = True

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__("__dict__")
        if own.get("_locked"):
            if name in ("useIpuId", "replicationFactor"):
                _refuse(name)
            if name == "Distributed":
                return _Distributed(own["Distributed"])
        return super().__getattribute__(name)

    def toDict(self) -> Dict[str, Any]:
        """Return all values; works on frozen options too and leaves them as they are."""
        return super().toDict()
