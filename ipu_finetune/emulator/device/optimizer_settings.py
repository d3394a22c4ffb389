# SPDX-License-Identifier: Apache-2.0
"""Optimizer settings on the device, by the names under which PopART streams them.

PopART does not keep a learning rate and a weight decay but the factors that its update operators multiply with, one per
weight, as `scaledLearningRate0___specific___fc.bias`. Checkpoints hold them by these names, so they are made from the
settings here, and settings are read back from them.

| kind | factors |
|---|---|
| SGD0 (no velocity) | scaledLearningRate0 = lr / ls, weightDecayScaleFactor0 = 1 - lr * wd |
| SGD1 (combined accumulator), SGD2 | scaledLearningRate = lr / vs, scaledMomentum, dampeningScaleFactor = (1 - dm) * \
vs / ls, each followed by the 1 or 2 |
| SGD1 | scaledWeightDecay1 = (1 - dm) * wd * vs |
| SGD2 | weightDecay |
| Adam, AdamW, LAMB | learningRate, weightDecay, adamBeta1, adamBeta2, adamEps, maxWeightNorm (LAMB) |
| RMSprop | learningRate, weightDecay, adaptiveAlpha, adaptiveEps, adaptiveMomentum |

ls is the loss scaling, vs the velocity scaling, dm the dampening.
"""

import dataclasses
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

__all__ = ["LOSS_SCALING", "OptimizerImage", "describe", "kind_of", "names_of", "read_back", "table_of"]

LOSS_SCALING = "lossScaling_FLOAT"
_SEPARATOR = "___specific___"
_DEFAULT_MAX_WEIGHT_NORM = 65500.0


@dataclasses.dataclass
class OptimizerImage:
    """What is copied from a Python optimizer.

    Attributes:
        rule: a key of `rules.RULES`.
        groups: hyperparameters per parameter group.
        members: the parameters of each group.
        constants: names of hyperparameters that are compiled in and may not change.
        types: accumulator dtypes by kind: `gradient`, `first`, `second`, `third`.
        combined: SGD accumulates gradients in the velocity.
        velocity_scaling: factor that SGD's velocity is stored with; None is the loss scaling, or 1 when combined.
        defaults: settings of a group that names none; for reports only.
    """

    rule: str
    groups: List[Dict[str, Any]]
    members: List[List[torch.Tensor]]
    constants: List[str]
    loss_scaling: float = 1.0
    max_grad_norm: Optional[float] = None
    types: Dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    combined: bool = False
    velocity_scaling: Optional[float] = None
    defaults: Dict[str, Any] = dataclasses.field(default_factory=dict)

    def type_of(self, kind: str) -> torch.dtype:
        """The dtype in which this kind of accumulator is stored."""
        return self.types.get(kind, torch.float32)

    def all_types(self) -> Dict[str, torch.dtype]:
        """The dtypes of every kind of accumulator, with defaults filled in."""
        return {kind: self.type_of(kind) for kind in ("gradient", "first", "second", "third")}


def kind_of(image: OptimizerImage) -> str:
    """Return PopART's name for the kind of optimizer: SGD0 has no velocity, SGD1 accumulates in it, SGD2 beside it."""
    if image.rule != "sgd":
        return {"adam": "ADAM", "adamw": "ADAMW", "rmsprop": "RMSPROP", "lamb": "LAMB"}[image.rule]
    if "momentum" in image.constants and not any(group["momentum"] for group in image.groups):
        return "SGD0"
    return "SGD1" if image.combined else "SGD2"


def _velocity_scaling(image: OptimizerImage, group: Dict[str, Any]) -> float:
    given = group.get("velocity_scaling", image.velocity_scaling) if image.combined else image.loss_scaling
    return 1.0 if given is None else float(given)


_ADAM = {"lr": "learningRate", "weight_decay": "weightDecay", "eps": "adamEps", "max_weight_norm": "maxWeightNorm"}
_ADAPTIVE = {
    "lr": "learningRate",
    "weight_decay": "weightDecay",
    "alpha": "adaptiveAlpha",
    "eps": "adaptiveEps",
    "momentum": "adaptiveMomentum",
}


def _factors(image: OptimizerImage, group: Dict[str, Any]) -> Iterator[Tuple[str, float]]:
    kind, constants = kind_of(image), image.constants
    if kind == "SGD0":
        yield "scaledLearningRate0", group["lr"] / image.loss_scaling
        yield "weightDecayScaleFactor0", 1.0 - group["lr"] * group["weight_decay"]
    elif kind in ("SGD1", "SGD2"):
        scale, number = _velocity_scaling(image, group), kind[-1]
        yield f"scaledLearningRate{number}", group["lr"] / scale
        if "momentum" not in constants:
            yield f"scaledMomentum{number}", group["momentum"]
        if "dampening" not in constants:
            yield f"dampeningScaleFactor{number}", (1.0 - group["dampening"]) * scale / image.loss_scaling
        if "weight_decay" not in constants:
            decay = group["weight_decay"]
            if kind == "SGD1":
                yield "scaledWeightDecay1", (1.0 - group["dampening"]) * decay * scale
            else:
                yield "weightDecay", decay
    else:
        names = _ADAPTIVE if kind == "RMSPROP" else _ADAM
        for setting, name in names.items():
            if setting in group and (setting == "lr" or setting not in constants):
                value = group[setting]
                yield name, _DEFAULT_MAX_WEIGHT_NORM if value is None else value
        if "betas" in group and "betas" not in constants:
            yield "adamBeta1", group["betas"][0]
            yield "adamBeta2", group["betas"][1]


def table_of(image: OptimizerImage, group_of: Dict[str, int]) -> Dict[str, float]:
    """Return the streamed factors of every trained weight, and the loss scaling.

    Args:
        image: the optimizer.
        group_of: weight name -> parameter group.
    """
    table = {LOSS_SCALING: float(image.loss_scaling)}
    for weight, number in group_of.items():
        for name, value in _factors(image, image.groups[number]):
            table[f"{name}{_SEPARATOR}{weight}"] = float(value)
    return table


def names_of(image: OptimizerImage, group_of: Dict[str, int]) -> List[str]:
    """Return the names of `table_of`."""
    return list(table_of(image, group_of))


def read_back(image: OptimizerImage, number: int, weight: str, table: Dict[str, float]) -> Dict[str, Any]:
    """Return the settings of a weight that belong to factors which were loaded: the inverse of `table_of`."""
    group = dict(image.groups[number])
    found = {name: table[f"{name}{_SEPARATOR}{weight}"] for name, _ in _factors(image, group)}
    loss_scaling, kind = table[LOSS_SCALING], kind_of(image)
    if kind == "SGD0":
        group["lr"] = found["scaledLearningRate0"] * loss_scaling
        decay = 1.0 - found["weightDecayScaleFactor0"]
        group["weight_decay"] = decay / group["lr"] if decay else 0.0
    elif kind in ("SGD1", "SGD2"):
        scale, kind_number = _velocity_scaling(image, group), kind[-1]
        group["lr"] = found[f"scaledLearningRate{kind_number}"] * scale
        group["momentum"] = found.get(f"scaledMomentum{kind_number}", group["momentum"])
        factor = found.get(f"dampeningScaleFactor{kind_number}")
        if factor is not None:
            group["dampening"] = 1.0 - factor * loss_scaling / scale
        if "scaledWeightDecay1" in found:
            group["weight_decay"] = found["scaledWeightDecay1"] / ((1.0 - group["dampening"]) * scale)
        group["weight_decay"] = found.get("weightDecay", group["weight_decay"])
    else:
        names = _ADAPTIVE if kind == "RMSPROP" else _ADAM
        group.update({setting: found[name] for setting, name in names.items() if name in found})
        if "adamBeta1" in found:
            group["betas"] = (found["adamBeta1"], found["adamBeta2"])
    return group


# ---- what is logged when settings are uploaded


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def _shown(image: OptimizerImage, group: Dict[str, Any]) -> Dict[str, Tuple[float, bool]]:
    shown: Dict[str, Tuple[float, bool]] = {}
    for name, value in group.items():
        fixed = name in image.constants and name != "lr"
        if name == "betas":
            shown["beta1"], shown["beta2"] = (value[0], fixed), (value[1], fixed)
        elif name == "max_weight_norm":
            shown["maxWeightNorm"] = (_DEFAULT_MAX_WEIGHT_NORM if value is None else value, fixed)
        elif name not in ("centered", "use_tf_variant", "bias_correction", "velocity_scaling"):
            shown["learningRate" if name == "lr" else _camel(name)] = (float(value), fixed)
    if image.rule == "sgd":
        shown["velocityScaling"] = (_velocity_scaling(image, group), False)
    return shown


def describe(image: OptimizerImage) -> Tuple[str, List[str]]:
    """Return one line for the optimizer's defaults and one for each group, for the debug log.

    A value that cannot change after compilation is followed by `(const)`.
    """
    kind = {"SGD0": "SGD1" if image.combined else "SGD2"}.get(kind_of(image), kind_of(image))
    types = image.all_types()
    tail = [
        f"accumType={_short(types['gradient'])}",
        f"firstOrderMomentumAccumType={_short(types['first'])}",
        f"secondOrderMomentumAccumType={_short(types['second'])}",
        f"maxGradNorm={'inf' if image.max_grad_norm is None else format(image.max_grad_norm, 'g')}",
    ]

    def line(values: Dict[str, Tuple[float, bool]]) -> str:
        parts = [f"{name}={value:g}{' (const)' if fixed else ''}" for name, (value, fixed) in values.items()]
        return ", ".join([kind, *parts, *tail])

    default = image.defaults or (image.groups[0] if image.groups else {})
    shown = {
        name if name == "nesterov" else f"default{name[0].upper()}{name[1:]}": value
        for name, value in _shown(image, default).items()
    }
    shown["lossScaling"] = (image.loss_scaling, "loss_scaling" in image.constants)
    return line(shown), [line(_shown(image, group)) for group in image.groups]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")
