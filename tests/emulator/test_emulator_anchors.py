# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from emulator_oracle import data, make, options, regression_loss, rows

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import optim

Mode = poptorch.OutputMode
BIAS = "Gradient___second.bias"


def anchored(*anchors, optimizer=None, D=1, A=1, R=1):
    model, twin = make()
    opts = options(D, A, R)
    for anchor in anchors:
        opts.anchorTensor(*anchor)
    optimizer = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.5)
    return poptorch.trainingModel(model, opts, optimizer), twin


def gradient_of(twin, x, y):
    twin.zero_grad()
    regression_loss(twin, x, y).backward()
    return twin.second.bias.grad.clone()


def test_a_gradient_and_an_updated_weight_can_be_read():
    training, twin = anchored(("grad", BIAS), ("weight", "UpdatedVar___second.bias"))
    x, y = data(4)
    training(x, y)
    gradient = gradient_of(twin, x, y)
    torch.testing.assert_close(training.getAnchoredTensor("grad"), gradient)
    expected = twin.second.bias.detach() - 0.5 * gradient
    torch.testing.assert_close(training.getAnchoredTensor("weight"), expected)
    torch.testing.assert_close(training.model.second.bias.detach(), expected)


@pytest.mark.parametrize(
    ("mode", "period", "chosen"),
    [(Mode.All, 1, range(8)), (Mode.Final, 1, [6, 7]), (Mode.EveryN, 2, range(4, 8))],
)
def test_an_anchor_has_an_output_mode_of_its_own(mode, period, chosen):
    D, A, R, B = 2, 2, 2, 2
    training, twin = anchored(
        ("grad", BIAS, mode, period), optimizer=lambda p: torch.optim.SGD(p, lr=0.0), D=D, A=A, R=R
    )
    x, y = data(D * A * R * B)
    training(x, y)
    pieces = [rows(d, a, r, D, A, R, B) for d in range(D) for a in range(A) for r in range(R)]
    expected = torch.cat([gradient_of(twin, x[pieces[index]], y[pieces[index]]) for index in chosen])
    torch.testing.assert_close(training.getAnchoredTensor("grad"), expected)


def test_without_a_mode_an_anchor_follows_the_models():
    training, _ = anchored(("grad", BIAS), D=3)
    training(*data(12))
    assert training.getAnchoredTensor("grad").shape == (2,)


def test_the_loss_scale_can_be_read():
    training, _ = anchored(
        ("given", "lossScaling_FLOAT"),
        ("final", "finalLossScale"),
        optimizer=lambda p: optim.SGD(p, lr=0.1, loss_scaling=8.0),
    )
    training(*data(4))
    assert training.getAnchoredTensor("given") == 8
    assert training.getAnchoredTensor("final") == 8


class HalfLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))

    def forward(self, x):
        return poptorch.identity_loss((self.w * x).sum(), "none")


def test_the_final_loss_scale_is_the_one_that_the_call_used():
    model = HalfLoss()
    opts = options()
    opts.Training.setAutomaticLossScaling(True)
    opts.anchorTensor("final", "finalLossScale")
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, opts, optimizer)
    x = torch.full((2,), 4.0, dtype=torch.float16)
    training.compile(x)
    # What an fp16 loss can hold; 4 times it overflows in the gradient.
    assert training.emulation.loss_scale == 32768
    for expected in (32768, 16384, 8192, 8192):
        assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == expected
        training(x)
        assert training.getAnchoredTensor("final") == expected


def test_an_anchor_is_known_by_its_short_name_after_a_run():
    training, _ = anchored(("grad", BIAS))
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        training.getAnchoredTensor("grad")
    training.compile(*data(4))
    with pytest.raises(poptorch.Error, match="Run the model before"):
        training.getAnchoredTensor("grad")
    training(*data(4))
    with pytest.raises(poptorch.Error, match=r"No tensor is anchored as 'grat'[\s\S]*'grad'"):
        training.getAnchoredTensor("grat")


def test_a_name_that_no_tensor_has_is_refused_at_compilation():
    training, _ = anchored(("grad", "Gradient___second.bia"))
    with pytest.raises(poptorch.Error, match=r"'Gradient___second.bia'[\s\S]*Gradient___second.bias"):
        training(*data(4))
    opts = options()
    opts.anchorTensor("grad", BIAS)
    with pytest.raises(poptorch.Error, match="there is no such tensor"):
        poptorch.inferenceModel(make()[0], opts)(torch.zeros(2, 3))


def test_tensor_names_are_those_of_inputs_weights_gradients_and_settings():
    model, _ = make()
    training = poptorch.trainingModel(model)
    with pytest.raises(AssertionError, match="must be compiled"):
        training.getTensorNames()
    training.compile(*data(4))
    names = training.getTensorNames()
    weights = set(dict(model.named_parameters()))
    assert {"input/x", "input/y", "loss", "lossScaling_FLOAT"} <= set(names)
    assert weights <= set(names)
    assert {f"Gradient___{name}" for name in weights} <= set(names)
    assert {f"UpdatedVar___{name}" for name in weights} <= set(names)
    assert "scaledLearningRate0___specific___first.weight" in names
    assert len(names) == len(set(names))
    training.destroy()
    with pytest.raises(AssertionError, match="must be compiled"):
        training.getTensorNames()


@pytest.mark.parametrize(
    ("optimizer", "updates"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {"SGD0VarUpdate"}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"SGD2VarUpdate"}),
        (lambda p: optim.AdamW(p, lr=0.1), {"AdamUpdater", "AdamVarUpdate"}),
    ],
)
def test_the_compiled_operations_can_be_listed(optimizer, updates):
    model, _ = make()
    training = poptorch.trainingModel(model, options(), optimizer(model.parameters()))
    training.compile(*data(4))
    operations = json.loads(training._debugGetPopartIR())["maingraph"]
    found = [each["name"] for each in operations if each["type"].endswith(("VarUpdate", "Updater"))]
    assert sorted(found) == sorted(f"{kind}/{name}" for kind in updates for name in dict(model.named_parameters()))
    forward = [
        each for each in operations if "backward" in each.get("attributes", {}) and not each["attributes"]["backward"]
    ]
    assert [each["name"] for each in forward if each["type"] in ("addmm", "tanh")] == [
        "first/addmm",
        "tanh",
        "second/addmm",
    ]
    assert any(each["attributes"]["backward"] for each in operations if "attributes" in each)
