# SPDX-License-Identifier: Apache-2.0
"""How the processes of one run find and talk to each other: torch.distributed over gloo.

PopDist and Horovod speak over the same connection here, whichever of them is initialised first.
"""

import atexit
import contextlib
import datetime
import os
import zlib
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Set, Tuple

from ..device.errors import Error

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["Scope", "connected", "join", "leave", "only", "scope"]

# What Open MPI tells every process about the run that it belongs to.
_RUN_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
_FIRST_PORT, _PORTS = 15000, 17000  # below the range from which systems pick ports of their own
_DEFAULT_PORT = 29500
_LAST_WAIT = 10  # seconds

_users: Set[str] = set()
_is_ours = False
_groups: Dict[Tuple[int, ...], Any] = {}
_members: Optional[Tuple[int, ...]] = None


class Scope:
    """The processes that a collective call spans.

    Attributes:
        ranks: their indexes among all.
        group: what torch.distributed calls them; None for all.
    """

    def __init__(self, ranks: Tuple[int, ...], group: Optional["torch.distributed.ProcessGroup"]) -> None:
        self.ranks, self.group = ranks, group


def connected() -> bool:
    """Whether this process is connected to others."""
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _address(rank: int, size: int) -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None:
        here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", size))
        if here != size:
            raise Error(
                f"This is process {rank} of {size}, of which {here} run on this host: set MASTER_ADDR to the host of "
                "process 0 (and MASTER_PORT to a free port there) for all of them, so that they find each other."
            )
        host = "127.0.0.1"
    if port is None:
        run = next((os.environ[name] for name in _RUN_NAMES if name in os.environ), None)
        # Two runs on one host must not meet.
        port = str(_DEFAULT_PORT if run is None else _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS)
    return f"{host}:{port}"


def join(user: str, rank: int, size: int) -> None:
    """Connect this process to the others of the run; waits until all have come.

    The address of process 0 is MASTER_ADDR and MASTER_PORT; without them it is this host and a port that follows from
    the name which Open MPI gave the run, or 29500.

    Args:
        user: who needs the connection.
        rank: this process's index.
        size: how many there are; nothing is done for one.

    Raises:
        Error: they cannot be found, or are connected already in another number.
    """
    global _is_ours
    import torch.distributed

    if size > 1:
        if not torch.distributed.is_available():
            raise Error(f"{size} processes cannot be connected: this PyTorch was built without torch.distributed")
        if not torch.distributed.is_initialized():
            _connect(_address(rank, size), rank, size)
            _is_ours = True
            atexit.register(_part)
        present = torch.distributed.get_world_size()
        if present != size:
            raise Error(
                f"torch.distributed already connects {present} processes, but the environment says that {size} run "
                "together: start all of them with the same launcher."
            )
    _users.add(user)


def _connect(address: str, rank: int, size: int) -> None:
    import torch.distributed

    try:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise Error(
            f"Process {rank} of {size} could not meet the others at {address}: {error}. Process 0 must be able to "
            "listen there and all must be started together; MASTER_ADDR and MASTER_PORT name another place."
        ) from error


def _part() -> None:
    """Leave in step at the end of the program: gloo's threads end the process that outlives its peers with an abort."""
    global _is_ours
    if not _is_ours or not connected():
        return
    import torch.distributed

    # A peer that has failed does not come; what happened there has been reported there.
    with contextlib.suppress(RuntimeError):
        torch.distributed.monitored_barrier(timeout=datetime.timedelta(seconds=_LAST_WAIT))
    torch.distributed.destroy_process_group()
    _is_ours = False


def leave(user: str) -> None:
    """Close the connection once nobody needs it, if it was made here."""
    global _is_ours
    _users.discard(user)
    if _users or not _is_ours:
        return
    import torch.distributed

    torch.distributed.destroy_process_group()
    _groups.clear()
    _is_ours = False


def scope() -> Scope:
    """Return the processes that a collective call made now spans."""
    import torch.distributed

    if not connected():
        return Scope((0,), None)
    everyone = tuple(range(torch.distributed.get_world_size()))
    members = everyone if _members is None else _members
    return Scope(members, _groups.get(members))


@contextlib.contextmanager
def only(members: Set[int]) -> Iterator[None]:
    """Let collective calls within the block span only these processes; the others must come here, too."""
    global _members
    import torch.distributed

    before, ranks = _members, tuple(sorted(members))
    if connected() and 1 < len(ranks) < torch.distributed.get_world_size() and ranks not in _groups:
        _groups[ranks] = torch.distributed.new_group(list(ranks))
    _members = ranks
    try:
        yield
    finally:
        _members = before
