# SPDX-License-Identifier: Apache-2.0
"""The reference engine: plain PyTorch on a CPU or CUDA device, through accelerate."""

from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import RecipeError
from ipu_finetune.inference.predictor import TorchPredictor
from ipu_finetune.training.engine import (
    Batch,
    ElementLoss,
    Engine,
    StepResult,
    TrainingState,
    Wrap,
    check_optimizer_covers,
    parameter_groups,
)

__all__ = ["ReferenceEngine"]

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class ReferenceEngine(Engine):
    """Trains the plain Transformers model with the recipe's batch arithmetic.

    Replicas are a matter of the pod: here their micro-batches are worked off one after the other, so that an update
    sees the same rows and gives each the same weight.

    Args:
        model: in float32; taken over by the engine.
        plan: the batch arithmetic.
        element_loss: of the task.
        label_names: columns that are labels, not model inputs.
        output_names: attributes of the model's answer.
        training: the recipe's training section.
        target: ``cpu`` or ``cuda``.
        wrap: makes the module that is run of the model, for packs; None runs the model itself.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        plan: BatchPlan,
        element_loss: ElementLoss,
        label_names: Sequence[str],
        output_names: Sequence[str],
        training: Any,
        target: str,
        wrap: Optional[Wrap] = None,
    ) -> None:
        if training.precision == "fp16" and target == "cpu":
            raise RecipeError(
                ["training.precision=fp16: the cpu target has no fp16 training; use fp32 or bf16, or --target emulator"]
            )
        # accelerate keeps one state per process and refuses a second run with another precision or device.
        AcceleratorState._reset_state(reset_partial_state=True)
        self._accelerator = Accelerator(
            mixed_precision={"fp32": "no"}.get(training.precision, training.precision), cpu=target == "cpu"
        )
        self._plan = plan
        self._element_loss = element_loss
        self._label_names = set(label_names)
        self._output_names = list(output_names)
        self._training = training
        torch.manual_seed(training.seed)
        groups = parameter_groups(model, training.weight_decay)
        check_optimizer_covers(model, groups)
        optimizer = _optimizer(training, groups)
        self._plain = model
        run = model if wrap is None else wrap(model)
        self._model, self._optimizer = self._accelerator.prepare(run, optimizer)
        self._model.train()

    def compile(self, batch: Batch, weights: torch.Tensor) -> None:
        """Nothing is compiled: PyTorch runs operation by operation."""

    def step(self, batch: Batch, weights: torch.Tensor, learning_rate: float) -> StepResult:
        """Make the updates of one combined batch, micro-batch by micro-batch."""
        plan, device = self._plan, self._accelerator.device
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        losses: List[float] = []
        skipped: List[bool] = []
        micro_batches = plan.gradient_accumulation * plan.replicas
        for update in range(plan.device_iterations):
            total = torch.zeros((), device=device)
            for micro in range(micro_batches):
                first = (update * micro_batches + micro) * plan.micro_batch_size
                rows = slice(first, first + plan.micro_batch_size)
                part = {name: tensor[rows].to(device) for name, tensor in batch.items()}
                inputs = {name: tensor for name, tensor in part.items() if name not in self._label_names}
                with self._accelerator.autocast():
                    outputs = self._model(**inputs)
                elements = self._element_loss({name: outputs[name] for name in self._output_names}, part)
                loss = (elements * weights[rows].to(device)).sum()
                total += loss.detach()
                self._accelerator.backward(loss / micro_batches)
            if self._training.max_grad_norm is not None:
                self._accelerator.clip_grad_norm_(self._model.parameters(), self._training.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(float(total) / micro_batches)
            skipped.append(bool(self._optimizer.step_was_skipped))
        scaler = self._accelerator.scaler
        return StepResult(losses, skipped, float(scaler.get_scale()) if scaler is not None else 1.0)

    def predict(self, columns: Mapping[str, np.ndarray]) -> List[np.ndarray]:
        """Return the outputs of all rows, in order."""
        inputs = [name for name in columns if name not in self._label_names]
        predictor = TorchPredictor(
            self._accelerator.unwrap_model(self._model),
            inputs,
            self._output_names,
            self._training.eval_batch_size or 8,
            dtype=_AUTOCAST[self._training.precision],
        )
        return predictor(columns)

    def plain_state(self) -> Dict[str, torch.Tensor]:
        """Return the weights, on the host."""
        return {name: tensor.detach().cpu() for name, tensor in self._plain.state_dict().items()}

    def training_state(self) -> TrainingState:
        """Return optimizer moments, random state and loss scale."""
        state = TrainingState()
        for key, moments in self._optimizer.state_dict()["state"].items():
            for name, value in moments.items():
                state.tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).detach().cpu()
        state.tensors["random.host"] = torch.get_rng_state()
        if self._accelerator.device.type == "cuda":
            state.tensors["random.cuda"] = torch.cuda.get_rng_state(self._accelerator.device)
        if self._accelerator.scaler is not None:
            state.values["scaler"] = self._accelerator.scaler.state_dict()
        return state

    def load_training_state(self, state: TrainingState) -> None:
        """Take up a state; the weights come with the model."""
        wrapped = self._optimizer.state_dict()
        moments: Dict[int, Dict[str, torch.Tensor]] = {}
        for name, tensor in state.tensors.items():
            if name.startswith("optimizer."):
                _, key, moment = name.split(".", 2)
                moments.setdefault(int(key), {})[moment] = tensor
        wrapped["state"] = moments
        self._optimizer.load_state_dict(wrapped)
        torch.set_rng_state(state.tensors["random.host"])
        if "random.cuda" in state.tensors:
            torch.cuda.set_rng_state(state.tensors["random.cuda"], self._accelerator.device)
        if self._accelerator.scaler is not None and "scaler" in state.values:
            self._accelerator.scaler.load_state_dict(state.values["scaler"])

    @property
    def facts(self) -> Dict[str, Any]:
        """Return device and thread count."""
        device = self._accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {"device": name, "threads": torch.get_num_threads()}


def _optimizer(training: Any, groups: List[Dict[str, Any]]) -> torch.optim.Optimizer:
    rate = training.learning_rate
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate)
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, lr=rate)
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate)
    raise RecipeError(
        [f"training.optimizer={training.optimizer}: plain PyTorch has none; use adamw, adam or sgd on the cpu target"]
    )
