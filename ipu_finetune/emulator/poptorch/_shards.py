# SPDX-License-Identifier: Apache-2.0
"""What one of several processes sees of a data set that all of them share."""

from typing import Any, Iterator, List, Optional

import torch

from ..device.errors import Error
from .options import Options

__all__ = ["ProcessShard"]


class ProcessShard(torch.utils.data.Dataset):
    """The contiguous block of a map-style data set that belongs to one process.

    With `shuffle` every epoch permutes the whole data set, equally in all processes, before it is cut. Where samples
    are left over, every second epoch moves the blocks up by as many: the order's end is used instead of its start.

    Args:
        dataset: the whole data set.
        options: names the processes, and the seed they have in common.
        step: samples per call in one process.
        drop_last: every process gets the same whole number of steps; else all samples are given out, in shares that
            differ by one at most.
        shuffle: draw a new order at every `begin_epoch`.

    Raises:
        AssertionError: `shuffle` without a seed in the options.
        Error: the data set is too small to give every process one step.
    """

    def __init__(self, dataset: Any, options: Options, step: int, drop_last: bool, shuffle: bool) -> None:
        process, processes = options.Distributed.processId, options.Distributed.numProcesses
        if shuffle and not options.exists("random_seed"):
            raise AssertionError(
                "When using auto_distributed_partitioning you must set poptorch.Options.randomSeed() to ensure that "
                f"tensors are in the same order in all {processes} processes; or set shuffle=False."
            )
        total = len(dataset)
        if drop_last:
            self._length = step * (total // (step * processes))
            self._start = process * self._length
            self._left_over = total - processes * self._length
            if self._length == 0:
                raise Error(
                    f"The dataset has {total} elements, but one step of all {processes} processes takes "
                    f"{step * processes}: nothing would be left of it with drop_last=True. Use fewer processes or "
                    "smaller batches, or drop_last=False."
                )
        else:
            share, more = divmod(total, processes)
            self._length = share + (process < more)
            self._start = process * share + min(process, more)
            self._left_over = 0
        self._dataset = dataset
        self._total = total
        self._seed: Optional[int] = options.random_seed if shuffle else None
        self._swapped = False
        self._generator_state: Optional[torch.Tensor] = None
        self._order: Optional[torch.Tensor] = None

    @property
    def shuffles(self) -> bool:
        """Whether every epoch has an order of its own."""
        return self._seed is not None

    def begin_epoch(self) -> None:
        """Draw the next epoch's order."""
        if self._seed is None:
            return
        generator = torch.Generator()
        if self._generator_state is None:
            generator.manual_seed(self._seed)
        else:
            generator.set_state(self._generator_state)
        order = torch.randperm(self._total, generator=generator)
        self._generator_state = generator.get_state()
        self._swapped = not self._swapped
        start = self._start + (self._left_over if self._swapped else 0)
        block = order[start : start + self._length]
        if self._order is None:
            # In shared memory, so that workers that outlive an epoch follow the next one's order.
            self._order = block.clone().share_memory_()
        else:
            self._order.copy_(block)

    def _whole_index(self, index: int) -> int:
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is outside of this process's {self._length} elements")
        return self._start + index if self._order is None else int(self._order[index])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._length))

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._whole_index(index)]

    def __getitems__(self, indices: List[int]) -> Any:
        """Fetch several elements at once where the data set can do so."""
        wanted = [self._whole_index(index) for index in indices]
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(wanted) if callable(fetch) else [self._dataset[index] for index in wanted]
