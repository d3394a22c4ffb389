# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the device: a copy of the user's settings, the state, and the update itself.

The Python optimizer's `step` never runs. Its settings are copied when the model is wrapped and at each `setOptimizer`;
changing them in between has no effect, as on an IPU.
"""

import dataclasses
import logging
import math
from typing import Any, Dict, List, Optional

import torch

from .errors import Error
from .gradients import GradientBook
from .plan import Plan
from .rng import DeviceRandom
from .rounding import stochastic_half
from .rules import RULES, SLOTS, State
from .scaling import LossScale
from .weights import Weight, WeightStore

__all__ = ["DeviceOptimizer", "OptimizerImage"]

_logger = logging.getLogger("ipu_finetune.emulator")


@dataclasses.dataclass
class OptimizerImage:
    """What is copied from a Python optimizer.

    Attributes:
        rule: a key of `RULES`.
        groups: hyperparameters per parameter group.
        members: the parameters of each group.
        constants: names of hyperparameters that are compiled in and may not change.
        types: accumulator dtypes by kind: `gradient`, `first`, `second`, `third`.
    """

    rule: str
    groups: List[Dict[str, Any]]
    members: List[List[torch.Tensor]]
    constants: List[str]
    loss_scaling: float = 1.0
    max_grad_norm: Optional[float] = None
    types: Dict[str, torch.dtype] = dataclasses.field(default_factory=dict)

    def type_of(self, kind: str) -> torch.dtype:
        """The dtype in which this kind of accumulator is stored."""
        return self.types.get(kind, torch.float32)


class DeviceOptimizer:
    """Optimizer settings and state on the device."""

    def __init__(self, image: OptimizerImage, weights: WeightStore, plan: Plan) -> None:
        self._weights = weights
        self._plan = plan
        self.states: Dict[str, State] = {}
        self.scale = LossScale(image.loss_scaling, plan.auto_loss_scaling)
        # Loss scale that fp16 first-order state is stored with: it would underflow otherwise, like the gradients.
        self._state_scale = self.scale.value
        self._groups: Dict[str, int] = {}
        self.image = image
        self._assign_groups()

    def replace(self, image: OptimizerImage) -> None:
        """Take new settings (`setOptimizer`).

        Raises:
            Error: something that is compiled in has changed.
        """
        old = self.image
        if (image.rule, image.types) != (old.rule, old.types):
            raise Error(
                f"The optimizer was compiled as {old.rule} with {_names(old.types)}, but is now {image.rule} with "
                f"{_names(image.types)}. The kind of optimizer and its accumulator types are part of the compiled "
                "model: call destroy() first."
            )
        if len(image.groups) != len(old.groups):
            raise Error(
                f"The optimizer was compiled with {len(old.groups)} parameter groups, but now has "
                f"{len(image.groups)}: call destroy() first."
            )
        for index, (group, was) in enumerate(zip(image.groups, old.groups)):
            for name in old.constants:
                if group.get(name) != was.get(name):
                    raise Error(
                        f"'{name}' of parameter group {index} was compiled as the constant {was.get(name)} and cannot "
                        f"become {group.get(name)}: mark it with variable_attrs.markAsVariable('{name}') before "
                        "compilation, or call destroy() first."
                    )
        self.image = image
        if image.loss_scaling != self.scale.base:
            self.scale.base = float(image.loss_scaling)
        self._assign_groups()

    def _assign_groups(self) -> None:
        group_of = {id(tensor): index for index, members in enumerate(self.image.members) for tensor in members}
        self._groups = {}
        left_out = []
        matched = set()
        for weight in self._weights.parameters():
            for tensor in (weight.tensor, self._weights.today(weight)):
                if tensor is not None and id(tensor) in group_of:
                    self._groups[weight.name] = group_of[id(tensor)]
                    matched.add(id(tensor))
                    break
            else:
                if weight.tensor.requires_grad:
                    left_out.append(weight.name)
        strangers = len(group_of) - len(matched)
        if left_out and strangers:
            _logger.warning(
                "%d trainable parameters are not in the optimizer and will not be updated (%s), while %d parameters "
                "of the optimizer are not in the model: was the optimizer made before the model's layers were "
                "replaced? Make it afterwards.",
                len(left_out),
                ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else ""),
                strangers,
            )

    def trained(self) -> List[Weight]:
        """The parameters that are updated."""
        return [weight for weight in self._weights.parameters() if weight.name in self._groups]

    # ---- the update

    def apply(self, book: GradientBook, random: DeviceRandom) -> None:
        """Update every parameter that took part; gradients are freed one by one."""
        multiplier = self._multiplier(book)
        self._rescale_state()
        for weight, gradient in book.totals():
            if weight.name in self._groups:
                self._update(weight, gradient, multiplier, random)
            book.forget(weight)
        book.clear()

    def _multiplier(self, book: GradientBook) -> float:
        """Return what turns an accumulated gradient into the one that the optimizer sees."""
        plan = self._plan
        multiplier = 1.0 / self.scale.value
        if plan.reduction.name == "Mean":
            multiplier /= plan.processes * (1 if plan.running_mean else plan.accumulation * plan.replicas)
        limit = self.image.max_grad_norm
        if limit:
            squares = sum(float(g.norm(dtype=torch.float32)) ** 2 for _, g in book.totals())
            multiplier *= min(1.0, limit / (math.sqrt(squares) * multiplier + 1e-6))
        return multiplier

    def _update(self, weight: Weight, gradient: torch.Tensor, multiplier: float, random: DeviceRandom) -> None:
        image = self.image
        stored = weight.device
        assert stored is not None
        state = self.states.setdefault(weight.name, State())
        state.step += 1
        work = torch.float64 if stored.dtype == torch.float64 else torch.float32
        parameter = stored.to(work)  # the stored tensor itself when it is fp32
        gradient = gradient.to(work)
        if multiplier != 1.0:
            gradient = gradient.mul_(multiplier)
        narrow = {
            slot: image.type_of(kind)
            for slot, kind in SLOTS[image.rule].items()
            if image.type_of(kind) != torch.float32
        }
        for slot in narrow:
            if slot in state:
                state[slot] = state[slot].to(work).mul_(1.0 / self._state_scale)
        RULES[image.rule](parameter, gradient, state, image.groups[self._groups[weight.name]])
        for slot, kind in narrow.items():
            if slot in state:
                state[slot] = state[slot].mul_(self._state_scale).to(kind)
        if parameter is not stored:
            if stored.dtype == torch.float16 and self._plan.stochastic_rounding:
                parameter = stochastic_half(parameter, random.rounding)
            stored.copy_(parameter)

    def _rescale_state(self) -> None:
        """Bring narrow state to the loss scale in force."""
        ratio = self.scale.value / self._state_scale
        if ratio == 1.0:
            return
        for slot, kind in SLOTS[self.image.rule].items():
            if self.image.type_of(kind) != torch.float32:
                for state in self.states.values():
                    if slot in state:
                        state[slot].mul_(ratio)
        self._state_scale = self.scale.value

    # ---- what the user can save and load

    def export_state(self) -> Dict[str, torch.Tensor]:
        """Return the state by the names that PopTorch uses, `Accl1___fc.weight`; tensors are not copied."""
        exported = {}
        for name, state in self.states.items():
            exported[f"Step___{name}"] = torch.tensor(float(state.step))
            for slot, tensor in state.items():
                exported[f"{slot}___{name}"] = tensor
        if self._plan.auto_loss_scaling:
            exported["lossScaleUpdateFactor"] = torch.tensor(self.scale.factor)
            exported["lossScaleCleanUpdates"] = torch.tensor(float(self.scale.clean_updates))
        exported["stateLossScale"] = torch.tensor(self._state_scale)
        return exported

    def export_parameters(self) -> Dict[str, torch.Tensor]:
        """Return the settings in force, by name; groups after the first carry their number."""
        exported = {"lossScaling": torch.tensor(self.scale.value)}
        for index, group in enumerate(self.image.groups):
            for name, value in group.items():
                for key, number in _numbers(name, value):
                    exported[f"{key}___group_{index}" if index else key] = torch.tensor(float(number))
        return exported

    def import_state(self, loaded: Dict[str, Any]) -> None:
        """Take state that `export_state` returned; entries that are missing keep their device values.

        Raises:
            Error: an entry belongs to no parameter of the model, or has the wrong shape.
        """
        for key, value in loaded.items():
            slot, _, name = key.partition("___")
            if not name:
                self._import_scalar(key, float(value))
                continue
            weight = self._weights.get(name)
            if weight is None:
                raise Error(
                    f"The optimizer state holds '{key}', but the model has no parameter '{name}'. "
                    "Load it into the model that it was saved from."
                )
            state = self.states.setdefault(name, State())
            if slot == "Step":
                state.step = int(value)
                continue
            if value.shape != weight.tensor.shape:
                raise Error(f"'{key}' has shape {tuple(value.shape)}, the parameter {tuple(weight.tensor.shape)}.")
            kind = SLOTS[self.image.rule].get(slot)
            if kind is None:
                raise Error(f"The optimizer state holds '{key}', which {self.image.rule} does not have.")
            state[slot] = value.detach().to(self.image.type_of(kind), copy=True)

    def _import_scalar(self, key: str, value: float) -> None:
        if key == "lossScaleUpdateFactor":
            if self._plan.auto_loss_scaling:
                self.scale.factor = value
        elif key == "lossScaleCleanUpdates":
            self.scale.clean_updates = int(value)
        elif key == "stateLossScale":
            self._state_scale = value


def _names(types: Dict[str, torch.dtype]) -> str:
    return ", ".join(f"{kind} {str(dtype).replace('torch.', '')}" for kind, dtype in sorted(types.items())) or "fp32"


def _numbers(name: str, value: Any) -> Any:
    if name == "lr":
        yield "learningRate", value
    elif name == "betas":
        yield "beta1", value[0]
        yield "beta2", value[1]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        parts = name.split("_")
        yield parts[0] + "".join(part.title() for part in parts[1:]), value
