# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a process that prepares batches: starting it, taking its batches, ending it."""

import multiprocessing
import os
import pickle
import tempfile
from collections import deque
from multiprocessing import forkserver, util
from multiprocessing.connection import wait
from typing import Any, Deque, List, Optional, Tuple

from .._install import is_installed
from ..children import show_to_children
from ..device.errors import Error
from ._logging import logger
from ._shared_ring import Layout, SharedRing
from ._worker import Parcel, Settings, cannot_be_sent, work
from .enums import SharingStrategy

__all__ = ["WorkerHandle"]

#: Seconds between two looks at whether a silent worker is still alive.
_LOOK = 1.0

#: Seconds that a worker has to follow a request to end before it is told more firmly.
_PATIENCE = 2.0

_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}


class _FilledSlots:
    """Which slots of the ring hold a batch that is ready and was not taken yet."""

    def __init__(self, handle: "WorkerHandle") -> None:
        self._handle = handle

    @property
    def indices_mem(self) -> List[bool]:
        """One per slot."""
        return self._handle._filled_slots()


class WorkerHandle:
    """A running worker. It is ended when this object is no longer used, at the latest when the program ends.

    Args:
        source: what the worker iterates over.
        settings: how.
        strategy: how the source gets there.

    Raises:
        Error: the worker could not start, with what it said.
    """

    def __init__(self, source: Any, settings: Settings, strategy: SharingStrategy) -> None:
        self._run = 0
        self._failure: Optional[str] = None
        #: what the worker announced and nobody took yet: slots with their rows, and None for the end of an epoch
        self._arrived: Deque[Optional[Tuple[int, Optional[int]]]] = deque()
        self._held: Optional[int] = None  # the slot of the batch that was handed out last
        self._begun = self._used = self._ended = False
        context: Any = multiprocessing.get_context(_METHODS[strategy])
        if strategy == SharingStrategy.ForkServer:
            _preload(context)
        self._connection, theirs = context.Pipe()
        file = _FileParcel(source) if strategy == SharingStrategy.FileSystem else None
        parents_end = self._connection if strategy == SharingStrategy.Fork else None
        self._process = context.Process(
            target=work,
            args=(Parcel(source) if file is None else file, settings, theirs, parents_end),
            name="poptorch-data",
        )
        try:
            _start(self._process)
            theirs.close()
            self._end = util.Finalize(self, _end, args=(self._process, self._connection), exitpriority=10)
            try:
                layout: Layout = self._receive("worker thread failed to start")
                self._ring = SharedRing.receive(layout, self._connection)
            except BaseException:
                self._end()
                raise
        finally:
            if file is not None:
                file.remove()

    @property
    def _data_buffers(self) -> _FilledSlots:
        return _FilledSlots(self)

    # ---- the worker's messages

    def _receive(self, what: str = "has an error: An error occurred in the data fetcher") -> Any:
        """Return the next message, waiting for it as long as the worker lives."""
        if self._failure is not None:
            raise Error(self._failure)
        try:
            while not self._connection.poll():
                ready = wait([self._connection, self._process.sentinel], timeout=_LOOK)
                if self._connection not in ready and not self._process.is_alive() and not self._connection.poll():
                    raise EOFError
            message = self._connection.recv()
        except (EOFError, ConnectionError):
            self._failure = f"AsynchronousDataAccessor {what}: {self._death()}"
        else:
            if not isinstance(message, tuple) or message[0] != "failed":
                return message
            self._failure = f"AsynchronousDataAccessor {what}. In the worker process:\n\n{message[1]}"
        self._end()
        raise Error(self._failure)

    def _death(self) -> str:
        self._process.join(_PATIENCE)
        code = self._process.exitcode
        how = "left without a word" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return (
            f"the worker process {how}. Check above for details. A script that starts workers must do so under "
            "`if __name__ == '__main__':`, because a worker imports it."
        )

    def _sort_in(self, message: Any) -> None:
        if message[1] == self._run:  # else from before a restart
            self._arrived.append(None if message[0] == "end" else (message[2], message[3]))

    def _filled_slots(self) -> List[bool]:
        while self._failure is None and self._connection.poll():
            self._sort_in(self._receive())
        filled = {entry[0] for entry in self._arrived if entry is not None}
        return [slot in filled for slot in range(self._ring.layout.slots)]

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            logger.debug("AsynchronousDataAccessor: the worker is gone")  # the next wait for it says so

    # ---- what the accessor needs

    def begin_epoch(self) -> None:
        """Make the next batch the first one of an epoch."""
        if self._begun and not self._used:
            return
        if self._begun and not self._ended:
            self._run += 1
            self._arrived.clear()
            self._send("restart", self._run, self._held)
        else:
            self._send("begin")
        self._begun, self._used, self._ended = True, False, False

    def next_batch(self) -> Any:
        """Return the next batch; its memory is used again after the following call.

        Raises:
            StopIteration: the epoch has ended.
            Error: the worker failed or is gone.
        """
        if not self._begun:
            self.begin_epoch()
        self._used = True
        if self._held is not None:
            self._send("free", self._held)
            self._held = None
        if self._ended:
            raise StopIteration
        while not self._arrived:
            self._sort_in(self._receive())
        entry = self._arrived.popleft()
        if entry is None:
            self._ended = True
            raise StopIteration
        self._held, rows = entry
        tensors = self._ring.slots[self._held]
        return self._ring.layout.assemble(tensors if rows is None else [tensor[:rows] for tensor in tensors])

    def end(self) -> None:
        """End the worker."""
        self._end()


class _FileParcel(Parcel):
    """A parcel that travels as a file."""

    def __init__(self, content: Any) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="poptorch-dataset-", suffix=".pkl")
        logger.debug("Serialising dataset to file: %s", self._path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pickle.dump(content, file, protocol=4)
        except BaseException as error:
            self.remove()
            if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                raise cannot_be_sent(error) from error
            raise

    def __getstate__(self) -> Any:
        return self.__dict__

    def open(self) -> Any:
        with open(self._path, "rb") as file:
            return pickle.load(file)

    def remove(self) -> None:
        """Remove the file."""
        os.unlink(self._path)


def _preload(context: Any) -> None:
    """Let the server, should it not run yet, import what every worker needs, so that a worker starts at once."""
    name = work.__module__
    known = list(getattr(forkserver._forkserver, "_preload_modules", ["__main__"]))
    if name not in known:
        context.set_forkserver_preload([*known, name])


def _start(process: Any) -> None:
    if not is_installed():
        process.start()
        return
    # The worker imports the script anew, and must find the emulator under the names that the script uses.
    undo = show_to_children()
    try:
        process.start()
    finally:
        undo()


def _end(process: Any, connection: Any) -> None:
    """End a worker: by asking, by a signal that it can act upon, by one that it cannot."""
    try:
        connection.send(("stop",))
    except OSError:
        pass  # it is gone already
    finally:
        connection.close()
    for more_firmly in (process.terminate, process.kill):
        process.join(_PATIENCE)
        if process.exitcode is not None:
            return
        more_firmly()
    process.join()
