# SPDX-License-Identifier: Apache-2.0
import copy
import io

import pytest
import torch
from emulator_oracle import Regression, data, make, options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch._impl import (
    PoptorchBuffer,
    PoptorchParameter,
    rewrapModelIfNecessary,
    unwrapModelIfNecessary,
)


def training_of(model, **settings):
    return poptorch.trainingModel(model, options(**settings), torch.optim.SGD(model.parameters(), lr=0.5))


@pytest.fixture
def trained():
    """A model, its executor, and the weights before training."""
    model, twin = make()
    training = training_of(model)
    training(*data(4))
    return model, training, twin


def count_copies(training):
    calls = []
    real = training.copyWeightsToHost
    training.copyWeightsToHost = lambda: (calls.append(1), real())[1]
    return calls


# ---- wrapping


def test_a_training_model_changes_the_classes_of_model_and_parameters():
    model, _ = make()
    model.register_buffer("count", torch.zeros(1))
    training = training_of(model)
    assert type(model).__name__ == "PoptorchRegression"
    assert type(model).__bases__ == (Regression,)
    assert isinstance(model.first.weight, PoptorchParameter)
    assert isinstance(model.first.weight, torch.nn.Parameter)
    assert isinstance(model.count, PoptorchBuffer)
    assert training.model is model
    training.destroy()
    assert type(model) is Regression
    assert type(model.first.weight) is torch.nn.Parameter
    assert type(model.count) is torch.Tensor


def test_an_inference_model_changes_no_class():
    model, _ = make()
    poptorch.inferenceModel(model)(torch.zeros(1, 3))
    assert type(model) is Regression
    assert type(model.first.weight) is torch.nn.Parameter


def test_a_model_is_wrapped_for_training_once():
    model, _ = make()
    training = training_of(model)
    with pytest.raises(RuntimeError, match=r"destroy\(\)"):
        training_of(model)
    training.destroy()
    training_of(model)


def test_the_users_parameter_objects_and_their_memory_stay():
    model, _ = make()
    weight = model.first.weight
    address = weight.data_ptr()
    training = training_of(model)
    training(*data(4))
    training.copyWeightsToHost()
    assert model.first.weight is weight
    assert weight.data_ptr() == address


# ---- fetching on first sight

LOOKS = {
    "attribute": lambda model: model.first.weight.data,
    "operation": lambda model: torch.sum(model.first.weight),
    "list": lambda model: torch.stack([model.first.bias, model.first.bias]),
    "print": lambda model: repr(model.first.weight),
    "forward": lambda model: model(torch.zeros(1, 3)),
    "submodule": lambda model: model.first(torch.zeros(1, 3)),
    "state_dict": lambda model: model.state_dict(),
    "inner state_dict": lambda model: model.first.state_dict(),
    "parameters": lambda model: model._parameters,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "deepcopy": lambda model: copy.deepcopy(model),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_looking_at_a_weight_fetches_it_exactly_once(look):
    model, _ = make()
    training = training_of(model)
    calls = count_copies(training)
    for _ in range(3):
        training(*data(4))
    assert calls == []
    look(model)
    look(model)
    assert calls == [1]
    training(*data(4))
    look(model)
    assert calls == [1, 1]


def test_fetched_weights_are_the_trained_ones(trained):
    model, _, twin = trained
    assert not torch.equal(model.first.weight, twin.first.weight)
    x, y = data(4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    torch.nn.functional.mse_loss(twin(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(model.first.weight.detach(), twin.first.weight.detach())


@pytest.mark.parametrize("leave", ["detachFromDevice", "destroy", "copyWeightsToHost"])
def test_leaving_the_device_brings_the_weights_home(leave):
    model, twin = make()
    weight = model.first.weight
    training = training_of(model)
    training(*data(4))
    calls = count_copies(training)
    getattr(training, leave)()
    assert len(calls) <= 1
    assert not torch.equal(weight.detach(), twin.first.weight)


def test_weights_are_fetched_after_the_executor_is_forgotten():
    model, twin = make()
    training_of(model)(*data(4))
    assert not torch.equal(model.first.weight, twin.first.weight)


# ---- editing on the host


def test_host_edits_count_only_after_copy_weights_to_device():
    model, _ = make()
    inference = poptorch.inferenceModel(model)
    x = torch.randn(2, 3)
    before = inference(x)
    with torch.no_grad():
        model.second.bias += 1
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(x), before + 1)


def test_a_training_model_overwrites_host_edits(trained):
    model, training, _ = trained
    bias = model.second.bias.detach().clone()
    with torch.no_grad():
        model.second.bias += 100
    training(*data(4))
    assert (model.second.bias - bias).abs().max() < 10


def test_load_state_dict_on_the_executor_reaches_the_device():
    model, _ = make()
    other, _ = make(seed=5)
    inference = poptorch.inferenceModel(model)
    x = torch.randn(2, 3)
    inference(x)
    inference.load_state_dict(other.state_dict())
    torch.testing.assert_close(inference(x), other(x).detach())


# ---- sharing


def test_an_inference_model_of_the_same_module_follows_the_training(trained):
    model, training, _ = trained
    inference = poptorch.inferenceModel(model)
    x, y = data(4)
    one = inference(x)
    assert torch.equal(one, model(x).detach())
    training(x, y)
    two = inference(x)
    assert not torch.equal(one, two)
    torch.testing.assert_close(two, model(x).detach())
    calls = count_copies(training)
    inference(x)
    assert calls == []


def test_an_inference_model_around_a_trained_part_follows_it(trained):
    model, training, _ = trained
    around = torch.nn.Sequential(model)
    inference = poptorch.inferenceModel(around)
    x, y = data(4)
    inference(x)
    training(x, y)
    torch.testing.assert_close(inference(x), model(x).detach())


def test_tied_parameters_stay_tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids, labels):
            return torch.nn.functional.cross_entropy(self.head(self.embedding(ids)), labels)

    model = Tied()
    twin = copy.deepcopy(model)
    ids, labels = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    training = training_of(model)
    training(ids, labels)
    assert model.head.weight is model.embedding.weight
    loss = twin(ids, labels)
    loss.backward()
    expected = twin.head.weight - 0.5 * twin.head.weight.grad
    torch.testing.assert_close(model.head.weight.detach(), expected.detach())


# ---- buffers


class Accumulates(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x):
        self.total += self.bias.detach()
        return torch.nn.functional.l1_loss(self.bias * x, torch.zeros_like(x))


@pytest.mark.parametrize(("D", "A"), [(1, 1), (3, 1), (1, 3), (3, 5)])
def test_a_buffer_is_updated_in_every_micro_batch_and_sees_the_weight_before_the_update(D, A):
    model = Accumulates()
    training = poptorch.trainingModel(model, options(D=D, A=A), torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(D * A))
    # The gradient of |b * 1| is 1, so b is 1.0, 0.9, 0.8 during the updates.
    expected = sum((1 - 0.1 * d) * A for d in range(D))
    torch.testing.assert_close(model.total.item(), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_state_outlives_the_inference_mode_of_whoever_compiled_or_called(compiled, called):
    # transformers' pipelines compile in inference mode; generate() calls later without it.
    user = Accumulates()
    model = poptorch.inferenceModel(user)
    with torch.inference_mode(compiled):
        model.compile(torch.ones(1))
    for _ in range(2):
        with torch.inference_mode(called):
            model(torch.ones(1))
    model.copyWeightsToHost()
    assert user.total.item() == 2


def test_compiling_changes_no_buffer():
    model = Accumulates()
    training = training_of(model)
    training.compile(torch.ones(1))
    training.copyWeightsToHost()
    assert model.total.item() == 0


def test_batch_norm_statistics_are_device_state():
    norm = torch.nn.BatchNorm1d(2)
    twin = copy.deepcopy(norm)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return torch.nn.functional.mse_loss(self.norm(x), x)

    net = Net()
    x = torch.randn(8, 2)
    poptorch.trainingModel(net, options(A=2), torch.optim.SGD(net.parameters(), lr=0.0))(x)
    twin(x[:4])
    twin(x[4:])
    torch.testing.assert_close(net.norm.running_mean, twin.running_mean)
    assert net.norm.num_batches_tracked == 2


def test_batch_norm_statistics_are_those_of_the_first_replica_and_need_no_decision():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2)

        def forward(self, x):
            return torch.nn.functional.mse_loss(self.norm(x), x)

    net = Net()
    first, second = copy.deepcopy(net.norm), copy.deepcopy(net.norm)
    x = torch.randn(16, 2)
    training = poptorch.trainingModel(net, options(R=2, A=2), torch.optim.SGD(net.parameters(), lr=0.0))
    training(x)
    for start in (0, 8):
        first(x[start : start + 4])
        second(x[start + 4 : start + 8])
    torch.testing.assert_close(net.norm.running_mean, first.running_mean)
    assert not torch.allclose(net.norm.running_mean, second.running_mean)
    assert net.norm.num_batches_tracked == 2


def test_changed_buffers_with_replicas_need_a_decision():
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
        poptorch.trainingModel(Accumulates(), options(R=2))(torch.ones(2))


def test_without_broadcasting_each_replica_has_its_own_buffer_and_the_first_is_read():
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += x
            return self.seen * 1

    model = Sums()
    inference = poptorch.inferenceModel(model, options(R=2, broadcastBuffers=False))
    assert inference(torch.tensor([1.0, 10.0])).tolist() == [1, 10]
    assert inference(torch.tensor([1.0, 10.0])).tolist() == [2, 20]
    assert model.seen.item() == 0  # inference leaves the host's buffer alone
    inference.copyWeightsToHost()
    assert model.seen.item() == 2


def test_replacing_a_buffer_in_forward_is_refused():
    class Replaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(1))

        def forward(self, x):
            self.state = self.state + x
            return self.state

    model = Replaces()
    with pytest.raises(poptorch.Error, match=r"Buffer state is reassigned.*copy_"):
        poptorch.inferenceModel(model)(torch.ones(1))
    assert model.state.item() == 0


def test_deleting_a_buffer_in_forward_is_refused():
    class Deletes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(1))

        def forward(self, x):
            del self.state
            return x

    with pytest.raises(poptorch.Error, match="Buffer state is removed"):
        poptorch.inferenceModel(Deletes())(torch.ones(1))


def test_named_buffers_are_copied_alone():
    class Offset(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.zeros(1))
            self.register_buffer("two", torch.zeros(1))

        def forward(self, x):
            return x + self.one + self.two

    model = Offset()
    inference = poptorch.inferenceModel(model, options(updatableNamedBuffers=["one"]))
    assert inference(torch.zeros(1)).item() == 0
    inference.one.copy_(torch.tensor([1.0]))
    model.two.fill_(10)
    inference.copyNamedBuffersToDevice()
    assert inference(torch.zeros(1)).item() == 1


def test_copying_named_buffers_needs_names_that_exist():
    model, _ = make()
    inference = poptorch.inferenceModel(model)
    inference(torch.zeros(1, 3))
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable"):
        inference.copyNamedBuffersToDevice()
    with pytest.raises(poptorch.Error, match="'gone'"):
        poptorch.inferenceModel(model, options(updatableNamedBuffers=["gone"]))(torch.zeros(1, 3))


# ---- saving and copying


def test_the_state_dict_holds_plain_tensors(trained):
    model, training, _ = trained
    for state in (model.state_dict(), training.state_dict()):
        assert {type(value) for value in state.values()} == {torch.Tensor}
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert torch.equal(loaded["first.weight"], model.first.weight)


def test_a_pickled_model_has_its_own_class_and_fresh_weights(trained):
    model, _, _ = trained
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert type(loaded) is Regression
    assert type(loaded.first.weight) is torch.nn.Parameter
    assert torch.equal(loaded.first.weight, model.first.weight)


def test_copies_keep_the_wrapper_and_live_on_their_own(trained):
    model, training, _ = trained
    clone = copy.deepcopy(model)
    assert type(clone).__name__ == "PoptorchRegression"
    frozen = clone.first.weight.detach().clone()
    training(*data(4))
    assert torch.equal(clone.first.weight, frozen)
    assert not torch.equal(model.first.weight, frozen)


def test_unwrap_and_rewrap_keep_the_training_going(trained):
    model, training, _ = trained
    unwrapModelIfNecessary(model)
    assert type(model) is Regression
    assert type(model.first.weight) is torch.nn.Parameter
    before = model.first.weight.detach().clone()
    rewrapModelIfNecessary(model)
    assert isinstance(model.first.weight, PoptorchParameter)
    training(*data(4))
    assert not torch.equal(model.first.weight, before)


# ---- the module changes after compilation


def test_a_layer_rebuilt_after_compilation_gets_the_trained_values():
    # optimum-graphcore takes its layout apart and rebuilds it whenever it saves a checkpoint.
    model, _ = make()
    other, _ = make()
    training, reference = training_of(model), training_of(other)
    for step in range(3):
        training(*data(4, seed=step))
        reference(*data(4, seed=step))
        training.copyWeightsToHost()
        rebuilt = torch.nn.Linear(3, 4)
        rebuilt.load_state_dict(model.first.state_dict())
        model.first = rebuilt
    training.copyWeightsToHost()
    torch.testing.assert_close(model.first.weight.detach(), other.first.weight.detach())
    torch.testing.assert_close(model.second.weight.detach(), other.second.weight.detach())


def test_switching_to_eval_after_compilation_does_not_change_the_compiled_training():
    class WithDropout(Regression):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.9)

        def forward(self, x, y):
            return torch.nn.functional.mse_loss(super().forward(self.drop(x)), y)

    model = WithDropout()
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.0))
    losses = {training(*data(4)).item()}
    model.eval()
    losses |= {training(*data(4)).item() for _ in range(5)}
    assert len(losses) > 1
    assert not model.training


def test_a_hook_removed_after_compilation_still_runs():
    model, _ = make()
    handle = model.second.register_forward_hook(lambda module, inputs, output: output + 100)
    inference = poptorch.inferenceModel(model)
    before = inference(torch.zeros(1, 3))
    handle.remove()
    assert torch.equal(inference(torch.zeros(1, 3)), before)
    assert model(torch.zeros(1, 3)).max() < 50


def test_weights_without_a_place_are_reported_not_lost(caplog):
    model, twin = make()
    training = training_of(model)
    training(*data(4))
    old = model.first
    model.first = torch.nn.Linear(3, 9)
    training.copyWeightsToHost()
    assert "first.weight" in caplog.text
    assert not torch.equal(old.weight, twin.first.weight)


# ---- attaching


def test_attach_and_detach_in_turn():
    model, _ = make()
    training = training_of(model)
    x, y = data(4)
    assert not training.isCompiled()
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        training.detachFromDevice()
    training.compile(x, y)
    assert training.isCompiled()
    assert training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()
    training.detachFromDevice()
    assert not training.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        training.detachFromDevice()
    training(x, y)
    assert training.isAttachedToDevice()


def test_detaching_between_calls_changes_nothing():
    model, twin = make()
    adam = poptorch.optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(), adam)
    reference = poptorch.trainingModel(twin, options(), poptorch.optim.Adam(twin.parameters(), lr=0.1))
    for step in range(3):
        training(*data(4, seed=step))
        training.detachFromDevice()
        reference(*data(4, seed=step))
    assert torch.equal(model.first.weight, twin.first.weight)


def test_attaching_uploads_what_the_host_holds():
    model, _ = make()
    other, _ = make(seed=9)
    inference = poptorch.inferenceModel(model)
    x = torch.randn(2, 3)
    inference(x)
    inference.detachFromDevice()
    model.load_state_dict(other.state_dict())
    inference.attachToDevice()
    torch.testing.assert_close(inference(x), other(x).detach())


def test_compiling_does_not_train():
    model, twin = make()
    training = training_of(model)
    training.compile(*data(4))
    training.copyWeightsToHost()
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(ours, theirs)
    assert training.emulation.updates == 0


def test_a_destroyed_model_compiles_again_for_another_size():
    model, _ = make()
    training = training_of(model)
    training(*data(4))
    training.destroy()
    assert not training.isCompiled()
    with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
        training.copyWeightsToHost()
    training(*data(6))
    assert training.isCompiled()
    assert isinstance(model.first.weight, PoptorchParameter)
