# SPDX-License-Identifier: Apache-2.0
"""`fps` and `nearest`: sampling and clustering of points, with shapes that do not depend on the points."""

import dataclasses
import math
from typing import Any, List, Optional, Tuple, Union

import torch

from ..device.errors import Error
from ..device.state import current
from ._recording import record

__all__ = ["fps", "nearest"]

Tensor = torch.Tensor
Batch = Optional[Union[List[int], Tensor]]


# ---- farthest point sampling


@dataclasses.dataclass(frozen=True)
class _FarthestPoints:
    """The node of the graph that samples."""

    ptr: Tuple[int, ...]
    counts: Tuple[int, ...]
    random_start: bool
    __name__ = "fps"

    def example(self) -> Tensor:
        """Return a tensor that looks like the result."""
        return torch.empty(sum(self.counts), dtype=torch.int32)

    def __call__(self, src: Tensor) -> List[Tensor]:
        """Sample real points."""
        points = src.detach().to(torch.float32)
        chosen = [
            first + self._sample(points[first:last], count)
            for first, last, count in zip(self.ptr, self.ptr[1:], self.counts)
            if count
        ]
        return [torch.cat(chosen).to(torch.int32) if chosen else self.example()]

    def _sample(self, points: Tensor, count: int) -> Tensor:
        indices = torch.empty(count, dtype=torch.int64)
        indices[0] = torch.randint(len(points), (1,)).item() if self.random_start else 0
        # To each point, the distance from the nearest point that was taken.
        distance = torch.full((len(points),), math.inf)
        for position in range(1, count):
            latest = points[indices[position - 1]]
            distance = torch.minimum(distance, (points - latest).square().sum(-1))
            indices[position] = torch.argmax(distance)
        return indices


def fps(src: Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Sample points of each set, each one as far as can be from those that were taken before it.

    Args:
        src: points, of shape (points, features).
        ptr: where the sets begin and the last one ends: set i holds the points ptr[i] up to ptr[i + 1].
        ratio: the share of a set's points that is taken, rounded up; above 0 and at most 1.
        random_start: begin with a random point of the set instead of its first one.

    Returns:
        Indices into `src`, int32, set by set.

    Raises:
        Error: an argument of the wrong type, shape or size.
    """
    if not isinstance(src, torch.Tensor):
        raise Error(f"`fps` must take a torch.tensor input. {type(src).__name__} is not supported.")
    if not isinstance(ptr, list) or not all(isinstance(item, int) for item in ptr):
        raise Error(f"`ptr` must be a list of integers, got {ptr!r}.")
    if len(ptr) < 2:
        raise Error(f"`ptr` must contain at least 2 elements, got {ptr!r}.")
    if not isinstance(ratio, float):
        raise Error(f"`ratio` must be of float type. {type(ratio).__name__} is not supported.")
    if not isinstance(random_start, bool):
        raise Error(f"`random_start` must be of bool type. {type(random_start).__name__} is not supported.")
    if not 0.0 < ratio <= 1.0:
        raise Error(f"`ratio` ({ratio}) has to be in range (0.0, 1.0>")
    if src.dim() != 2:
        raise Error(f"`src` is supposed to be 2d Tensor, while it has {src.dim()} dims")
    if ptr != sorted(ptr) or ptr[0] < 0 or ptr[-1] > src.shape[0]:
        raise Error(f"`ptr` must ascend from 0 to at most the {src.shape[0]} points of `src`, got {ptr}")
    counts = tuple(math.ceil((last - first) * ratio) for first, last in zip(ptr, ptr[1:]))
    sampler = _FarthestPoints(tuple(ptr), counts, random_start)
    if current.recorder is None:
        return sampler(src)[0]
    return record(sampler, (src,), [sampler.example()])[0]


# ---- nearest point


def _batch_of(name: str, batch: Any, points: Tensor) -> Optional[Tensor]:
    """Return a batch vector as a tensor of the points' length; None for none."""
    if isinstance(batch, list):
        if not batch:
            return None
        batch = torch.tensor(batch, dtype=torch.int64)
    elif not isinstance(batch, torch.Tensor):
        raise Error(f"`{name}` must be a torch.Tensor or a list while it is of type {type(batch).__name__}.")
    if batch.dim() == 1 and batch.shape[0] == 0:
        return None
    if tuple(batch.shape) != (points.shape[0],):
        raise ValueError(
            f"'{name}' must hold one number for each of {points.shape[0]} points, got {tuple(batch.shape)}"
        )
    return batch


def nearest(x: Tensor, y: Tensor, batch_x: Batch = None, batch_y: Batch = None) -> Tensor:
    """Find for each point of `x` the nearest point of `y` that belongs to the same sample.

    Args:
        x: points, of shape (points, features) or (points,).
        y: points with as many features.
        batch_x: the sample of each point of `x`, ascending; without it they all belong to sample 0.
        batch_y: the sample of each point of `y`, ascending.

    Returns:
        Indices into `y`, int32, one for each point of `x`.

    Raises:
        Error: an argument of the wrong type.
        ValueError: shapes that do not fit, or samples (when they are given as lists) that are not sorted or not the
            same in both.
    """
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, torch.Tensor):
            raise Error(f"`nearest` must take a torch.tensor `{name}` input. {type(value).__name__} is not supported.")
    if x.dim() > 2 or y.dim() > 2:
        raise ValueError(
            f"Inputs `x` and `y` should be max 2D tensors, while `x` has {x.dim()} dims and `y` has {y.dim()} dims."
        )
    x = x.reshape(-1, 1) if x.dim() == 1 else x
    y = y.reshape(-1, 1) if y.dim() == 1 else y
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"Inputs shapes inconsistent x.shape[1]={x.shape[1]} vs. y.shape[1]={y.shape[1]}")
    _check_samples(batch_x, batch_y)
    samples_x = _batch_of("batch_x", [] if batch_x is None else batch_x, x)
    samples_y = _batch_of("batch_y", [] if batch_y is None else batch_y, y)
    distance = torch.cdist(x.to(torch.float32), y.to(torch.float32))
    if samples_x is not None or samples_y is not None:
        samples_x = torch.zeros(x.shape[0], dtype=torch.int64) if samples_x is None else samples_x
        samples_y = torch.zeros(y.shape[0], dtype=torch.int64) if samples_y is None else samples_y
        apart = (samples_x.unsqueeze(1) - samples_y.unsqueeze(0)).abs()
        # Further away than any point of the same sample; finite, as samples in tensors may have no partner.
        distance = distance + apart * (distance.amax() + 1)
    return torch.argmin(distance, 1).to(torch.int32)


def _check_samples(batch_x: Batch, batch_y: Batch) -> None:
    """Compare the samples that are known before the model runs."""
    for name, batch in (("batch_x", batch_x), ("batch_y", batch_y)):
        if isinstance(batch, list) and batch != sorted(batch):
            raise ValueError(f"'{name}' is not sorted: {batch}")
    if isinstance(batch_x, torch.Tensor) or isinstance(batch_y, torch.Tensor) or not (batch_x or batch_y):
        return
    known_x, known_y = set(batch_x or [0]), set(batch_y or [0])
    if known_x != known_y:
        raise ValueError(
            "Some batch indices occur in 'batch_x' that do not occur in 'batch_y', or the reverse: "
            f"{sorted(known_x)} and {sorted(known_y)}"
        )
