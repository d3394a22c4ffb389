# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the device: a copy of the user's settings, the state, and the update itself.

The Python optimizer's `step` never runs. Its settings are copied when the model is wrapped and at each `setOptimizer`;
changing them in between has no effect, as on an IPU.
"""

import logging
import math
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from . import wrappers
from .errors import Error
from .gradients import GradientBook
from .optimizer_settings import LOSS_SCALING, OptimizerImage, describe, kind_of, read_back, table_of
from .plan import Plan
from .rng import DeviceRandom
from .rounding import stochastic_half
from .rules import BIASED, RULES, SLOTS, State, slots_of
from .scaling import LossScale
from .weights import Weight, WeightStore

__all__ = ["DeviceOptimizer", "OptimizerImage"]

_logger = logging.getLogger("ipu_finetune.emulator")


class DeviceOptimizer:
    """Optimizer settings and state on the device.

    Attributes:
        states: by weight; allocated with zeros when the model is compiled.
    """

    def __init__(self, image: OptimizerImage, weights: WeightStore, plan: Plan) -> None:
        self._weights = weights
        self._plan = plan
        self.states: Dict[str, State] = {}
        self.scale = LossScale(image.loss_scaling, plan.auto_loss_scaling)
        # Loss scale that fp16 first-order state is stored with: it would underflow otherwise, like the gradients.
        self._state_scale = self.scale.value
        self._groups: Dict[str, int] = {}
        # Streamed factors that were loaded by name, and the settings per weight that follow from them.
        self._loaded: Optional[Dict[str, float]] = None
        self._hyper: Dict[str, Dict[str, Any]] = {}
        self._version = 0
        self.image = image
        self._described = describe(image)
        self._assign_groups()
        self._report(self._described)

    @property
    def version(self) -> Tuple[float, ...]:
        """Another value whenever the state or a setting has changed."""
        return (self._version, self.scale.factor, self.scale.clean_updates)

    def replace(self, image: OptimizerImage) -> None:
        """Take new settings (`setOptimizer`).

        Raises:
            Error: something that is compiled in has changed.
        """
        old = self.image
        if (image.rule, image.all_types()) != (old.rule, old.all_types()):
            raise Error(
                f"The optimizer was compiled as {old.rule} with {_names(old)}, but is now {image.rule} with "
                f"{_names(image)}. The kind of optimizer and its accumulator types are part of the compiled model: "
                "call destroy() first."
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
        self._loaded = None
        if image.loss_scaling != self.scale.base:
            self.scale.base = float(image.loss_scaling)
        self._assign_groups()
        described = describe(image)
        if described != self._described:
            self._described = described
            self._report(described)
        self._version += 1

    @staticmethod
    def _report(described: Any) -> None:
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("Updating graph optimizer with %s", described[0])
            for index, line in enumerate(described[1]):
                _logger.debug("Updating group %d optimizer with %s", index, line)

    def _assign_groups(self) -> None:
        group_of = {id(tensor): index for index, members in enumerate(self.image.members) for tensor in members}
        self._groups = {}
        left_out = []
        matched = set()
        # Looking at a wrapped parameter would fetch the weights from the device.
        with wrappers.all_plain(weight.tensor for weight in self._weights.parameters()):
            for weight in self._weights.parameters():
                for tensor in (weight.tensor, self._weights.today(weight)):
                    if tensor is not None and id(tensor) in group_of:
                        self._groups[weight.name] = group_of[id(tensor)]
                        matched.add(id(tensor))
                        break
                else:
                    if weight.requires_grad:
                        left_out.append(weight.name)
        self._derive()
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

    def _derive(self) -> None:
        """Find the settings of every trained weight, and give new ones their state."""
        image = self.image
        slots = slots_of(image.rule, image.groups, image.constants)
        for weight in self.trained():
            name, number = weight.name, self._groups[weight.name]
            if self._loaded is None:
                self._hyper[name] = image.groups[number]
            else:
                self._hyper[name] = read_back(image, number, name, self._loaded)
            state = self.states.setdefault(name, State())
            for slot in slots:
                if slot not in state:
                    state[slot] = torch.zeros(weight.shape, dtype=image.type_of(SLOTS[image.rule][slot]))
                    state.blank.add(slot)

    def trained(self) -> List[Weight]:
        """The parameters that are updated."""
        return [weight for weight in self._weights.parameters() if weight.name in self._groups and weight.requires_grad]

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
        self._version += 1

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
        self._apply_rule(weight, parameter, gradient, state)
        for slot, kind in narrow.items():
            if slot in state:
                state[slot] = state[slot].mul_(self._state_scale).to(kind)
        if parameter is not stored:
            if stored.dtype == torch.float16 and self._plan.stochastic_rounding:
                parameter = stochastic_half(parameter, random.rounding)
            stored.copy_(parameter)

    def _apply_rule(self, weight: Weight, parameter: torch.Tensor, gradient: torch.Tensor, state: State) -> None:
        rule, settings = self.image.rule, self._hyper[weight.name]
        if rule != "lamb" or not _grouping_of(weight):
            RULES[rule](parameter, gradient, state, settings)
            return
        # Each replica group holds a weight of its own, and LAMB looks at the norm of one weight.
        for index in range(parameter.shape[0]):
            part = State()
            part.step = state.step
            part.update({slot: tensor[index] for slot, tensor in state.items()})
            RULES[rule](parameter[index], gradient[index], part, settings)

    def _rescale_state(self) -> None:
        """Bring narrow state to the loss scale in force."""
        ratio = self.scale.value / self._state_scale
        if ratio == 1.0:
            return
        for slot in self._narrow_slots():
            for state in self.states.values():
                if slot in state:
                    state[slot].mul_(ratio)
        self._state_scale = self.scale.value

    def _narrow_slots(self) -> List[str]:
        kinds = SLOTS[self.image.rule]
        return [slot for slot, kind in kinds.items() if self.image.type_of(kind) != torch.float32]

    # ---- what the user can save and load

    def export_state(self, copy: bool = True) -> Dict[str, torch.Tensor]:
        """Return the state by the names that PopTorch uses, as `Accl1___fc.weight`.

        Args:
            copy: return copies; without, the device's own tensors, for a model that will not run again.
        """
        exported = {}
        counted = self.image.rule in BIASED
        for weight in self.trained():
            state = self.states[weight.name]
            for slot, tensor in state.items():
                exported[f"{slot}___{weight.name}"] = tensor.clone() if copy else tensor
            if counted:
                # One counter per replica group, as the other state has one tensor per group.
                groups = (weight.shape[0],) if _grouping_of(weight) else ()
                exported[f"Step___{weight.name}"] = torch.full(groups, float(state.step))
        if self._plan.auto_loss_scaling:
            exported["lossScaleUpdateFactor"] = torch.tensor(self.scale.factor)
            exported["lossScaleCleanUpdates"] = torch.tensor(float(self.scale.clean_updates))
        if self._state_scale != 1.0 and self._narrow_slots():
            exported["stateLossScale"] = torch.tensor(self._state_scale)
        return exported

    def export_parameters(self) -> Dict[str, torch.Tensor]:
        """Return the settings in force, by the names of `optimizer_settings.table_of`."""
        table = self._loaded if self._loaded is not None else table_of(self.image, self._groups)
        return {name: torch.tensor(value) for name, value in table.items()}

    def setting_names(self) -> List[str]:
        """Return the names of `export_parameters`."""
        return list(table_of(self.image, self._groups))

    def import_parameters(self, loaded: Mapping[str, Any]) -> None:
        """Take factors that `export_parameters` returned; entries that are missing keep their device values.

        Raises:
            Error: an entry is not one of this optimizer's settings.
        """
        table = table_of(self.image, self._groups) if self._loaded is None else dict(self._loaded)
        for name, value in loaded.items():
            if name not in table:
                raise Error(
                    f"The optimizer state holds the setting '{name}', which this {kind_of(self.image)} optimizer does "
                    "not have. Load it into the optimizer and model that it was saved from."
                )
            table[name] = float(value)
        self._loaded = table
        self.scale.base = table[LOSS_SCALING]
        self._derive()
        self._version += 1

    def import_state(self, loaded: Mapping[str, Any]) -> None:
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
            if weight is None or not weight.is_parameter:
                raise Error(
                    f"The optimizer state holds '{key}', but the model has no parameter '{name}'. "
                    "Load it into the model that it was saved from."
                )
            state = self.states.setdefault(name, State())
            if slot == "Step":
                # A single counter per weight: the groups of a per-replica weight are updated together.
                state.step = max(0, int(torch.as_tensor(value).reshape(-1)[0]))
                continue
            if value.shape != weight.shape:
                raise Error(f"'{key}' has shape {tuple(value.shape)}, the parameter {tuple(weight.shape)}.")
            kind = SLOTS[self.image.rule].get(slot)
            if kind is None:
                raise Error(f"The optimizer state holds '{key}', which {self.image.rule} does not have.")
            state[slot] = value.detach().to(self.image.type_of(kind), copy=True)
            if bool(value.any()):
                state.blank.discard(slot)
        self._version += 1

    def _import_scalar(self, key: str, value: float) -> None:
        if key == "lossScaleUpdateFactor":
            if self._plan.auto_loss_scaling:
                self.scale.factor = value
        elif key == "lossScaleCleanUpdates":
            self.scale.clean_updates = int(value)
        elif key == "stateLossScale":
            self._state_scale = value
        else:
            raise Error(
                f"The optimizer state holds '{key}', which is neither a state of a parameter, as 'Accl1___fc.weight', "
                "nor part of automatic loss scaling."
            )


def _grouping_of(weight: Weight) -> Any:
    """Return how a weight differs between replicas, or None."""
    return getattr(weight, "grouping", None)


def _names(image: OptimizerImage) -> str:
    kinds = {"gradient", *SLOTS[image.rule].values()}
    types = {kind: str(image.type_of(kind)).replace("torch.", "") for kind in sorted(kinds)}
    return ", ".join(f"{kind} {dtype}" for kind, dtype in types.items())
