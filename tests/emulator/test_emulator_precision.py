# SPDX-License-Identifier: Apache-2.0
import warnings

import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device.rounding import stochastic_half
from ipu_finetune.emulator.poptorch import MeanReductionStrategy, ReductionType, optim

F = torch.nn.functional


class Tiny(torch.nn.Module):
    """Its gradient with respect to w is `slope * x`, through fp16, with an fp32 loss."""

    def __init__(self, start=0.0):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), start))

    def forward(self, x, slope):
        out = self.w * x
        return poptorch.identity_loss((out.float() * slope).sum(), "none")


def update(half, slope=1e-8, scale=None, auto=False, lr=1e4, calls=1, start=0.0, A=1):
    model = Tiny(start)
    if half:
        model = model.half()
    optimizer = optim.SGD(model.parameters(), lr=lr, loss_scaling=scale)
    opts = options(A=A)
    opts.Training.setAutomaticLossScaling(auto)
    training = poptorch.trainingModel(model, opts, optimizer)
    x = torch.ones(4 * A, dtype=torch.float16 if half else torch.float32)
    for _ in range(calls):
        training(x, torch.full((4 * A,), slope))
    return (model.w - start).detach().float(), training


# ---- loss scaling in fp16


def test_a_gradient_of_1e_minus_8_is_lost_at_scale_1_and_reported_once():
    with pytest.warns(UserWarning, match="underflow 100 %.*loss scale 1; raise loss_scaling") as caught:
        change, training = update(half=True, calls=3)
    assert len(caught) == 1
    assert change.unique().tolist() == [0.0]
    assert training.emulation.underflow_share == 1.0


@pytest.mark.parametrize(("scale", "auto"), [(65536.0, False), (None, True)])
def test_a_scaled_gradient_of_1e_minus_8_updates_as_in_fp32(scale, auto):
    expected, _ = update(half=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change, training = update(half=True, scale=scale, auto=auto)
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=0)
    assert training.emulation.underflow_share == 0.0


def test_the_automatic_scale_leaves_inference_alone():
    _, training = update(half=True, auto=True)
    inference = poptorch.inferenceModel(training)
    assert inference.emulation.loss_scale is None
    inference(torch.ones(4, dtype=torch.float16), torch.ones(4))
    opts = options()
    opts.Training.setAutomaticLossScaling(True)
    poptorch.inferenceModel(torch.nn.Linear(2, 2).half(), opts)(torch.ones(1, 2, dtype=torch.float16))


def test_an_overflowing_step_is_skipped_and_the_scale_halved():
    change, training = update(half=True, slope=10.0, auto=True, lr=0.1)
    emulation = training.emulation
    assert change.unique().tolist() == [0.0]
    assert emulation.last_update_skipped
    assert (emulation.updates, emulation.skipped_updates) == (0, 1)
    assert emulation.loss_scale == 32768.0


def test_the_scale_falls_until_updates_go_through_again():
    change, training = update(half=True, slope=10.0, auto=True, lr=0.125, calls=6)
    emulation = training.emulation
    # 10 * 65536, 10 * 32768, 10 * 16384 and 10 * 8192 are above 65504; 10 * 4096 is not.
    assert (emulation.updates, emulation.skipped_updates) == (2, 4)
    assert emulation.loss_scale == 4096.0
    assert not emulation.last_update_skipped
    torch.testing.assert_close(change, torch.full((4,), -2.5))


def test_a_skipped_step_does_not_advance_the_optimizer():
    model = Tiny().half()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    opts = options()
    opts.Training.setAutomaticLossScaling(True)
    training = poptorch.trainingModel(model, opts, optimizer)
    x = torch.ones(4, dtype=torch.float16)
    training(x, torch.full((4,), 10.0))
    assert optimizer.state_dict()["ipu_state"]["Step___w"] == 0
    training(x, torch.full((4,), 0.01))
    state = optimizer.state_dict()["ipu_state"]
    assert state["Step___w"] == 1
    assert state["lossScaleUpdateFactor"] == 32768.0


@pytest.mark.parametrize("behaviour", ["clip", "ieee", "nan"])
def test_without_automatic_scaling_an_overflow_reaches_the_weights(behaviour, monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_OVERFLOW", behaviour)
    change, training = update(half=True, slope=10.0, scale=65536.0)
    if behaviour == "clip":
        # The gradient 10 * 65536 saturates at 65504, which is 0.9995 once the scale is taken out again.
        assert torch.isfinite(change).all()
    else:
        assert not torch.isfinite(change).any()
    assert training.emulation.skipped_updates == 0


def test_the_automatic_scale_is_saved_and_restored():
    _, training = update(half=True, slope=10.0, auto=True, calls=3)
    state = training._optimizer.state_dict()
    model = Tiny().half()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    opts = options()
    opts.Training.setAutomaticLossScaling(True)
    optimizer.load_state_dict(state)
    again = poptorch.trainingModel(model, opts, optimizer)
    again.compile(torch.ones(4, dtype=torch.float16), torch.ones(4))
    assert again.emulation.loss_scale == training.emulation.loss_scale == 8192.0


def test_each_update_of_a_call_reports_whether_it_was_skipped():
    model = Tiny().half()
    opts = options(D=3)
    opts.Training.setAutomaticLossScaling(True)
    training = poptorch.trainingModel(model, opts, optim.SGD(model.parameters(), lr=0.1))
    slope = torch.tensor([1e-3] * 4 + [10.0] * 4 + [1e-3] * 4)
    training(torch.ones(12, dtype=torch.float16), slope)
    assert training.emulation.last_updates_skipped == [False, True, False]


def test_a_scale_above_fp16s_range_still_works_with_an_fp16_loss(caplog):
    class HalfLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return F.l1_loss(self.w, x)

    model = HalfLoss().half()
    optimizer = optim.SGD(model.parameters(), lr=0.5, loss_scaling=65536.0)
    loss = poptorch.trainingModel(model, options(), optimizer)(torch.ones(1, dtype=torch.float16))
    assert loss.dtype == torch.float16
    assert model.w.item() == 0.5
    assert "does not fit an fp16 loss" in caplog.text


def test_fp32_models_have_no_underflow_share():
    _, training = update(half=False)
    assert training.emulation.underflow_share is None


# ---- accumulators


def fp16_reduction(strategy, gradient=20000.0, A=8):
    """The reduced gradient of A equal fp16 gradients, accumulated in fp16."""
    model = Tiny().half()
    optimizer = optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    opts = options(A=A)
    if strategy is not None:
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    training = poptorch.trainingModel(model, opts, optimizer)
    training(torch.ones(4 * A, dtype=torch.float16), torch.full((4 * A,), gradient))
    return -model.w.detach().float()


@pytest.mark.parametrize("strategy", [None, MeanReductionStrategy.Running, MeanReductionStrategy.Post])
def test_fp16_accumulators_keep_a_running_mean_which_does_not_overflow(strategy, monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_OVERFLOW", "ieee")
    # The sum of 8 gradients of 20000 would be infinite.
    torch.testing.assert_close(fp16_reduction(strategy), torch.full((4,), 20000.0), rtol=1e-3, atol=0)


def test_fp32_accumulators_hold_the_sum_of_fp16_gradients():
    model = Tiny().half()
    opts = options(A=8)
    opts.Training.accumulationAndReplicationReductionType(ReductionType.Sum)
    poptorch.trainingModel(model, opts, optim.SGD(model.parameters(), lr=1e-3))(
        torch.ones(32, dtype=torch.float16), torch.full((32,), 20000.0)
    )
    torch.testing.assert_close(model.w.detach().float(), torch.full((4,), -160.0))


def test_running_mean_of_different_gradients_is_their_mean():
    model = Tiny().half()
    optimizer = optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    slopes = torch.tensor([1.0, 2.0, 3.0, 6.0]).repeat_interleave(4)
    poptorch.trainingModel(model, options(A=2, R=2), optimizer)(torch.ones(16, dtype=torch.float16), slopes)
    torch.testing.assert_close(model.w.detach().float(), torch.full((4,), -3.0), rtol=2e-3, atol=0)


def test_an_fp16_first_moment_does_not_underflow_under_a_loss_scale():
    changes = []
    for half in (False, True):
        model = Tiny()
        model = model.half() if half else model
        moment = torch.float16 if half else torch.float32
        optimizer = optim.AdamW(
            model.parameters(), lr=0.5, weight_decay=0.0, loss_scaling=65536.0, first_order_momentum_accum_type=moment
        )
        training = poptorch.trainingModel(model, options(), optimizer)
        for slope in (1e-6, 2e-6, 5e-7):
            training(torch.ones(4, dtype=torch.float16 if half else torch.float32), torch.full((4,), slope))
        changes.append(model.w.detach().float())
    torch.testing.assert_close(changes[1], changes[0], rtol=5e-3, atol=0)


# ---- half models


def test_a_half_model_trains_and_answers_in_half():
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.GELU())
            self.head = torch.nn.Linear(16, 3)

        def forward(self, x, labels=None):
            logits = self.head(self.body(x))
            return logits if labels is None else (F.cross_entropy(logits, labels), logits)

    net = Net().half()
    x, labels = torch.randn(16, 4).half(), torch.arange(16) % 3
    optimizer = optim.AdamW(net.parameters(), lr=0.01, loss_scaling=128.0)
    training = poptorch.trainingModel(net, options(A=2, R=2), optimizer)
    losses = [training(x, labels)[0].mean().item() for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    assert net.head.weight.dtype == torch.float16
    logits = poptorch.inferenceModel(net)(x)
    assert logits.dtype == torch.float16


# ---- stochastic rounding


@pytest.mark.parametrize("value", [1.0001, -3.14159, 6e-6, -1.7e-7, 3e-5, 60001.0, 2.0**-14 * 1.0003, 1e-9])
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(value):
    generator = torch.Generator().manual_seed(0)
    values = torch.full((200_000,), value)
    rounded = stochastic_half(values, generator).double()
    exact = float(values[0])
    below, above = rounded.min().item(), rounded.max().item()
    assert below <= exact <= above
    assert len(rounded.unique()) == 2
    step = above - below
    nearest = torch.tensor(exact).half()
    assert nearest.item() in (below, above)
    assert abs(rounded.mean().item() - exact) < 5 * step / (200_000**0.5)


def test_stochastic_rounding_keeps_exact_and_special_values():
    values = torch.tensor([0.0, 1.5, -65504.0, float("inf"), -float("inf"), 2.0**-24])
    rounded = stochastic_half(values.repeat(1000), torch.Generator().manual_seed(0)).reshape(1000, -1)
    assert (rounded.float() == values).all()
    assert torch.isnan(stochastic_half(torch.tensor([float("nan")]), torch.Generator())).all()


def test_weights_move_on_average_where_nearest_rounding_would_stand_still():
    # A step of 2**-12 from 1.0 is a quarter of the spacing below 1.0: rounded to nearest it is lost.
    def mean_after(rounding):
        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.ones(20_000))

            def forward(self, x):
                return poptorch.identity_loss((self.w * x).float().sum(), "none")

        model = Wide().half()
        opts = options(randomSeed=0)
        opts.Precision.enableStochasticRounding(rounding)
        training = poptorch.trainingModel(model, opts, optim.SGD(model.parameters(), lr=2.0**-13))
        training(torch.ones(20_000, dtype=torch.float16))
        return model.w.detach().float().mean().item()

    assert mean_after(False) == 1.0
    assert mean_after(True) == pytest.approx(1 - 2.0**-13, abs=1e-5)
