# SPDX-License-Identifier: Apache-2.0
import gc

import pytest
import torch
from emulator_oracle import data, make, options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device import pod


@pytest.fixture(autouse=True)
def own_pod(tmp_path, monkeypatch):
    """A pod of two IPUs that no other process sees."""
    gc.collect()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "2")
    monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU", raising=False)


def held():
    return [state.id for state in pod.listing() if state.pid is not None]


def training_of(model, **settings):
    return poptorch.trainingModel(model, options(**settings))


def inference_of(model, **settings):
    return poptorch.inferenceModel(model, options(**settings))


X = torch.zeros(2, 3)


def test_ipus_are_taken_when_the_model_is_compiled_and_given_back_on_detach():
    model, _ = make()
    training = training_of(model)
    assert held() == []
    training.compile(*data(4))
    assert held() == [0]
    assert training.isAttachedToDevice()
    training.detachFromDevice()
    assert held() == []
    training(*data(4))
    assert held() == [0]
    training.destroy()
    assert held() == []


def test_each_replica_needs_its_ipus():
    executor = inference_of(make()[0], R=2)
    executor.compile(torch.zeros(4, 3))
    assert held() == [0, 1]


def test_two_models_cannot_have_the_same_ipu_until_one_detaches():
    # U44
    model, _ = make()
    training, inference = training_of(model, useIpuId=1), inference_of(model, useIpuId=1)
    training(*data(4))
    with pytest.raises(poptorch.Error, match=r"Failed to acquire[\s\S]*Regression"):
        inference(X)
    assert not inference.isCompiled()
    training.detachFromDevice()
    inference(X)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        training.attachToDevice()
    assert not training.isAttachedToDevice()
    inference.detachFromDevice()
    training.attachToDevice()


def test_a_full_pod_names_who_holds_it():
    # U44
    executors = [inference_of(make()[0]) for _ in range(3)]
    for executor in executors[:2]:
        executor(X)
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 1 IPU\(s\)[\s\S]*Regression"):
        executors[2](X)
    executors[0].detachFromDevice()
    executors[2](X)


def test_a_forgotten_model_gives_its_ipus_back():
    for _ in range(5):
        training_of(make()[0])(*data(4))
    gc.collect()
    assert held() == []


def test_an_error_while_compiling_takes_nothing():
    # U44
    class Breaks(torch.nn.Module):
        def forward(self, x):
            raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        inference_of(Breaks())(X)
    assert held() == []


def test_a_model_that_is_left_by_an_exception_gives_its_ipus_back():
    # U44
    def use():
        training_of(make()[0])(*data(4))
        raise KeyError("in the user's loop")

    with pytest.raises(KeyError):
        use()
    gc.collect()
    assert held() == []


def test_offline_targets_and_the_ipu_model_take_no_ipus():
    offline = options()
    offline.useOfflineIpuTarget()
    poptorch.inferenceModel(make()[0], offline).compile(X)
    assert held() == []
    executor = inference_of(make()[0], R=3, useIpuModel=True)
    executor(torch.zeros(6, 3))
    assert executor.isAttachedToDevice()
    assert held() == []


def test_without_claimed_hardware_there_is_no_pod(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", "0")
    inference_of(make()[0])(X)
    assert held() == []


def test_an_offline_target_cannot_be_attached():
    opts = options()
    opts.useOfflineIpuTarget()
    executor = poptorch.inferenceModel(make()[0], opts)
    executor.compile(X)
    with pytest.raises(poptorch.Error, match=r"ConnectionType\.Never"):
        executor.attachToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()


def test_the_ipu_model_cannot_be_offline():
    opts = options(useIpuModel=True)
    opts.useOfflineIpuTarget()
    with pytest.raises(poptorch.Error, match="not supported for the IPU model"):
        poptorch.inferenceModel(make()[0], opts).compile(X)


@pytest.mark.parametrize("kind", ["Always", "OnDemand"])
def test_the_log_says_which_device_is_used_and_when(kind, caplog):
    other = inference_of(make()[0])
    other(X)
    with caplog.at_level("DEBUG", logger="ipu_finetune.emulator"):
        inference_of(make()[0], connectionType=poptorch.ConnectionType[kind])(X)
    lines = [record.getMessage() for record in caplog.records]
    compiled = lines.index("Finished Poplar compilation (emulated)")
    attached = lines.index("Attached to device 1")
    assert (attached < compiled) == (kind == "Always")
    # On demand a model is compiled for the first device, free or not.
    assert f"Acquired 1 IPU(s): running on device Id {1 if kind == 'Always' else 0}" in lines


def test_weights_and_optimizer_state_survive_detaching():
    def run(detach):
        model, _ = make()
        training = poptorch.trainingModel(model, options(), poptorch.optim.AdamW(model.parameters(), lr=0.1))
        for step in range(4):
            training(*data(4, seed=step))
            if detach:
                training.detachFromDevice()
        return model.first.weight.detach()

    assert torch.equal(run(True), run(False))


def test_host_edits_between_detach_and_attach_reach_the_device():
    model, _ = make()
    inference = inference_of(model)
    before = inference(X)
    inference.detachFromDevice()
    with torch.no_grad():
        model.second.bias += 1
    torch.testing.assert_close(inference(X), before + 1)
