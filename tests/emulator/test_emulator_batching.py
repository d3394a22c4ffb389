# SPDX-License-Identifier: Apache-2.0
import collections

import pytest
import torch
from emulator_oracle import data, make, options, plain_step, regression_loss, rows

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import CommGroupType, OutputMode


class Identity(torch.nn.Module):
    def forward(self, x):
        return x * 1


def run(model, D=1, R=1, mode=OutputMode.All, period=None, args=(), **settings):
    opts = options(D=D, R=R, **settings)
    opts.outputMode(mode, period)
    return poptorch.inferenceModel(model, opts)(*args)


# ---- the order of micro-batches


def test_replicas_are_innermost_in_a_combined_batch():
    x = torch.arange(2 * 3 * 2, dtype=torch.float32).reshape(12, 1)  # D=2, R=3, B=2
    final = run(Identity(), D=2, R=3, mode=OutputMode.Final, args=(x,), autoRoundNumIPUs=True)
    # The last iteration of every replica is the second half of the batch; replica-major order would give 2 3 6 7 10 11.
    assert final.flatten().tolist() == [6, 7, 8, 9, 10, 11]


def test_each_update_sees_the_rows_of_its_own_iteration_over_all_replicas():
    D, A, R, B = 3, 2, 2, 2
    model, twin = make()
    x, y = data(D * A * R * B)
    training = poptorch.trainingModel(
        model, options(D, A, R, outputMode=OutputMode.All), torch.optim.SGD(model.parameters(), lr=0.5)
    )
    _, losses = training(x, y)
    expected = plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.5), D, A, R)
    torch.testing.assert_close(losses, expected)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.detach(), theirs.detach())


def test_replica_major_order_would_give_other_weights():
    # The oracle itself can tell the two orders apart: without this the test above would prove nothing.
    D, A, R, B = 3, 2, 2, 2
    model, twin = make()
    x, y = data(D * A * R * B)
    order = [row for d in range(D) for a in range(A) for r in range(R) for row in range(24)[rows(r, d, a, R, D, A, B)]]
    plain_step(model, regression_loss, (x, y), torch.optim.SGD(model.parameters(), lr=0.5), D, A, R)
    plain_step(twin, regression_loss, (x[order], y[order]), torch.optim.SGD(twin.parameters(), lr=0.5), D, A, R)
    assert not torch.allclose(model.first.weight, twin.first.weight)


@pytest.mark.parametrize(
    ("kind", "expected"), [(CommGroupType.Consecutive, [0, 0, 1, 1]), (CommGroupType.Orthogonal, [0, 1, 0, 1])]
)
def test_replica_groups_share_an_input(kind, expected):
    opts = options(R=4)
    opts.inputReplicaGrouping(2, kind)
    result = poptorch.inferenceModel(Identity(), opts)(torch.arange(2.0).reshape(2, 1))
    assert result.flatten().tolist() == expected


def test_a_batch_that_is_not_whole_is_refused_with_every_factor():
    factors = r"deviceIterations\(3\).*replicationFactor\(2\).*gradientAccumulation\(1\) = 6"
    with pytest.raises(AssertionError, match=factors):
        run(Identity(), D=3, R=2, args=(torch.zeros(8, 1),))


def test_a_scalar_input_needs_a_single_micro_batch():
    assert run(Identity(), args=(torch.tensor(3.0),)) == 3.0
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        run(Identity(), D=2, args=(torch.tensor(3.0),))


def test_batch_norm_sees_one_micro_batch():
    class Normalise(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.batch_norm(x, None, None, training=True)

    x = torch.randn(8, 3)
    expected = torch.cat([torch.nn.functional.batch_norm(part, None, None, training=True) for part in x.split(4)])
    torch.testing.assert_close(run(Normalise(), D=2, args=(x,)), expected)


# ---- output modes


@pytest.mark.parametrize(
    ("mode", "period", "micro_batches"),
    [
        (OutputMode.All, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (OutputMode.EveryN, 2, [2, 3, 6, 7]),
        (OutputMode.Final, None, [6, 7]),
        (OutputMode.Default, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_inference_output_modes_return_these_micro_batches(mode, period, micro_batches):
    x = torch.randn(8 * 3, 2)  # D=4, R=2, B=3
    expected = torch.cat([x[3 * k : 3 * k + 3] for k in micro_batches])
    assert torch.equal(run(Identity(), D=4, R=2, mode=mode, period=period, args=(x,)), expected)


def test_sum_adds_over_iterations_but_not_over_replicas():
    x = torch.randn(4 * 2 * 3, 2)  # D=4, R=2, B=3
    expected = x.reshape(4, 2, 3, 2).sum(0).reshape(6, 2)
    torch.testing.assert_close(run(Identity(), D=4, R=2, mode=OutputMode.Sum, args=(x,)), expected)


@pytest.mark.parametrize(
    ("mode", "period", "shape"),
    [
        (OutputMode.Default, None, (2,)),
        (OutputMode.Final, None, (2,)),
        (OutputMode.Sum, None, (2,)),
        (OutputMode.All, None, (16,)),
        (OutputMode.EveryN, 2, (8,)),
    ],
)
def test_a_loss_becomes_one_value_per_returned_micro_batch(mode, period, shape):
    D, A, R = 4, 2, 2
    model, twin = make()
    x, y = data(D * A * R * 2)
    opts = options(D, A, R)
    opts.outputMode(mode, period)
    _, losses = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))(x, y)
    every = plain_step(twin, regression_loss, (x, y), torch.optim.SGD(twin.parameters(), lr=0.1), D, A, R)
    every = every.reshape(D, A, R)
    expected = {
        OutputMode.All: every.flatten(),
        OutputMode.EveryN: every[1::2].flatten(),
        OutputMode.Sum: every.sum((0, 1)),
    }.get(mode, every[-1, -1])
    assert losses.shape == shape
    torch.testing.assert_close(losses, expected)


def test_a_loss_stays_a_scalar_when_it_is_the_only_one():
    model, _ = make()
    _, loss = poptorch.trainingModel(model, options(D=2, A=2))(*data(8))
    assert loss.dim() == 0


def test_the_users_options_keep_the_default_output_mode():
    opts = poptorch.Options()
    model, _ = make()
    training = poptorch.trainingModel(model, opts)
    training(*data(2))
    assert opts.output_mode == OutputMode.Default
    assert training.options.output_mode == OutputMode.Final


@pytest.mark.parametrize(("period", "text"), [(3, "factor of the number of batches"), (8, "<= to the number")])
def test_a_return_period_must_divide_the_iterations(period, text):
    with pytest.raises(poptorch.Error, match=text):
        run(Identity(), D=4, mode=OutputMode.EveryN, period=period, args=(torch.zeros(4, 1),))


# ---- types and structure


def test_integers_come_back_as_int32_and_wrap():
    result = run(Identity(), args=(torch.tensor([7, 2**32 + 5, 2**31]),))
    assert result.dtype == torch.int32
    assert result.tolist() == [7, 5, -(2**31)]


def test_double_precision_is_single_on_the_device():
    value = torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    result = run(Identity(), args=(value,))
    assert result.dtype == torch.float32
    assert result.item() == 1.0


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "make_output",
    [
        lambda x: (x, x + 1),
        lambda x: [x, (x + 1, {"a": x + 2})],
        lambda x: {"logits": x, "note": "text", "none": None, "n": 3},
        lambda x: Pair(x, x * 2),
        lambda x: (x, x),
    ],
)
def test_the_structure_of_the_result_is_kept(make_output):
    class Structured(torch.nn.Module):
        def forward(self, x):
            return make_output(x * 1)

    x = torch.randn(4, 2)
    result, expected = run(Structured(), D=2, args=(x,)), make_output(x)
    assert type(result) is type(expected)
    assert_same(result, expected)


def assert_same(result, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key in expected:
            assert_same(result[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(result) == len(expected)
        for one, other in zip(result, expected):
            assert_same(one, other)
    else:
        assert result == expected


def test_a_tensor_returned_twice_gives_two_tensors():
    class Twice(torch.nn.Module):
        def forward(self, x):
            y = x * 1
            return y, y

    one, other = run(Twice(), args=(torch.ones(2),))
    one.zero_()
    assert other.tolist() == [1, 1]


def test_no_tensor_gives_none():
    class Nothing(torch.nn.Module):
        def forward(self, x):
            return None

    assert run(Nothing(), args=(torch.ones(2),)) is None


def test_a_custom_type_is_opened_and_closed_by_its_parser():
    class Holder:
        def __init__(self, tensor, name):
            self.tensor, self.name = tensor, name

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct.tensor

        def reconstruct(self, original_structure, tensor_iterator):
            return Holder(next(tensor_iterator), original_structure.name)

    class Model(torch.nn.Module):
        def forward(self, holder):
            return Holder(holder.tensor * 2, holder.name)

    poptorch.registerCustomArgParser(Holder, Parser())
    result = run(Model(), D=2, args=(Holder(torch.tensor([1.0, 2.0]), "n"),))
    assert result.tensor.tolist() == [2, 4]
    assert result.name == "n"


def test_outputs_do_not_share_memory_with_the_weights():
    class Leak(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2, 2))

        def forward(self, x):
            return self.w

    leak = poptorch.inferenceModel(Leak())
    leak(torch.zeros(1)).fill_(9)
    assert leak(torch.zeros(1)).tolist() == [[0, 0], [0, 0]]


def test_backward_on_an_output_is_refused():
    model, _ = make()
    _, loss = poptorch.trainingModel(model)(*data(2))
    with pytest.raises(poptorch.Error, match="cannot be called explicitly"):
        loss.backward()


# ---- inputs that the model changes


class AddsInPlace(torch.nn.Module):
    def forward(self, values, nested):
        values += 1
        nested["deep"][0].mul_(2)
        return values.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_changes_to_inputs_reach_the_callers_tensors(dtype):
    values, deep = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    run(AddsInPlace(), D=2, args=(values, {"deep": [deep]}))
    assert values.tolist() == [1] * 4
    assert deep.tolist() == [2] * 4
    assert values.dtype == dtype


def test_non_contiguous_inputs_give_the_same_result_and_are_written_back():
    values = torch.zeros(2, 4).t()
    run(AddsInPlace(), D=2, args=(values, {"deep": [torch.ones(4)]}))
    assert values.sum() == 8


def test_compiling_changes_no_input():
    values = torch.zeros(4)
    model = poptorch.inferenceModel(AddsInPlace(), options(D=2))
    model.compile(values, {"deep": [torch.ones(4)]})
    assert values.tolist() == [0] * 4
