# SPDX-License-Identifier: Apache-2.0
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
