# SPDX-License-Identifier: Apache-2.0
"""Attaching and detaching as a script meets it: one device, two models (U44)."""

import gc

import pytest
import torch

from ipu_finetune.emulator import poptorch


@pytest.fixture(autouse=True)
def _pod_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU", raising=False)


class ModelA(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


class ModelB(ModelA):
    pass


X = torch.ones(1, 2)


def test_u44_the_second_model_names_the_first_and_runs_once_that_is_detached():
    first, second = poptorch.inferenceModel(ModelA().eval()), poptorch.inferenceModel(ModelB().eval())
    expected = first(X)
    with pytest.raises(poptorch.Error, match="Failed to acquire 1 IPU.*\n.*model ModelA, since .*\n.*detachFromDevice"):
        second(X)
    first.detachFromDevice()
    second(X)
    with pytest.raises(poptorch.Error, match="model ModelB"):
        first(X)
    second.destroy()
    assert torch.equal(first(X), expected)
    first.destroy()


def test_u44_after_an_exception_while_compiling_the_device_is_free():
    class Fails(ModelA):
        def forward(self, x):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        poptorch.inferenceModel(Fails().eval())(X)
    poptorch.inferenceModel(ModelB().eval())(X)


def test_a_model_that_is_forgotten_gives_its_device_back():
    poptorch.inferenceModel(ModelA().eval())(X)
    gc.collect()
    poptorch.inferenceModel(ModelB().eval())(X)


def test_use_ipu_id_is_kept(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "2")
    options = poptorch.Options().useIpuId(1)
    first = poptorch.inferenceModel(ModelA().eval(), options)
    first(X)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 1"):
        poptorch.inferenceModel(ModelB().eval(), options.clone())(X)
    poptorch.inferenceModel(ModelB().eval())(X)


def test_nothing_is_held_for_an_offline_target():
    first = poptorch.inferenceModel(ModelA().eval(), poptorch.Options().useOfflineIpuTarget())
    first.compile(X)
    poptorch.inferenceModel(ModelB().eval())(X)
