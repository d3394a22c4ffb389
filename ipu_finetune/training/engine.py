# SPDX-License-Identifier: Apache-2.0
"""What the training loop asks of an engine: the seam between a recipe's optimisation and the device that makes it."""

import abc
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping

import numpy as np
import torch
from torch import nn

from ipu_finetune.errors import IpuFinetuneError

__all__ = ["Engine", "StepResult", "TrainingState", "Wrap", "check_optimizer_covers", "parameter_groups"]

Batch = Mapping[str, torch.Tensor]
# Called with the model's outputs and the labels by name; returns the loss of each row (or token), float32.
ElementLoss = Callable[[Mapping[str, torch.Tensor], Batch], torch.Tensor]
# Called with the model as the target holds it; returns the module that is run in its place, around the same weights.
Wrap = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class StepResult:
    """What one host call brought back.

    Attributes:
        losses: the mean loss of each weight update, in order.
        skipped: for each update, whether its gradients overflowed and the weights were left as they were.
        loss_scale: in force after the call.
    """

    losses: List[float]
    skipped: List[bool]
    loss_scale: float = 1.0


@dataclass
class TrainingState:
    """Everything beside the plain weights that a bit-exact continuation needs."""

    tensors: Dict[str, torch.Tensor] = field(default_factory=dict)
    values: Dict[str, Any] = field(default_factory=dict)


class Engine(abc.ABC):
    """One model on one target, with its optimizer.

    The model's plain weights (the names and shapes of the Transformers checkpoint) go in and out; how they are laid out
    on the target stays inside.
    """

    @abc.abstractmethod
    def compile(self, batch: Batch, weights: torch.Tensor) -> None:
        """Prepare for combined batches of this shape; changes no weight."""

    @abc.abstractmethod
    def step(self, batch: Batch, weights: torch.Tensor, learning_rate: float) -> StepResult:
        """Make ``device iterations`` weight updates from one combined batch, all with the given learning rate.

        Args:
            batch: inputs and labels, each [combined batch, ...].
            weights: of each element in the loss (`loss_weights`).
            learning_rate: of every parameter group.
        """

    @abc.abstractmethod
    def predict(self, columns: Mapping[str, np.ndarray]) -> List[np.ndarray]:
        """Return the model's outputs for all rows in order, with the present weights; training goes on undisturbed."""

    @abc.abstractmethod
    def plain_state(self) -> Dict[str, torch.Tensor]:
        """Return the present weights under their Transformers names, on the host."""

    @abc.abstractmethod
    def training_state(self) -> TrainingState:
        """Return optimizer state, random state and loss scale."""

    @abc.abstractmethod
    def load_training_state(self, state: TrainingState) -> None:
        """Take up a state from `training_state`; called before `compile`."""

    @property
    @abc.abstractmethod
    def facts(self) -> Dict[str, Any]:
        """Return what the run record should say of this target, as plain JSON values."""

    def close(self) -> None:  # noqa: B027 - most engines hold nothing that must be given back
        """Give the device back."""


def parameter_groups(model: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
    """Return the two groups that Transformers' trainers use: biases and LayerNorms do not decay."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed: List[nn.Parameter] = []
    other: List[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (other if id(parameter) in norms or name.rpartition(".")[2] == "bias" else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": other, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_optimizer_covers(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Stop where the optimizer and the model do not hold the same parameters, by identity.

    A layer that is rebuilt after the optimizer has collected its parameters never trains, and nothing else tells.

    Raises:
        IpuFinetuneError: naming the parameters that would not train.
    """
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    untrained = sorted(name for key, name in trainable.items() if key not in held)
    if untrained or held - set(trainable):
        raise IpuFinetuneError(
            f"the optimizer does not hold the model's parameters: {len(untrained)} would never train "
            f"({', '.join(untrained[:3]) or 'none'}) and {len(held - set(trainable))} of the optimizer's are not in "
            "the model; the model was laid out again after its optimizer was built"
        )
