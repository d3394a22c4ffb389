# SPDX-License-Identifier: Apache-2.0
"""What `importlib.metadata.version("poptorch")` answers while the emulator is installed.

Libraries check PopTorch's version by its distribution's metadata, so a module alone is not enough.
"""

import sys
from importlib import metadata
from typing import Any, Iterator, Optional

__all__ = ["add", "remove"]


class _Distribution(metadata.Distribution):
    """A distribution that exists in memory."""

    def read_text(self, filename: str) -> Optional[str]:
        """Return the metadata; there are no other files."""
        from .poptorch import __version__

        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: poptorch\nVersion: {__version__}\n"

    def locate_file(self, path: Any) -> Any:
        """Return the path: there is nothing on disk."""
        return path


class _Finder(metadata.DistributionFinder):
    """Finds the distribution, and no module."""

    @staticmethod
    def find_spec(*_: Any, **__: Any) -> None:
        """Modules are in `sys.modules` already."""
        return

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """Yield the look-alike's distribution if it is asked for by name."""
        if getattr(context, "name", None) == "poptorch":
            yield _Distribution()


_finder = _Finder()


def add() -> None:
    """Let the distribution be found, after any on disk."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def remove() -> None:
    """Forget it again."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
