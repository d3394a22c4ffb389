# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.poptorch import (
    AutoStage,
    BeginBlock,
    Block,
    Liveness,
    ParallelPhasedExecution,
    Phase,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)


def segments(forward, strategy):
    """(ipu, blocks) of every segment of a compiled function."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return forward(x)

    opts = options(autoRoundNumIPUs=True, setExecutionStrategy=strategy)
    executor = poptorch.inferenceModel(Model(), opts)
    executor.compile(torch.ones(2))
    return [(segment.ipu, segment.blocks) for segment in executor.emulation.layout.segments]


def increment():
    return ShardedExecution(AutoStage.AutoIncrement)


# ---- names


def test_a_layer_that_comes_back_keeps_its_number():
    layer = BeginBlock(torch.nn.Linear(2, 2), ipu_id=0)
    double = BeginBlock(lambda x: x * 2, ipu_id=1)
    for _ in range(2):  # and every compilation numbers anew
        assert segments(lambda x: double(layer(double(layer(x)))), increment()) == [
            (0, ["0"]),
            (1, ["1"]),
            (0, ["0"]),
            (1, ["1"]),
        ]


def test_contexts_without_a_name_are_all_different():
    def forward(x):
        for _ in range(2):
            with Block(ipu_id=0):
                x = x + 1
            with Block("named", ipu_id=1):
                x = x + 1
        return x

    assert segments(forward, increment()) == [(0, ["0"]), (1, ["named"]), (0, ["1"]), (1, ["named"])]


def test_numbering_can_begin_again():
    def forward(x):
        Block.start(ipu_id=0)
        x = x + 1
        Block.useAutoId()
        Block.start(ipu_id=1)
        return x + 1

    # the same name is the same block, whose first place counts
    assert segments(forward, increment()) == [(0, ["0", "0"])]


def test_a_block_function_keeps_its_name_and_arguments():
    @poptorch.BlockFunction("f", ipu_id=2)
    def scaled(x, *, by):
        """Scale."""
        return x * by

    assert scaled.__doc__ == "Scale."
    assert scaled(torch.ones(1), by=3).item() == 3
    assert segments(lambda x: scaled(x, by=3), increment()) == [(2, ["f"])]


def test_an_exception_in_a_block_is_the_one_that_is_seen():
    def forward(x):
        with Block("a", ipu_id=0):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        segments(forward, increment())


# ---- phases


def four_blocks(ipus):
    def forward(x):
        for name, ipu in zip("abcd", ipus):
            with Block(name, ipu_id=ipu):
                x = x + 1
        return x

    return forward


def test_the_ipu_of_a_stage_wins_over_that_of_its_block():
    strategy = SerialPhasedExecution(Stage("a"), Stage("b"), Stage("c"), Stage("d"))
    strategy.stage("b").ipu(1)
    assert [ipu for ipu, _ in segments(four_blocks([3, 3, 2, None]), strategy)] == [3, 1, 2, 0]


def test_parallel_phases_alternate_between_even_and_odd_ipus():
    stages = lambda: ([Stage("a"), Stage("b")], [Stage("c"), Stage("d")])  # noqa: E731
    assert [ipu for ipu, _ in segments(four_blocks([None] * 4), ParallelPhasedExecution(*stages()))] == [0, 2, 1, 3]
    assert [ipu for ipu, _ in segments(four_blocks([2, 0, 3, 1]), ParallelPhasedExecution(*stages()))] == [2, 0, 3, 1]
    strategy = ParallelPhasedExecution(*stages())
    strategy.phase(0).ipus(0, 1)
    with pytest.raises(poptorch.Error, match="even phases must run on even IPUs .* block b of phase 0 runs on IPU 1"):
        segments(four_blocks([None] * 4), strategy)


@pytest.mark.parametrize(
    ("phases", "blocks"),
    [
        ([Phase("a", "b"), Phase("c")], [[["a", "b"]], [["c"]]]),
        ([Stage("a"), Stage("b", "c")], [[["a"]], [["b", "c"]]]),
        ([[Stage("a"), Stage("b")], [Stage("c")]], [[["a"], ["b"]], [["c"]]]),
        ([["a", "b"], ["c"]], [[["a", "b"]], [["c"]]]),
        (["a", "b", "c"], [[["a"]], [["b"]], [["c"]]]),
    ],
)
def test_phases_can_be_given_in_many_ways(phases, blocks):
    strategy = SerialPhasedExecution(*phases)
    found = [[stage.blocks for stage in strategy.phase(i).stages] for i in range(len(blocks))]
    assert found == blocks


def test_phases_are_checked():
    with pytest.raises(AssertionError, match="explicitly specify the phases"):
        SerialPhasedExecution()
    with pytest.raises(AssertionError, match="a associated with more than one stage"):
        SerialPhasedExecution("a", ["b", "a"])
    with pytest.raises(AssertionError, match="block IDs .* or Stages"):
        Phase("a", Stage("b"))
    strategy = SerialPhasedExecution("a")
    with pytest.raises(AssertionError, match="positive integers"):
        strategy.phase(-1)
    for call in (
        lambda: strategy.setTensorsLiveness(1),
        lambda: strategy.useSeparateBackwardPhase(1),
        lambda: ParallelPhasedExecution("a").sendTensorsOffChipAfterFwd("yes"),
        lambda: Stage("a").ipu("0"),
    ):
        with pytest.raises(AssertionError):
            call()
    assert strategy.setTensorsLiveness(Liveness.OffChipAfterFwd).useSeparateBackwardPhase() is strategy
