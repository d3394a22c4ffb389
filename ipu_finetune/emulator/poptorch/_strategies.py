# SPDX-License-Identifier: Apache-2.0
"""Stages, phases and the strategies that spread a model's blocks over IPUs."""

import dataclasses
from typing import Any, Dict, List, Optional, Tuple, Union

from ..device.errors import Error
from ..device.layout import BlockStage, ExplicitStages, StageRule
from .enums import AutoStage, Liveness

__all__ = [
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
]


# ---- stages and phases


class Stage:
    """Blocks that run together on one IPU."""

    def __init__(self, *block_ids: str) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise AssertionError(f"Block ids are supposed to be strings, got {block_ids}")
        self._blocks: List[str] = list(block_ids)
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Optional[int] = None

    def ipu(self, ipu: int) -> "Stage":
        """Place the stage on an IPU."""
        if not isinstance(ipu, int) or isinstance(ipu, bool) or ipu < 0:
            raise AssertionError(f"ipu must be the number of an IPU, got {ipu!r}")
        self._ipu = ipu
        return self

    @property
    def blocks(self) -> List[str]:
        """Ids of the stage's blocks."""
        return self._blocks

    def _setStage(self, stage: int) -> "Stage":
        self._stage_id = stage
        return self


def _as_stage(value: Any) -> Stage:
    if isinstance(value, Stage):
        return value
    if isinstance(value, str):
        return Stage(value)
    if isinstance(value, (list, tuple)):
        return Stage(*value)
    raise AssertionError(f"Expected a poptorch.Stage, block ids or a list of them, got {value!r}")


class Phase:
    """Stages that run at the same time, each on its IPU."""

    def __init__(self, *args: Any) -> None:
        strings = [arg for arg in args if isinstance(arg, str)]
        if strings and len(strings) != len(args):
            raise AssertionError(
                "All arguments must either be block IDs (strings) or Stages, got "
                f"{[type(arg).__name__ for arg in args]}"
            )
        self.stages: List[Stage] = [Stage(*strings)] if strings else [_as_stage(arg) for arg in args]

    def stage(self, index: int) -> Stage:
        """Return one stage."""
        return self.stages[index]

    def ipus(self, *ipus: int) -> "Phase":
        """Place the stages, one IPU each."""
        if len(ipus) != len(self.stages):
            raise AssertionError(f"Phase contains {len(self.stages)} stages but you provided {len(ipus)} ipus")
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)
        return self


# ---- strategies


class _ExecutionStrategy:
    """What `Options.setExecutionStrategy` takes; `rule()` tells the device how blocks get stages."""

    pipelined = False

    def __init__(self, stages: List[Stage], auto: AutoStage) -> None:
        self._auto = auto
        self._stages = stages
        self._by_block: Dict[str, Stage] = {}
        for stage in stages:
            for block in stage.blocks:
                if block in self._by_block:
                    raise AssertionError(f"{block} associated with more than one stage")
                self._by_block[block] = stage

    def stage(self, block_id: str) -> Stage:
        """Return the stage that a block belongs to."""
        if block_id not in self._by_block:
            raise AssertionError(f"Unknown block {block_id}, the blocks are: {sorted(self._by_block)}")
        return self._by_block[block_id]

    def rule(self) -> Union[StageRule, ExplicitStages]:
        """Return what assigns blocks during compilation."""
        if not self._stages:
            return StageRule(self._auto, self.pipelined)
        return ExplicitStages(
            {block: (stage._stage_id, stage._ipu) for block, stage in self._by_block.items()}, self.pipelined
        )


def _parse(args: Tuple[Any, ...]) -> Tuple[List[Stage], AutoStage]:
    if len(args) == 1 and isinstance(args[0], AutoStage):
        return [], args[0]
    stages = [_as_stage(arg) for arg in args]
    for index, stage in enumerate(stages):
        stage._setStage(index)
    return stages, AutoStage.SameAsIpu


class ShardedExecution(_ExecutionStrategy):
    """Stages run one after the other, one micro-batch at a time.

    Args:
        args: an `AutoStage`, or stages, block ids and lists of block ids in order.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*_parse(args))


class PipelinedExecution(ShardedExecution):
    """Stages run at the same time on consecutive micro-batches; results are those of running one after the other."""

    pipelined = True


@dataclasses.dataclass
class _PhasedStages(ExplicitStages):
    """Stages of phases: a stage's own IPU wins over its block's, and the phase decides where there is neither.

    Attributes:
        defaults: block -> IPU.
        phases: block -> number of its phase.
        parallel: phases alternate between even and odd IPUs.
    """

    defaults: Dict[str, int] = dataclasses.field(default_factory=dict)
    phases: Dict[str, int] = dataclasses.field(default_factory=dict)
    parallel: bool = False

    def assign(self, block: str, ipu_id: Optional[int]) -> BlockStage:
        """Return where a block runs."""
        place = super().assign(block, self.defaults[block] if ipu_id is None and block in self.defaults else ipu_id)
        if self.parallel and self.phases[block] % 2 != place.ipu % 2:
            raise Error(
                "When phases are executed in parallel: even phases must run on even IPUs and odd phases on odd IPUs, "
                f"but block {block} of phase {self.phases[block]} runs on IPU {place.ipu}"
            )
        return place


class _PhasedExecution(_ExecutionStrategy):
    _parallel = False

    def __init__(self, *phases: Any) -> None:
        if len(phases) == 1 and isinstance(phases[0], list) and all(isinstance(each, Phase) for each in phases[0]):
            phases = tuple(phases[0])
        if not phases or any(isinstance(phase, AutoStage) for phase in phases):
            raise AssertionError(
                "There is currently no AutoStage for PhasedExecution, please explicitly specify the phases"
            )
        self._phases = [phase if isinstance(phase, Phase) else _as_phase(phase) for phase in phases]
        stages = [stage for phase in self._phases for stage in phase.stages]
        for index, stage in enumerate(stages):
            stage._setStage(index)
        for index, phase in enumerate(self._phases):
            for stage in phase.stages:
                stage._phase_id = index
        super().__init__(stages, AutoStage.SameAsIpu)
        self._separate_backward = False
        self._liveness = Liveness.AlwaysLive

    def _default_ipu(self, phase: int, position: int) -> int:
        return position

    def rule(self) -> _PhasedStages:
        """Return what assigns blocks during compilation."""
        rule = _PhasedStages(
            {block: (stage._stage_id, stage._ipu) for block, stage in self._by_block.items()}, parallel=self._parallel
        )
        for number, phase in enumerate(self._phases):
            for position, stage in enumerate(phase.stages):
                for block in stage.blocks:
                    rule.phases[block] = number
                    rule.defaults[block] = self._default_ipu(number, position)
        return rule

    def phase(self, phase: int) -> Phase:
        """Return one phase."""
        if not isinstance(phase, int) or not 0 <= phase < len(self._phases):
            raise AssertionError(
                f"Phases are identified by positive integers: there are {len(self._phases)}, asked for {phase!r}"
            )
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> "_PhasedExecution":
        """Give the backward pass of the last phase a phase of its own."""
        if not isinstance(use, bool):
            raise AssertionError(f"useSeparateBackwardPhase takes a bool, got {use!r}")
        self._separate_backward = use
        return self


def _as_phase(value: Any) -> Phase:
    return Phase(*value) if isinstance(value, (list, tuple)) else Phase(value)


class SerialPhasedExecution(_PhasedExecution):
    """Phases run one after the other on the same IPUs."""

    def setTensorsLiveness(self, liveness: Liveness) -> "SerialPhasedExecution":
        """Set when a phase's tensors leave the chip; no effect on results."""
        if not isinstance(liveness, Liveness):
            raise AssertionError(f"Expected a poptorch.Liveness, got {liveness!r}")
        self._liveness = liveness
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Phases alternate between two groups of IPUs: even phases on even IPUs, odd ones on odd IPUs."""

    _parallel = True

    def _default_ipu(self, phase: int, position: int) -> int:
        return 2 * position + phase % 2

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> "ParallelPhasedExecution":
        """Let a phase's tensors leave the chip after the forward pass; no effect on results."""
        if not isinstance(off_chip, bool):
            raise AssertionError(f"sendTensorsOffChipAfterFwd takes a bool, got {off_chip!r}")
        self._liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self
