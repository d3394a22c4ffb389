# SPDX-License-Identifier: Apache-2.0
"""Argument types of the user's own: how their tensors are found and put back."""

from typing import Any, Iterator, Optional, Type, Union

import torch

from ..device import nested
from ..device.errors import Error

__all__ = ["ICustomArgParser", "registerCustomArgParser", "registerGeometricCustomArgParsers"]


class ICustomArgParser:
    """Opens and closes values of one type."""

    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors of a value, always in the same order.

        Raises:
            Error: the class does not say how.
        """
        raise Error(f"{type(self).__name__} must define yieldTensors(struct)")

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a value like `original_structure` with tensors taken from the iterator.

        Raises:
            Error: the class does not say how.
        """
        raise Error(f"{type(self).__name__} must define reconstruct(original_structure, tensor_iterator)")


def registerCustomArgParser(
    arg_type: type, arg_parser: Optional[Union[ICustomArgParser, Type[ICustomArgParser]]]
) -> None:
    """Use a parser for every argument and result of a type, or of one derived from it; None forgets it again."""
    if arg_parser is None:
        nested.custom_parsers.pop(arg_type, None)
        return
    if isinstance(arg_parser, type) and issubclass(arg_parser, ICustomArgParser):
        arg_parser = arg_parser()
    if not isinstance(arg_parser, ICustomArgParser):
        raise Error(f"arg_parser must inherit from ICustomArgParser, got {arg_parser!r}")
    nested.custom_parsers[arg_type] = arg_parser


def registerGeometricCustomArgParsers() -> None:
    """Do nothing: torch_geometric's types come with poptorch_geometric, which is not emulated."""
