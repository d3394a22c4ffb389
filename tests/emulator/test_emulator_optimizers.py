# SPDX-License-Identifier: Apache-2.0
import copy
import io

import pytest
import torch
from emulator_oracle import Regression, data, make, options, plain_step, regression_loss

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import optim

SETTINGS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
]


def train(model, optimizer, steps=4, **settings):
    training = poptorch.trainingModel(model, options(**settings), optimizer)
    D, A, R = (settings.get(name, 1) for name in "DAR")
    for step in range(steps):
        training(*data(3 * D * A * R, seed=step))
    return training


@pytest.mark.parametrize("family", [torch.optim, optim], ids=["torch", "poptorch"])
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_updates_equal_pytorchs(family, name, settings):
    model, twin = make()
    train(model, getattr(family, name)(model.parameters(), **settings), D=2, A=2, R=2)
    plain = getattr(torch.optim, name)(twin.parameters(), **settings)
    for step in range(4):
        plain_step(twin, regression_loss, data(24, seed=step), plain, 2, 2, 2)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def vector_after(optimizer_of, gradients, start=(1.0, 2.0)):
    """The weight vector after updates with these gradients."""

    class Vector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(start))

        def forward(self, g):
            return poptorch.identity_loss((self.w * g).sum(), "none")

    model = Vector()
    training = poptorch.trainingModel(model, options(), optimizer_of(model.parameters()))
    for gradient in gradients:
        training(torch.tensor(gradient))
    return model.w.detach()


def test_adamw_without_bias_correction_by_hand():
    lr, eps, decay, (b1, b2) = 0.1, 1e-3, 0.5, (0.9, 0.99)
    w, m, v = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2)
    for g in ([1.0, -2.0], [0.5, 4.0]):
        g = torch.tensor(g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * (m / (v.sqrt() + eps) + decay * w)
    found = vector_after(
        lambda p: optim.AdamW(p, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, bias_correction=False),
        [[1.0, -2.0], [0.5, 4.0]],
    )
    torch.testing.assert_close(found, w)


@pytest.mark.parametrize("limit", [None, 0.0, 0.5])
def test_lamb_scales_adams_direction_by_hand(limit):
    lr, eps, decay, (b1, b2) = 0.1, 1e-6, 0.01, (0.9, 0.99)
    w, m, v = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2)
    for step, g in enumerate(([1.0, -2.0], [0.5, 4.0]), start=1):
        g = torch.tensor(g)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        direction = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps) + decay * w
        norm = min(w.norm().item(), 65500.0 if limit is None else limit)
        ratio = norm / direction.norm().item() if norm > 0 else 1.0
        w = w - lr * ratio * direction
    found = vector_after(
        lambda p: optim.LAMB(p, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, max_weight_norm=limit),
        [[1.0, -2.0], [0.5, 4.0]],
    )
    torch.testing.assert_close(found, w)


def test_rmsprops_tensorflow_variant_by_hand():
    lr, eps, alpha, momentum = 0.1, 1e-2, 0.9, 0.5
    w, square, velocity = torch.tensor([1.0, 2.0]), torch.ones(2), torch.zeros(2)
    for g in ([1.0, -2.0], [0.5, 4.0]):
        g = torch.tensor(g)
        square = alpha * square + (1 - alpha) * g * g
        velocity = momentum * velocity + lr * g / (square + eps).sqrt()
        w = w - velocity
    found = vector_after(
        lambda p: optim.RMSprop(p, lr=lr, alpha=alpha, eps=eps, momentum=momentum, use_tf_variant=True),
        [[1.0, -2.0], [0.5, 4.0]],
    )
    torch.testing.assert_close(found, w)


def test_parameter_groups_have_their_own_settings():
    model, twin = make()

    def groups(of):
        return [
            {"params": of.first.parameters(), "lr": 0.5},
            {"params": of.second.parameters(), "weight_decay": 0.2},
        ]

    train(model, optim.AdamW(groups(model), lr=0.01, weight_decay=0.0))
    plain = torch.optim.AdamW(groups(twin), lr=0.01, weight_decay=0.0)
    for step in range(4):
        plain_step(twin, regression_loss, data(3, seed=step), plain)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_the_default_optimizer_is_sgd_with_a_hundredth():
    model, twin = make()
    poptorch.trainingModel(model)(*data(3))
    plain_step(twin, regression_loss, data(3), torch.optim.SGD(twin.parameters(), lr=0.01))
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


# ---- settings are copies


@pytest.mark.parametrize("family", [torch.optim, optim], ids=["torch", "poptorch"])
def test_a_learning_rate_counts_from_set_optimizer_on(family):
    change = {}
    model, _ = make()
    optimizer = family.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), optimizer)
    training.compile(*data(3))

    def step(name):
        training.load_state_dict(start)
        training(*data(3))
        change[name] = (model.second.bias - start["second.bias"]).detach()

    start = copy.deepcopy(model.state_dict())
    step("first")
    optimizer.param_groups[0]["lr"] = 0.2
    step("ignored")
    training.setOptimizer(optimizer)
    step("taken")
    assert torch.equal(change["ignored"], change["first"])
    torch.testing.assert_close(change["taken"], 2 * change["first"])


def test_a_learning_rate_changed_between_wrapping_and_compiling_is_not_seen():
    model, twin = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), optimizer)
    optimizer.param_groups[0]["lr"] = 99.0
    training(*data(3))
    plain_step(twin, regression_loss, data(3), torch.optim.SGD(twin.parameters(), lr=0.1))
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


def test_a_scheduler_works_through_set_optimizer_without_a_warning():
    model, _ = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    training(*data(3))
    scheduler.step()
    training.setOptimizer(optimizer)
    before = model.first.weight.detach().clone()
    training(*data(3))
    assert torch.equal(model.first.weight, before)


def test_a_constant_setting_cannot_change_after_compilation():
    model, _ = make()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.variable_attrs.markAsConstant("weight_decay")
    assert optimizer.variable_attrs.isConstant("weight_decay")
    training = poptorch.trainingModel(model, options(), optimizer)
    training(*data(3))
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(poptorch.Error, match="'weight_decay' of parameter group 0 was compiled as the constant 0.1"):
        training.setOptimizer(optimizer)


def test_the_learning_rate_is_always_variable_and_unknown_names_are_refused():
    model, _ = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.variable_attrs.markAsConstant("lr")
    assert not optimizer.variable_attrs.isConstant("lr")
    with pytest.raises(AssertionError, match="Unknown attribute 'momentun'.*'momentum'"):
        optimizer.variable_attrs.markAsConstant("momentun")


def test_another_kind_of_optimizer_needs_a_new_compilation():
    model, _ = make()
    training = train(model, optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"compiled as sgd.*destroy\(\)"):
        training.setOptimizer(optim.Adam(model.parameters()))


def test_another_gradient_accumulator_needs_a_new_compilation():
    model, _ = make()
    training = train(model, optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="already compiled"):
        training.setOptimizer(optim.SGD(model.parameters(), lr=0.1, accum_type=torch.float16))


def test_what_an_ipu_has_not_is_refused():
    model, _ = make()
    with pytest.raises(AssertionError, match="Unsupported optimizer type Adagrad"):
        poptorch.trainingModel(model, optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(ValueError, match="non-amsgrad"):
        poptorch.trainingModel(model, optimizer=torch.optim.Adam(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match="non-amsgrad"):
        optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(AssertionError, match=r"torch\.float16 or torch\.float32"):
        optim.Adam(model.parameters(), accum_type=torch.float64)


@pytest.mark.parametrize("family", [torch.optim, optim], ids=["torch", "poptorch"])
def test_attributes_that_appear_after_wrapping_are_reported_once(family, caplog):
    model, _ = make()
    optimizer = family.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["flavour"] = optimizer.colour = 1
    training = poptorch.trainingModel(model, options(), optimizer)
    training.setOptimizer(optimizer)
    assert "unexpected" not in caplog.text
    optimizer.param_groups[0]["loss_scaling"] = optimizer.lr = 2
    for _ in range(2):
        training.setOptimizer(optimizer)
    assert caplog.text.count("Ignoring unexpected group 0 attribute in SGD optimizer: ['loss_scaling']") == 1
    assert caplog.text.count("Ignoring unexpected optimizer attribute in SGD optimizer: ['lr']") == 1


def test_relaxed_checks_report_nothing_and_neither_does_a_scheduler(caplog):
    model, _ = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(relaxOptimizerAttributesChecks=True), optimizer)
    optimizer.colour = 1
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    training.setOptimizer(optimizer)
    assert "unexpected" not in caplog.text


def test_a_subclass_is_reported_because_its_step_never_runs(caplog):
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("runs on the host")

    model, _ = make()
    training = train(model, Mine(model.parameters(), lr=0.1), steps=1)
    training.setOptimizer(Mine(model.parameters(), lr=0.2))
    assert caplog.text.count("does not run Python optimizer code") == 1
    poptorch.trainingModel(make()[0], optimizer=optim.AdamW(model.parameters()))
    assert caplog.text.count("does not run Python optimizer code") == 1


def test_an_optimizer_made_before_the_layers_were_replaced_is_reported(caplog):
    model, _ = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model.first = torch.nn.Linear(3, 4)
    poptorch.trainingModel(model, options(), optimizer)(*data(3))
    assert "first.weight" in caplog.text
    assert "are not in the model" in caplog.text


# ---- saving and resuming


def test_there_is_no_device_state_before_compilation():
    model, _ = make()
    optimizer = optim.Adam(model.parameters())
    poptorch.trainingModel(model, options(), optimizer)
    state = optimizer.state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None


def test_the_state_is_named_by_slot_and_parameter():
    model, _ = make()
    optimizer = optim.AdamW(model.parameters(), lr=0.125)
    train(model, optimizer, steps=2)
    state = optimizer.state_dict()
    names = {f"{slot}___{name}" for slot in ("Accl1", "Accl2", "Step") for name, _ in model.named_parameters()}
    assert names <= set(state["ipu_state"])
    assert set(state["ipu_state"]) == names
    assert state["ipu_state"]["Step___first.weight"] == 2
    assert state["ipu_param"]["learningRate___specific___first.weight"] == 0.125
    assert state["ipu_param"]["lossScaling_FLOAT"] == 1


def test_a_snapshot_of_the_state_does_not_move_on_with_the_device():
    model, _ = make()
    optimizer = optim.AdamW(model.parameters(), lr=0.125)
    training = train(model, optimizer, steps=1)
    state = optimizer.state_dict()["ipu_state"]
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert optimizer.state_dict()["ipu_state"]["Accl1___first.weight"] is state["Accl1___first.weight"]
    training(*data(3))
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert not torch.equal(optimizer.state_dict()["ipu_state"]["Accl1___first.weight"], before["Accl1___first.weight"])


# name of a factor -> what it is for lr 0.5, weight decay 0.25, loss scaling 4, momentum 0.75, dampening 0.5
FACTORS = [
    ("SGD", {}, {"scaledLearningRate0": 0.5 / 4, "weightDecayScaleFactor0": 1 - 0.5 * 0.25}),
    (
        "SGD",
        {"momentum": 0.75, "dampening": 0.5},
        {
            "scaledLearningRate2": 0.5 / 4,
            "scaledMomentum2": 0.75,
            "dampeningScaleFactor2": 0.5 * 4 / 4,
            "weightDecay": 0.25,
        },
    ),
    (
        "SGD",
        {"momentum": 0.75, "dampening": 0.5, "use_combined_accum": True, "velocity_scaling": 8.0},
        {
            "scaledLearningRate1": 0.5 / 8,
            "scaledMomentum1": 0.75,
            "dampeningScaleFactor1": 0.5 * 8 / 4,
            "scaledWeightDecay1": 0.5 * 0.25 * 8,
        },
    ),
    (
        "AdamW",
        {"betas": (0.5, 0.75), "eps": 0.125},
        {"learningRate": 0.5, "weightDecay": 0.25, "adamBeta1": 0.5, "adamBeta2": 0.75, "adamEps": 0.125},
    ),
    ("LAMB", {"max_weight_norm": 3.0}, {"learningRate": 0.5, "weightDecay": 0.25, "maxWeightNorm": 3}),
    (
        "RMSprop",
        {"alpha": 0.5, "eps": 0.25, "momentum": 0.75},
        {
            "learningRate": 0.5,
            "weightDecay": 0.25,
            "adaptiveAlpha": 0.5,
            "adaptiveEps": 0.25,
            "adaptiveMomentum": 0.75,
        },
    ),
]


@pytest.mark.parametrize(("kind", "settings", "factors"), FACTORS)
def test_settings_are_streamed_as_the_factors_of_the_update(kind, settings, factors):
    model, _ = make()
    optimizer = getattr(optim, kind)(model.parameters(), lr=0.5, weight_decay=0.25, loss_scaling=4.0, **settings)
    poptorch.trainingModel(model, options(), optimizer).compile(*data(3))
    found = optimizer.state_dict()["ipu_param"]
    assert found.pop("lossScaling_FLOAT") == 4
    expected = {
        f"{name}___specific___{weight}": value
        for name, value in factors.items()
        for weight in dict(model.named_parameters())
    }
    assert {name: value.item() for name, value in found.items()} == expected


@pytest.mark.parametrize(("kind", "settings", "factors"), FACTORS)
def test_loaded_factors_drive_the_update_until_set_optimizer(kind, settings, factors):
    def of(model, lr, decay):
        return getattr(optim, kind)(model.parameters(), lr=lr, weight_decay=decay, loss_scaling=4.0, **settings)

    model, other = make()
    source, target = of(model, 0.5, 0.25), of(other, 0.0, 0.0)
    reference, training = (
        poptorch.trainingModel(each, options(), optimizer) for each, optimizer in ((model, source), (other, target))
    )
    reference.compile(*data(3))
    training.compile(*data(3))
    loaded = source.state_dict()["ipu_param"]
    target.load_state_dict({**target.state_dict(), "ipu_param": loaded})
    start = other.first.weight.detach().clone()
    for _ in range(2):
        reference(*data(3))
        training(*data(3))
    torch.testing.assert_close(other.first.weight.detach(), model.first.weight.detach())
    assert {name: value.item() for name, value in target.state_dict()["ipu_param"].items()} == {
        name: value.item() for name, value in loaded.items()
    }
    assert not torch.equal(other.first.weight, start)
    training.setOptimizer(target)
    frozen = other.first.weight.detach().clone()
    training(*data(3))
    assert torch.equal(other.first.weight, frozen)


def test_a_factor_of_another_optimizer_is_refused():
    model, _ = make()
    optimizer = optim.Adam(model.parameters())
    training = train(model, optimizer)
    optimizer.load_state_dict(
        {
            "ipu_state": {},
            "ipu_param": {"scaledLearningRate0___specific___first.weight": 1.0},
            **torch.optim.Adam(model.parameters()).state_dict(),
        }
    )
    with pytest.raises(poptorch.Error, match="'scaledLearningRate0___specific___first.weight', which this ADAM"):
        training(*data(3))


def test_what_is_loaded_is_what_is_read_back_until_the_next_run_merges_it():
    model, _ = make()
    optimizer = optim.Adam(model.parameters(), lr=0.25)
    training = train(model, optimizer)
    state = optimizer.state_dict()
    part = {"Accl1___first.bias": torch.full((4,), 7.0)}
    optimizer.load_state_dict({**state, "ipu_state": part, "ipu_param": {}})
    assert list(optimizer.state_dict()["ipu_state"]) == ["Accl1___first.bias"]
    training(*data(3))
    assert set(optimizer.state_dict()["ipu_state"]) == set(state["ipu_state"])


def test_an_offline_model_has_no_device_state():
    model, _ = make()
    optimizer = optim.Adam(model.parameters())
    opts = options()
    opts.useOfflineIpuTarget()
    poptorch.trainingModel(model, opts, optimizer).compile(*data(3))
    assert optimizer.state_dict()["ipu_state"] is None
    assert optimizer.state_dict()["ipu_param"] is None


def test_pytorchs_and_poptorchs_optimizer_of_one_kind_can_take_turns():
    model, twin = make()
    training = train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    training.setOptimizer(optim.SGD(model.parameters(), lr=0.2))
    training(*data(3, seed=1))
    plain_step(twin, regression_loss, data(3, seed=0), torch.optim.SGD(twin.parameters(), lr=0.1))
    plain_step(twin, regression_loss, data(3, seed=1), torch.optim.SGD(twin.parameters(), lr=0.2))
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


def test_set_optimizer_does_not_fetch_weights():
    model, _ = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    training = train(model, optimizer)
    training.copyWeightsToHost = lambda: pytest.fail("the weights were fetched")
    training.setOptimizer(optimizer)
    optimizer.state_dict()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "LAMB"])
@pytest.mark.parametrize("slot", ["first_order_momentum_accum_type", "second_order_momentum_accum_type"])
def test_accumulator_types_are_those_asked_for(kind, slot):
    model, _ = make()
    optimizer = getattr(optim, kind)(model.parameters(), **{slot: torch.float16})
    train(model, optimizer, steps=1)
    state = optimizer.state_dict()["ipu_state"]
    half, single = ("Accl1", "Accl2") if slot.startswith("first") else ("Accl2", "Accl1")
    assert state[f"{half}___first.weight"].dtype == torch.float16
    assert state[f"{single}___first.weight"].dtype == torch.float32


def test_an_fp16_gradient_accumulator_keeps_a_running_mean_in_the_executors_own_options():
    model, _ = make()
    opts = options(A=2)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Post)
    optimizer = optim.Adam(model.parameters(), accum_type=torch.float16)
    training = poptorch.trainingModel(model, opts, optimizer)
    training.compile(*data(4))
    strategy = "meanAccumulationAndReplicationReductionStrategy"
    assert getattr(training.options.Training, strategy) == poptorch.MeanReductionStrategy.Running
    assert getattr(opts.Training, strategy) == poptorch.MeanReductionStrategy.Post
    optimizer.accum_type = torch.float32
    with pytest.raises(ValueError, match="is already compiled"):
        training.setOptimizer(optimizer)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: optim.LAMB(p, lr=0.1),
        lambda p: optim.AdamW(p, lr=0.1, bias_correction=False),
        lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, use_tf_variant=True),
    ],
)
def test_optimizers_that_pytorch_has_not_can_step_on_the_host_too(make_optimizer):
    model, twin = make()
    train(model, make_optimizer(model.parameters()), steps=3)
    plain = make_optimizer(twin.parameters())
    for step in range(3):
        plain_step(twin, regression_loss, data(3, seed=step), plain)
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


def test_uploaded_settings_are_logged_once_and_mark_constants(caplog):
    model, _ = make()
    optimizer = optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25, accum_type=torch.float16)
    with caplog.at_level("DEBUG", logger="ipu_finetune.emulator"):
        training = train(model, optimizer, steps=1)
        training.setOptimizer(optimizer)
    line = next(line for line in caplog.text.splitlines() if "Updating group 0 optimizer with ADAMW" in line)
    assert "learningRate=0.5," in line
    assert "weightDecay=0.25," in line
    assert "eps=1e-08 (const)" in line
    assert "accumType=float16, firstOrderMomentumAccumType=float32" in line
    assert caplog.text.count("Updating group 0 optimizer") == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("detached", [False, True])
def test_a_resumed_run_goes_on_to_the_bit(moment, detached):
    class WithDropout(Regression):
        def forward(self, x, y):
            return torch.nn.functional.mse_loss(super().forward(torch.nn.functional.dropout(x, 0.3)), y)

    def begin():
        torch.manual_seed(0)
        model = WithDropout()
        optimizer = optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
        return model, optimizer, poptorch.trainingModel(model, options(2, 2, 2, randomSeed=11), optimizer)

    def run(training, steps):
        return [training(*data(16, seed=step)) for step in steps]

    model, optimizer, training = begin()
    run(training, range(3))
    if detached:
        training.detachFromDevice()
    stream = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "r": training.rng_state}, stream)
    stream.seek(0)
    expected = run(training, range(3, 6))

    saved = torch.load(stream, weights_only=True)
    again, optimizer2, training2 = begin()
    if moment == "before":
        again.load_state_dict(saved["m"])
        optimizer2.load_state_dict(saved["o"])
        training2.compile(*data(16))
    else:
        training2.compile(*data(16))
        training2.load_state_dict(saved["m"])
        optimizer2.load_state_dict(saved["o"])
    training2.rng_state = saved["r"]
    found = run(training2, range(3, 6))
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(again.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)


def test_without_its_state_a_resumed_run_would_differ():
    model, twin = make()
    training = train(model, optim.Adam(model.parameters(), lr=0.05))
    twin.load_state_dict(model.state_dict())
    fresh = poptorch.trainingModel(twin, options(), optim.Adam(twin.parameters(), lr=0.05))
    training(*data(3))
    fresh(*data(3))
    assert not torch.allclose(model.first.weight, twin.first.weight)


def test_missing_entries_keep_the_devices_values():
    model, _ = make()
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    training = train(model, optimizer)
    state = optimizer.state_dict()
    name = "Accl1___first.weight"
    before = {key: value.clone() for key, value in state["ipu_state"].items()}
    optimizer.load_state_dict({**state, "ipu_state": {name: torch.full((4, 3), 7.0)}})
    optimizer.param_groups[0]["lr"] = 0.0
    training.setOptimizer(optimizer)
    after = optimizer.state_dict()["ipu_state"]
    assert after[name].unique().tolist() == [7.0]
    for other in set(before) - {name}:
        assert torch.equal(after[other], before[other])


def test_only_ipu_states_are_loaded():
    model, _ = make()
    optimizer = optim.Adam(model.parameters())
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(RuntimeError, match="because it is empty"):
        optimizer.load_state_dict({})


def test_settings_of_a_pytorch_optimizer_can_be_taken_over():
    model, _ = make()
    plain = torch.optim.AdamW(model.parameters(), lr=0.5)
    ours = optim.AdamW(model.parameters(), lr=1e4, bias_correction=False)
    ours.load_state_dict({"ipu_state": None, "ipu_param": None, **plain.state_dict()})
    assert ours.param_groups[0]["lr"] == 0.5
    assert ours.param_groups[0]["bias_correction"] is False
    train(model, ours, steps=1)


def test_state_of_another_model_is_refused():
    model, _ = make()
    optimizer = optim.Adam(model.parameters())
    training = train(model, optimizer)
    state = optimizer.state_dict()
    for entry, text in [
        ({"Accl1___third.weight": torch.zeros(1)}, "no parameter 'third.weight'"),
        ({"Accl1___first.weight": torch.zeros(1)}, "has shape"),
        ({"Accl9___first.weight": torch.zeros(4, 3)}, "which adam does not have"),
    ]:
        optimizer.load_state_dict({**state, "ipu_state": entry})
        with pytest.raises(poptorch.Error, match=text):
            training(*data(3))


def test_a_recompiled_model_goes_on_from_its_optimizer_state():
    model, twin = make()
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options(), optimizer)
    plain = torch.optim.Adam(twin.parameters(), lr=0.05)
    for size in (3, 5, 4):
        training(*data(size))
        training.destroy()
        plain_step(twin, regression_loss, data(size), plain)
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


def test_an_optimizer_can_be_copied_with_its_state():
    model, _ = make()
    optimizer = optim.Adam(model.parameters(), lr=0.05, loss_scaling=8.0)
    train(model, optimizer)
    clone = copy.deepcopy(optimizer)
    assert clone.loss_scaling == 8.0
    state, cloned = optimizer.state_dict()["ipu_state"], clone.state_dict()["ipu_state"]
    assert torch.equal(state["Accl1___first.weight"], cloned["Accl1___first.weight"])
