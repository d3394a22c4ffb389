# SPDX-License-Identifier: Apache-2.0
"""`ipu_print_tensor`: shows a tensor, and its gradient, every time that the model computes it."""

import dataclasses
import math
import sys
from typing import Any, List, Sequence

import torch

from ..device.errors import Error
from ..device.state import current
from ._recording import record

__all__ = ["ipu_print_tensor"]

_FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a tensor becomes text; the arguments of `ipu_print_tensor`."""

    summarise_threshold: int
    edge_items: int
    max_line_width: int
    digits: int
    float_format: str
    separator: str
    open_bracket: str
    close_bracket: str

    def text(self, tensor: torch.Tensor) -> str:
        """Return the whole tensor between brackets, a row to a line."""
        summarise = bool(self.summarise_threshold) and tensor.numel() > self.summarise_threshold
        return self._nested(tensor.tolist(), self._elements(tensor), 0, summarise, tensor.dim())

    def _elements(self, tensor: torch.Tensor) -> "_Elements":
        values = tensor.reshape(-1).tolist()
        if not tensor.is_floating_point():
            return _Elements([str(int(value)) for value in values], bool(self.digits))
        finite = [abs(value) for value in values if math.isfinite(value)]
        form = self.float_format
        if form == "auto" and self.digits:
            largest = max(finite, default=0.0)
            smallest = min((value for value in finite if value), default=largest)
            form = "scientific" if largest >= 10**self.digits or (smallest and smallest < 1e-4) else "fixed"
        if form in ("auto", "none") or not self.digits:
            return _Elements([f"{value:g}" for value in values], False)
        if form == "scientific":
            return _Elements([f"{value:.{self.digits - 1}e}" for value in values], True)
        before = len(str(int(max(finite, default=0.0))))
        return _Elements([f"{value:.{max(self.digits - before, 0)}f}" for value in values], True)

    def _nested(self, value: Any, elements: "_Elements", depth: int, summarise: bool, dims: int) -> str:
        if dims == 0:
            return elements.next()
        cut = summarise and len(value) > 2 * self.edge_items
        parts: List[str] = []
        for index, item in enumerate(value):
            part = self._nested(item, elements, depth + 1, summarise, dims - 1)
            if cut and self.edge_items <= index < len(value) - self.edge_items:
                if index == self.edge_items:
                    parts.append("...")
                continue
            parts.append(part)
        if dims == 1:
            return self._row(parts, depth)
        lines = "\n".join(" " * (depth + 1) + part for part in parts)
        return f"{self.open_bracket}\n{lines}\n{' ' * depth}{self.close_bracket}"

    def _row(self, parts: Sequence[str], depth: int) -> str:
        lines = [" " * depth + self.open_bracket]
        for index, part in enumerate(parts):
            piece = part + (self.separator if index < len(parts) - 1 else self.close_bracket)
            full = len(lines[-1]) + len(piece.rstrip()) > self.max_line_width
            if index and self.max_line_width and full:
                lines[-1] = lines[-1].rstrip()
                lines.append(" " * (depth + 2))
            lines[-1] += piece
        if not parts:
            lines[-1] += self.close_bracket
        return "\n".join(lines)[depth:]


class _Elements:
    """The texts of a tensor's elements, in order, padded to one width."""

    def __init__(self, texts: List[str], align: bool) -> None:
        width = max((len(text) for text in texts), default=0) if align else 0
        self._texts = iter([text.rjust(width) for text in texts])

    def next(self) -> str:
        """Return the next one."""
        return next(self._texts)


@dataclasses.dataclass(frozen=True)
class _Printer:
    """The node of the graph that prints."""

    title: str
    layout: _Layout
    __name__ = "ipu_print_tensor"

    def __call__(self, tensor: torch.Tensor) -> List[torch.Tensor]:
        """Write the tensor to standard error."""
        sys.stderr.write(f"{self.title}: {self.layout.text(tensor.detach())}\n")
        return []


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Return a tensor that is printed to standard error whenever the model computes it.

    The gradient of the returned tensor is printed too, with `_gradient` after the title. Outside of a compiled model
    this is the identity.

    Args:
        tensor: what to print.
        title: goes before it.
        print_gradient: whether the gradient is printed in training.
        summarise_threshold: with more elements than this, only the edges are shown; 0 for never.
        edge_items: how many elements, or rows, an edge has.
        max_line_width: where long rows are broken; 0 for never.
        digits: how many digits a number has; 0 for as many as it needs, without alignment.
        float_format: "auto", "fixed", "scientific" or "none".
        separator: goes between elements.
        open_bracket: goes before a row.
        close_bracket: goes after it.

    Raises:
        Error: not a tensor, or an unknown format.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"ipu print tensor must take a torch.tensor argument. {type(tensor).__name__} is not supported.")
    if float_format not in _FLOAT_FORMATS:
        raise Error(f"ipu_print_tensor: float_format must be one of {', '.join(_FLOAT_FORMATS)}, got {float_format!r}")
    recorder = current.recorder
    if recorder is None:
        return tensor
    layout = _Layout(
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator, open_bracket, close_bracket
    )
    record(_Printer(title, layout), (tensor,), ())
    if not (print_gradient and tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    printed = tensor.view_as(tensor)
    gradient_printer = _Printer(f"{title}_gradient", layout)
    printed.register_hook(lambda gradient: _print_gradient(recorder, gradient_printer, gradient))
    return printed


def _print_gradient(recorder: Any, printer: _Printer, gradient: torch.Tensor) -> None:
    recorder.call(printer, (gradient,), ())
