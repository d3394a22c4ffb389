# SPDX-License-Identifier: Apache-2.0
"""`poptorch.DataLoader`: one item is a combined batch, what one call of the model consumes.

```
combined batch = batch_size * device iterations * gradient accumulation * (replicas / input group size)
```
In the asynchronous modes batches are prepared ahead, by PyTorch's worker processes where there are any, else by a
thread. In AsyncRebatched the workers' smaller pieces are joined here, so that no worker keeps a remainder to itself.
"""

import math
from typing import Any, Dict, Iterator, List, Optional, Sequence, Sized

import torch
from torch.utils.data import IterableDataset, Sampler

from ..device import nested
from ..device.errors import Error
from ._logging import logger
from ._prefetch import ASYNC_OPTIONS, AsynchronousDataAccessor
from .enums import DataLoaderMode
from .options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]


def batches_to_combine(options: Options) -> int:
    """Return how many micro-batches one call consumes."""
    groups = options.replication_factor // options.input_group_size
    return options.device_iterations * groups * options.Training.gradient_accumulation


class _ProcessShard(Sampler):
    """The part of a data set that belongs to one of several processes, as a contiguous block.

    Args:
        source: the data set.
        shuffle: permute the whole set anew each epoch, equally in all processes, before it is cut.
        options: names the processes and the seed.
        step: samples per call and process; with `drop_last`, every process gets a whole number of them.
    """

    def __init__(self, source: Sized, shuffle: bool, options: Options, step: int, drop_last: bool) -> None:
        self._source = source
        self._shuffle = shuffle
        self._process, self._processes = options.Distributed.processId, options.Distributed.numProcesses
        self._step = step
        self._drop_last = drop_last
        if shuffle and options.random_seed is None:
            raise AssertionError(
                "When using shuffle=True in a distributed environment you must set poptorch.Options.randomSeed(): "
                "all processes have to draw the same order."
            )
        self._seed = options.random_seed
        self._epoch = 0

    def _bounds(self) -> range:
        total = len(self._source)
        if self._drop_last:
            length = self._step * (total // (self._step * self._processes))
            return range(self._process * length, (self._process + 1) * length)
        share, more = divmod(total, self._processes)
        start = self._process * share + min(self._process, more)
        return range(start, start + share + (self._process < more))

    def __len__(self) -> int:
        return len(self._bounds())

    def __iter__(self) -> Iterator[int]:
        bounds = self._bounds()
        if not self._shuffle:
            return iter(bounds)
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch += 1
        order = torch.randperm(len(self._source), generator=generator).tolist()
        return iter([order[index] for index in bounds])


class _JoinedBatches(Sampler):
    """Joins the batches of a user's batch sampler until a combined batch is full."""

    def __init__(self, batches: Any, count: int, drop_last: bool) -> None:
        self._batches, self._count, self._drop_last = batches, count, drop_last

    def __iter__(self) -> Iterator[List[int]]:
        joined: List[int] = []
        for number, batch in enumerate(self._batches, start=1):
            joined += list(batch)
            if number % self._count == 0:
                yield joined
                joined = []
        if joined and not self._drop_last:
            yield joined

    def __len__(self) -> int:
        length = len(self._batches)
        return length // self._count if self._drop_last else math.ceil(length / self._count)


class DataLoader(torch.utils.data.DataLoader):
    """A PyTorch DataLoader whose items are combined batches.

    Args:
        options: those of the model that is fed; they are frozen.
        dataset: map-style or iterable.
        batch_size: the micro-batch; None switches batching off.
        shuffle: reshuffle every epoch.
        num_workers: worker processes.
        drop_last: leave out an incomplete last batch, which the compiled model could not take.
        persistent_workers: keep workers between epochs; the default where there are workers.
        auto_distributed_partitioning: with several processes, give each its own part.
        mode: where batches are prepared.
        async_options: options of `AsynchronousDataAccessor`.
        rebatched_worker_size: in AsyncRebatched, samples per piece that a worker prepares.
        batch_sampler: yields micro-batches of indices; excludes `batch_size` and `shuffle`.
        kwargs: passed to `torch.utils.data.DataLoader`. `pin_memory` has no meaning for an IPU and is left out.
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
        if not isinstance(options, Options):
            raise AssertionError(f"Expected poptorch.Options, got {type(options).__name__}")
        if not isinstance(mode, DataLoaderMode):
            raise Error(f"mode must be a poptorch.DataLoaderMode, got {mode!r}")
        options._freeze()
        self._options = options
        self._combine = batches_to_combine(options)
        self._mode = mode
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._drop_last_batch = drop_last
        self._combined: Optional[int] = None
        self._joins_pieces = False
        kwargs.pop("pin_memory", None)
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        common = {"num_workers": num_workers, "persistent_workers": persistent_workers, **kwargs}
        unknown = sorted(set(async_options or {}) - set(ASYNC_OPTIONS))
        if unknown:
            raise Error(f"Unknown async_options {unknown}, the options are {list(ASYNC_OPTIONS)}")
        self._worker_note(dataset, num_workers, kwargs.get("worker_init_fn"))

        if batch_sampler is not None:
            if batch_size not in (None, 1) or shuffle:
                raise Error("batch_sampler is mutually exclusive with batch_size and shuffle")
            if auto_distributed_partitioning and options.Distributed.numProcesses > 1:
                raise Error("batch_sampler excludes auto_distributed_partitioning: set it to False")
            if isinstance(dataset, IterableDataset):
                raise Error("batch_sampler has no meaning for an IterableDataset")
            joined = _JoinedBatches(batch_sampler, self._combine, drop_last)
            super().__init__(dataset, batch_sampler=joined, **common)
        elif batch_size is None:
            super().__init__(dataset, batch_size=None, shuffle=shuffle, **common)
        else:
            self._combined = batch_size * self._combine
            sizes = self._sizes(dataset, drop_last, mode, rebatched_worker_size)
            sampler = self._partition(dataset, shuffle, drop_last, auto_distributed_partitioning, common)
            if sampler is not None:
                common["sampler"], shuffle = sampler, None
            super().__init__(dataset, shuffle=shuffle, **sizes, **common)
            self._note_remainder(dataset, drop_last)
        # PyTorch's workers prepare batches ahead by themselves; only without any is a thread needed for that.
        if mode != DataLoaderMode.Sync and num_workers == 0:
            self._accessor = AsynchronousDataAccessor(self, _internal=True, **(async_options or {}))

    # ---- construction

    @staticmethod
    def _worker_note(dataset: Any, num_workers: int, worker_init_fn: Any) -> None:
        if isinstance(dataset, IterableDataset) and num_workers > 1 and worker_init_fn is None:
            logger.warning(
                "An IterableDataset with %d workers and no worker_init_fn: each worker will yield every sample.",
                num_workers,
            )

    def _sizes(self, dataset: Any, drop_last: bool, mode: DataLoaderMode, rebatched: Optional[int]) -> Dict[str, Any]:
        """Return what one worker prepares at a time."""
        assert self._combined is not None
        asked = rebatched if mode == DataLoaderMode.AsyncRebatched else None
        if asked is not None and not 0 < asked <= self._combined:
            raise AssertionError(
                f"rebatched_worker_size must be above 0 and at most the combined batch size {self._combined}, "
                f"got {asked}"
            )
        joins = mode == DataLoaderMode.AsyncRebatched or (
            mode == DataLoaderMode.Async and not drop_last and self._combined > 1
        )
        # Only workers of an iterable data set keep remainders to themselves; elsewhere whole batches are the same.
        self._joins_pieces = joins and isinstance(dataset, IterableDataset)
        if self._joins_pieces:
            return {"batch_size": rebatched or 1, "drop_last": False}
        return {"batch_size": self._combined, "drop_last": drop_last}

    def _partition(
        self, dataset: Any, shuffle: Optional[bool], drop_last: bool, partition: bool, common: Dict[str, Any]
    ) -> Optional[Sampler]:
        options = self._options
        if options.Distributed.numProcesses == 1 or not partition:
            return None
        if isinstance(dataset, IterableDataset):
            raise AssertionError("auto_distributed_partitioning not supported for IterableDataset")
        if common.get("sampler") is not None:
            raise Error("A sampler excludes auto_distributed_partitioning: set it to False")
        assert self._combined is not None
        return _ProcessShard(dataset, bool(shuffle), options, self._combined, drop_last)

    def _note_remainder(self, dataset: Any, drop_last: bool) -> None:
        if drop_last or isinstance(dataset, IterableDataset) or self._combined is None:
            return
        remainder = len(dataset) % self._combined
        if remainder:
            logger.warning(
                "The last batch has %d samples instead of %d. A compiled model takes one size only, so it cannot run "
                "on this batch: use drop_last=True, or destroy() and compile again.",
                remainder,
                self._combined,
            )

    # ---- use

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Samples per item, or None where batching is switched off or left to a batch sampler."""
        return self._combined

    @property
    def options(self) -> Options:
        """The options that the batches are made for."""
        return self._options

    def terminate(self) -> None:
        """Stop what prepares batches in the background."""
        if self._accessor is not None:
            self._accessor.terminate()
        workers = getattr(self, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()
            self._iterator = None

    def __len__(self) -> int:
        if self._joins_pieces and self._combined is not None:
            total = len(self.dataset)  # type: ignore[arg-type]
            return total // self._combined if self._drop_last_batch else math.ceil(total / self._combined)
        return super().__len__()

    def __iter__(self) -> Any:
        if self._accessor is not None:
            return iter(self._accessor)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        """Iterate in this thread."""
        pieces = super().__iter__()
        return self._join(pieces) if self._joins_pieces else pieces

    def _join(self, pieces: Iterator[Any]) -> Iterator[Any]:
        assert self._combined is not None
        held: Any = None
        for piece in pieces:
            held = piece if held is None else _concatenate([held, piece])
            while _rows(held) >= self._combined:
                whole, held = _cut(held, self._combined)
                yield whole
        if held is not None and _rows(held) and not self._drop_last_batch:
            yield held


def _tensors(value: Any) -> List[torch.Tensor]:
    return [leaf for _, leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor)]


def _rows(value: Any) -> int:
    tensors = _tensors(value)
    if not tensors:
        raise Error("AsyncRebatched can only join batches that are made of tensors")
    return tensors[0].shape[0]


def _concatenate(values: Sequence[Any]) -> Any:
    columns = iter([torch.cat(column) for column in zip(*[_tensors(value) for value in values])])
    return nested.rebuild(values[0], lambda _: next(columns))


def _cut(value: Any, rows: int) -> Any:
    return nested.rebuild(value, lambda t: t[:rows]), nested.rebuild(value, lambda t: t[rows:])
