# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from ipu_finetune.emulator import poptorch


class Convolutions(nn.Module):
    """`count` convolutions of one input within a `MultiConv`, and one after it."""

    def __init__(self, block, count=2):
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(1, 2, 3) for _ in range(count))
        self.after = nn.Conv2d(2, 1, 1)
        self.block = block

    def forward(self, x):
        with self.block:
            found = [part(x.abs()) for part in self.parts]
        return self.after(torch.stack([torch.zeros(2, 2, 3, 3), *found]).sum(0))


IMAGE = torch.randn(2, 1, 5, 5)


def run(block, count=2):
    model = Convolutions(block, count)
    expected = model(IMAGE)
    torch.testing.assert_close(poptorch.inferenceModel(model)(IMAGE), expected.detach())


def test_results_are_those_of_single_convolutions():
    run(poptorch.MultiConv())
    run(
        poptorch.MultiConv()
        .availableMemoryProportions((0.8, 0.7))
        .partialsTypes([torch.float, torch.half])
        .planType(poptorch.MultiConvPlanType.Serial)
        .perConvReservedTiles(120)
        .cycleBackOff(0.4)
        .enableConvDithering(True)
    )


def test_training_goes_through_a_multi_convolution():
    class Training(Convolutions):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), "sum")

    model = Training(poptorch.MultiConv())
    before = model.parts[1].weight.clone().detach()
    gradient = torch.autograd.grad(model(IMAGE), model.parts[1].weight)[0]
    poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))(IMAGE)
    torch.testing.assert_close(model.parts[1].weight.detach(), before - 0.1 * gradient)


@pytest.mark.parametrize(
    "block",
    [
        lambda: poptorch.MultiConv().availableMemoryProportions([0.1, 0.2]),
        lambda: poptorch.MultiConv().partialsTypes((torch.half, torch.half)),
        lambda: poptorch.MultiConv().enableConvDithering([True, False]),
    ],
)
def test_a_setting_has_one_value_or_one_for_each_convolution(block):
    run(block(), 2)
    with pytest.raises(poptorch.Error, match="has 2 values, but the block holds 3 convolutions"):
        run(block(), 3)


def test_a_block_without_convolutions_is_refused():
    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        run(poptorch.MultiConv(), 0)


def test_only_forward_convolutions_count():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.ConvTranspose2d(1, 1, 3)

        def forward(self, x):
            with poptorch.MultiConv():
                return self.conv(x)

    with pytest.raises(poptorch.Error, match="holds no convolution"):
        poptorch.inferenceModel(Transposed())(IMAGE)


def test_blocks_within_blocks_are_refused_and_the_next_model_is_not():
    class Nested(Convolutions):
        def forward(self, x):
            with poptorch.MultiConv():
                return super().forward(x)

    with pytest.raises(poptorch.Error, match=r"Nested poptorch\.MultiConv is not supported"):
        poptorch.inferenceModel(Nested(poptorch.MultiConv()))(IMAGE)
    run(poptorch.MultiConv())


def test_outside_of_a_compiled_model_a_block_does_nothing():
    with poptorch.MultiConv(), poptorch.MultiConv():
        assert torch.ones(1) + 1 == 2


@pytest.mark.parametrize(
    ("name", "value", "kind", "text"),
    [
        ("availableMemoryProportions", 3.0, AssertionError, "Invalid available memory proportion"),
        ("availableMemoryProportions", [], AssertionError, "Invalid available memory proportion"),
        ("availableMemoryProportions", 1, AssertionError, "Invalid available memory proportion"),
        ("partialsTypes", "half", ValueError, "Invalid partials types"),
        ("partialsTypes", torch.float64, ValueError, "Invalid partials types"),
        ("enableConvDithering", 1, ValueError, "bool or list of bools"),
        ("planType", "parallel", AssertionError, "Invalid plan type"),
        ("perConvReservedTiles", 0.5, AssertionError, "Invalid number of reserved tiles"),
        ("cycleBackOff", 2.0, AssertionError, "Invalid cycle back off"),
    ],
)
def test_settings_are_checked(name, value, kind, text):
    with pytest.raises(kind, match=text):
        getattr(poptorch.MultiConv(), name)(value)


@pytest.mark.parametrize("name", ["availableMemoryProportions", "enableConvDithering", "planType"])
def test_none_takes_a_setting_back(name):
    block = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2]).enableConvDithering([True, True])
    block = getattr(block, name)(None)
    for other in {"availableMemoryProportions", "enableConvDithering"} - {name}:
        getattr(block, other)(None)
    run(block, 3)
