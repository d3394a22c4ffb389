# SPDX-License-Identifier: Apache-2.0
"""Preparing the next batches in the background."""

import queue
import threading
from typing import Any, Iterator, Optional

from ..device.errors import Error
from .enums import DataLoaderMode, SharingStrategy

__all__ = ["ASYNC_OPTIONS", "AsynchronousDataAccessor"]

#: what `DataLoader(async_options=...)` may hold
ASYNC_OPTIONS = (
    "buffer_size",
    "miss_sleep_time_in_ms",
    "load_indefinitely",
    "early_preload",
    "sharing_strategy",
    "rebatched_size",
)

_END = object()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class AsynchronousDataAccessor:
    """Iterates over a data set or loader in the background and hands out its items in order.

    Args:
        dataset: anything that can be iterated again and again.
        buffer_size: items that are kept ready.
        miss_sleep_time_in_ms: accepted; waiting does not poll here.
        load_indefinitely: begin the next epoch when one ends, before anybody asks.
        early_preload: begin before anybody asks at all.
        sharing_strategy: accepted; a thread shares memory as it is.
        rebatched_size: accepted for the DataLoader's sake.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.FileSystem,
        rebatched_size: Optional[int] = None,
        _internal: bool = False,
    ) -> None:
        self._epoch: Optional[_Epoch] = None
        if buffer_size < 1:
            raise Error(f"buffer_size must be at least 1, got {buffer_size}")
        if not _internal and getattr(dataset, "_mode", DataLoaderMode.Sync) != DataLoaderMode.Sync:
            raise Error("The DataLoader is already asynchronous: it must be created with DataLoaderMode.Sync")
        self._dataset = dataset
        self._size = buffer_size
        self._ahead = load_indefinitely
        if early_preload:
            self._epoch = self._start()

    def _start(self) -> "_Epoch":
        if self._epoch is not None:
            # Workers may be shared between epochs, so two must never be read at the same time.
            self._epoch.stop(wait=True)
        iterate = getattr(self._dataset, "_iterate", None)
        return _Epoch(iterate if iterate is not None else self._dataset.__iter__, self._size)

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def dataset(self) -> Any:
        """What is iterated over."""
        return self._dataset

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch if self._epoch is not None and not self._epoch.taken else self._start()
        epoch.taken = True
        self._epoch = epoch
        yield from epoch
        if self._ahead and self._epoch is epoch:
            # The next epoch's first batches are prepared while the caller does something else.
            self._epoch = self._start()

    def terminate(self) -> None:
        """Stop preparing."""
        if self._epoch is not None:
            self._epoch.stop(wait=True)
            self._epoch = None

    def __del__(self) -> None:
        if self._epoch is not None:
            self._epoch.stop()


class _Epoch:
    """One pass over the data by a thread of its own."""

    def __init__(self, iterate: Any, size: int) -> None:
        self.taken = False
        self._items: queue.Queue[Any] = queue.Queue(size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(iterate,), daemon=True, name="poptorch-prefetch")
        self._thread.start()

    def _put(self, item: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _fill(self, iterate: Any) -> None:
        try:
            for item in iterate():
                if not self._put(item):
                    return
            self._put(_END)
        except BaseException as error:  # handed to the thread that waits for the data, which raises it
            self._put(_Failure(error))

    def __iter__(self) -> Iterator[Any]:
        try:
            while True:
                item = self._items.get()
                if item is _END:
                    return
                if isinstance(item, _Failure):
                    raise item.error
                yield item
        finally:
            self.stop()

    def stop(self, wait: bool = False) -> None:
        """End the thread; `wait` until it has ended."""
        self._stopped.set()
        if wait:
            self._thread.join()
