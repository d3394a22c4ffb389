# SPDX-License-Identifier: Apache-2.0
"""Data sets that a worker process can import."""

import os
import time

import torch

from ipu_finetune.emulator import poptorch


class Numbers(torch.utils.data.Dataset):
    """0..n-1; how many were read, by any process, is in `read`."""

    def __init__(self, n):
        self.n = n
        self.read = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        self.read += 1
        return torch.tensor(index)


class Stream(torch.utils.data.IterableDataset):
    """Yields 0..n-1, cut into contiguous parts among PyTorch's workers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        workers, index = (info.num_workers, info.id) if info else (1, 0)
        share = -(-self.n // workers)
        return iter(torch.tensor(i) for i in range(index * share, min(self.n, (index + 1) * share)))


class Calls(torch.utils.data.Dataset):
    """Elements that a function of the index makes."""

    def __init__(self, n, function):
        self.n, self.function = n, function

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.function(index)


class Pair:
    """A type of the user's own."""

    def __init__(self, left, right):
        self.left, self.right = left, right


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        return Pair(*tensor_iterator)


def process_id(index):
    return torch.tensor(os.getpid())


def broken_from_two(index):
    if index >= 2:
        raise KeyError("no such sample")
    return torch.tensor(index)


def broken(index):
    raise KeyError("no such sample")


def stuck_from_one(index):
    if index >= 1:
        time.sleep(100)
    return torch.tensor(index)


def growing(index):
    return torch.zeros(1 + index)


def nested(index):
    return {"outer": {"inner": torch.tensor(index)}}


def words(index):
    return {"text": "word", "id": torch.tensor(index)}


def dictionary(index):
    return {"a": torch.tensor(index), "b": torch.tensor([float(index)])}


def backwards_dictionary(index):
    items = dictionary(index)
    return items if index == 0 else dict(reversed(list(items.items())))


def to_pair(items):
    poptorch.registerCustomArgParser(Pair, PairParser())
    return Pair(torch.stack(items), torch.stack(items) * 2)


def to_tuple(items):
    return torch.stack(items), torch.stack(items) * 2


def to_sizes(items):
    """Rows that say how many were collated together."""
    return torch.full((len(items),), len(items))


def to_four(items):
    """Pads a micro-batch with -1."""
    return torch.cat([torch.stack(items), torch.full((4 - len(items),), -1)])


class Growing(torch.utils.data.Sampler):
    """Batches of 1, 2, 3, 4, 1, 2... indices."""

    batch_size = 4

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        start, size = 0, 1
        while start < self.n:
            yield list(range(start, min(self.n, start + size)))
            start, size = start + size, size % 4 + 1


def batches(loader):
    return [batch.tolist() for batch in loader]


def values(loader):
    return [value for batch in loader for value in batch.flatten().tolist()]


def gone(pid, seconds=5.0):
    """Whether a process ends within the time; a child must have been waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False
