# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from ipu_finetune.emulator import poptorch


def compiled(forward, **modules):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, *args):
            return forward(self, *args)

    return poptorch.inferenceModel(Model())


TRUE, FALSE = torch.tensor([True]), torch.tensor([False])


# ---- cond


def test_a_branch_is_chosen_at_every_run():
    model = compiled(lambda _, c, x: poptorch.cond(c, lambda a: a + 1, [x], lambda a: a * 10, [x]))
    x = torch.tensor([2.0])
    for condition, expected in ((TRUE, 3), (FALSE, 20), (TRUE, 3)):
        assert model(condition, x)[0].item() == expected


def test_bodies_reach_the_tensors_and_layers_around_them():
    layer = torch.nn.Linear(2, 2)

    def forward(self, c, x):
        shift = x.sum()
        return poptorch.cond(c, lambda: self.layer(x) + shift, [], lambda: x - shift, [])[0]

    model = compiled(forward, layer=layer)
    x = torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(model(TRUE, x), layer(x).detach() + 3)
    torch.testing.assert_close(model(FALSE, x), x - 3)


def test_branches_nest():
    def forward(_, outer, inner, x):
        def then():
            return poptorch.cond(inner, lambda: x + 1, [], lambda: x + 2, [])[0]

        return poptorch.cond(outer, then, [], lambda: x + 3, [])[0]

    model = compiled(forward)
    x = torch.zeros(1)
    found = [model(a, b, x).item() for a in (TRUE, FALSE) for b in (TRUE, FALSE)]
    assert found == [1, 2, 3, 3]


def test_a_body_works_on_copies():
    def forward(_, c, x):
        y = poptorch.cond(c, lambda a: a.add_(1), [x], lambda a: a.mul_(5), [x])[0]
        return x, y

    x = torch.tensor([3.0])
    assert [value.item() for value in compiled(forward)(TRUE, x)] == [3, 4]
    assert x.item() == 3


def test_the_condition_may_be_computed():
    model = compiled(lambda _, x: poptorch.cond(x.sum() > 0, lambda: x, [], lambda: -x, [])[0])
    for value in (2.0, -2.0):
        assert model(torch.tensor([value])).item() == 2


@pytest.mark.parametrize(
    "other",
    [lambda x: (x, x), lambda x: x.int(), lambda x: x.repeat(2)],
)
def test_bodies_must_return_the_same_kind_of_tensors(other):
    model = compiled(lambda _, c, x: poptorch.cond(c, lambda: x + 1, [], other, [x]))
    with pytest.raises(poptorch.Error, match="the same number of outputs with the same shapes and types"):
        model(TRUE, torch.ones(1))


def test_a_body_must_return_tensors_and_the_condition_be_one_element():
    with pytest.raises(poptorch.Error, match="must return tensors, got float"):
        compiled(lambda _, c, x: poptorch.cond(c, lambda: 3.0, [], lambda: x, []))(TRUE, torch.ones(1))
    with pytest.raises(poptorch.Error, match=r"one element, got \(2,\)"):
        compiled(lambda _, c, x: poptorch.cond(c, lambda: x, [], lambda: x, []))(
            torch.tensor([True, False]), torch.ones(1)
        )


def test_cond_outside_of_a_model_runs_one_body():
    ran = []

    def then(x):
        ran.append("then")
        return x + 1

    def other(x):
        ran.append("else")
        return x, x

    assert poptorch.cond(torch.tensor([True]), then, [torch.ones(1)], other, [torch.ones(1)])[0].item() == 2
    assert len(poptorch.cond(torch.tensor(False), then, [torch.ones(1)], other, [torch.ones(1)])) == 2
    assert ran == ["then", "else"]
    with pytest.raises(ValueError, match="to be a list"):
        poptorch.cond(torch.tensor(True), then, torch.ones(1), other, [torch.ones(1)])


# ---- for_loop


def test_a_loop_feeds_its_results_back_and_copies_its_inputs():
    def forward(_, x, y):
        def body(a, b):
            a += b
            return a, b * 2

        return poptorch.for_loop(4, body, [x, y])

    x, y = torch.tensor([1.0]), torch.tensor([1.0])
    assert [value.item() for value in compiled(forward)(x, y)] == [1 + 1 + 2 + 4 + 8, 16]
    assert (x.item(), y.item()) == (1, 1)


def test_a_loop_uses_weights_and_outer_tensors():
    layer = torch.nn.Linear(2, 2)
    model = compiled(lambda self, x, y: poptorch.for_loop(3, lambda a: self.layer(a) + y, [x])[0], layer=layer)
    x, y = torch.randn(1, 2), torch.randn(1, 2)
    expected = x
    for _ in range(3):
        expected = layer(expected) + y
    torch.testing.assert_close(model(x, y), expected.detach())


def test_a_loop_of_no_iterations_returns_its_inputs():
    assert compiled(lambda _, x: poptorch.for_loop(0, lambda a: a + 1, [x])[0])(torch.tensor([5.0])).item() == 5


def test_a_loop_may_hold_a_branch():
    def body(a):
        return poptorch.cond(a.sum() > 10, lambda: a - 10, [], lambda: a * 2, [])[0]

    model = compiled(lambda _, x: poptorch.for_loop(5, body, [x])[0])
    for start in (3.0, 7.0):
        expected = start
        for _ in range(5):
            expected = expected - 10 if expected > 10 else expected * 2
        assert model(torch.tensor([start])).item() == expected


def test_a_body_must_return_what_it_takes():
    for body in (lambda a: (a, a), lambda a: a.int(), lambda a: a.repeat(2)):
        for call in (
            lambda body=body: compiled(lambda _, x: poptorch.for_loop(2, body, [x]))(torch.ones(1)),
            lambda body=body: poptorch.for_loop(2, body, [torch.ones(1)]),
        ):
            with pytest.raises(poptorch.Error, match="but returned"):
                call()


def test_the_arguments_of_a_loop_are_checked():
    for inputs, text in ((torch.ones(1), "Object is not list"), ([torch.ones(1), 3], "at index 1 is not")):
        with pytest.raises(ValueError, match=text):
            poptorch.for_loop(1, lambda a: a, inputs)
    with pytest.raises(ValueError, match="constant int"):
        poptorch.for_loop(torch.tensor(2), lambda a: a, [torch.ones(1)])
    assert poptorch.for_loop(3, lambda a: a.mul_(2), [torch.ones(2)])[0].tolist() == [8, 8]


# ---- code on the host


def test_a_host_function_sees_the_values_of_each_run():
    seen = []

    def on_host(x, scale):
        assert not poptorch.isRunningOnIpu()
        seen.append(x.sum().item())
        return x * scale, torch.from_numpy(x.numpy() + 1)

    model = compiled(lambda self, x: self.host(x + 1, 3)[0] * 2, host=None)
    model._user_model.host = poptorch.CPU(on_host, "scale")
    assert model(torch.tensor([1.0, 2.0])).tolist() == [12, 18]
    assert model(torch.tensor([0.0, 0.0])).tolist() == [6, 6]
    # once with zeros, for the shapes; then each run
    assert seen == [0, 5, 2]


def test_a_host_function_may_run_a_module_and_return_one_tensor():
    layer = torch.nn.Linear(2, 3)
    op = poptorch.CPU(layer, "layer")
    x = torch.randn(4, 2)
    torch.testing.assert_close(compiled(lambda _, x: op(x))(x), layer(x).detach())
    assert not layer.weight.requires_grad
    torch.testing.assert_close(op(x), layer(x))


def test_host_results_must_keep_their_shape():
    op = poptorch.CPU(lambda x: x[x > 0], "positive")
    with pytest.raises(poptorch.Error, match=r"'positive' returned .*compiled for"):
        compiled(lambda _, x: op(x))(torch.ones(3))


def test_a_host_function_must_return_tensors():
    with pytest.raises(poptorch.Error, match="must return tensors, got float"):
        compiled(lambda _, x: poptorch.CPU(lambda x: 3.0, "op")(x))(torch.ones(3))
    with pytest.raises(poptorch.Error, match="must be callable"):
        poptorch.CPU(3, "op")


# ---- training


@pytest.mark.parametrize("name", ["cond", "for_loop", "CPU"])
def test_what_is_decided_at_run_time_is_refused_in_training(name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            if name == "cond":
                x = poptorch.cond(x.sum() > 0, lambda a: a, [x], lambda a: a, [x])[0]
            elif name == "for_loop":
                x = poptorch.for_loop(1, lambda a: a, [x])[0]
            else:
                x = poptorch.CPU(lambda a: a, "op")(x)
            return poptorch.identity_loss(x * self.w, "sum")

    with pytest.raises(poptorch.Error, match="only supported in inference"):
        poptorch.trainingModel(Model())(torch.ones(1))
    poptorch.inferenceModel(Model())(torch.ones(1))
