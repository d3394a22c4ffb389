# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin under which a test suite of PopTorch code runs unmodified, with no conftest of its own for that.

```
python -m pytest -p ipu_finetune.emulator.pytest_plugin tests
```

The emulator is in force from before the first conftest is read until the session ends. The report's header says so: a
green run is a statement about an emulated IPU.
"""

import os
from contextlib import ExitStack
from typing import List

import pytest

from ..errors import TargetUnavailableError
from . import children, install, is_installed, uninstall

__all__: List[str] = []

_undo = ExitStack()


# Of all hooks this is called first: at once when the plugin is loaded, so before a conftest's `import poptorch`.
def pytest_addoption(parser: pytest.Parser) -> None:
    """Install the emulator; there are no options."""
    if is_installed():
        return
    try:
        install()
    except TargetUnavailableError as error:
        raise pytest.UsageError(str(error)) from error
    _undo.callback(uninstall)
    _undo.callback(children.show_to_children())


def pytest_report_header(config: pytest.Config) -> List[str]:
    """Say that nothing runs on an IPU."""
    import poptorch

    claimed = os.environ.get("IPU_FINETUNE_EMULATED_HARDWARE", "2")
    hardware = "claims no IPU hardware" if claimed == "0" else f"claims IPU hardware of version {claimed}"
    return [
        f"emulated: poptorch {poptorch.__version__} is ipu-finetune's emulator ({hardware}); nothing runs on an IPU"
    ]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the emulator away again, if it was this plugin that installed it."""
    _undo.close()
