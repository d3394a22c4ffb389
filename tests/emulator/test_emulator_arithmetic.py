# SPDX-License-Identifier: Apache-2.0
"""Half precision, overflow and floating-point exceptions of the emulated device."""

import pytest
import torch

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device.partials import CHANNELS
from ipu_finetune.emulator.device.precision import Arithmetic, Overflow, _Rounding, function_for

OVERFLOW = "IPU_FINETUNE_EMULATED_OVERFLOW"

F = torch.nn.functional


def infer(function, *inputs, options=None):
    return poptorch.inferenceModel(function, options)(*inputs)


def with_precision(**switches):
    options = poptorch.Options()
    for name, value in switches.items():
        getattr(options.Precision, name)(value)
    return options


# ---- half precision


def test_fp16_products_add_up_in_fp32():
    # 2048 + 1 is not an fp16 number: a running fp16 sum of ones would stop at 2048.
    ones = torch.ones(1, 4096, dtype=torch.float16)
    result = infer(lambda x: x @ x.t(), ones)
    assert result.dtype == torch.float16
    assert result.item() == 4096.0


def test_half_partials_lose_what_an_fp16_sum_loses():
    ones = torch.ones(1, 4096, dtype=torch.float16)
    tiny = torch.full((4096, 1), 0.03125, dtype=torch.float16)
    tiny[:CHANNELS] = 128.0  # the first block sums to 2048, where fp16 numbers are 2 apart
    exact = infer(lambda x, y: x @ y, ones, tiny)
    halved = infer(lambda x, y: x @ y, ones, tiny, options=with_precision(setPartialsType=torch.half))
    assert exact.item() == 2048 + round((4096 - CHANNELS) * 0.03125 / 2) * 2
    # Each later block adds 0.5, which rounds away.
    assert halved.item() == 2048.0


def test_half_partials_leave_fp32_alone():
    x = torch.randn(8, 64)
    options = with_precision(setPartialsType=torch.half)
    torch.testing.assert_close(infer(lambda x: x @ x.t(), x, options=options), x @ x.t())


def test_half_partials_reach_convolutions_and_linear_layers():
    torch.manual_seed(0)
    for layer, x in ((torch.nn.Conv1d(64, 3, 2), torch.randn(1, 64, 5)), (torch.nn.Linear(64, 3), torch.randn(2, 64))):
        layer, x = layer.half(), x.half()
        exact = layer.float()(x.float())
        halved = infer(layer.half(), x, options=with_precision(setPartialsType=torch.half))
        error = (halved.float() - exact).abs().max()
        assert 0 < error < 2e-2


def test_a_kernel_without_fp16_is_computed_in_fp32_and_rounded():
    x = torch.tensor([1.5, 2.5, -3.0], dtype=torch.float16)

    def no_half(*args):
        if args[0].dtype == torch.float16:
            raise RuntimeError("\"kernel_cpu\" not implemented for 'Half'")
        return torch.mul(*args)

    executor = poptorch.inferenceModel(lambda x: x * x)
    executor(x)
    (node,) = executor._program.trace.graph.operations()
    rounding = function_for(node, Arithmetic())
    assert isinstance(rounding, _Rounding)
    rounding._function = no_half
    result = rounding(x, x)
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, x * x)


def test_rounding_writes_in_place_results_back():
    x = torch.tensor([1.0, 2.0], dtype=torch.float16)
    executor = poptorch.inferenceModel(lambda x: x.clone().add_(1))
    executor(x)
    node = list(executor._program.trace.graph.operations())[-1]
    rounding = function_for(node, Arithmetic())
    rounding._native = False
    result = rounding(x, 1)
    assert result is x
    torch.testing.assert_close(x, torch.tensor([2.0, 3.0], dtype=torch.float16))


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [("clip", [65504.0, -65504.0, 4.0]), ("ieee", [float("inf"), -float("inf"), 4.0]), ("nan", [None, None, 4.0])],
)
def test_an_fp16_overflow_does_what_was_asked(behaviour, expected, monkeypatch):
    monkeypatch.setenv(OVERFLOW, behaviour)
    result = infer(lambda x: x * x.abs(), torch.tensor([300.0, -300.0, 2.0], dtype=torch.float16)).tolist()
    assert [None if value != value else value for value in result] == expected


def test_an_unknown_overflow_behaviour_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(OVERFLOW, "clipp")
    with pytest.raises(poptorch.Error, match="clipp: expected one of ieee, clip, nan.*clip"):
        infer(lambda x: x, torch.ones(1))


def test_an_fp32_infinity_is_no_overflow_of_fp16(monkeypatch):
    monkeypatch.setenv(OVERFLOW, "nan")
    assert infer(lambda x: x * 2, torch.tensor([float("inf")])).item() == float("inf")
    assert Overflow("nan") is Overflow.NAN


# ---- exceptions


INVALID = {
    "division by zero": lambda x: x / (x - x),
    "0 / 0": lambda x: (x - x) / (x - x),
    "overflow": lambda x: x * 3e38 * 3e38,
    "root of a negative": lambda x: torch.sqrt(x - 5),
    "logarithm of a negative": lambda x: torch.log(x - 5),
    "exponent": lambda x: torch.exp(x * 1000),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_floating_point_exception_raises_and_names_operator_and_module(name):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return torch.where(x > 0, INVALID[name](x), 0.0).sum()

    model = torch.nn.Sequential(torch.nn.Identity(), Layer())
    options = with_precision(enableFloatingPointExceptions=True)
    with pytest.raises(poptorch.Error, match=r"Floating point exception: aten\..* in module '1'"):
        infer(model, torch.ones(2), options=options)
    poptorch.inferenceModel(model)(torch.ones(2))  # without the switch nothing is raised


def test_a_comparison_with_nan_raises():
    options = with_precision(enableFloatingPointExceptions=True)
    with pytest.raises(poptorch.Error, match="comparison with NaN"):
        infer(lambda x: x > 0, torch.tensor([float("nan")]), options=options)


def test_masks_of_infinity_are_no_exception():
    options = with_precision(enableFloatingPointExceptions=True)

    def body(x):
        return torch.softmax(x.masked_fill(torch.tensor([False, True]), float("-inf")), -1)

    torch.testing.assert_close(infer(body, torch.tensor([1.0, 2.0]), options=options), torch.tensor([1.0, 0.0]))


def test_an_exception_in_the_backward_pass_raises():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return F.l1_loss(torch.sqrt(self.inner(x)), x)

    options = with_precision(enableFloatingPointExceptions=True)
    training = poptorch.trainingModel(Root(), options, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        training(torch.ones(1, 1))


# ---- mixed types


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_weights_follow_the_type_of_the_activations(kind):
    layer, shape = (torch.nn.Linear(4, 2), (3, 4)) if kind == "linear" else (torch.nn.Conv1d(4, 2, 1), (3, 4, 1))
    x = torch.randn(shape)
    expected = layer(x)
    for weights in (torch.float32, torch.float16):
        layer = layer.to(weights)
        for activations in (torch.float32, torch.float16):
            result = poptorch.inferenceModel(layer)(x.to(activations))
            assert result.dtype == activations
            torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2)


def test_fp32_master_weights_train_on_fp16_activations():
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return F.mse_loss(self.layer(x), x)

    model, x = Model(), torch.randn(2, 4).half()
    twin = torch.nn.Linear(4, 4)
    twin.load_state_dict(model.layer.state_dict())
    F.mse_loss(twin(x.float()), x.float()).backward()
    expected = twin.weight - twin.weight.grad
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))(x)
    assert model.layer.weight.dtype == torch.float32
    torch.testing.assert_close(model.layer.weight.detach(), expected.detach(), rtol=5e-3, atol=5e-3)


def test_an_index_beyond_the_tensor_adds_nothing():
    index = torch.tensor([0, 5, -100, 1])
    result = infer(lambda x, i: torch.zeros(2).scatter_add(0, i, x), torch.ones(4), index)
    torch.testing.assert_close(result, torch.tensor([1.0, 1.0]))
