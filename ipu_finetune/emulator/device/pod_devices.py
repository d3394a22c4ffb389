# SPDX-License-Identifier: Apache-2.0
"""The numbers of IPUs and of the groups that can be had: what `gc-info -l` lists and `Options.useIpuId` takes.

An IPU Pod numbers its single IPUs first, then the pairs, then the groups of four and so on; a group starts at a
multiple of its size. A pod of 4 has the devices 0 to 3, the pairs 4 (IPUs 0 and 1) and 5 (2 and 3), and 6, all of them.
Source: Graphcore's command-line tools guide, "gc-info", the listing of a four-IPU partition.
"""

import os
from typing import Iterator, List, Tuple

from .errors import Error

__all__ = ["VARIABLE", "Group", "device_members", "first_device", "groups", "pod_size", "too_many"]

#: Name of the environment variable that says how many IPUs the emulated pod has.
VARIABLE = "IPU_FINETUNE_EMULATED_IPUS"
#: As many as one process can have, so that what fits a real pod fits here.
DEFAULT_IPUS = 64
#: One process cannot have more; larger pods serve several processes.
MAX_GROUP = 64
_MAX_IPUS = 4096

Group = Tuple[int, Tuple[int, ...]]


def pod_size() -> int:
    """Return how many IPUs the emulated pod has.

    Raises:
        Error: IPU_FINETUNE_EMULATED_IPUS is not a power of two.
    """
    text = os.environ.get(VARIABLE, "").strip() or str(DEFAULT_IPUS)
    size = int(text) if text.isdigit() else 0
    if size < 1 or size > _MAX_IPUS or size & (size - 1):
        raise Error(f"{VARIABLE}={text}: a pod has a power of two of IPUs, from 1 to {_MAX_IPUS}, such as 4, 16 or 64")
    return size


def _levels(ipus: int) -> Iterator[Tuple[int, int]]:
    """Yield (IPUs in a group, id of the first such group)."""
    size, first = 1, 0
    while size <= min(ipus, MAX_GROUP):
        yield size, first
        first += ipus // size
        size *= 2


def groups(count: int, ipus: int) -> List[Group]:
    """Return the devices of `count` IPUs in a pod of `ipus`, each as its id and its IPUs; none if it is too small."""
    for size, first in _levels(ipus):
        if size == count:
            return [(first + at, tuple(range(at * size, (at + 1) * size))) for at in range(ipus // size)]
    return []


def first_device(count: int) -> int:
    """Return the id of the first device of `count` IPUs, in use or not: what a model that attaches later compiles for.

    Raises:
        Error: the pod has no such device.
    """
    found = groups(count, pod_size())
    if not found:
        raise Error(too_many(count, pod_size()))
    return found[0][0]


def device_members(device_id: int) -> Tuple[int, ...]:
    """Return the IPUs of a device.

    Raises:
        Error: there is no device of that id.
    """
    ipus = pod_size()
    for size, first in _levels(ipus):
        at = device_id - first
        if 0 <= at < ipus // size:
            return tuple(range(at * size, (at + 1) * size))
    raise Error(
        f"Failed to acquire device Id {device_id}: there is no such device; the {_devices_text(ipus)}. Give useIpuId "
        f"one of these, or set {VARIABLE} for a larger pod."
    )


def _devices_text(ipus: int) -> str:
    """Return a clause that lists the ids of each size of group."""
    parts = []
    for size, first in _levels(ipus):
        last = first + ipus // size - 1
        ids = str(first) if first == last else f"{first}-{last}"
        parts.append(f"{ids} ({size} IPU{'s' if size > 1 else ''})")
    return f"emulated pod of {ipus} has the devices {', '.join(parts)}"


def too_many(count: int, ipus: int) -> str:
    """Return the message for a number of IPUs that no pod of this size can give."""
    if count < 1 or count & (count - 1) or count > MAX_GROUP:
        return (
            f"Failed to acquire {count} IPU(s): PopTorch must reserve a power of two, and at most {MAX_GROUP} IPUs in "
            "one process."
        )
    return (
        f"Failed to acquire {count} IPU(s): the emulated pod has {ipus}. Set {VARIABLE}={count} for a larger pod, or "
        "use fewer replicas or pipeline stages."
    )
