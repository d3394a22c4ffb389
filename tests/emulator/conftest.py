# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch

from ipu_finetune import emulator


@pytest.fixture
def installed():
    """`import poptorch` gives the look-alike within the test, and not after it."""
    emulator.install()
    yield
    emulator.uninstall()


@pytest.fixture(autouse=True)
def _one_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_log_level():
    """Libraries that were imported by other tests may have silenced the emulator's log."""
    log = logging.getLogger("ipu_finetune.emulator")
    before = log.level
    log.setLevel(logging.NOTSET)
    yield
    log.setLevel(before)
