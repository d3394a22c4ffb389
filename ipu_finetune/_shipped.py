# SPDX-License-Identifier: Apache-2.0
"""Where the recipes and IPU configs that come with the package lie."""

from pathlib import Path

__all__ = ["shipped_folder"]

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(name: str) -> Path:
    """Return the folder `recipes` or `ipu_configs`: in an installed wheel, else beside the package in a checkout."""
    # The wheel's copy comes first: beside an installed package lies site-packages, and a `recipes` there is not ours.
    installed = _PACKAGE / "_shipped" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
