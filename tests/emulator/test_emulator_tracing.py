# SPDX-License-Identifier: Apache-2.0
"""A compiled model is a static graph: traced once, with Python's part in it frozen."""

import random

import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch

F = torch.nn.functional


class Model(torch.nn.Module):
    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.body(self, *inputs)


def infer(body, *inputs, calls=1, **parts):
    executor = poptorch.inferenceModel(Model(body, **parts).eval())
    return [executor(*inputs) for _ in range(calls)][-1]


def test_python_runs_once_however_many_micro_batches_there_are():
    runs = []

    def body(model, x):
        runs.append(1)
        return x + len(runs)

    options = poptorch.Options().deviceIterations(4)
    executor = poptorch.inferenceModel(Model(body), options)
    for _ in range(3):
        torch.testing.assert_close(executor(torch.zeros(8)), torch.ones(8))
    assert len(runs) == 1


def test_python_control_flow_is_the_traced_one():
    def body(model, x):
        return x * random.choice([2.0, 3.0, 5.0, 7.0])

    executor = poptorch.inferenceModel(Model(body))
    first = executor(torch.ones(1))
    assert all(torch.equal(executor(torch.ones(1)), first) for _ in range(10))


def test_plain_attributes_are_frozen_and_put_back():
    def body(model, x):
        model.count += 1
        return x + model.count

    model = Model(body)
    model.count = 0
    executor = poptorch.inferenceModel(model)
    assert [executor(torch.zeros(1)).item() for _ in range(3)] == [1.0, 1.0, 1.0]
    assert model.count == 0


def test_a_constant_is_copied_at_compilation():
    table = torch.tensor([1.0, 2.0])
    executor = poptorch.inferenceModel(Model(lambda model, x: x + table.to("ipu")))
    torch.testing.assert_close(executor(torch.zeros(2)), torch.tensor([1.0, 2.0]))
    table.fill_(9.0)
    torch.testing.assert_close(executor(torch.zeros(2)), torch.tensor([1.0, 2.0]))


def test_the_training_flag_counts_at_compilation():
    model = Model(lambda model, x: model.drop(x), drop=torch.nn.Dropout(0.5))
    executor = poptorch.inferenceModel(model.eval())
    executor(torch.ones(64))
    model.train()
    torch.testing.assert_close(executor(torch.ones(64)), torch.ones(64))


def test_the_seed_of_a_model_that_seeds_is_part_of_its_graph():
    def body(model, x):
        torch.manual_seed(7)
        return x + torch.rand(4)

    before = torch.get_rng_state()
    executor = poptorch.inferenceModel(Model(body))
    results = [executor(torch.zeros(4)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before), "the host's random state is its own"
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    for result in results:
        torch.testing.assert_close(result, expected)


def test_random_numbers_go_on_where_the_model_does_not_seed():
    executor = poptorch.inferenceModel(Model(lambda model, x: x + torch.rand(4)), poptorch.Options().randomSeed(3))
    first, second = executor(torch.zeros(4)), executor(torch.zeros(4))
    assert not torch.equal(first, second)
    generator = torch.Generator().manual_seed(3)
    torch.testing.assert_close(first, torch.rand(4, generator=generator))
    torch.testing.assert_close(second, torch.rand(4, generator=generator))


# ---- what is refused


REFUSED = {
    "nonzero": lambda model, x: x.nonzero(),
    "masked_select": lambda model, x: torch.masked_select(x, x > 0),
    "index": lambda model, x: x[x > 0],
    "unique": lambda model, x: torch.unique(x),
    "item": lambda model, x: x * x[0].item(),
    "__int__": lambda model, x: x[: int(x[0])],
    "__float__": lambda model, x: x * float(x[0]),
    "numpy": lambda model, x: x * x.numpy()[0],
}


@pytest.mark.parametrize("operator", REFUSED)
def test_data_dependence_is_refused_with_operator_module_place_and_replacement(operator):
    class Inner(torch.nn.Module):
        def forward(self, x):
            return REFUSED[operator](self, x)

    model = Model(lambda model, x: model.layer(x), layer=Inner())
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(model)(torch.tensor([1.0, 2.0]))
    text = str(caught.value)
    assert operator in text
    assert "module 'layer'" in text
    assert "test_emulator_tracing.py:" in text
    assert "Usual replacement" in text


def test_a_refused_model_can_be_mended_and_compiled():
    bad = True

    def body(model, x):
        return x.nonzero() if bad else torch.where(x > 0, x, 0.0)

    executor = poptorch.inferenceModel(Model(body))
    with pytest.raises(poptorch.Error, match="aten::nonzero"):
        executor(torch.ones(2))
    assert not executor.isCompiled()
    bad = False
    torch.testing.assert_close(executor(torch.ones(2)), torch.ones(2))


def test_u57_all_findings_of_one_compilation_are_listed_with_line_and_hint(caplog):
    def body(model, x, y):
        x = torch.nan_to_num(x)
        if x.sum() > 0:
            x = x + 1
        return x * int(y[0])

    with pytest.raises(poptorch.Error) as caught:
        infer(body, torch.ones(2), torch.ones(2))
    lines = [line for line in str(caught.value).splitlines() if "Usual replacement" in line]
    assert len(lines) == 2
    assert "nan_to_num" in lines[0]
    assert "Tensor.__int__" in lines[1]
    assert "keep the value as a tensor" in lines[1]
    first = body.__code__.co_firstlineno
    assert f"test_emulator_tracing.py:{first + 1}" in lines[0]
    assert f"test_emulator_tracing.py:{first + 4}" in lines[1]


def test_u57_a_branch_on_a_tensor_is_frozen_with_a_warning(caplog):
    def body(model, x):
        if x.sum() > 0:
            return x + 1
        return x - 1

    with caplog.at_level("WARNING", logger="ipu_finetune.emulator"):
        executor = poptorch.inferenceModel(Model(body))
        torch.testing.assert_close(executor(torch.ones(2)), torch.full((2,), 2.0))
    assert "frozen at trace time" in caplog.text
    assert f"test_emulator_tracing.py:{body.__code__.co_firstlineno + 1}" in caplog.text
    torch.testing.assert_close(executor(-torch.ones(2)), torch.zeros(2)), "the branch of the first micro-batch stays"


def test_python_may_read_what_is_constant():
    scale = torch.tensor(3)
    torch.testing.assert_close(
        infer(lambda model, x: x[: scale.item()] * float(torch.arange(4).sum()), torch.ones(5)), torch.full((3,), 6.0)
    )


def test_a_tensor_of_the_host_becomes_a_constant():
    table = torch.tensor([1, 0])
    x = torch.rand(4)
    for move in (
        lambda: table,
        lambda: table.to("ipu"),
        lambda: table.to(torch.device("ipu")),
        lambda: torch.tensor([1, 0]),
    ):
        result = infer(lambda model, x, move=move: torch.index_select(x, 0, move()), x)
        torch.testing.assert_close(result, x[[1, 0]])
    made = infer(lambda model, x: x + torch.ones(4, device="ipu").to(x.device), x)
    torch.testing.assert_close(made, x + 1)


def test_assigning_through_a_mask_is_no_data_dependent_shape():
    def body(model, x):
        x = x.clone()
        x[x > 1] = 0.0
        return x

    torch.testing.assert_close(infer(body, torch.tensor([1.0, 2.0])), torch.tensor([1.0, 0.0]))


def test_an_error_of_the_model_speaks_of_tensors():
    with pytest.raises((TypeError, RuntimeError)) as caught:
        infer(lambda model, x: torch.zeros(2).scatter(0, x, x, 5, 6), torch.zeros(2, dtype=torch.int64))
    assert "Tensor" in str(caught.value)
    assert "FakeTensor" not in str(caught.value)


# ---- the graph against autograd


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x  # not the true derivative, so that a replay through autograd would show


def gradients(body, *inputs, **parts):
    """Return the weights after one step of plain descent, by the emulator and by PyTorch."""
    ours, theirs = (Model(body, **{k: v() for k, v in parts.items()}) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    loss = theirs(*inputs)
    loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=1.0))(*inputs)
    return ours.state_dict(), theirs.state_dict()


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (lambda m, x: F.mse_loss(Square.apply(m.a(x)), x), {"a": lambda: torch.nn.Linear(3, 3)}),
        (lambda m, x: F.mse_loss(m.a(x).detach() * m.b(x), x), {n: lambda: torch.nn.Linear(3, 3) for n in "ab"}),
        (lambda m, x: F.mse_loss(m.a(m.a(x)), x), {"a": lambda: torch.nn.Linear(3, 3)}),
        (lambda m, x: F.mse_loss(m.n(x.unsqueeze(1)).squeeze(1), x), {"n": lambda: torch.nn.LayerNorm(3)}),
        (
            lambda m, x: poptorch.identity_loss(m.a.weight.expand(2, 3, 3), "sum"),
            {"a": lambda: torch.nn.Linear(3, 3)},
        ),
        (
            lambda m, x: F.nll_loss(F.log_softmax(m.a(x).relu_(), -1), torch.tensor([0, 1])),
            {"a": lambda: torch.nn.Linear(3, 3)},
        ),
    ],
    ids=["own backward", "detached", "shared", "layer norm", "expanded", "in place"],
)
def test_a_step_is_that_of_autograd(body, parts):
    torch.manual_seed(0)
    ours, theirs = gradients(body, torch.randn(2, 3), **parts)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_no_grad_is_kept():
    def body(model, x):
        with torch.no_grad():
            scale = model.a(x)
        return F.mse_loss(model.b(x) * scale, x)

    torch.manual_seed(0)
    parts = {name: lambda: torch.nn.Linear(3, 3) for name in "ab"}
    ours, theirs = gradients(body, torch.randn(2, 3), **parts)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


def test_gradients_add_up_over_micro_batches_when_one_is_shared_memory():
    # The gradient of both weights is the same tensor; accumulating into it in place would count it twice.
    model = Model(lambda m, x: poptorch.identity_loss((m.p + m.q) * x, "sum"))
    model.p, model.q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    training(torch.arange(1.0, 4.0).reshape(3, 1))
    for weight in (model.p, model.q):
        torch.testing.assert_close(weight.detach(), torch.full((2,), -6.0))


def test_inference_mode_of_the_caller_changes_nothing():
    executor = poptorch.inferenceModel(Model(lambda model, x: x.add_(1)))
    x = torch.zeros(2)
    with torch.inference_mode():
        y = torch.zeros(2)
        torch.testing.assert_close(executor(y), torch.ones(2))
        torch.testing.assert_close(y, torch.ones(2))
    torch.testing.assert_close(executor(x), torch.ones(2))
    torch.testing.assert_close(x, torch.ones(2))


def test_a_node_knows_its_module_stage_and_direction():
    model = Model(lambda m, x: F.mse_loss(m.second(m.first(x)), x))
    model.first = poptorch.BeginBlock(torch.nn.Linear(3, 3), ipu_id=0)
    model.second = poptorch.BeginBlock(torch.nn.Linear(3, 3), ipu_id=1)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    training = poptorch.trainingModel(model, options.autoRoundNumIPUs(True))
    training(torch.ones(2, 3))
    products = [
        (node.meta["module"], node.meta["ipu"], node.meta["backward"])
        for node in training._program.trace.graph.operations()
        if str(node.target) in ("aten.addmm.default", "aten.mm.default")
    ]
    assert products == [
        ("first", 0, False),
        ("second", 1, False),
        ("second", 1, True),
        ("second", 1, True),
        ("first", 0, True),
    ]


def test_a_tensor_without_elements_is_refused():
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[0, 2\]\)"):
        infer(lambda model, x: x + 1, torch.zeros(0, 2))


def test_bincount_has_a_fixed_length():
    def body(model, x):
        return torch.bincount(x, minlength=3)

    torch.testing.assert_close(infer(body, torch.tensor([0, 2, 2, 7])), torch.tensor([1, 0, 2], dtype=torch.int32))
    with pytest.raises(poptorch.Error, match="`minlength` must be specified"):
        infer(lambda model, x: torch.bincount(x), torch.tensor([0, 2]))


@pytest.mark.parametrize("as_tensors", [True, False])
def test_the_ctc_loss_trains_though_its_inner_size_depends_on_the_targets(as_tensors):
    lengths = [6, 5], [2, 3]
    inputs, targets = lengths

    def body(model, x, labels):
        sizes = [torch.tensor(each) for each in (inputs, targets)] if as_tensors else [inputs, targets]
        return F.ctc_loss(F.log_softmax(model.a(x), -1), labels, *sizes)

    torch.manual_seed(0)
    # The batch is dimension 1 of what the loss takes; a micro-batch of everything leaves it as it is.
    ours, theirs = gradients(
        body, torch.randn(6, 2, 4), torch.tensor([[1, 2, 0], [3, 1, 2]]), a=lambda: torch.nn.Linear(4, 4)
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


# ---- tensors of the host that are no buffers


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self):
        self.count += 1
        return self.count


def test_an_attribute_that_is_no_buffer_counts_once_while_the_model_is_traced():
    # The user guide's example of a counter that does not count.
    user = Counter()
    model = poptorch.inferenceModel(user)
    assert model().tolist() == [1.0]
    assert model().tolist() == [1.0]
    assert user.count.tolist() == [1.0]


def test_a_constant_that_is_changed_again_has_both_values():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.zeros(2)

        def forward(self, x):
            before = x + self.bias
            self.bias[0] = 5.0
            return before, x + self.bias

    model = poptorch.inferenceModel(Twice())
    for _ in range(2):
        before, after = model(torch.ones(2))
        assert before.tolist() == [1.0, 1.0]
        assert after.tolist() == [6.0, 1.0]


def test_a_constant_that_the_graph_writes_into_is_the_same_for_every_micro_batch():
    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.total = torch.zeros(1)

        def forward(self, x):
            return self.total.add_(x)

    model = poptorch.inferenceModel(Adds(), options(D=3))
    assert model(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]
    assert model(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]
