# SPDX-License-Identifier: Apache-2.0
"""The process that prepares batches: everything here runs in it, and nothing of the parent's.

The two processes talk through one socket. To the worker: `("begin",)` an epoch is wanted, `("free", slot)` the batch in
a slot is no longer used, `("restart", run, slot)` begin anew although an epoch was not read to its end, but leave alone
the slot that is still in use, `("stop",)`. From the worker: the ring's layout and memory, then
`("ready", run, slot, rows)`, `("end", run)` after an epoch's last batch, and `("failed", traceback)`. A *run* is what
lies between two restarts, so that the parent can tell what the worker said before it heard of one.
"""

import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import torch

from .._install import install
from ..device.errors import Error
from ._logging import logger
from ._shared_ring import Layout, SharedRing, rows_of

__all__ = ["Parcel", "RandomState", "Settings", "work"]


class RandomState(NamedTuple):
    """Where the random generators of a process stand; the worker goes on from where its parent stood."""

    torch: bytes
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Return this process's."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Make it this process's."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)


class Settings(NamedTuple):
    """What the worker is told; the first five are those of `AsynchronousDataAccessor`.

    Attributes:
        buffer_size: slots of the ring.
        load_indefinitely: prepare the next epoch when one ends, before it is asked for.
        early_preload: fill the ring before the first epoch is asked for.
        rebatched_size: rows of the batches that are put together of smaller ones.
        keep_rest: hand out what is left at an epoch's end though it is less than a whole batch.
        parent: its process id.
        random_state: the parent's.
        log_level: the parent's.
        installed: whether the parent's scripts see the emulator as `poptorch`, and its log is written.
        start_method: how the parent starts processes of its own, and PyTorch's workers below this one are started.
    """

    buffer_size: int
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: Optional[int]
    keep_rest: bool
    parent: int
    random_state: RandomState
    log_level: int
    installed: bool
    start_method: Optional[str]


class Parcel:
    """What is iterated over, packed when a process is started and opened where a failure can be reported.

    Raises:
        Error: when it is pickled, and its content cannot be.
    """

    def __init__(self, content: Any) -> None:
        self._content = content

    def __getstate__(self) -> Dict[str, Any]:
        try:
            return {"_packed": bytes(ForkingPickler.dumps(self._content))}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise cannot_be_sent(error) from error

    def open(self) -> Any:
        """Return the content."""
        packed = self.__dict__.pop("_packed", None)
        return self._content if packed is None else pickle.loads(packed)


def cannot_be_sent(error: Exception) -> Error:
    """Return what to tell about a data set that is not picklable."""
    return Error(
        f"The dataset cannot be sent to the AsynchronousDataAccessor's worker process: {error}. Define its class, the "
        "collate_fn and the worker_init_fn at the top level of a module, or let the worker be forked with "
        "async_options={'sharing_strategy': poptorch.SharingStrategy.Fork}."
    )


class _StopError(Exception):
    """The parent wants no more, or is gone."""


class _RestartError(Exception):
    """The parent wants the data from the beginning."""


def work(parcel: Parcel, settings: Settings, connection: Any, parents_end: Any) -> None:
    """Prepare batches until the parent says stop or is gone.

    Args:
        parcel: what to iterate over.
        settings: how.
        connection: the socket to the parent.
        parents_end: in a forked process, the socket's other end, which it inherited and must not hold open.
    """
    # Ctrl-C reaches every process of the terminal; the parent ends this one in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if parents_end is not None:
        parents_end.close()
    if settings.installed:
        install(force=True)  # the parent has decided so; a forked process has it already
    logger.setLevel(settings.log_level)
    logger.debug("AsynchronousDataAccessor worker process: %d", os.getpid())
    # The cores are the model's; and threads of a forked process's parent are not here to answer.
    torch.set_num_threads(1)
    # A process from a server would otherwise start its own by another server, which imports everything anew each time.
    multiprocessing.set_start_method(settings.start_method, force=True)
    settings.random_state.restore()
    try:
        _Preparation(parcel.open(), settings, connection).run()
    except _StopError:
        logger.debug("AsynchronousDataAccessor worker: clean exit")
    except Exception:
        try:
            connection.send(("failed", traceback.format_exc()))
        except OSError:
            return  # nobody is left to be told
        raise
    finally:
        connection.close()


def _iterate(source: Any) -> Iterator[Any]:
    if not hasattr(type(source), "__iter__") and hasattr(source, "__len__"):
        return map(source.__getitem__, range(len(source)))
    return iter(source)


class _Preparation:
    """Fills the ring in the order in which the parent reads it."""

    def __init__(self, source: Any, settings: Settings, connection: Any) -> None:
        self._source = source
        self._settings = settings
        self._connection = connection
        self._run = 0
        self._begun = 0  # epochs of this run that the parent asked for
        self._ended = 0  # and that were prepared to their end
        self._free: List[int] = list(range(settings.buffer_size))
        self._filling: Optional[int] = None  # a slot that is filled piece by piece, and how far it is
        self._filled = 0

    def run(self) -> None:
        """Prepare epoch after epoch."""
        items = _iterate(self._source)
        none = object()
        first = next(items, none)
        if first is none:
            raise Error("The Dataset is empty")
        layout = Layout.of(first, self._settings.buffer_size, self._settings.rebatched_size or 0)
        self._layout = layout
        self._ring = SharedRing.create(layout, self._connection, self._settings.parent)
        items = itertools.chain([first], items)
        del first
        ahead = self._settings.early_preload
        while True:
            try:
                self._epoch(items, ahead)
                ahead = self._settings.load_indefinitely
                if not ahead:
                    self._until(self._wanted)
            except _RestartError:
                self._ended = 0
            del items  # a loader's workers end before those of the next epoch start
            items = _iterate(self._source)

    def _wanted(self) -> bool:
        """Whether the parent asked for the epoch that follows those that ended."""
        return self._begun > self._ended

    def _epoch(self, items: Iterator[Any], ahead: bool) -> None:
        """Prepare an epoch and say when it is all there; unless `ahead`, only one item before somebody asked for it."""
        for item in items:
            self._place(self._layout.tensors_of(item))
            if ahead:
                self._hear_all()
            else:
                self._until(self._wanted)
        # An epoch may be prepared ahead, but not ended: without a whole batch in it, the next would follow at once.
        self._until(self._wanted)
        self._ended += 1
        if self._filling is not None:
            if self._settings.keep_rest:
                self._hand_over(self._filling, self._filled)
            else:
                self._free.append(self._filling)
            self._filling = None
        self._connection.send(("end", self._run))

    # ---- the ring

    def _place(self, tensors: List[torch.Tensor]) -> None:
        if self._settings.rebatched_size is not None:
            self._place_rows(tensors)
            return
        shapes = [tensor.shape for tensor in tensors]
        rows = None
        if shapes != self._layout.shapes:
            rows = self._rows_of_rest(tensors)
        slot = self._take_slot()
        for place, tensor in zip(self._ring.slots[slot], tensors):
            (place if rows is None else place[:rows]).copy_(tensor)
        self._hand_over(slot, rows)

    def _rows_of_rest(self, tensors: List[torch.Tensor]) -> int:
        """Return the rows of a batch that is only shorter than the others, where that is allowed."""
        self._check_rows(tensors, what="batch")
        rows = rows_of(tensors)
        if not self._settings.keep_rest or rows > self._layout.shapes[0][0]:
            raise self._differs(tensors, "batch")
        return rows

    def _check_rows(self, tensors: List[torch.Tensor], what: str) -> None:
        if any(not t.dim() or t.shape[1:] != shape[1:] for t, shape in zip(tensors, self._layout.shapes)):
            raise self._differs(tensors, what)

    def _differs(self, tensors: List[torch.Tensor], what: str) -> Error:
        return Error(
            f"Every {what} must have the shapes of the first one, which a ring of fixed buffers was made for: expected "
            f"{[list(shape) for shape in self._layout.shapes]}, got {[list(tensor.shape) for tensor in tensors]}. Pad "
            "to a fixed size in the collate_fn: a compiled model takes one size only."
        )

    def _place_rows(self, tensors: List[torch.Tensor]) -> None:
        """Put rows behind those that are there, into as many slots as it takes."""
        assert self._settings.rebatched_size is not None
        self._check_rows(tensors, what="row")
        rows, done = rows_of(tensors), 0
        while done < rows:
            if self._filling is None:
                self._filling, self._filled = self._take_slot(), 0
            count = min(rows - done, self._settings.rebatched_size - self._filled)
            for place, tensor in zip(self._ring.slots[self._filling], tensors):
                place[self._filled : self._filled + count].copy_(tensor[done : done + count])
            done += count
            self._filled += count
            if self._filled == self._settings.rebatched_size:
                self._hand_over(self._filling, None)
                self._filling = None

    def _take_slot(self) -> int:
        self._until(lambda: bool(self._free))
        return self._free.pop(0)

    def _hand_over(self, slot: int, rows: Optional[int]) -> None:
        self._connection.send(("ready", self._run, slot, rows))

    # ---- the parent's wishes

    def _hear_all(self) -> None:
        self._until(lambda: True)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Hear what the parent has to say, and wait for more until the condition holds."""
        try:
            while self._connection.poll() or not condition():
                self._hear(self._connection.recv())
        except (EOFError, ConnectionError):
            raise _StopError from None

    def _hear(self, message: Any) -> None:
        kind = message[0]
        if kind == "begin":
            self._begun += 1
        elif kind == "free":
            self._free.append(message[1])
        elif kind == "restart":
            _, self._run, held = message
            self._begun = 1
            self._filling = None
            self._free = [slot for slot in range(self._settings.buffer_size) if slot != held]
            logger.debug("AsynchronousDataAccessor worker: reset command received. Creating a new iterator")
            raise _RestartError
        else:
            raise _StopError
