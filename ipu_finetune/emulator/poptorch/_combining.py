# SPDX-License-Identifier: Apache-2.0
"""Joining micro-batches into what one call of a model consumes."""

from typing import Any, Iterable, Iterator, List, Sequence

import torch

from ..device import nested
from ..device.errors import Error

__all__ = ["combine", "concatenate"]


def _tensors(value: Any) -> List[torch.Tensor]:
    return [leaf for _, leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor)]


def concatenate(values: Sequence[Any]) -> Any:
    """Join equally built values along the first dimension of their tensors; what is no tensor is the first one's.

    Raises:
        Error: the values do not hold the same number of tensors.
    """
    found = [_tensors(value) for value in values]
    counts = sorted({len(tensors) for tensors in found})
    if len(counts) > 1:
        raise Error(f"Batches that are combined must be built alike, but they hold {counts} tensors")
    joined = iter([torch.cat(column) for column in zip(*found)])
    return nested.rebuild(values[0], lambda _: next(joined))


def combine(batches: Iterable[Any], count: int, drop_last: bool) -> Iterator[Any]:
    """Yield every `count` batches as one; fewer are left at the end, and kept unless `drop_last`."""
    held: List[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) == count:
            yield concatenate(held)
            held = []
    if held and not drop_last:
        yield concatenate(held)
