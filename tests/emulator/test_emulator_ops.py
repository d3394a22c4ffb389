# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import MatMulSerializationMode, OverlapMode

# ---- annotations are identities


def test_recomputation_checkpoints_keep_their_arguments():
    a, b = torch.ones(1), torch.zeros(1)
    assert poptorch.recomputationCheckpoint(a) is a
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(a, 3)


@pytest.mark.parametrize("mode", list(MatMulSerializationMode))
def test_a_serialised_product_is_a_product(mode):
    lhs, rhs = torch.randn(2, 4, 6), torch.randn(6, 8)
    assert torch.equal(poptorch.serializedMatMul(lhs, rhs, mode, 2), lhs @ rhs)


def test_a_serialised_product_checks_its_arguments():
    lhs, rhs = torch.randn(4, 6), torch.randn(6, 8)
    with pytest.raises(AssertionError, match="mode"):
        poptorch.serializedMatMul(lhs, rhs, "output_channels", 2)
    with pytest.raises(poptorch.Error, match="output_channels dimension has 8 elements, which 3"):
        poptorch.serializedMatMul(lhs, rhs, MatMulSerializationMode.OutputChannels, 3)


def test_memory_and_overlap_annotations():
    x = torch.ones(2)
    assert poptorch.set_available_memory(x, 0.3) is x
    assert poptorch.nop(x) is x
    assert poptorch.set_overlap_for_input(x, OverlapMode.NoOverlap) is x
    with pytest.raises(poptorch.Error, match="only set available memory"):
        poptorch.set_available_memory(3, 0.3)
    with pytest.raises(poptorch.Error, match="must lie in"):
        poptorch.set_available_memory(x, 3)
    with pytest.raises(poptorch.Error, match="OverlapMode"):
        poptorch.set_overlap_for_output(x, "none")


def test_scopes_change_nothing():
    with poptorch.NameScope("layer"), poptorch.Attribute(__outline={"layer": "a"}):
        assert (torch.ones(1) + 1).item() == 2
    with pytest.raises(AssertionError, match="NameScope"):
        poptorch.NameScope(3)


def test_multiconv_checks_its_settings():
    outer = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2)).partialsTypes(torch.half)
    with outer.perConvReservedTiles(50), pytest.raises(poptorch.Error, match="Nested"), poptorch.MultiConv():
        pass
    for name, value in [("availableMemoryProportions", 3.0), ("enableConvDithering", 1), ("cycleBackOff", 2.0)]:
        with pytest.raises(AssertionError, match="Invalid"):
            getattr(poptorch.MultiConv(), name)(value)
    with pytest.raises(ValueError, match="Invalid partials"):
        poptorch.MultiConv().partialsTypes(torch.float64)


def test_a_printed_tensor_shows_itself_and_its_gradient(capsys):
    x = torch.ones(1, requires_grad=True)
    (poptorch.ipu_print_tensor(x * 2, "doubled") * 3).backward()
    printed = capsys.readouterr().out
    assert "doubled: tensor([2.])" in printed
    assert "Gradient___doubled: tensor([3.])" in printed


# ---- slices


@pytest.mark.parametrize(("start", "size", "step"), [(0, 3, 1), (2, 2, 1), (1, 4, 2)])
def test_dynamic_slice_takes_rows_from_a_tensor_start(start, size, step):
    x = torch.arange(12).reshape(2, 6)
    found = poptorch.dynamic_slice(x, 1, torch.tensor([start]), size, step)
    assert torch.equal(found, x[:, start : start + size : step])


def test_dynamic_slice_passes_gradients():
    x = torch.ones(4, requires_grad=True)
    poptorch.dynamic_slice(x, 0, torch.tensor(1), 2, 1).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]


def test_dynamic_update_replaces_rows_and_leaves_the_input():
    x = torch.zeros(2, 5)
    found = poptorch.dynamic_update(x, torch.ones(2, 2), 1, torch.tensor([2]), 2)
    assert found.tolist() == [[0, 0, 1, 1, 0]] * 2
    assert x.sum() == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((3, 0, torch.tensor(0), 1, 1), "tensor must be"),
        ((torch.ones(4), "0", torch.tensor(0), 1, 1), "dim must be an integer"),
        ((torch.ones(4), 2, torch.tensor(0), 1, 1), "out of range"),
        ((torch.ones(4), 0, 0, 1, 1), "start must be"),
        ((torch.ones(4), 0, torch.tensor(0.5), 1, 1), "one integer"),
        ((torch.ones(4), 0, torch.tensor(0), 5, 1), "size 5 is above"),
        ((torch.ones(4), 0, torch.tensor(0), 3, 2), "must divide"),
    ],
)
def test_dynamic_slice_names_a_wrong_argument(args, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.dynamic_slice(*args)


@pytest.mark.parametrize("src", [torch.ones(2, dtype=torch.int64), torch.ones(1, 2)])
def test_dynamic_update_needs_the_same_type_and_rank(src):
    with pytest.raises(poptorch.Error, match="input (is|has)"):
        poptorch.dynamic_update(torch.zeros(4), src, 0, torch.tensor(0), 2)


# ---- control flow


def test_cond_runs_one_body():
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


def test_for_loop_feeds_results_back_and_copies_its_inputs():
    x = torch.ones(2)
    found = poptorch.for_loop(3, lambda a: a.mul_(2), [x])
    assert found[0].tolist() == [8, 8]
    assert x.tolist() == [1, 1]
    for inputs in (x, [3]):
        with pytest.raises(ValueError, match="for_loop"):
            poptorch.for_loop(1, lambda a: a, inputs)


@pytest.mark.parametrize("name", ["cond", "for_loop"])
def test_control_flow_is_refused_in_training(name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            if name == "cond":
                x = poptorch.cond(torch.tensor(True), lambda a: a, [x], lambda a: a, [x])[0]
            else:
                x = poptorch.for_loop(1, lambda a: a, [x])[0]
            return poptorch.identity_loss(x * self.w, "sum")

    with pytest.raises(poptorch.Error, match=rf"poptorch\.{name}\(\) is only supported in inference"):
        poptorch.trainingModel(Model())(torch.ones(1))
    poptorch.inferenceModel(Model())(torch.ones(1))


# ---- custom operators


def cube(x, example_outputs, attributes):
    return [x**3 * attributes.get("factor", 1)]


def test_a_custom_operator_runs_its_replacement():
    poptorch.registerCustomOpReplacement("Cube", cube, domain="test.ops")
    found = poptorch.custom_op([torch.tensor([2.0])], "Cube", "test.ops", 1, [torch.empty(1)], {"factor": 2})
    assert found[0].item() == 16


def test_a_custom_operator_without_a_replacement_says_how_to_give_one():
    poptorch.registerCustomOpReplacement("Cube", cube)
    with pytest.raises(
        poptorch.Error, match=r"other\.Cubes.*did you mean 'Cube'.*registerCustomOpReplacement\('Cubes'"
    ):
        poptorch.custom_op([torch.ones(1)], "Cubes", "other", 1, [torch.empty(1)])


def test_a_replacement_must_return_what_the_example_shows():
    poptorch.registerCustomOpReplacement("Cube", cube)
    with pytest.raises(poptorch.Error, match="example"):
        poptorch.custom_op([torch.ones(1)], "Cube", "other", 1, [torch.empty(7)])


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({3: 1}, "keys must be strings"),
        ({"a": None}, "'a' must be"),
        ({"a": [1, 2.0]}, "one type"),
        ({"a": "é"}, "ASCII"),
    ],
)
def test_attributes_must_be_passable_to_compiled_code(attributes, text):
    with pytest.raises(ValueError, match=text):
        poptorch.custom_op([torch.ones(1)], "Cube", "other", 1, [torch.empty(1)], attributes)
