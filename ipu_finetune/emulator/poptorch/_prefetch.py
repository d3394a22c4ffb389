# SPDX-License-Identifier: Apache-2.0
"""`poptorch.AsynchronousDataAccessor`: a data set or loader read by a process of its own."""

import multiprocessing
import os
import weakref
from typing import Any, Callable, Optional

from .._install import is_installed
from ..device.errors import Error
from ._logging import logger
from ._worker import RandomState, Settings
from ._worker_handle import WorkerHandle
from .enums import SharingStrategy

__all__ = ["ASYNC_OPTIONS", "AsynchronousDataAccessor"]

#: what `DataLoader(async_options=...)` may hold
ASYNC_OPTIONS = ("buffer_size", "miss_sleep_time_in_ms", "load_indefinitely", "early_preload", "sharing_strategy")


class AsynchronousDataAccessor:
    """Reads a data set or loader ahead in a worker process and hands out its batches in order.

    Batches lie in a ring of buffers that both processes share. A batch is valid until the next one is asked for, and is
    overwritten then: clone what is kept for longer. All batches must have the first one's shapes; they are tensors, or
    flat lists, tuples or dictionaries of tensors, or of a type with a registered argument parser.

    The worker continues from where this process's random generators stand. It computes on one thread. It ends with
    `terminate()`, when the accessor is no longer used, or when the program ends.

    Args:
        dataset: a `poptorch.DataLoader` in mode Sync, or anything that can be iterated again and again.
        buffer_size: batches that are kept ready.
        miss_sleep_time_in_ms: accepted; waiting for a free buffer does not poll here.
        load_indefinitely: prepare the next epoch when one ends, before it is asked for.
        early_preload: fill the buffers at once; else one batch is loaded until the first epoch begins.
        sharing_strategy: how the data set gets to the worker. SharedMemory starts a fresh interpreter and moves tensors
            to shared memory; FileSystem does so by way of a file; Fork copies this process, which may hang where it
            runs threads; ForkServer asks a process without threads for a copy of itself.
        rebatched_size: put batches of this many rows together of the smaller ones that come. The rest is dropped,
            unless `dataset` is a `poptorch.DataLoader` with `drop_last=False`.

    Raises:
        Error: the loader is asynchronous already; an argument is out of range; the data set cannot be sent to the
            worker; or the worker failed to start, with its traceback.
        AssertionError: a loader that keeps an incomplete batch, without `rebatched_size`; or one not above 1.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        self._worker: Optional[WorkerHandle] = None
        # A loader owns its accessor; a reference back would keep both, and the process, until the cycle is found.
        embedded = getattr(dataset, "_owns_accessor", False) and dataset._accessor is None
        self._dataset_of: Callable[[], Any] = weakref.ref(dataset) if embedded else lambda: dataset
        if not embedded:
            self._check_loader(dataset, rebatched_size)
        if rebatched_size is not None and rebatched_size <= 1:
            raise AssertionError(f"rebatched_size must be None or greater than 1, got {rebatched_size}")
        if buffer_size < 1:
            raise Error(f"buffer_size must be at least 1, got {buffer_size}")
        if miss_sleep_time_in_ms < 0:
            raise Error(f"miss_sleep_time_in_ms cannot be negative, got {miss_sleep_time_in_ms}")
        self.rebatched_size = rebatched_size
        settings = Settings(
            buffer_size=buffer_size,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            keep_rest=bool(getattr(dataset, "_keeps_rest", False)),
            parent=os.getpid(),
            random_state=RandomState.now(),
            log_level=logger.level,
            installed=is_installed(),
            start_method=multiprocessing.get_start_method(allow_none=True),
        )
        logger.debug("AsynchronousDataAccessor parent process: %d", settings.parent)
        self._worker = WorkerHandle(dataset, settings, SharingStrategy(sharing_strategy))

    @staticmethod
    def _check_loader(dataset: Any, rebatched_size: Optional[int]) -> None:
        if getattr(dataset, "_accessor", None) is not None:
            raise Error(
                "The DataLoader already uses an AsynchronousDataAccessor internally. Either use the existing one, by "
                "iterating over the loader, or set mode=poptorch.DataLoaderMode.Sync in the DataLoader."
            )
        combined = getattr(dataset, "combinedBatchSize", None)
        if combined in (None, 1) or rebatched_size is not None or getattr(dataset, "_joins_micro_batches", False):
            return
        if getattr(dataset, "_keeps_rest", False):
            raise AssertionError(
                "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is specified too: "
                f"pass rebatched_size={combined}, or create the loader with DataLoaderMode.AsyncRebatched."
            )

    @property
    def dataset(self) -> Any:
        """What is iterated over."""
        return self._dataset_of()

    def terminate(self) -> None:
        """End the worker process. The accessor cannot be iterated over any more."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _running(self) -> WorkerHandle:
        if self._worker is None:
            raise Error("The AsynchronousDataAccessor was terminated: create a new one")
        return self._worker

    def __len__(self) -> int:
        dataset = self.dataset
        length = len(dataset)
        if self.rebatched_size is None or getattr(dataset, "_accessor", None) is self:
            return length
        rows = length * (getattr(dataset, "batch_size", None) or 1)
        if getattr(dataset, "_keeps_rest", False):
            return -(-rows // self.rebatched_size)
        return rows // self.rebatched_size

    def __iter__(self) -> "AsynchronousDataAccessor":
        self._running().begin_epoch()
        return self

    def __next__(self) -> Any:
        return self._running().next_batch()
