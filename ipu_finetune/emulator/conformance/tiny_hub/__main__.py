# SPDX-License-Identifier: Apache-2.0
"""`python -m ipu_finetune.emulator.conformance.tiny_hub DIR`: build the local hub."""

import argparse
import importlib.util
import sys
from typing import List, Optional

from ... import install, is_installed
from . import build

__all__ = ["main"]


def main(arguments: Optional[List[str]] = None) -> int:
    """Build the hub and say what is in it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ipu_finetune.emulator.conformance.tiny_hub",
        description="Write a local hub of tiny random models, for optimum-graphcore's tests without a network.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder to point HF_HOME to")
    folder = parser.parse_args(arguments).folder
    if not is_installed() and importlib.util.find_spec("poptorch") is None:
        install()
    hub = build(folder)
    print(f"{len(hub.repositories)} model repositories and {len(hub.datasets)} data sets in {hub.home}")
    print(f"Use it with HF_HOME={hub.home} HF_HUB_OFFLINE=1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
