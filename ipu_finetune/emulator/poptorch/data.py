# SPDX-License-Identifier: Apache-2.0
"""`poptorch.DataLoader`: one item is a combined batch, what one call of the model consumes.

```
combined batch = batch_size * device iterations * gradient accumulation * (replicas / input group size)
```
In the asynchronous modes a worker process of its own iterates over the loader, which may have PyTorch's worker
processes below it, and hands the batches over in shared memory.
"""

from typing import Any, Dict, Iterator, Optional

import torch
from torch.utils.data import IterableDataset

from ..device.errors import Error
from ._combining import combine
from ._logging import logger
from ._prefetch import ASYNC_OPTIONS, AsynchronousDataAccessor
from ._shards import ProcessShard
from .enums import DataLoaderMode
from .options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


def batches_to_combine(options: Options) -> int:
    """Return how many micro-batches one call consumes."""
    groups = options.replication_factor // options.input_group_size
    return options.device_iterations * groups * options.Training.gradient_accumulation


class DataLoader(torch.utils.data.DataLoader):
    """A PyTorch DataLoader whose items are combined batches.

    Replicas of one process share its batches, so no distributed sampler is needed for them. Where there are several
    processes, each gets its own part of a map-style data set.

    Args:
        options: those of the model that is fed; they are frozen.
        dataset: map-style or iterable.
        batch_size: the micro-batch; None switches batching off.
        shuffle: reshuffle every epoch.
        num_workers: worker processes of PyTorch's.
        drop_last: leave out an incomplete last batch, which the compiled model could not take.
        persistent_workers: keep them between epochs; the default where there are any.
        auto_distributed_partitioning: with several processes, give each its own part.
        mode: Sync loads a batch when it is asked for. Async loads ahead in a process of its own. AsyncRebatched puts
            batches together there, so that the workers of an iterable data set do not drop a remainder each; Async
            does the same where `drop_last` is False and a batch is more than one sample.
        async_options: arguments of `AsynchronousDataAccessor` other than `rebatched_size`.
        rebatched_worker_size: where batches are put together, samples per piece that a worker loads; by default a
            combined batch.
        batch_sampler: yields micro-batches of indices; each is collated by itself, then as many as a call consumes
            are joined. Excludes `batch_size` and `shuffle`.
        kwargs: passed to `torch.utils.data.DataLoader`. `pin_memory` has no meaning for an IPU and is left out.

    Raises:
        Error: arguments that exclude each other, a worker that did not start, a mode or async option that there is not.
        AssertionError: no `poptorch.Options`; what several processes or rebatching cannot do.
    """

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: Optional[int] = 1,
        shuffle: Optional[bool] = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self._accessor: Optional[AsynchronousDataAccessor] = None
        if not isinstance(options, Options):
            raise AssertionError(f"options must be poptorch.Options, got {type(options).__name__}")
        if batch_sampler is not None:
            _check_batch_sampler(options, batch_size, shuffle, auto_distributed_partitioning)
            batch_size = getattr(batch_sampler, "batch_size", None)
        mode = _mode(mode)
        _check_async_options(mode, async_options)
        options._freeze()
        self._options = options
        self._mode = mode
        self._combine = batches_to_combine(options)
        self._combined = None if batch_size is None else batch_size * self._combine
        self._keeps_rest = not drop_last
        self._joins_micro_batches = batch_sampler is not None
        if isinstance(dataset, IterableDataset):
            _note_duplicates(num_workers, kwargs)
        if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
            dataset = self._partition(dataset, bool(shuffle), drop_last, kwargs)
            shuffle = False
        self._rebatched_size = self._combined if self._rebatches(mode) else None

        if batch_sampler is not None:
            batching: Dict[str, Any] = {"batch_sampler": batch_sampler}
        elif self._rebatched_size is not None:
            # No remainder is dropped below the process that puts batches together.
            piece = self._piece(rebatched_worker_size)
            batching = {"batch_size": piece, "shuffle": shuffle, "drop_last": False}
        elif self._combined is not None:
            batching = {"batch_size": self._combined, "shuffle": shuffle, "drop_last": drop_last}
        else:
            batching = {"batch_size": None, "shuffle": shuffle}
        kwargs.pop("pin_memory", None)
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(dataset, num_workers=num_workers, persistent_workers=persistent_workers, **batching, **kwargs)
        self._note_remainder()

        self._owns_accessor = mode != DataLoaderMode.Sync
        if self._owns_accessor:
            self._accessor = AsynchronousDataAccessor(
                self, rebatched_size=self._rebatched_size, **(async_options or {})
            )

    # ---- construction

    def _rebatches(self, mode: DataLoaderMode) -> bool:
        if self._combined is None or mode == DataLoaderMode.Sync:
            return False
        return mode == DataLoaderMode.AsyncRebatched or (self._keeps_rest and self._combined > 1)

    def _piece(self, asked: Optional[int]) -> Optional[int]:
        """Return how many samples a worker loads at a time where batches are put together of what it loads."""
        if asked is None:
            return self._combined
        assert self._combined is not None
        if not 0 < asked <= self._combined:
            raise AssertionError(
                f"The rebatched_worker_size ({asked}) must be above 0 and <= to the combined batch size "
                f"({self._combined})"
            )
        return asked

    def _partition(self, dataset: Any, shuffle: bool, drop_last: bool, kwargs: Dict[str, Any]) -> ProcessShard:
        if isinstance(dataset, IterableDataset):
            raise AssertionError(
                "auto_distributed_partitioning not supported for IterableDataset: let the dataset yield each process "
                "its own part, and set auto_distributed_partitioning=False"
            )
        if kwargs.get("sampler") is not None:
            raise Error(
                "`sampler` option is mutually exclusive with auto_distributed_partitioning=True: its indices would be "
                "taken as positions in each process's part. Set auto_distributed_partitioning=False and let the "
                "sampler cover this process's part only."
            )
        if self._combined is None:
            raise AssertionError("batch_size=None not allowed when using auto_distributed_partitioning.")
        return ProcessShard(dataset, self._options, self._combined, drop_last, shuffle)

    def _note_remainder(self) -> None:
        if self._joins_micro_batches:
            self._note_remaining_micro_batches()
            return
        if isinstance(self.dataset, IterableDataset) or self._combined is None:
            return
        total = len(self.dataset)  # type: ignore[arg-type]
        remainder = total % self._combined
        if not remainder:
            return
        if not self._keeps_rest:
            logger.debug("%d of %d elements are left out of every epoch (drop_last=True)", remainder, total)
            return
        logger.warning(
            "The number of elements in the dataset (%d) is not divisible by the number of elements processed per step "
            "(%d) and drop_last=False. The last tensor will have a batch size of %d, which a model that was compiled "
            "for %d does not take: switch to drop_last=True, or destroy() the model before.",
            total,
            self._combined,
            remainder,
            self._combined,
        )

    def _note_remaining_micro_batches(self) -> None:
        if not self._keeps_rest:
            return
        count = _length_of(self.batch_sampler)
        if count is None:
            logger.warning(
                "The `batch_sampler` __len__ method is not implemented and drop_last=False. The last tensor may be "
                "incomplete, which a compiled model does not take: switch to drop_last=True."
            )
        elif count % self._combine:
            logger.warning(
                "The number of batches generated by the batch sampler (%d) is not divisible by the number of batches "
                "processed per step (%d) and drop_last=False. The last tensor will hold %d of them, which a compiled "
                "model does not take: switch to drop_last=True.",
                count,
                self._combine,
                count % self._combine,
            )

    # ---- use

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Samples per item; None where batching is switched off or a batch sampler has no `batch_size`."""
        return self._combined

    @property
    def options(self) -> Options:
        """The options that the batches are made for."""
        return self._options

    def terminate(self) -> None:
        """End the worker process of the asynchronous modes; the loader cannot be iterated over any more."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        if self._joins_micro_batches:
            return self._steps(len(self.batch_sampler), self._combine)  # type: ignore[arg-type]
        if self._rebatched_size is not None:
            return self._steps(len(self.dataset), self._rebatched_size)  # type: ignore[arg-type]
        return super().__len__()

    def _steps(self, total: int, step: int) -> int:
        return -(-total // step) if self._keeps_rest else total // step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._accessor is not None:
            return iter(self._accessor)
        if isinstance(self.dataset, ProcessShard):
            self.dataset.begin_epoch()
        batches = super().__iter__()
        if self._joins_micro_batches and self._combine != 1:
            return combine(batches, self._combine, not self._keeps_rest)
        return batches

    def __getstate__(self) -> Dict[str, Any]:
        # The worker process gets a loader that reads for itself; running processes cannot be sent.
        return {**self.__dict__, "_accessor": None, "_iterator": None}


def _mode(mode: Any) -> DataLoaderMode:
    try:
        return DataLoaderMode(mode)
    except ValueError:
        names = ", ".join(str(each) for each in DataLoaderMode)
        raise Error(f"mode must be a poptorch.DataLoaderMode, one of {names}; got {mode!r}") from None


def _check_async_options(mode: DataLoaderMode, async_options: Optional[Dict[str, Any]]) -> None:
    if not async_options:
        return
    if "rebatched_size" in async_options:
        raise AssertionError(
            "You cannot manually specify the rebatched_size in async_options: DataLoaderMode.AsyncRebatched takes the "
            "combined batch size"
        )
    unknown = sorted(set(async_options) - set(ASYNC_OPTIONS))
    if unknown:
        raise Error(f"Unknown async_options {unknown}, the options are {list(ASYNC_OPTIONS)}")
    if mode == DataLoaderMode.Sync:
        logger.warning("async_options have no effect in DataLoaderMode.Sync: %s", sorted(async_options))


def _check_batch_sampler(options: Options, batch_size: Optional[int], shuffle: Any, partitioning: bool) -> None:
    if batch_size != 1 or shuffle:
        raise Error("`batch_sampler` option is mutually exclusive with batch_size, shuffle.")
    if partitioning and options.Distributed.numProcesses > 1:
        raise Error(
            "`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True: set it to False and "
            "let the sampler cover this process's part only."
        )


def _note_duplicates(num_workers: int, kwargs: Dict[str, Any]) -> None:
    if num_workers > 1 and kwargs.get("worker_init_fn") is None:
        logger.warning(
            "IterableDataset used with num_workers=%d but no worker_init_fn specified: as a result the DataLoader will "
            "return %d times each element in the dataset, unless the dataset asks torch.utils.data.get_worker_info() "
            "for its part",
            num_workers,
            num_workers,
        )


def _length_of(sampler: Any) -> Optional[int]:
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError):
        return None
    return None if length is NotImplemented else length
