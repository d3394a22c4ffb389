# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device.replica_weights import ReplicaGrouping, stripped, widened

Kind = poptorch.CommGroupType
ONE = poptorch.VariableRetrievalMode.OnePerGroup
ALL = poptorch.VariableRetrievalMode.AllReplicas


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [
        (Kind.All, 0, [0, 0, 0, 0, 0, 0]),
        (Kind.Consecutive, 2, [0, 0, 1, 1, 2, 2]),
        (Kind.Orthogonal, 2, [0, 1, 2, 0, 1, 2]),
        (Kind.Consecutive, 3, [0, 0, 0, 1, 1, 1]),
        (Kind.Orthogonal, 3, [0, 1, 0, 1, 0, 1]),
        (Kind.NoGrouping, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_group_of_a_replica(kind, size, groups):
    grouping = ReplicaGrouping(kind, size)
    assert [grouping.index(replica, 6) for replica in range(6)] == groups
    assert grouping.groups(6) == max(groups) + 1


def test_a_parameter_must_have_one_value_per_group():
    grouping = ReplicaGrouping(Kind.Consecutive, 2)
    grouping.check("w", (2, 5), 4)
    with pytest.raises(poptorch.Error, match="must be the number of groups, which is 2"):
        grouping.check("w", (4, 5), 4)
    with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica weight tensor values"):
        grouping.check("w", (), 4)
    with pytest.raises(poptorch.Error, match="groups of 3 replicas .* do not divide the replication factor 4"):
        ReplicaGrouping(Kind.Orthogonal, 3).check("w", (2,), 4)
    with pytest.raises(poptorch.Error, match="AllReplicas returns 4 values"):
        ReplicaGrouping(Kind.Consecutive, 2, ALL).check("w", (2,), 4)
    ReplicaGrouping(Kind.NoGrouping, 0, ALL).check("w", (4,), 4)


def test_tracing_sees_one_group_and_leaves_the_parameter_as_it_was():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    with stripped([parameter]):
        assert parameter.tolist() == [0, 1, 2]
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_gradient_belongs_to_its_replicas_group():
    wide = widened(torch.ones(3), ReplicaGrouping(Kind.Consecutive, 2), 2, 4)
    assert wide.tolist() == [[0, 0, 0], [1, 1, 1]]


# ---- on the device


class Scales(torch.nn.Module):
    """Multiplies by a vector that may differ between replicas; the loss is the squared result."""

    def __init__(self, values):
        super().__init__()
        self.w = torch.nn.Parameter(values)
        self.shared = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        assert self.w.dim() == 1
        out = x * self.w + self.shared
        return out, poptorch.identity_loss((out**2).sum(), "none")


def grouped(values, kind, size, R, optimizer=None, A=1):
    model = Scales(values)
    optimizer = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.125)
    opts = options(A=A, R=R, outputMode=poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, opts, optimizer)
    training.w.replicaGrouping(kind, size, ONE)
    return model, training


@pytest.mark.parametrize(("kind", "size"), [(Kind.Consecutive, 2), (Kind.Orthogonal, 2), (Kind.NoGrouping, 0)])
@pytest.mark.parametrize("A", [1, 2])
def test_each_group_has_its_value_and_the_gradients_of_its_replicas(kind, size, A):
    R = 4
    grouping = ReplicaGrouping(kind, size)
    count = grouping.groups(R)
    values = torch.arange(1.0, 2 * count + 1).view(count, 2)
    model, training = grouped(values.clone(), kind, size, R, A=A)
    x = torch.randn(A * R, 2)
    out, _ = training(x)

    w, shared = values.clone().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    expected, total = [], 0.0
    for a, r in itertools.product(range(A), range(R)):
        one = x[a * R + r] * w[grouping.index(r, R)] + shared
        expected.append(one.detach())
        total = total + (one**2).sum()
    (total / (A * R)).backward()
    torch.testing.assert_close(out, torch.stack(expected))
    torch.testing.assert_close(model.w.detach(), values - 0.125 * w.grad)
    torch.testing.assert_close(model.shared.detach(), 0.5 - 0.125 * shared.grad)


def test_optimizer_state_has_one_tensor_and_one_counter_per_group():
    values = torch.ones(4, 2)
    holder = []

    def adam(parameters):
        holder.append(poptorch.optim.AdamW(parameters, lr=0.1))
        return holder[0]

    _, training = grouped(values, Kind.NoGrouping, 0, 4, adam)
    training(torch.randn(4, 2))
    state = holder[0].state_dict()["ipu_state"]
    assert state["Accl1___w"].shape == (4, 2)
    assert state["Step___w"].tolist() == [1, 1, 1, 1]
    assert state["Step___shared"].shape == ()
    holder[0].load_state_dict(holder[0].state_dict())
    training(torch.randn(4, 2))
    assert holder[0].state_dict()["ipu_state"]["Step___w"].tolist() == [2, 2, 2, 2]


def test_lamb_looks_at_the_norm_of_one_groups_weight():
    values = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    model, training = grouped(values.clone(), Kind.NoGrouping, 0, 2, lambda p: poptorch.optim.LAMB(p, lr=0.1))
    x = torch.randn(2, 2)
    training(x)
    for index in range(2):
        alone = Scales(values[index].clone())
        optimizer = poptorch.optim.LAMB([alone.w], lr=0.1)
        (alone(x[index])[1] / 2).backward()
        optimizer.step()
        torch.testing.assert_close(model.w[index].detach(), alone.w.detach())


def test_values_go_to_the_device_and_back():
    values = torch.tensor([[1.0], [2.0]])
    model, training = grouped(values.clone(), Kind.NoGrouping, 0, 2)
    x = torch.ones(2, 1)
    training(x)
    trained = model.w.detach().clone()
    assert not torch.equal(trained, values)
    training.detachFromDevice()
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    out, _ = training(x)
    torch.testing.assert_close(out, trained + model.shared.detach())
    with torch.no_grad():
        model.w.copy_(torch.tensor([[5.0], [7.0]]))
    training.copyWeightsToDevice()
    torch.testing.assert_close(training(x)[0], torch.tensor([[5.0], [7.0]]) + model.shared.detach())


def test_a_parameter_comes_as_itself_with_one_more_method():
    model = Scales(torch.ones(2, 3))
    executor = poptorch.inferenceModel(model, options(R=2))
    assert executor.w.shape == (2, 3)
    assert torch.sum(executor.w).item() == 6
    assert executor.w[0].tolist() == [1, 1, 1]
    executor.w.requires_grad = False
    assert not model.w.requires_grad


def test_grouping_is_checked():
    model = Scales(torch.ones(2, 3))
    executor = poptorch.inferenceModel(model, options(R=2))
    with pytest.raises(poptorch.Error, match="must be a poptorch.CommGroupType"):
        executor.w.replicaGrouping("all", 1, ONE)
    with pytest.raises(poptorch.Error, match="must be a poptorch.VariableRetrievalMode"):
        executor.w.replicaGrouping(Kind.All, 1, 0)
    executor.shared.replicaGrouping(Kind.NoGrouping, 0, ONE)
    with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica weight"):
        executor(torch.ones(2, 3))
    executor = poptorch.inferenceModel(model, options(R=2))
    executor.w.replicaGrouping(Kind.NoGrouping, 0, ONE)
    executor(torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match="after the compilation"):
        executor.w.replicaGrouping(Kind.NoGrouping, 0, ONE)
