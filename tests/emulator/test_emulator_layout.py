# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import AutoStage, BeginBlock, Block, PipelinedExecution, ShardedExecution, Stage


class Layers(torch.nn.Module):
    """A row of linear layers, each in a block on the IPU given."""

    def __init__(self, ipus, names=True, loss=True):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in ipus)
        self.loss = loss
        for index, (layer, ipu) in enumerate(zip(self.layers, ipus)):
            BeginBlock(layer, f"b{index}" if names else None, ipu_id=ipu)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return poptorch.identity_loss(x, "sum") if self.loss else x


def compile_(model, training=False, strategy=None, D=1, A=1, R=1, auto_round=True):
    opts = options(D, A, R, autoRoundNumIPUs=auto_round)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    executor = poptorch.trainingModel(model, opts) if training else poptorch.inferenceModel(model, opts)
    executor.compile(torch.zeros(D * A * R, 2))
    return executor


def table(model, strategy):
    """(stage, ipu, blocks) of every segment, from a sharded compilation."""
    segments = compile_(model, strategy=strategy).emulation.layout.segments
    return [(segment.stage, segment.ipu, segment.blocks) for segment in segments]


# ---- stages


def test_auto_increment_counts_blocks_from_one_and_keeps_their_ipu():
    assert table(Layers([0, 0, 3], loss=False), ShardedExecution(AutoStage.AutoIncrement)) == [
        (1, 0, ["b0"]),
        (2, 0, ["b1"]),
        (3, 3, ["b2"]),
    ]


def test_auto_increment_without_ipus_uses_the_stage_number():
    assert table(Layers([None, None], loss=False), ShardedExecution(AutoStage.AutoIncrement)) == [
        (1, 1, ["b0"]),
        (2, 2, ["b1"]),
    ]


def test_same_as_ipu_merges_blocks_on_one_ipu():
    found = [(stage, ipu) for stage, ipu, _ in table(Layers([0, 0, 1], loss=False), ShardedExecution())]
    assert found == [(0, 0), (1, 1)]


def test_same_as_ipu_needs_an_ipu():
    with pytest.raises(AssertionError, match="no IPU was specified for block b0"):
        table(Layers([None]), ShardedExecution(AutoStage.SameAsIpu))


def test_blocks_without_a_name_are_numbered_as_they_run():
    blocks = [blocks for _, _, blocks in table(Layers([0, 1], names=False), ShardedExecution(AutoStage.AutoIncrement))]
    assert blocks == [["0"], ["1"]]


def test_operations_before_the_first_block_are_on_stage_0_and_ipu_0():
    class Before(Layers):
        def forward(self, x):
            return super().forward(x * 2)

    assert table(Before([2], loss=False), ShardedExecution(AutoStage.AutoIncrement)) == [(0, 0, []), (1, 2, ["b0"])]


def test_explicit_stages_number_in_order_and_their_ipu_wins():
    strategy = ShardedExecution(Stage("b0").ipu(3), ["b1", "b2"])
    assert [row[:2] for row in table(Layers([0, 1, 1], loss=False), strategy)] == [(0, 3), (1, 1)]


def test_a_block_that_no_stage_lists_is_refused():
    with pytest.raises(poptorch.Error, match="Unknown Block 'b1' list of expected Blocks"):
        table(Layers([0, 1]), ShardedExecution("b0"))


def test_a_block_in_two_stages_is_refused():
    with pytest.raises(AssertionError, match="b0 associated with more than one stage"):
        ShardedExecution("b0", Stage("b0"))


def test_asking_a_strategy_for_an_unknown_block_is_refused():
    strategy = PipelinedExecution("b0", "b1")
    assert strategy.stage("b1")._stage_id == 1
    with pytest.raises(AssertionError, match="Unknown block b9"):
        strategy.stage("b9")


# ---- pipelines


@pytest.mark.parametrize(("ipus", "stages"), [([0], 1), ([0, 1], 2), ([0, 1, 1, 2], 3), ([0, 1, 0], 3)])
def test_training_needs_a_micro_batch_per_forward_and_backward_stage(ipus, stages):
    needed = 2 * stages - 1
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    assert compile_(Layers(ipus), True, strategy, A=needed).emulation.layout.forward_stages == stages
    if needed > 1:
        with pytest.raises(poptorch.Error, match=rf"number of pipeline stages \({needed}\).*It is {needed - 1}"):
            compile_(Layers(ipus), True, strategy, A=needed - 1)


def test_inference_needs_an_iteration_per_stage():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    compile_(Layers([0, 1, 2]), False, strategy, D=3)
    with pytest.raises(poptorch.Error, match=r"deviceIterations must be .* stages \(3\)"):
        compile_(Layers([0, 1, 2]), False, strategy, D=2)


def test_sharded_execution_needs_no_filling():
    compile_(Layers([0, 1, 2]), True, ShardedExecution(AutoStage.AutoIncrement), A=1)


def test_pipeline_stages_must_ascend():
    with pytest.raises(poptorch.Error, match="must ascend"):
        compile_(Layers([0, 1, 0]), True, PipelinedExecution(), A=5)


# ---- the number of IPUs


@pytest.mark.parametrize(("ipus", "R", "reserved"), [([0], 1, 1), ([0, 1], 2, 4), ([0, 1, 2], 1, 4), ([0, 5], 1, 8)])
def test_ipus_are_reserved_in_powers_of_two(ipus, R, reserved):
    assert compile_(Layers(ipus), strategy=ShardedExecution(), R=R).emulation.ipus == reserved


def test_another_number_of_ipus_needs_rounding_to_be_allowed():
    with pytest.raises(poptorch.Error, match=r"use of 3 IPUs.*minimum of 4.*autoRoundNumIPUs\(True\)"):
        compile_(Layers([0, 1, 2]), strategy=ShardedExecution(), auto_round=False)


def test_more_than_64_ipus_are_refused():
    compile_(Layers([0, 1]), strategy=ShardedExecution(), R=32)
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(66\)"):
        compile_(Layers([0, 1]), strategy=ShardedExecution(), R=33)


def test_the_ipu_model_takes_any_number(monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert compile_(Layers([0, 1, 2]), strategy=ShardedExecution(), auto_round=False).emulation.ipus == 3


# ---- blocks


def test_a_module_begins_one_block_only():
    layer = BeginBlock(torch.nn.Linear(2, 2), "a", ipu_id=0)
    assert isinstance(layer, torch.nn.Linear)
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        BeginBlock(layer, "b", ipu_id=1)
    poptorch.removeBlocks(layer)
    BeginBlock(layer, "b", ipu_id=1)


def test_removing_blocks_reaches_every_layer_and_leaves_other_hooks():
    model = Layers([0, 1])
    seen = []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append(1))
    poptorch.removeBlocks(model)
    strategy = ShardedExecution(AutoStage.AutoIncrement)
    assert [row[:2] for row in table(model, strategy)] == [(0, 0)]
    assert seen


def test_a_deep_copy_keeps_its_blocks():
    strategy = ShardedExecution(AutoStage.AutoIncrement)
    assert [row[:2] for row in table(copy.deepcopy(Layers([0, 1], loss=False)), strategy)] == [(1, 0), (2, 1)]


def test_only_modules_and_functions_begin_blocks():
    with pytest.raises(poptorch.Error, match=r"not an instance of torch\.nn\.Module or function"):
        BeginBlock(3)


def test_a_function_can_begin_a_block():
    class Model(torch.nn.Module):
        def forward(self, x):
            return BeginBlock(torch.tanh, "f", ipu_id=1)(x)

    assert table(Model(), ShardedExecution(AutoStage.AutoIncrement)) == [(1, 1, ["f"])]


def test_block_contexts_functions_and_start():
    @poptorch.BlockFunction("function", ipu_id=1)
    def doubled(x):
        return x * 2

    class Model(torch.nn.Module):
        def forward(self, x):
            with Block("context", ipu_id=0):
                x = x + 1
            x = doubled(x)
            Block.start("rest", ipu_id=2)
            return x + 1

    assert table(Model(), ShardedExecution(AutoStage.AutoIncrement)) == [
        (1, 0, ["context"]),
        (2, 1, ["function"]),
        (3, 2, ["rest"]),
    ]


def test_an_operation_after_a_block_context_must_be_in_a_block():
    class Model(torch.nn.Module):
        def forward(self, x):
            with Block("context", ipu_id=0):
                x = x + 1
            return x + 1

    with pytest.raises(poptorch.Error, match="No active Block"):
        table(Model(), ShardedExecution(AutoStage.AutoIncrement))


def test_blocks_do_nothing_outside_of_a_compiled_model():
    model = Layers([0, 1], loss=False)
    with Block("a", ipu_id=3):
        assert model(torch.zeros(1, 2)).shape == (1, 2)


def test_phased_strategies_run_with_the_same_numbers():
    model = Layers([None, None], loss=False)
    expected = model(torch.ones(1, 2))
    for kind in (poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution):
        strategy = kind(["b0"], ["b1"])
        executor = compile_(model, strategy=strategy)
        torch.testing.assert_close(executor(torch.ones(1, 2)), expected.detach())
    assert [segment.ipu for segment in executor.emulation.layout.segments] == [0, 1]
    with pytest.raises(AssertionError, match="no AutoStage for PhasedExecution"):
        poptorch.SerialPhasedExecution(AutoStage.AutoIncrement)


def test_a_phase_needs_an_ipu_per_stage():
    phase = poptorch.Phase(Stage("a"), Stage("b"))
    assert [stage._ipu for stage in phase.ipus(1, 3).stages] == [1, 3]
    with pytest.raises(AssertionError, match="contains 2 stages but you provided 1"):
        phase.ipus(0)
