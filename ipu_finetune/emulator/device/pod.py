# SPDX-License-Identifier: Apache-2.0
"""The virtual pod: a model that attaches takes IPUs which no other model and no other process of this user can have.

A lease ends with `release`, or with the process, however that ends. See `pod_devices` for the numbers of the devices
and `pod_file` for how processes share them. Where the state folder cannot be used, only the models of one process see
each other.
"""

import dataclasses
import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .errors import Error
from .pod_devices import Group, device_members, first_device, groups, pod_size, too_many
from .pod_file import PodFile, state_folder

__all__ = ["IpuState", "Lease", "acquire", "device_members", "first_device", "holders_text", "listing", "pod_size"]

logger = logging.getLogger("ipu_finetune.emulator")

# A pod waits for 15 s between two attempts; asking here costs microseconds.
POLL_SECONDS = 0.5
_NAME_LENGTH = 64
_SHOWN_HOLDERS = 8
_GENERATIONS = {"1": "ipu1", "2": "ipu2", "21": "ipu21"}


@dataclasses.dataclass(frozen=True)
class _Holder:
    """Who has an IPU: process, program, model, and since when (seconds since the epoch)."""

    pid: int
    program: str = "?"
    model: str = "?"
    since: Optional[float] = None


class IpuState(NamedTuple):
    """One line of the listing; the last four are None where the IPU is free.

    Attributes:
        partition: as the environment names it, or ``emulated``.
        id: of the IPU.
        type: generation that is claimed: ``ipu1``, ``ipu2``, ``ipu21``, or ``none``.
        pid: process that holds it.
        program: that process runs.
        model: that is attached.
        since: seconds since the epoch.
    """

    partition: str
    id: int
    type: str
    pid: Optional[int]
    program: Optional[str]
    model: Optional[str]
    since: Optional[float]


class Lease:
    """IPUs that a model holds; also a context manager that releases them.

    Attributes:
        ids: numbers of the IPUs.
        device_id: of the group that they form, as `Options.useIpuId` takes it.
        holder: name of the model.
    """

    def __init__(self, pod: "_Pod", group: Group, holder: str) -> None:
        self.device_id, self.ids = group
        self.holder = holder
        self._pod = pod
        self._owner = os.getpid()
        self._ended = False

    @property
    def released(self) -> bool:
        """Whether the IPUs were given back, or belong to the process that this one was forked from."""
        return self._ended or self._owner != os.getpid()

    def release(self) -> None:
        """Give the IPUs back; a second call does nothing, nor does one in a forked child, which never owned them."""
        if self.released:
            return
        with self._pod.guard:
            if not self._ended:  # another thread may have been quicker
                self._ended = True
                self._pod.give_back(self.ids)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


class _Pod:
    """One process's view of the pod in one state folder.

    Attributes:
        guard: held while leases begin or end.
    """

    def __init__(self, folder: Path) -> None:
        # Reentrant: the garbage collector may end a lease in the middle of `take`, on the same thread.
        self.guard = threading.RLock()
        self._held: Dict[int, _Holder] = {}
        self._file: Optional[PodFile] = None
        try:
            self._file = PodFile(folder)
        except OSError as error:
            logger.warning(
                "The state of the emulated pod cannot be kept in %s (%s): other processes will not see which IPUs this "
                "one holds. Set XDG_STATE_HOME to a folder that can be written.",
                folder,
                error,
            )

    def take(self, candidates: List[Group], model: str) -> Optional[Group]:
        """Take the first of these groups that is free."""
        holder = _Holder(os.getpid(), _program(), model[:_NAME_LENGTH], time.time())
        with self.guard:
            self._keep_locks()
            for group in candidates:
                members = group[1]
                if any(ipu in self._held for ipu in members):
                    continue
                if self._file is not None:
                    if not self._file.try_lock(members[0], len(members)):
                        continue
                    self._file.write(members[0], len(members), dataclasses.asdict(holder))
                self._held.update(dict.fromkeys(members, holder))
                return group
        return None

    def _keep_locks(self) -> None:
        """Lock what is held once more where somebody deleted the file: new processes look at the new one."""
        if self._file is not None and self._file.renew():
            for ipu, holder in self._held.items():
                if self._file.try_lock(ipu, 1):
                    self._file.write(ipu, 1, dataclasses.asdict(holder))

    def give_back(self, members: Tuple[int, ...]) -> None:
        """End a lease of this process; the caller has the guard."""
        for ipu in members:
            self._held.pop(ipu, None)
        if self._file is not None:
            self._file.unlock(members[0], len(members))

    def holds_any(self) -> bool:
        """Whether a model of this process is attached."""
        return bool(self._held)

    def holder(self, ipu: int) -> Optional[_Holder]:
        """Return who has an IPU."""
        with self.guard:
            if ipu in self._held or self._file is None:
                return self._held.get(ipu)
            process = self._file.locks_elsewhere(ipu)
            if process is None:
                return None
            record = self._file.read(ipu)
        if process and record.get("pid") != process:
            return _Holder(process)  # it has the lock and has not written its record yet
        try:
            return _Holder(int(record["pid"]), str(record["program"]), str(record["model"]), float(record["since"]))
        except (KeyError, TypeError, ValueError):
            return _Holder(process)


_pods: Dict[Tuple[int, str], _Pod] = {}


def _pod() -> _Pod:
    # By process, so that a forked child starts with nothing held and with a guard that no thread of its parent has.
    folder = state_folder()
    key = (os.getpid(), str(folder))
    found = _pods.get(key)
    return found if found is not None else _pods.setdefault(key, _Pod(folder))


def acquire(count: int, *, ipu_id: Optional[int] = None, holder: str, wait: Optional[bool] = None) -> Lease:
    """Take IPUs for a model.

    Args:
        count: how many, a power of two up to 64.
        ipu_id: id of the device to take; it may have more IPUs than `count`, and then all of them are held.
        holder: name of the model, for those who find the IPUs in use.
        wait: whether to wait until there is room; None asks POPTORCH_WAIT_FOR_IPU.

    Raises:
        Error: there is no room and `wait` is False, or the pod has no such device.
    """
    ipus = pod_size()
    if ipu_id is None:
        candidates = groups(count, ipus)
        if not candidates:
            raise Error(too_many(count, ipus))
    else:
        candidates = [(ipu_id, _chosen(ipu_id, count))]
    pod = _pod()
    group = pod.take(candidates, holder)
    if group is None and pod.holds_any():
        # A model that nobody refers to any more keeps its IPUs only until its cycle of references is found.
        gc.collect()
        group = pod.take(candidates, holder)
    if group is None:
        failure = _failure(count, ipu_id, candidates)
        if not (_waits() if wait is None else wait):
            raise Error(failure)
        logger.warning("No IPU available, sleeping for %g s at a time until there is. %s", POLL_SECONDS, failure)
        while group is None:
            time.sleep(POLL_SECONDS)
            if pod.holds_any():
                gc.collect()
            group = pod.take(candidates, holder)
    return Lease(pod, group, holder)


def _chosen(ipu_id: int, count: int) -> Tuple[int, ...]:
    members = device_members(ipu_id)
    if len(members) < count:
        raise Error(
            f"Failed to acquire device Id {ipu_id}: expected at least replication factor * used IPUs = {count} IPU(s), "
            f"but the device that useIpuId names has {len(members)}. The first device of {count} is "
            f"{first_device(count)}."
        )
    if len(members) > count:
        logger.warning(
            "Device Id %d has %d IPUs and the model uses %d (replication factor * used IPUs): the others are held and "
            "not used.",
            ipu_id,
            len(members),
            count,
        )
    return members


def _waits() -> bool:
    text = os.environ.get("POPTORCH_WAIT_FOR_IPU", "").strip() or "0"
    if not text.lstrip("+-").isdigit():
        raise Error(f"POPTORCH_WAIT_FOR_IPU={text}: expected 1 to wait for an IPU, or 0 to fail at once")
    return int(text) != 0


def _program() -> str:
    first = sys.argv[0] if sys.argv else ""
    name = {"": "python", "-c": "python -c", "-m": "python -m"}.get(first) or os.path.basename(first)
    return name[:_NAME_LENGTH]


def _failure(count: int, ipu_id: Optional[int], candidates: List[Group]) -> str:
    wanted = sorted({ipu for _, members in candidates for ipu in members})
    if ipu_id is None:
        size = len(wanted)
        free = "none of them is free" if count == 1 else f"no {count} of them that form one device are free"
        start = f"Failed to acquire {count} IPU(s): the emulated pod has {size}, and {free}."
    else:
        start = f"Failed to acquire device Id {ipu_id} ({len(wanted)} IPU(s)): in use."
    lines = holders_text(wanted)
    if len(lines) > _SHOWN_HOLDERS:
        lines = [*lines[:_SHOWN_HOLDERS], f"and {len(lines) - _SHOWN_HOLDERS} more: ipu-finetune doctor --ipus"]
    return "\n  ".join([start, *lines]) + (
        "\nCall detachFromDevice() or destroy() on the model that holds them, or end that process; or set "
        "POPTORCH_WAIT_FOR_IPU=1 to wait for them."
    )


def holders_text(ipus: List[int]) -> List[str]:
    """Return a line for each model that holds some of `ipus`."""
    pod = _pod()
    leases: List[Tuple[_Holder, List[int]]] = []
    for ipu in ipus:
        holder = pod.holder(ipu)
        if holder is None:
            continue
        if leases and leases[-1][0] == holder and leases[-1][1][-1] == ipu - 1:
            leases[-1][1].append(ipu)
        else:
            leases.append((holder, [ipu]))
    lines = []
    for holder, members in leases:
        numbers = f"IPU {members[0]}" if len(members) == 1 else f"IPUs {members[0]}-{members[-1]}"
        whose = "this process" if holder.pid == os.getpid() else f"process {holder.pid or '?'}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder.since else "?"
        lines.append(f"{numbers}: {whose} ({holder.program}), model {holder.model}, since {since}")
    return lines


def listing() -> List[IpuState]:
    """Return every IPU of the pod with its holder; takes none, not even for a moment."""
    partition = os.environ.get("IPUOF_VIPU_API_PARTITION_ID", "").strip() or "emulated"
    claimed = _GENERATIONS.get(os.environ.get("IPU_FINETUNE_EMULATED_HARDWARE", "2"), "none")
    pod, rows = _pod(), []
    for ipu in range(pod_size()):
        holder = pod.holder(ipu)
        if holder is None:
            rows.append(IpuState(partition, ipu, claimed, None, None, None, None))
        else:
            rows.append(IpuState(partition, ipu, claimed, holder.pid, holder.program, holder.model, holder.since))
    return rows
