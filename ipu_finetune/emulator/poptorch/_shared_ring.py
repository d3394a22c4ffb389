# SPDX-License-Identifier: Apache-2.0
"""Batches in memory that two processes share: a ring of slots, each of which holds one batch.

The memory has no name, so nothing is left behind however the processes end. Its descriptor travels through the socket
between them.
"""

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import Any, List, NamedTuple, Tuple

import torch

from ..device import nested
from ..device.errors import Error

__all__ = ["Layout", "SharedRing", "flatten", "rows_of"]

_ALIGNMENT = 64  # a cache line, and a multiple of every element's size


def _is_custom(value: Any) -> bool:
    return any(kind in nested.custom_parsers for kind in type(value).__mro__)


def flatten(item: Any) -> Tuple[Any, List[torch.Tensor]]:
    """Return an item in the form in which it is handed out, and its tensors.

    A tensor, a dictionary and a type with a registered parser keep their form; other sequences become a list.

    Raises:
        Error: the item is not a flat container of tensors.
    """
    form: Any
    parts: List[Any]
    if isinstance(item, torch.Tensor):
        form, parts = item, [item]
    elif _is_custom(item):
        form, parts = item, [leaf for _, leaf in nested.leaves(item)]
    elif isinstance(item, dict):
        form, parts = dict(item), list(item.values())
    else:
        form = parts = list(item) if isinstance(item, (list, tuple)) else [item]
    for index, part in enumerate(parts):
        if not isinstance(part, torch.Tensor):
            raise Error(
                f"Tensor at index {index} is not a torch tensor ({type(part)}). AsynchronousDataAccessor expects data "
                "to be organised as a flat 1D container of tensors: a tensor, a list, a tuple or a dict of them. "
                "Convert it in the dataset or collate_fn, or use DataLoaderMode.Sync."
            )
    return form, parts


class Layout(NamedTuple):
    """What every slot of a ring looks like.

    Attributes:
        template: an item without data.
        shapes: one per tensor.
        dtypes: one per tensor.
        slots: how many there are.
    """

    template: Any
    shapes: List[torch.Size]
    dtypes: List[torch.dtype]
    slots: int

    @classmethod
    def of(cls, item: Any, slots: int, rows: int = 0) -> "Layout":
        """Return the layout for items like this one; with `rows` their first dimension is that."""
        form, tensors = flatten(item)
        template = nested.rebuild(form, lambda tensor: torch.empty(0, dtype=tensor.dtype))
        shapes = [tensor.shape for tensor in tensors]
        if rows:
            rows_of(tensors)
            shapes = [torch.Size([rows, *shape[1:]]) for shape in shapes]
        return cls(template, shapes, [tensor.dtype for tensor in tensors], slots)

    def tensors_of(self, item: Any) -> List[torch.Tensor]:
        """Return an item's tensors in this layout's order.

        Raises:
            Error: the item is not built like the first one.
        """
        form, tensors = flatten(item)
        if isinstance(form, dict) and isinstance(self.template, dict) and form.keys() == self.template.keys():
            return [form[key] for key in self.template]
        same_form = all(isinstance(each, torch.Tensor) for each in (form, self.template)) or (
            type(form) is type(self.template) and not isinstance(form, dict)
        )
        if not same_form or len(tensors) != len(self.shapes):
            raise Error(
                "Every batch must be built like the first one, which a ring of fixed buffers was made for: expected "
                f"{nested.describe(self.template)}, got {nested.describe(form)}"
            )
        return tensors

    def assemble(self, tensors: List[torch.Tensor]) -> Any:
        """Return an item of these tensors."""
        following = iter(tensors)
        return nested.rebuild(self.template, lambda _: next(following))

    def offsets(self) -> Tuple[List[int], int]:
        """Return where each tensor begins in a slot, and the slot's size, in bytes."""
        offsets, end = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes):
            offsets.append(end)
            size = shape.numel() * torch.empty(0, dtype=dtype).element_size()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offsets, end


def rows_of(tensors: List[torch.Tensor]) -> int:
    """Return the first dimension that all tensors of an item have.

    Raises:
        Error: they differ in it, or one has no dimensions.
    """
    found = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(found) != 1 or None in found:
        raise Error(
            "Batches can only be joined or split where all tensors have the same first dimension; this one's are of "
            f"shapes {[list(tensor.shape) for tensor in tensors]}"
        )
    return int(found.pop())  # type: ignore[arg-type]


class SharedRing:
    """The slots of a layout in shared memory.

    Attributes:
        layout: what a slot looks like.
        slots: the tensors of each slot; they are views of the memory.
    """

    def __init__(self, layout: Layout, descriptor: int) -> None:
        self.layout = layout
        offsets, size = layout.offsets()
        memory = mmap.mmap(descriptor, max(1, size * layout.slots))
        self.slots = [
            [
                _view(memory, shape, dtype, slot * size + offset)
                for shape, dtype, offset in zip(layout.shapes, layout.dtypes, offsets)
            ]
            for slot in range(layout.slots)
        ]

    @classmethod
    def create(cls, layout: Layout, connection: Any, receiver: int) -> "SharedRing":
        """Make the memory and give it to the process `receiver` at the connection's other end."""
        _, size = layout.offsets()
        descriptor = _anonymous_file(max(1, size * layout.slots))
        try:
            connection.send(layout)
            reduction.send_handle(connection, descriptor, receiver)
            return cls(layout, descriptor)
        finally:
            os.close(descriptor)

    @classmethod
    def receive(cls, layout: Layout, connection: Any) -> "SharedRing":
        """Open the memory that the process at the connection's other end made."""
        descriptor = reduction.recv_handle(connection)
        try:
            return cls(layout, descriptor)
        finally:
            os.close(descriptor)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("poptorch-batches")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _view(memory: mmap.mmap, shape: torch.Size, dtype: torch.dtype, offset: int) -> torch.Tensor:
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
