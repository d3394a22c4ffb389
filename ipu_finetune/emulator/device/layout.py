# SPDX-License-Identifier: Apache-2.0
"""Which part of the model lies on which IPU, found by running it once, and the rules a layout must keep.

Operations before the first block belong to stage 0 on IPU 0. A block lasts until the next one begins; consecutive
blocks on one IPU form one pipeline stage. A model with F forward stages has 2F - 1 stages in training.
"""

import dataclasses
from typing import Any, Dict, List, Optional

from .enums import AutoStage
from .errors import Error
from .plan import Plan

__all__ = ["BlockStage", "ExplicitStages", "Layout", "LayoutTracer", "StageRule", "reserve_ipus"]

MAX_IPUS = 64


@dataclasses.dataclass(frozen=True)
class BlockStage:
    """Where one block runs."""

    block: str
    stage: int
    ipu: int


class StageRule:
    """Gives each new block its stage and IPU; `AutoStage` decides how."""

    def __init__(self, auto: AutoStage, pipelined: bool = False) -> None:
        self.auto = auto
        self.pipelined = pipelined
        self._next = 0

    def fresh(self) -> "StageRule":
        """Return a rule that has assigned nothing yet."""
        return StageRule(self.auto, self.pipelined)

    def assign(self, block: str, ipu_id: Optional[int]) -> BlockStage:
        """Return the stage of a block that begins for the first time."""
        if self.auto == AutoStage.SameAsIpu:
            if ipu_id is None:
                raise AssertionError(
                    f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {block}"
                )
            return BlockStage(block, ipu_id, ipu_id)
        self._next += 1
        return BlockStage(block, self._next, self._next if ipu_id is None else ipu_id)


@dataclasses.dataclass
class ExplicitStages:
    """Stages listed by the user: block -> (stage, IPU or None)."""

    stages: Dict[str, Any]
    pipelined: bool = False

    def fresh(self) -> "ExplicitStages":
        """Return itself: nothing is counted."""
        return self

    def assign(self, block: str, ipu_id: Optional[int]) -> BlockStage:
        """Return the stage that lists the block; the stage's own IPU wins over the block's."""
        if block not in self.stages:
            raise Error(f"Unknown Block '{block}' list of expected Blocks: {sorted(self.stages)}")
        stage, ipu = self.stages[block]
        if ipu is None:
            ipu = stage if ipu_id is None else ipu_id
        return BlockStage(block, stage, ipu)


@dataclasses.dataclass
class Segment:
    """A run of operations on one stage."""

    stage: int
    ipu: int
    blocks: List[str]
    operations: int = 0


class LayoutTracer:
    """Follows the blocks of one traced forward pass."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule.fresh()
        self._assigned: Dict[str, BlockStage] = {}
        self._segments: List[Segment] = []
        self._active: Optional[BlockStage] = None
        self._closed = False
        self._auto_id = 0

    def begin_block(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        """A block starts here; without an id it gets the next number."""
        if user_id is None:
            user_id, self._auto_id = str(self._auto_id), self._auto_id + 1
        if user_id not in self._assigned:
            self._assigned[user_id] = self._rule.assign(user_id, ipu_id)
        self._enter(self._assigned[user_id])

    def _enter(self, place: BlockStage) -> None:
        self._active, self._closed = place, False
        last = self._segments[-1] if self._segments else None
        if last is not None and last.ipu == place.ipu and (last.stage == place.stage or last.operations == 0):
            if place.block:
                last.blocks.append(place.block)
            last.stage = place.stage
        else:
            self._segments.append(Segment(place.stage, place.ipu, [place.block] if place.block else []))

    def end_block(self) -> None:
        """The innermost `Block` context ends: what follows must lie in another one."""
        self._active, self._closed = None, True

    def operation(self) -> None:
        """One operation runs in the active block."""
        if self._active is None:
            if self._closed:
                raise Error("No active Block, all the ops must belong to a Block")
            self._enter(BlockStage("", 0, 0))
        self._segments[-1].operations += 1

    def place(self) -> Dict[str, Any]:
        """Return where the last operation lies: its segment's index, stage and IPU."""
        if not self._segments:
            return {}
        last = self._segments[-1]
        return {"segment": len(self._segments) - 1, "stage": last.stage, "ipu": last.ipu}

    def layout(self) -> "Layout":
        """Return what was found."""
        return Layout([segment for segment in self._segments if segment.operations or segment.blocks])


class Layout:
    """The segments of a compiled model in the order in which they run.

    Attributes:
        segments: runs of operations with their stage, IPU and blocks.
    """

    def __init__(self, segments: List[Segment]) -> None:
        self.segments = segments

    @property
    def forward_stages(self) -> int:
        """F: one more than the number of times that the data moves to another IPU."""
        ipus = [segment.ipu for segment in self.segments] or [0]
        return 1 + sum(1 for before, after in zip(ipus, ipus[1:]) if before != after)

    @property
    def ipus(self) -> int:
        """IPUs of one replica: as many as are named, and at least the highest number plus one."""
        used = {segment.ipu for segment in self.segments} or {0}
        return max(len(used), max(used) + 1)

    def check_pipeline(self, plan: Plan) -> None:
        """Raise if a pipelined model has too few micro-batches to fill its stages, or stages out of order."""
        stages = self.forward_stages
        if plan.training and plan.accumulation < 2 * stages - 1:
            raise Error(
                "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of "
                f"pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution. Please note that a model "
                f"with {stages} pipeline stages in PopTorch will have an additional {stages - 1} stages when "
                f"training. It is {plan.accumulation}."
            )
        if not plan.training and plan.device_iterations < stages:
            raise Error(
                "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages "
                f"({stages}) when using poptorch.PipelinedExecution; it is {plan.device_iterations}."
            )
        order = [segment.stage for segment in self.segments]
        for before, after in zip(order, order[1:]):
            if after < before:
                raise Error(
                    f"Pipeline stages must ascend, but stage {after} runs after stage {before}: give the blocks that "
                    "return to an earlier IPU their own stage, for example with poptorch.AutoStage.AutoIncrement."
                )


def reserve_ipus(per_replica: int, replicas: int, round_up: bool, enforce: bool = True) -> int:
    """Return how many IPUs must be reserved for a model.

    Args:
        per_replica: IPUs that one replica uses.
        replicas: copies in this process.
        round_up: `Options.autoRoundNumIPUs`.
        enforce: False on the IPU model, where any number can be had.

    Raises:
        Error: the number is not a power of two, or above 64.
    """
    used = per_replica * replicas
    if used > MAX_IPUS:
        raise Error(
            f"Too many IPUs requested ({used}). Experiments that need more than {MAX_IPUS} IPUs require distributed "
            "execution."
        )
    reserved = 1 << (used - 1).bit_length()
    if reserved != used and enforce and not round_up:
        raise Error(
            f"{per_replica} IPUs x {replicas} replicas: The model specifies the use of {used} IPUs, however PopTorch "
            f"must reserve a minimum of {reserved} in order to allow the model to run, because PopTorch must reserve a "
            "power of 2 or maximum of 64 IPUs per process. Please reconfigure your model to use a different number of "
            "IPUs or set poptorch.Options().autoRoundNumIPUs(True)."
        )
    return reserved if enforce else used
