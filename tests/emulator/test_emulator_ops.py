# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_oracle import options

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


def test_annotations_are_identities_in_a_compiled_model():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            with poptorch.NameScope("layer"), poptorch.Attribute(__outline={"layer": "a"}):
                y = poptorch.serializedMatMul(x, w, MatMulSerializationMode.ReducingDim, 2, keep_precision=True)
            return poptorch.nop(poptorch.set_available_memory(poptorch.recomputationCheckpoint(y), 0.2))

    x, w = torch.randn(3, 4), torch.randn(4, 2)
    torch.testing.assert_close(poptorch.inferenceModel(Model())(x, w), x @ w)


def test_attributes_nest():
    in_force = poptorch.Attribute
    with poptorch.NameScope("layer"), poptorch.Attribute(__outline={"layer": "a", "kind": "b"}):
        with poptorch.Attribute(__outline={"layer": "c"}, other={"x": "y"}):
            assert in_force._current_attrs == {"__outline": {"layer": "c", "kind": "b"}, "other": {"x": "y"}}
        assert in_force._current_attrs == {"__outline": {"layer": "a", "kind": "b"}}
    assert in_force._current_attrs == {}


def test_scopes_check_their_arguments():
    with pytest.raises(AssertionError, match="NameScope"):
        poptorch.NameScope(3)
    for attributes in ({"__outline": "a"}, {"__outline": {"layer": 3}}):
        with pytest.raises(poptorch.Error, match="Attribute '__outline'"):
            poptorch.Attribute(**attributes)


# ---- printing


class Printing(torch.nn.Module):
    def __init__(self, *settings, **more):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([[2.0]]))
        self.settings, self.more = settings, more

    def forward(self, x):
        y = poptorch.ipu_print_tensor(x * self.w, *self.settings, **self.more)
        return poptorch.identity_loss(y * 3, "sum") if self.training else y


def printed(capfd, model, *inputs):
    poptorch.inferenceModel(model.eval())(*inputs)
    return capfd.readouterr().err


def test_a_tensor_is_printed_at_every_micro_batch(capfd):
    opts = options(D=2)
    model = poptorch.inferenceModel(Printing("doubled", digits=2).eval(), opts)
    model(torch.tensor([[1.0], [4.0]]))
    model(torch.tensor([[2.0], [3.0]]))
    lines = [line for line in capfd.readouterr().err.splitlines() if "(" in line and "." in line]
    assert [line.strip() for line in lines] == ["(2.0)", "(8.0)", "(4.0)", "(6.0)"]


@pytest.mark.parametrize("print_gradient", [True, False])
def test_its_gradient_is_printed_in_training(capfd, print_gradient):
    model = Printing("doubled", print_gradient, digits=2)
    poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.5))(torch.tensor([[1.0]]))
    text = capfd.readouterr().err
    assert "doubled: (\n (2.0)\n)" in text
    assert ("doubled_gradient: (\n (3.0)\n)" in text) is print_gradient
    # and the printed tensor trains as any other: w - lr * 3 * x
    assert model.w.item() == 2 - 0.5 * 3


@pytest.mark.parametrize(
    ("settings", "values", "text"),
    [
        ({"digits": 4}, [[1.0, 20.0]], "(\n ( 2.00, 40.00)\n)"),
        ({"digits": 3, "float_format": "scientific", "separator": ";"}, [[1.0, 2.0]], "(\n (2.00e+00;4.00e+00)\n)"),
        ({"digits": 0, "open_bracket": "[", "close_bracket": "]"}, [[0.5, 100.25]], "[\n [1, 200.5]\n]"),
        ({"digits": 3, "max_line_width": 13}, [[1.0, 2.0, 3.0]], "(\n (2.00, 4.00,\n   6.00)\n)"),
        ({"digits": 3, "max_line_width": 0}, [[1.0] * 40], "(\n (" + ", ".join(["2.00"] * 40) + ")\n)"),
        ({"digits": 2, "summarise_threshold": 4, "edge_items": 1}, [[1.0, 2.0, 3.0, 4.0, 5.0]], "(\n ( 2, ..., 10)\n)"),
        ({"digits": 4}, [[1e-7, 1.0]], "(\n (2.000e-07, 2.000e+00)\n)"),
        ({"digits": 4}, [[float("nan"), 1.0]], "(\n (  nan, 2.000)\n)"),
    ],
)
def test_the_text_follows_its_settings(capfd, settings, values, text):
    assert f"t: {text}\n" in printed(capfd, Printing("t", **settings), torch.tensor(values))


def test_printing_outside_of_a_model_is_the_identity(capfd):
    x = torch.ones(1, requires_grad=True)
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert capfd.readouterr().err == ""
    with pytest.raises(poptorch.Error, match="ipu print tensor must take a torch.tensor"):
        poptorch.ipu_print_tensor(3)
    with pytest.raises(poptorch.Error, match="float_format must be one of auto, fixed"):
        poptorch.ipu_print_tensor(x, float_format="hex")


# ---- slices


@pytest.mark.parametrize(("start", "size", "step"), [(0, 3, 1), (2, 2, 1), (1, 4, 2), (1, 3, 2), (0, 1, 3)])
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


def test_a_compiled_slice_starts_where_each_call_says():
    class Model(torch.nn.Module):
        def forward(self, x, start):
            piece = poptorch.dynamic_slice(x, -1, start, 2, 1)
            return piece, poptorch.dynamic_update(x, piece * 10, 1, start + 1, 2)

    model = poptorch.inferenceModel(Model())
    x = torch.arange(6.0).reshape(1, 6)
    for start in (1, 3):
        expected = x.clone()
        expected[:, start + 1 : start + 3] = x[:, start : start + 2] * 10
        piece, updated = model(x, torch.tensor([start]))
        assert torch.equal(piece, x[:, start : start + 2])
        assert torch.equal(updated, expected)


def test_a_slice_that_leaves_the_dimension_goes_on_at_its_beginning():
    x = torch.arange(4)
    assert poptorch.dynamic_slice(x, 0, torch.tensor(3), 2, 1).tolist() == [3, 0]
    assert poptorch.dynamic_update(x, torch.tensor([8, 9]), 0, torch.tensor(3), 2).tolist() == [9, 1, 2, 8]


def test_the_size_of_a_compiled_slice_divides_the_dimension():
    class Model(torch.nn.Module):
        def forward(self, x, start):
            return poptorch.dynamic_slice(x, 0, start, 3, 1)

    with pytest.raises(
        poptorch.Error, match=r"size of the slice \(3\) must be a factor of the slicing dimension \(8\)"
    ):
        poptorch.inferenceModel(Model())(torch.ones(8), torch.tensor([1]))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((3, 0, torch.tensor(0), 1, 1), "must take a torch.tensor input"),
        ((torch.ones(4), "0", torch.tensor(0), 1, 1), "Dimension must be an integer"),
        ((torch.ones(4), 2, torch.tensor(0), 1, 1), "out of range"),
        ((torch.ones(4), 0, 0, 1, 1), "Slice start argument to dynamic_slice must be a torch.tensor"),
        ((torch.ones(4), 0, torch.tensor(0.5), 1, 1), "integer typed"),
        ((torch.ones(4), 0, torch.tensor(0), "1", 1), "Size must be an integer"),
        ((torch.ones(4), 0, torch.tensor(0), 5, 1), "size 5 is above"),
        ((torch.ones(4), 0, torch.tensor(0), 0, 1), "start and end of a slice must be different"),
        ((torch.ones(4), 0, torch.tensor(0), -2, 1), "end less than the start is not supported"),
        ((torch.ones(4), 0, torch.tensor(0), 2, 0), "Slicing step must be at least 1"),
        ((torch.ones(4), 0, torch.tensor(0), 2, 1.0), "Step must be an integer"),
    ],
)
def test_dynamic_slice_names_a_wrong_argument(args, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.dynamic_slice(*args)


@pytest.mark.parametrize(
    ("src", "text"),
    [
        (torch.ones(2, dtype=torch.int64), "must have same dtype"),
        (torch.ones(1, 2), "same dimensionality"),
        (torch.ones(3), r"must have the shape \(2,\)"),
        (3, "Src argument to dynamic_update must be a torch.tensor"),
    ],
)
def test_dynamic_update_names_a_wrong_argument(src, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.dynamic_update(torch.zeros(4), src, 0, torch.tensor(0), 2)


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
        ({3: 1}, "attribute keys must be strings"),
        ({"a": None}, "'a': values must be"),
        ({"a": []}, "must hold floats, ints or strings"),
        ({"a": [[1]]}, "must hold floats, ints or strings"),
        ({"a": [1, 2.0]}, "must all be the same"),
        ({"a": "é"}, "é contains non-ASCII characters"),
        ({"a": ["b", "é"]}, "é contains non-ASCII characters"),
        ({"é": 1}, "é contains non-ASCII characters"),
    ],
)
def test_attributes_must_be_passable_to_compiled_code(attributes, text):
    with pytest.raises(ValueError, match=text):
        poptorch.custom_op([torch.ones(1)], "Cube", "other", 1, [torch.empty(1)], attributes)


@pytest.mark.parametrize(("value", "text"), [(1e300, "1e\\+300 is too high"), ([1.0, -1e300], "-1e\\+300 is too low")])
def test_numbers_must_fit_into_a_float(value, text):
    with pytest.raises(poptorch.Error, match=f"{text} for a Popart float attribute"):
        poptorch.custom_op([torch.ones(1)], "Cube", "other", 1, [torch.empty(1)], {"a": value})


def test_attributes_reach_the_replacement_as_they_are():
    seen = {}

    def replacement(x, example_outputs, attributes):
        seen.update(attributes)
        return [x + 1]

    poptorch.registerCustomOpReplacement("Look", replacement, domain="test.ops")
    given = {"f": 1.5, "i": -3, "s": "x", "fs": [1.0, 2.0], "is": (1, 2), "ss": ["a", "b"], "inf": float("inf")}

    class Model(torch.nn.Module):
        def forward(self, x):
            return poptorch.custom_op([x], "Look", "test.ops", 1, [x], given)[0]

    assert poptorch.inferenceModel(Model())(torch.ones(2)).tolist() == [2, 2]
    assert seen == given


def gather_last_dim(data, index):
    outputs = [torch.zeros(index.shape)]
    return poptorch.custom_op([data, index], "FastGatherLastDim", "poptorch.custom_ops", 1, outputs)[0]


def test_gathering_along_the_last_dimension_is_that_of_torch():
    data, index = torch.randn(3, 4, 6), torch.randint(0, 6, (3, 4, 2))
    assert torch.equal(gather_last_dim(data, index), torch.gather(data, -1, index))


@pytest.mark.parametrize("shape", [(3, 1, 6), (4, 6), (3, 4, 1, 6)])
def test_gathering_along_the_last_dimension_needs_indices_for_every_row(shape):
    with pytest.raises(poptorch.Error, match="all dimensions save the last must be those of the data"):
        gather_last_dim(torch.randn(3, 4, 6), torch.zeros(shape, dtype=torch.int64))
