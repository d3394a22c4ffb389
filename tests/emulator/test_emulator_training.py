# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_oracle import Regression, data, make, options, plain_step, regression_loss

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import ReductionType

F = torch.nn.functional


def same_weights(model, twin, **tolerance):
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values()):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ---- reduction


@pytest.mark.parametrize(("reduction", "mean"), [(ReductionType.Mean, True), (ReductionType.Sum, False)])
@pytest.mark.parametrize(("A", "R"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_gradients_are_reduced_over_accumulation_and_replicas_together(reduction, mean, A, R):
    model, twin = make()
    x, y = data(2 * A * R * 3)
    opts = options(2, A, R)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1), 2, A, R, mean=mean)
    same_weights(model, twin)


def test_mean_is_the_default_reduction():
    assert poptorch.Options().Training.accumulation_and_replication_reduction_type == ReductionType.Mean


@pytest.mark.parametrize("scale", [0.125, 1024.0])
def test_loss_scaling_changes_neither_weights_nor_the_returned_loss(scale):
    model, twin = make()
    x, y = data(12)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scale)
    _, loss = poptorch.trainingModel(model, options(A=2, R=2), optimizer)(x, y)
    losses = plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1), 1, 2, 2)
    torch.testing.assert_close(loss, losses[2:])
    same_weights(model, twin)


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_clipping_bounds_the_global_norm_after_the_reduction(clip):
    model, twin = make()
    x, y = data(12)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, max_grad_norm=clip, loss_scaling=64.0)
    poptorch.trainingModel(model, options(A=2, R=2), optimizer)(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=1.0), 1, 2, 2, clip=clip)
    same_weights(model, twin)


def test_pipelining_leaves_no_weight_staleness():
    class Pipelined(Regression):
        def __init__(self):
            super().__init__()
            poptorch.BeginBlock(self.first, "first", ipu_id=0)
            poptorch.BeginBlock(self.second, "second", ipu_id=1)

    torch.manual_seed(0)
    model = Pipelined()
    _, twin = make()
    twin.load_state_dict(model.state_dict())
    x, y = data(2 * 3 * 2)
    poptorch.trainingModel(model, options(D=2, A=3), torch.optim.SGD(model.parameters(), lr=0.3))(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.3), 2, 3, 1)
    same_weights(model, twin)


def test_training_runs_under_the_callers_no_grad():
    model, twin = make()
    x, y = data(4)
    with torch.no_grad():
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1))
    same_weights(model, twin)


# ---- which tensor is the loss


def train_once(forward, width=2, lr=1.0):
    """Train a single weight vector once and return its change: minus the gradient."""

    class Single(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(width))

        def forward(self, x):
            return forward(self.w, x)

    model = Single()
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=lr))(torch.full((width,), 3.0))
    return (model.w - 1).detach()


@pytest.mark.parametrize(
    ("reduction", "expected"), [("none", [-3.0, -3.0]), ("sum", [-3.0, -3.0]), ("mean", [-1.5, -1.5])]
)
def test_identity_loss_reduces_and_back_propagates_ones(reduction, expected):
    assert train_once(lambda w, x: poptorch.identity_loss(w * x, reduction)).tolist() == expected


def test_an_unknown_reduction_is_refused():
    with pytest.raises(AssertionError, match="Unsupported reduction type"):
        poptorch.identity_loss(torch.ones(1), "max")


def test_a_loss_need_not_be_returned():
    def forward(w, x):
        F.l1_loss(w * x, torch.zeros_like(x), reduction="sum")
        return w.detach()

    assert train_once(forward).tolist() == [-3.0, -3.0]


def test_a_returned_multiple_of_the_loss_does_not_change_the_gradient():
    assert train_once(lambda w, x: 10 * F.l1_loss(w * x, torch.zeros_like(x), reduction="sum")).tolist() == [-3, -3]


def test_a_loss_that_feeds_a_marked_one_is_not_final():
    def forward(w, x):
        inner = F.l1_loss(w * x, torch.zeros_like(x), reduction="sum")
        return poptorch.identity_loss(2 * inner, "none")

    assert train_once(forward).tolist() == [-6.0, -6.0]


def test_two_losses_joined_in_a_third_are_one():
    def forward(w, x):
        one = F.l1_loss(w[:1] * x[:1], torch.zeros(1))
        other = F.l1_loss(w[1:] * x[1:], torch.zeros(1))
        return poptorch.identity_loss((one + other) / 2, "none")

    assert train_once(forward).tolist() == [-1.5, -1.5]


def test_independent_losses_are_refused():
    def forward(w, x):
        return F.l1_loss(w, x), F.mse_loss(w, x)

    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        train_once(forward)


@pytest.mark.parametrize("forward", [lambda w, x: ((w - x) ** 2).mean(), lambda w, x: w * x])
def test_a_model_without_a_loss_function_is_refused(forward):
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        train_once(forward)


def test_a_loss_module_counts_as_a_loss():
    loss = torch.nn.CrossEntropyLoss()
    change = train_once(lambda w, x: loss(w.unsqueeze(0), torch.tensor([0])))
    assert change.tolist() == [0.5, -0.5]


def test_parameters_are_reached_through_closures():
    model, twin = make()
    x, y = data(4)

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, y):
            return F.mse_loss(model(x), y)  # not self.inner

    around = Around()
    poptorch.trainingModel(around, options(), torch.optim.SGD(around.parameters(), lr=0.1))(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1))
    same_weights(model, twin)


# ---- what is left alone


def test_frozen_and_unused_parameters_are_untouched_even_with_weight_decay():
    model, twin = make()
    model.first.weight.requires_grad_(False)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    before = model.first.weight.clone()
    training = poptorch.trainingModel(
        model, options(), poptorch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    )
    training(*data(4))
    assert torch.equal(model.first.weight, before)
    assert torch.equal(model.unused, torch.ones(2))
    assert not torch.equal(model.first.bias, twin.first.bias)


def test_parameters_outside_of_the_optimizer_are_not_updated():
    model, twin = make()
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.second.parameters(), lr=0.1))(*data(4))
    assert torch.equal(model.first.weight, twin.first.weight)
    assert not torch.equal(model.second.weight, twin.second.weight)


def test_the_hosts_gradients_are_neither_used_nor_changed():
    model, twin = make()
    x, y = data(4)
    model.first.weight.grad = torch.full_like(model.first.weight, 7.0)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1))
    same_weights(model, twin)
    assert model.first.weight.grad.unique().tolist() == [7.0]
    assert model.second.weight.grad is None


def test_attributes_changed_in_forward_are_frozen_at_the_traced_value():
    class Counting(Regression):
        calls = 0

        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, x, y):
            self.factor = self.factor * 2
            return F.mse_loss(super().forward(x) * self.factor, y), x.sum() * 0 + self.factor

    model = Counting()
    training = poptorch.trainingModel(model, options(A=2))
    assert training(*data(4))[1] == 2
    assert training(*data(4))[1] == 2
    assert model.factor == 1.0


def test_a_failing_forward_leaves_the_model_usable():
    class Fails(Regression):
        def forward(self, x, y):
            if fail:
                raise ValueError("stop")
            return F.mse_loss(super().forward(x), y)

    fail = True
    training = poptorch.trainingModel(Fails(), options())
    with pytest.raises(ValueError, match="stop"):
        training(*data(4))
    assert not poptorch.isRunningOnIpu()
    fail = False
    first = training(*data(4))
    assert training(*data(4)) < first


def test_code_in_the_model_knows_that_it_runs_on_the_ipu():
    seen = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            seen.append(poptorch.isRunningOnIpu())
            return x

    poptorch.inferenceModel(Asks())(torch.ones(1))
    assert seen
    assert all(seen)
    assert not poptorch.isRunningOnIpu()


def test_inference_builds_no_graph():
    class Asks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            out = self.w * x
            assert not out.requires_grad
            return out

    assert poptorch.inferenceModel(Asks())(torch.ones(1)).item() == 1


def test_floating_point_exceptions_stop_the_run_when_asked_for():
    class Divides(torch.nn.Module):
        def forward(self, x):
            return 1 / x

    opts = options()
    assert poptorch.inferenceModel(Divides(), opts)(torch.zeros(1)).item() == float("inf")
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        poptorch.inferenceModel(Divides(), opts)(torch.zeros(1))


# ---- random numbers


class Drops(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


def test_replicas_draw_different_numbers_and_calls_go_on():
    opts = options(R=2, randomSeed=42)
    model = poptorch.inferenceModel(Drops(), opts)
    one, other = model(torch.ones(2, 400)), model(torch.ones(2, 400))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


def test_a_replica_draws_from_the_seed_plus_its_index():
    model = poptorch.inferenceModel(Drops(), options(R=2, randomSeed=42))
    drawn = model(torch.ones(2, 50))
    for replica in range(2):
        torch.manual_seed(42 + replica)
        assert torch.equal(drawn[replica], F.dropout(torch.ones(50), 0.5))


def test_the_same_seed_gives_the_same_numbers():
    drawn = [poptorch.inferenceModel(Drops(), options(R=2, randomSeed=3))(torch.ones(2, 400)) for _ in range(2)]
    assert torch.equal(*drawn)


def test_random_seed_seeds_the_host_as_well():
    options(randomSeed=7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_the_hosts_random_state_is_untouched_by_a_call():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    poptorch.inferenceModel(Drops())(torch.ones(1, 10))
    assert torch.equal(torch.rand(3), expected)


def test_rng_state_restores_every_replica_to_the_bit():
    model = poptorch.inferenceModel(Drops(), options(R=2, randomSeed=1))
    model(torch.ones(2, 30))
    state = model.rng_state
    expected = model(torch.ones(2, 30))
    other = poptorch.inferenceModel(Drops(), options(R=2, randomSeed=99))
    other.compile(torch.ones(2, 30))
    other.rng_state = state
    assert torch.equal(other(torch.ones(2, 30)), expected)
    assert state[0] == 1
    assert all(isinstance(word, int) for word in state)


def test_rng_state_of_another_replication_factor_is_refused():
    one = poptorch.inferenceModel(Drops(), options(R=2))
    one.compile(torch.ones(2, 3))
    other = poptorch.inferenceModel(Drops(), options(R=1))
    other.compile(torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match="replication factor"):
        other.rng_state = one.rng_state


def test_compiling_draws_nothing():
    one = poptorch.inferenceModel(Drops(), options(randomSeed=1))
    other = poptorch.inferenceModel(Drops(), options(randomSeed=1))
    one.compile(torch.ones(1, 30))
    assert torch.equal(one(torch.ones(1, 30)), other(torch.ones(1, 30)))
