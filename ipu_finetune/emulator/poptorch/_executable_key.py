# SPDX-License-Identifier: Apache-2.0
"""What decides whether an executable can be used again, in parts that tell a person what is different."""

import dataclasses
import enum
from typing import Any, Dict, Mapping, Optional

import torch
from torch import nn

from ... import __version__ as package_version
from ..device import nested
from ..device.optimizer_settings import OptimizerImage, kind_of
from ..device.plan import Plan
from ..device.program import Program
from ._version import __version__
from .options import Options

__all__ = ["parts_of"]

# What is streamed at run time, where files lie on the way, and who watches: nothing of it changes what is compiled.
_NOT_COMPILED = frozenset(
    (
        "random_seed",
        "log_dir",
        "connection_type",
        "ipu_id",
        "max_repeat_logs",
        "model_name",
        "relax_optimizer_checks",
        "show_compilation_progress_bar",
        "source_location_excludes",
        "use_model",
        "cachePath",
        "saveInitializersToFile",
        "enableEngineCaching",
        "distributed_process_id",
    )
)
# Told by the plan, whose names people know.
_IN_PLAN = frozenset(
    (
        "accumulation_and_replication_reduction_type",
        "anchored_tensors",
        "broadcast_buffers",
        "device_iterations",
        "gradient_accumulation",
        "input_cgt",
        "input_group_size",
        "meanAccumulationAndReplicationReductionStrategy",
        "num_distributed_processes",
        "output_mode",
        "output_return_period",
        "replication_factor",
    )
)
_TOLD_APART = frozenset(("seed", "strategy", "anchors", "groupings"))


def parts_of(
    program: Program,
    plan: Plan,
    arguments: Mapping[str, Any],
    options: Options,
    model: nn.Module,
    image: Optional[OptimizerImage],
) -> Dict[str, Any]:
    """Return the parts of an executable's key.

    Args:
        program: the traced model.
        plan: what it was traced with.
        arguments: the compiled inputs.
        options: the options in force.
        model: the user's module; facts that are also in the graph are named here for people.
        image: the optimizer.
    """
    tensors = [
        (path, leaf)
        for name, value in arguments.items()
        for path, leaf in nested.leaves(value, name)
        if isinstance(leaf, torch.Tensor)
    ]
    numbers = {name: plain(value) for name, value in vars(plan).items() if name not in _TOLD_APART}
    return {
        "graph": program.trace.fingerprint,
        "shapes": {path: list(tensor.shape) for path, tensor in tensors},
        "dtypes": {path: str(tensor.dtype).replace("torch.", "") for path, tensor in tensors},
        "dropout": _dropouts(model),
        "options": _options(options),
        "plan": {
            **numbers,
            "anchors": sorted(anchor.name for anchor in plan.anchors),
            "groupings": {name: plain(vars(grouping)) for name, grouping in plan.groupings},
        },
        "layout": [plain(dataclasses.asdict(segment)) for segment in program.trace.layout.segments],
        "optimizer": _optimizer(image),
        "version": {"poptorch": __version__, "ipu_finetune": package_version, "torch": torch.__version__},
    }


def _dropouts(model: nn.Module) -> Dict[str, float]:
    return {
        name: float(module.p)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training
    }


def _options(options: Options) -> Dict[str, Any]:
    """Return every option that is compiled in."""
    skipped = _NOT_COMPILED | _IN_PLAN
    return {name: plain(value) for name, value in options.toDict().items() if name not in skipped}


def _optimizer(image: Optional[OptimizerImage]) -> Any:
    if image is None:
        return None
    constants = [{name: plain(group.get(name)) for name in image.constants} for group in image.groups]
    return {
        "type": kind_of(image),
        "types": plain(image.all_types()),
        "constants": constants,
        "clipping": image.max_grad_norm is not None,
    }


def plain(value: Any) -> Any:
    """Return a value in a form that JSON has and that two runs agree on."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, torch.dtype):
        return str(value).replace("torch.", "")
    table = getattr(value, "__dict__", None)
    return {"type": type(value).__name__, **plain(table)} if table else type(value).__name__
