# SPDX-License-Identifier: Apache-2.0
"""Runs on both targets; the emulator stays in force for the session, since optimum-graphcore binds to it at import."""

import pytest


@pytest.fixture(params=["cpu", "emulator"])
def target(request):
    return request.param


@pytest.fixture
def state_of():
    """Return a function that reads the weights of a finished run."""
    import safetensors.torch

    def read(folder):
        return safetensors.torch.load_file(str(folder / "model" / "model.safetensors"))

    return read
