# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import OutputMode, OverlapMode, set_overlap_for_input, set_overlap_for_output

LOOP = OverlapMode.OverlapAccumulationLoop


def sharded(tiles=32, mode=OutputMode.All):
    opts = poptorch.Options()
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    if tiles:
        opts.TensorLocations.numIOTiles(tiles)
    opts.outputMode(mode)
    return opts


def run(forward, *inputs, options=None):
    class Model(torch.nn.Module):
        def forward(self, *args):
            return forward(*args)

    return poptorch.inferenceModel(Model(), options or sharded())(*(inputs or (torch.tensor([1.0]),)))


def both(x, mode=LOOP):
    return set_overlap_for_output(set_overlap_for_input(x, mode) + 1, mode)


def test_results_do_not_depend_on_overlap():
    assert run(both).item() == 2
    pair = (torch.ones(2), torch.zeros(2))
    found = run(lambda xs: set_overlap_for_output({"s": sum(set_overlap_for_input(xs, LOOP))}, LOOP), pair)
    assert found["s"].tolist() == [1, 1]


def test_outside_of_a_compiled_model_they_are_the_identity():
    x = torch.ones(2)
    assert set_overlap_for_input(x, LOOP) is x
    assert set_overlap_for_output(x, LOOP) is x


def test_gradients_pass_through():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            y = set_overlap_for_input(x, LOOP) * self.w
            return set_overlap_for_output(poptorch.identity_loss(y, "sum"), LOOP)

    model = Model()
    poptorch.trainingModel(model, sharded(), poptorch.optim.SGD(model.parameters(), lr=0.5))(torch.tensor([3.0]))
    assert model.w.item() == 1 - 0.5 * 3


# ---- what may be marked


def test_an_input_may_have_no_other_use():
    for other in (lambda x: x + 1, lambda x: x):
        with pytest.raises(
            poptorch.Error, match=r"set_overlap_for_input must be the only op .* for input 0 to the model"
        ):
            run(lambda x, other=other: (other(x), set_overlap_for_input(x, LOOP)))
    with pytest.raises(poptorch.Error, match="for input 1 to the model"):
        run(lambda x, y: (set_overlap_for_input(x, LOOP), y * 2, set_overlap_for_input(y, LOOP)), *torch.ones(2, 1))


def test_only_an_input_can_be_marked_as_one():
    with pytest.raises(poptorch.Error, match="set_overlap_for_input applied on a node which is not a tensor input"):
        run(lambda x: set_overlap_for_input(x + 1, LOOP))


def test_only_an_output_can_be_marked_as_one():
    with pytest.raises(poptorch.Error, match="set_overlap_for_output applied on a node which is not a tensor output"):
        run(lambda x: set_overlap_for_output(x + 1, LOOP).mean())


def test_an_output_may_be_used_but_not_returned_twice():
    def reused(x):
        y = x + 1
        return set_overlap_for_output(y, LOOP), y * 2

    assert [value.item() for value in run(reused)] == [2, 4]

    def twice(x):
        y = x + 1
        return y, [set_overlap_for_output(y, LOOP)]

    with pytest.raises(poptorch.Error, match="cannot be used with a tensor that is returned twice"):
        run(twice)


@pytest.mark.parametrize("function", [set_overlap_for_input, set_overlap_for_output])
def test_the_arguments_are_checked(function):
    with pytest.raises(poptorch.Error, match="OverlapMode"):
        function(torch.ones(1), "no_overlap")
    with pytest.raises(poptorch.Error, match="You may only set overlap for torch.tensor"):
        function([torch.ones(1), 3], LOOP)


# ---- what the options must say


def test_a_pipelined_model_is_refused():
    opts = poptorch.Options()
    opts.TensorLocations.numIOTiles(32)
    with pytest.raises(poptorch.Error, match=r"not supported with poptorch\.PipelinedExecution.*ShardedExecution"):
        run(both, options=opts)


def test_io_tiles_are_needed():
    with pytest.raises(poptorch.Error, match=r"No IO tiles allocated.*at least 32.*numIOTiles"):
        run(both, options=sharded(tiles=0))


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.Sum])
def test_the_output_mode_must_be_all_or_sum(mode):
    if mode == OutputMode.Sum:
        assert run(both, options=sharded(mode=mode)).item() == 2
        return
    with pytest.raises(poptorch.Error, match=r"Unsupported output mode for overlapped IO.*OutputMode\.All"):
        run(both, options=sharded(mode=mode))


def test_marks_without_overlap_need_none_of_it():
    assert run(lambda x: both(x, OverlapMode.NoOverlap), options=poptorch.Options()).item() == 2
