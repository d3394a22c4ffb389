# SPDX-License-Identifier: Apache-2.0
"""The IPU engine: optimum-graphcore's pipelined model under poptorch, on real IPUs or on the emulator.

It uses poptorch's public interface, so one code path serves both; what only the emulator can tell (skipped updates, the
loss scale in force) is read from the executor's `emulation` where there is one.

Import this module only once `targets` has decided which `poptorch` is in force.
"""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import numpy as np
import poptorch
import torch
import transformers
from optimum.graphcore import IPUConfig

from ipu_finetune.batching import BatchPlan
from ipu_finetune.errors import RecipeError
from ipu_finetune.inference.ipu_model import IpuPredictor, TupleModel, explain, lay_out, plain_state
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

__all__ = ["IpuEngine"]


class IpuEngine(Engine):
    """Trains a Transformers model in an IPU layout.

    Training and evaluation have a model each: an evaluation never touches the training model's layers, hooks or mode,
    only reads its weights, so what trains after it is what trained before it.

    Args:
        model: plain, in float32; not changed, and not needed afterwards.
        ipu_config: with gradient accumulation and replication as in `plan`, and output mode ``all``.
        plan: the batch arithmetic.
        element_loss: of the task.
        label_names: columns that are labels, not model inputs.
        output_names: attributes of the model's answer.
        training: the recipe's training section.
        wrap: makes the module that is run of the laid-out model, for packs; None runs the model itself.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        ipu_config: IPUConfig,
        plan: BatchPlan,
        element_loss: ElementLoss,
        label_names: Sequence[str],
        output_names: Sequence[str],
        training: Any,
        wrap: Optional[Wrap] = None,
    ) -> None:
        if training.precision == "bf16":
            raise RecipeError(["training.precision=bf16: IPUs have no bfloat16; use fp16 or fp32"])
        self._half = training.precision == "fp16"
        self._plan, self._training, self._ipu_config = plan, training, ipu_config
        self._label_names = list(label_names)
        self._output_names = list(output_names)
        self._element_loss = element_loss
        self._model_class, self._model_config = type(model), model.config
        placed = lay_out(model, ipu_config)
        self._placed = (placed.half() if self._half else placed).train()
        self._wrap = wrap
        self._optimizer = self._build_optimizer()
        check_optimizer_covers(self._placed, self._optimizer.param_groups)
        self._names: List[str] = []
        self._executor: Any = None
        self._predictor: Optional[IpuPredictor] = None
        self._resume: Optional[TrainingState] = None
        self._cache = "off"

    def compile(self, batch: Batch, weights: torch.Tensor) -> None:
        """Compile for combined batches of this shape."""
        self._names = list(batch)
        run = self._placed if self._wrap is None else self._wrap(self._placed)
        wrapper = TupleModel(run, self._names, self._output_names, self._element_loss, self._label_names)
        options = self._ipu_config.to_options()
        # IPUConfig takes the seed 0 for no seed.
        options.randomSeed(self._training.seed)
        if self._resume is not None:
            self._optimizer.load_state_dict(_optimizer_state(self._optimizer, self._resume))
        before = _files_in(self._ipu_config.executable_cache_dir)
        with explain("model"):
            self._executor = poptorch.trainingModel(wrapper.train(), options=options, optimizer=self._optimizer)
            self._executor.compile(tuple(batch.values()), weights)
        self._cache = self._cache_state(before)
        if self._resume is not None and "random.device" in self._resume.tensors:
            self._executor.rng_state = self._resume.tensors["random.device"].tolist()
        self._resume = None

    def _cache_state(self, before: int) -> str:
        emulation = getattr(self._executor, "emulation", None)
        if emulation is not None:
            return str(emulation.executable_cache)
        folder = self._ipu_config.executable_cache_dir
        if not folder or folder == "disabled":
            return "off"
        # poptorch itself does not tell; a compilation leaves a new file, a hit does not.
        return "miss" if _files_in(folder) > before else "hit"

    def step(self, batch: Batch, weights: torch.Tensor, learning_rate: float) -> StepResult:
        """Make the updates of one combined batch in one host call."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._executor.setOptimizer(self._optimizer)
        tensors = tuple(batch[name] for name in self._names)
        with explain("weight update"):
            losses = self._executor(tensors, weights)
        per_update = losses.detach().float().reshape(self._plan.device_iterations, -1).mean(dim=1)
        emulation = getattr(self._executor, "emulation", None)
        skipped = list(emulation.last_updates_skipped) if emulation is not None else [False] * len(per_update)
        scale = float(emulation.loss_scale) if emulation is not None else float(self._training.loss_scaling)
        return StepResult(per_update.tolist(), skipped, scale)

    def predict(self, columns: Mapping[str, np.ndarray]) -> List[np.ndarray]:
        """Return the outputs of all rows, in order, from the inference layout."""
        self._executor.detachFromDevice()
        state = self.plain_state()
        if self._predictor is None:
            with torch.device("cpu"):
                model = self._model_class(self._model_config)
            model.load_state_dict(state)
            inputs = [name for name in columns if name not in self._label_names]
            self._predictor = IpuPredictor(
                model,
                self._ipu_config,
                inputs,
                self._output_names,
                self._training.eval_batch_size or self._training.micro_batch_size,
                half=self._half,
                wrap=self._wrap,
            )
        else:
            self._predictor.load(state)
        try:
            return self._predictor(columns)
        finally:
            self._predictor.detach()
            self._executor.attachToDevice()

    def plain_state(self) -> Dict[str, torch.Tensor]:
        """Return the weights as they are on the device, under their Transformers names."""
        if self._executor is not None and self._executor.isAttachedToDevice():
            self._executor.copyWeightsToHost()
        return plain_state(self._placed)

    def training_state(self) -> TrainingState:
        """Return poptorch's optimizer state and the device's random state."""
        state = TrainingState()
        stored = self._optimizer.state_dict()
        for section in ("ipu_state", "ipu_param"):
            for name, value in (stored.get(section) or {}).items():
                state.tensors[f"{section}.{name}"] = torch.as_tensor(value).detach()
        state.tensors["random.device"] = torch.tensor([int(word) for word in self._executor.rng_state])
        return state

    def load_training_state(self, state: TrainingState) -> None:
        """Keep a state for `compile`, which uploads it with the weights."""
        self._resume = state

    @property
    def facts(self) -> Dict[str, Any]:
        """Return the IPUs in use and their layout."""
        config = self._ipu_config
        return {
            "replicas": config.replication_factor,
            "ipus_per_replica": config.ipus_per_replica,
            "layers_per_ipu": list(config.layers_per_ipu),
            "threads": torch.get_num_threads(),
            "executable_cache": self._cache,
        }

    def close(self) -> None:
        """Give the IPUs back."""
        if self._predictor is not None:
            self._predictor.close()
        if self._executor is not None and self._executor.isCompiled():
            self._executor.destroy()

    def _build_optimizer(self) -> Any:
        training = self._training
        groups = parameter_groups(self._placed, training.weight_decay)
        # As optimum-graphcore does: with float16 weights, gradients and first moments are float16 too; second moments
        # never are, since a squared float16 gradient underflows.
        kind = torch.float16 if self._half else torch.float32
        common = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling}
        types = {
            "accum_type": kind,
            "first_order_momentum_accum_type": kind,
            "second_order_momentum_accum_type": torch.float32,
        }
        clip = {} if training.max_grad_norm is None else {"max_grad_norm": training.max_grad_norm}
        if training.optimizer == "adamw":
            return poptorch.optim.AdamW(groups, **common, **types, **clip)
        if training.optimizer == "adam":
            return poptorch.optim.Adam(groups, **common, **types, **clip)
        if training.optimizer == "lamb":
            if clip:
                raise RecipeError(["training.max_grad_norm: poptorch's LAMB does not clip; leave it out"])
            return poptorch.optim.LAMB(groups, **common, **types)
        return poptorch.optim.SGD(groups, **common, **clip, use_combined_accum=True)


def _files_in(folder: str) -> int:
    return sum(1 for path in Path(folder).glob("*") if path.is_file()) if folder else 0


def _optimizer_state(optimizer: Any, state: TrainingState) -> Dict[str, Any]:
    stored = dict(optimizer.state_dict())
    for section in ("ipu_state", "ipu_param"):
        prefix = f"{section}."
        values = {name[len(prefix) :]: value for name, value in state.tensors.items() if name.startswith(prefix)}
        stored[section] = values or None
    return stored
