# SPDX-License-Identifier: Apache-2.0
"""A Transformers model in an IPU layout, through optimum-graphcore, and back to its plain weights.

Import this module only once `targets` has decided which `poptorch` is in force.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import poptorch
import torch
import transformers
from optimum.graphcore import IPUConfig
from optimum.graphcore.ipu_configuration import IncompatibleIPUConfigError
from optimum.graphcore.modeling_utils import SerializedEmbedding, SplitProjection, to_pipelined
from torch import nn

from ipu_finetune.errors import IpuFinetuneError, RecipeError
from ipu_finetune.inference.predictor import Predictor

__all__ = ["IpuPredictor", "TupleModel", "build_ipu_config", "explain", "lay_out", "load_plain_state", "plain_state"]


def build_ipu_config(fields: Mapping[str, Any], **derived: Any) -> IPUConfig:
    """Build optimum-graphcore's `IPUConfig` from resolved fields and the ones that follow from the run.

    Raises:
        RecipeError: optimum-graphcore finds the fields inconsistent.
    """
    try:
        return IPUConfig(**{**fields, **derived})
    except (IncompatibleIPUConfigError, ValueError, TypeError) as error:
        raise RecipeError([str(error)], where="IPU config") from error


def lay_out(model: nn.Module, ipu_config: IPUConfig, *, inference: bool = False) -> nn.Module:
    """Return `model` in the layout of `ipu_config`; a model that has its layout already is returned as it is.

    Args:
        model: a plain Transformers model (left as it is; the result has its own weights), or a result of this function.
        ipu_config: where its layers go.
        inference: take the config's `inference_*` fields.

    Raises:
        RecipeError: optimum-graphcore has no pipelined form of the model, or the config does not fit it.
    """
    mode = "inference" if inference else "training"
    placed_for = getattr(model, "_ipu_finetune_layout", None)
    if placed_for == mode:
        return model
    if placed_for is not None:
        raise IpuFinetuneError(f"the model is laid out for {placed_for}; build another one for {mode}")
    try:
        placed = to_pipelined(model, ipu_config)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        _freeze(placed, frozen)
        placed.ipu_config.eval() if inference else placed.ipu_config.train()
        kwargs = ipu_config.inference_parallelize_kwargs if inference else ipu_config.parallelize_kwargs
        placed.parallelize(**kwargs)
    except KeyError as error:
        raise RecipeError([f"optimum-graphcore has no pipelined form: {error.args[0]}"], where="model") from error
    except (IncompatibleIPUConfigError, ValueError, AssertionError, IndexError) as error:
        raise RecipeError([f"the layout does not fit the model: {error}"], where="IPU config") from error
    _freeze(placed, frozen)
    _keep_padding(placed)
    placed._ipu_finetune_layout = mode
    return placed


def _freeze(model: nn.Module, frozen: Set[str]) -> None:
    """Let the weights of these Transformers names be frozen, split or whole.

    optimum-graphcore 0.7.1 pipelines a copy of the model, built anew, whose weights are all trainable, and makes the
    parts of a split projection trainable whatever it was. Only a frozen embedding does it split into frozen parts.
    """
    split = {part: f"{prefix}weight" for prefix, parts, _ in _split_weights(model) for part in parts}
    for name, parameter in model.named_parameters():
        if split.get(name, name) in frozen:
            parameter.requires_grad_(False)


def _keep_padding(model: nn.Module) -> None:
    """Let the padding row of a split embedding stay untrained, as it is in the plain model.

    optimum-graphcore 0.7.1 hands the padding index on to the part that holds it, except where the index is 0, which it
    takes for none; and 0 is what BERT has.
    """
    for module in model.modules():
        if isinstance(module, SerializedEmbedding) and module.padding_idx is not None:
            part, row = divmod(module.padding_idx, module.split_size)
            module.split_embeddings[part].padding_idx = row


def plain_state(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Return a laid-out model's weights under their Transformers names and shapes."""
    state = dict(model.state_dict())
    for prefix, parts, dim in _split_weights(model):
        pieces = [state.pop(name) for name in parts]
        state[f"{prefix}weight"] = torch.cat(pieces, dim=dim)
    return {name: tensor.detach() for name, tensor in state.items()}


def load_plain_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Write weights under their Transformers names into a laid-out model, in place."""
    split = dict(state)
    for prefix, parts, dim in _split_weights(model):
        whole = split.pop(f"{prefix}weight")
        split.update(zip(parts, torch.chunk(whole, len(parts), dim=dim)))
    with torch.no_grad():
        model.load_state_dict(split)


def _split_weights(model: nn.Module) -> List[Tuple[str, List[str], int]]:
    """Name the weights that a layout splits: (prefix, names of the parts, the dimension they are split along)."""
    found = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, SerializedEmbedding):
            parts = [f"{prefix}split_embeddings.{i}.weight" for i in range(len(module.split_embeddings))]
            found.append((prefix, parts, 0))
        elif isinstance(module, SplitProjection):
            parts = [f"{prefix}split_linear_layers.{i}.weight" for i in range(len(module.split_linear_layers))]
            reducing = module.serialization_mode is poptorch.MatMulSerializationMode.ReducingDim
            found.append((prefix, parts, 1 if reducing else 0))
    return found


class TupleModel(nn.Module):
    """A laid-out model whose inputs are one tuple, as static graphs like them.

    Args:
        model: laid out.
        names: of the tuple's tensors.
        output_names: attributes of the model's answer.
        element_loss: for training: called with the outputs and all inputs by name.
        label_names: inputs that the model itself does not take.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        output_names: Sequence[str],
        element_loss: Optional[Callable[..., torch.Tensor]] = None,
        label_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.names = list(names)
        self.output_names = list(output_names)
        self.element_loss = element_loss
        self.label_names = set(label_names)

    def forward(self, tensors: Tuple[torch.Tensor, ...], weights: Optional[torch.Tensor] = None) -> Any:
        """Return the outputs, or with an `element_loss` the weighted sum of the elements' losses."""
        batch = dict(zip(self.names, tensors))
        inputs = {name: tensor for name, tensor in batch.items() if name not in self.label_names}
        answer = self.model(**inputs)
        outputs = {name: answer[name] for name in self.output_names}
        if self.element_loss is None:
            return tuple(outputs.values())
        assert weights is not None, "a training batch carries a weight for each element"
        loss = (self.element_loss(outputs, batch) * weights).sum()
        return poptorch.identity_loss(loss, reduction="none")


class IpuPredictor(Predictor):
    """A Transformers model on an IPU, real or emulated, in its inference layout.

    Args:
        model: plain; left as it is.
        ipu_config: its `inference_*` fields are used.
        micro_batch: rows that a replica sees at once.
        half: compute in float16.
        wrap: makes the module that is run of the laid-out model, for packs; None runs the model itself.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        ipu_config: IPUConfig,
        input_names: Sequence[str],
        output_names: Sequence[str],
        micro_batch: int,
        length: Optional[int] = None,
        too_long: str = "error",
        half: bool = False,
        wrap: Optional[Callable[[nn.Module], nn.Module]] = None,
    ) -> None:
        factor = ipu_config.batch_size_factor(for_inference=True)
        super().__init__(input_names, micro_batch * factor, length, too_long)
        placed = lay_out(model, ipu_config, inference=True)
        self._placed = placed.half() if half else placed
        run = self._placed if wrap is None else wrap(self._placed)
        wrapper = TupleModel(run, self.input_names, output_names).eval()
        self._executor = poptorch.inferenceModel(wrapper, options=ipu_config.to_options(for_inference=True))

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up other weights, under their Transformers names."""
        load_plain_state(self._placed, state)
        if self._executor.isCompiled():
            self.attach()
            self._executor.copyWeightsToDevice()

    def run(self, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one full batch on the device."""
        self.attach()
        tensors = tuple(batch[name] for name in self.input_names)
        with explain("inference"):
            return self._executor(tensors)

    def attach(self) -> None:
        """Take the device, where it was given back."""
        if self._executor.isCompiled() and not self._executor.isAttachedToDevice():
            self._executor.attachToDevice()

    def detach(self) -> None:
        """Give the device back; the next run takes it again."""
        if self._executor.isCompiled() and self._executor.isAttachedToDevice():
            self._executor.detachFromDevice()

    def close(self) -> None:
        """Give the device and the executable back."""
        if self._executor.isCompiled():
            self._executor.destroy()


@contextlib.contextmanager
def explain(doing: str) -> Iterator[None]:
    """Turn poptorch's own errors into one message that says during what they came up."""
    try:
        yield
    except (poptorch.Error, AssertionError) as error:
        raise IpuFinetuneError(f"poptorch refused the {doing}: {error}") from error
