# SPDX-License-Identifier: Apache-2.0
"""Blocks, stages and execution strategies: how a model is spread over IPUs."""

import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from torch import nn

from ..device.errors import Error
from ..device.layout import ExplicitStages, StageRule
from ..device.state import current
from .enums import AutoStage, Liveness

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "removeBlocks",
]


def _begin(user_id: Optional[str], ipu_id: Optional[int]) -> None:
    if current.tracer is not None:
        current.tracer.begin_block(user_id, ipu_id)


# ---- blocks


class _BlockHook:
    """A forward pre-hook that begins a block."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        _begin(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def _check_ids(user_id: Any, ipu_id: Any) -> None:
    if user_id is not None and not isinstance(user_id, str):
        raise AssertionError(f"user_id must be a string, got {user_id!r}")
    if ipu_id is not None and (not isinstance(ipu_id, int) or isinstance(ipu_id, bool) or ipu_id < 0):
        raise AssertionError(f"ipu_id must be the number of an IPU, got {ipu_id!r}")


class LegacyBeginBlockFn:
    """A function that begins a block when it is called."""

    def __init__(self, function: Callable[..., Any], user_id: Optional[str] = None, ipu_id: Optional[int] = None):
        _check_ids(user_id, ipu_id)
        functools.update_wrapper(self, function, updated=())
        self._function, self._user_id, self._ipu_id = function, user_id, ipu_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the block and call the function."""
        _begin(self._user_id, self._ipu_id)
        return self._function(*args, **kwargs)


def BeginBlock(
    layer_to_call: Union[nn.Module, Callable[..., Any]],
    user_id: Optional[str] = None,
    ipu_id: Optional[int] = None,
) -> Any:
    """Let a block begin with this layer; it lasts until the next block.

    Args:
        layer_to_call: a module, which is returned as it is, or a function.
        user_id: name of the block; without one, blocks are numbered in the order in which they run.
        ipu_id: the IPU that holds it.

    Raises:
        Error: the module already begins a block, or is neither module nor function.
    """
    _check_ids(user_id, ipu_id)
    if isinstance(layer_to_call, nn.Module):
        if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
            raise Error("module has already been assigned to a block.")
        layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
        return layer_to_call
    if callable(layer_to_call) and not isinstance(layer_to_call, type):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    raise Error(f"module is not an instance of torch.nn.Module or function: {layer_to_call!r}.")


def removeBlocks(module: nn.Module) -> None:
    """Remove every block that `BeginBlock` has put on the module or below it."""
    if not isinstance(module, nn.Module):
        raise AssertionError(f"removeBlocks takes a torch.nn.Module, got {type(module).__name__}")
    for child in module.modules():
        hooks = child._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _BlockHook)]:
            del hooks[key]


class Block(nn.Module):
    """A block as a context manager: `with poptorch.Block("encoder", ipu_id=1): ...`."""

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        _check_ids(user_id, ipu_id)
        self._user_id, self._ipu_id = user_id, ipu_id

    def __enter__(self) -> "Block":
        _begin(self._user_id, self._ipu_id)
        return self

    def __exit__(self, *_: Any) -> None:
        if current.tracer is not None:
            current.tracer.end_block()

    @staticmethod
    def useAutoId() -> None:
        """Number blocks from zero again; every compilation does so by itself."""
        if current.tracer is not None:
            current.tracer._auto_id = 0

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Begin a block that lasts until the next one."""
        _check_ids(user_id, ipu_id)
        _begin(user_id, ipu_id)


class BlockFunction:
    """A decorator that puts a function's body into a block."""

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        _check_ids(user_id, ipu_id)
        self._user_id, self._ipu_id = user_id, ipu_id

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, in its block."""

        @functools.wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            with Block(self._user_id, self._ipu_id):
                return function(*args, **kwargs)

        return in_block


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
            raise AssertionError("A Phase is made either of block ids or of stages")
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
                if self._by_block.get(block, stage) is not stage:
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


class _PhasedExecution(_ExecutionStrategy):
    def __init__(self, *phases: Any) -> None:
        if any(isinstance(phase, AutoStage) for phase in phases):
            raise AssertionError("There is currently no AutoStage for PhasedExecution: list the phases.")
        self._phases = [phase if isinstance(phase, Phase) else _as_phase(phase) for phase in phases]
        self._check_phases()
        for index, stage in enumerate(self._all_stages()):
            stage._setStage(index)
        for index, phase in enumerate(self._phases):
            for position, stage in enumerate(phase.stages):
                stage._phase_id = index
                if stage._ipu is None:
                    stage._ipu = self._default_ipu(index, position)
        super().__init__(list(self._all_stages()), AutoStage.SameAsIpu)
        self._separate_backward = False

    def _check_phases(self) -> None:
        if not self._phases:
            raise AssertionError("A phased strategy needs at least one phase")

    def _all_stages(self) -> Iterator[Stage]:
        for phase in self._phases:
            yield from phase.stages

    def _default_ipu(self, phase: int, position: int) -> int:
        return position

    def phase(self, phase: int) -> Phase:
        """Return one phase."""
        if not 0 <= phase < len(self._phases):
            raise AssertionError(f"There are {len(self._phases)} phases, asked for {phase}")
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> "_PhasedExecution":
        """Give the backward pass of the last phase a phase of its own."""
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

    def _default_ipu(self, phase: int, position: int) -> int:
        return 2 * position + phase % 2

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> "ParallelPhasedExecution":
        """Let a phase's tensors leave the chip after the forward pass; no effect on results."""
        self._off_chip = off_chip
        return self
