# SPDX-License-Identifier: Apache-2.0
"""The rules that every engine keeps, against a hand-written PyTorch loop."""

import numpy as np
import pytest
import torch

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.training.engine import check_optimizer_covers, parameter_groups
from ipu_finetune.training.order import host_batches, loss_weights, read_batch


def squared_error(outputs, batch):
    return (outputs["y"] - batch["target"]) ** 2


@pytest.fixture
def columns():
    generator = np.random.default_rng(0)
    return {
        "x": generator.normal(size=(11, 3)).astype(np.float32),
        "target": generator.normal(size=11).astype(np.float32),
    }


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.plain_state().items()}


def test_u28_a_short_last_batch_weighs_every_example_the_same(build_engine, toy_model, columns):
    plan = BatchPlan(rows=11, micro_batch_size=4, drop_last=False)
    batches = list(host_batches(plan, 5, 0))
    oracle = toy_model()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for rows in batches:
        real = rows[rows >= 0]
        x, target = torch.from_numpy(columns["x"][real]), torch.from_numpy(columns["target"][real])
        optimizer.zero_grad()
        ((oracle(x)["y"] - target) ** 2).mean().backward()
        optimizer.step()
    engine = build_engine(toy_model(), plan, squared_error, ["target"], ["y"])
    engine.compile(*read_batch(columns, batches[0], plan))
    for rows in batches:
        engine.step(*read_batch(columns, rows, plan), learning_rate=0.1)
    for name, tensor in weights_of(engine).items():
        assert torch.allclose(tensor, oracle.state_dict()[name], atol=1e-6), name
    engine.close()


@pytest.mark.parametrize(("micro", "accumulation", "replicas"), [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)])
def test_any_split_of_the_global_batch_is_the_same_update(
    build_engine, toy_model, columns, micro, accumulation, replicas
):
    oracle = toy_model()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    x, target = torch.from_numpy(columns["x"][:8]), torch.from_numpy(columns["target"][:8])
    loss = ((oracle(x)["y"] - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    plan = BatchPlan(rows=8, micro_batch_size=micro, gradient_accumulation=accumulation, replicas=replicas)
    engine = build_engine(toy_model(), plan, squared_error, ["target"], ["y"])
    batch = read_batch(columns, np.arange(8), plan)
    engine.compile(*batch)
    result = engine.step(*batch, learning_rate=0.1)
    assert result.losses == [pytest.approx(loss.item(), abs=1e-6)]
    for name, tensor in weights_of(engine).items():
        assert torch.allclose(tensor, oracle.state_dict()[name], atol=1e-6), name
    engine.close()


def test_u07_any_split_of_unequal_micro_batches_gives_the_token_mean(build_engine, toy_model):
    # 10 valid tokens over 2 rows: 1 in the first, 9 in the second.
    valid = torch.tensor([[True] + [False] * 8, [True] * 9])
    values = torch.linspace(-1.0, 1.0, 54).reshape(2, 9, 3)
    target = torch.linspace(0.0, 2.0, 18).reshape(2, 9)
    oracle = toy_model()
    ((oracle(values)["y"] - target) ** 2)[valid].mean().backward()
    gradient = torch.cat([oracle.linear.weight.grad.flatten(), oracle.linear.bias.grad])
    for micro, accumulation, replicas in [(2, 1, 1), (1, 2, 1), (1, 1, 2)]:
        plan = BatchPlan(rows=2, micro_batch_size=micro, gradient_accumulation=accumulation, replicas=replicas)
        model = toy_model()
        before = torch.cat([model.linear.weight.detach().flatten(), model.linear.bias.detach()]).clone()
        engine = build_engine(model, plan, squared_error, ["target"], ["y"])
        batch = ({"x": values, "target": target}, loss_weights(valid, plan))
        engine.compile(*batch)
        engine.step(*batch, learning_rate=1.0)
        after = torch.cat([tensor.flatten() for tensor in weights_of(engine).values()])
        assert torch.allclose(before - after, gradient, atol=1e-6), (micro, accumulation, replicas)
        engine.close()


def test_several_updates_in_one_host_call_are_made_one_after_the_other(build_engine, toy_model, columns):
    oracle = toy_model()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    losses = []
    for first in (0, 4):
        x, target = (torch.from_numpy(columns[name][first : first + 4]) for name in ("x", "target"))
        optimizer.zero_grad()
        loss = ((oracle(x)["y"] - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plan = BatchPlan(rows=8, micro_batch_size=2, gradient_accumulation=2, device_iterations=2)
    engine = build_engine(toy_model(), plan, squared_error, ["target"], ["y"])
    batch = read_batch(columns, np.arange(8), plan)
    engine.compile(*batch)
    result = engine.step(*batch, learning_rate=0.1)
    assert result.losses == pytest.approx(losses, abs=1e-6)
    assert result.skipped == [False, False]
    for name, tensor in weights_of(engine).items():
        assert torch.allclose(tensor, oracle.state_dict()[name], atol=1e-6), name
    engine.close()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_an_engine_continues_another_ones_state_to_the_bit(build_engine, toy_model, columns, optimizer):
    plan = BatchPlan(rows=8, micro_batch_size=2, gradient_accumulation=2)
    batches = [read_batch(columns, np.arange(first, first + 4), plan) for first in (0, 4, 2, 6)]

    def engine_from(model):
        return build_engine(model, plan, squared_error, ["target"], ["y"], optimizer=optimizer, weight_decay=0.01)

    unbroken = engine_from(toy_model())
    unbroken.compile(*batches[0])
    for batch in batches:
        unbroken.step(*batch, learning_rate=0.05)
    first = engine_from(toy_model())
    first.compile(*batches[0])
    for batch in batches[:2]:
        first.step(*batch, learning_rate=0.05)
    weights, state = weights_of(first), first.training_state()
    first.close()
    model = toy_model()
    model.load_state_dict(weights)
    second = engine_from(model)
    second.load_training_state(state)
    second.compile(*batches[0])
    for batch in batches[2:]:
        second.step(*batch, learning_rate=0.05)
    expected, got = weights_of(unbroken), weights_of(second)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    unbroken.close()
    second.close()


def test_u05_an_optimizer_of_layers_that_were_rebuilt_is_refused(toy_model):
    model = toy_model()
    groups = parameter_groups(model, 0.0)
    check_optimizer_covers(model, groups)
    model.linear = torch.nn.Linear(3, 1)
    with pytest.raises(IpuFinetuneError, match=r"2 would never train \(linear.bias, linear.weight\)"):
        check_optimizer_covers(model, groups)


def test_biases_and_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    decayed, other = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight)]
    assert {id(p) for p in other["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}
    assert (decayed["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
