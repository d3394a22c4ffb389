# SPDX-License-Identifier: Apache-2.0
"""Plain Transformers models and tokenizers, from a folder, an installed package or the hub.

Weights are read from safetensors. A pickle needs `allow_pickle` and goes through torch's `weights_only` loader.
Remote code is never run.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import safetensors
import safetensors.torch
import torch
import transformers

from ipu_finetune.errors import DataError, RecipeError
from ipu_finetune.models.hub import model_snapshot
from ipu_finetune.models.known import KNOWN

__all__ = ["Checkpoint", "build_model", "find_checkpoint", "load_config", "load_tokenizer"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder that a config, a tokenizer and weights are read from.

    Attributes:
        name: as the recipe gives it.
        folder: where its files lie.
        source: one line for the log and the run folder.
        revision: the hub's commit; None for a folder or a package.
        sha256: what `model.safetensors` must hash to; None where nothing is known.
        known_config: the architecture's sizes, where the folder lends its tokenizer only.
    """

    name: str
    folder: Path
    source: str
    revision: Optional[str] = None
    sha256: Optional[str] = None
    known_config: Optional[Dict[str, Any]] = None

    def file(self, name: str) -> Optional[Path]:
        """Return the path of one of the checkpoint's files, or None."""
        path = self.folder / name
        return path if path.is_file() else None


def find_checkpoint(
    name: str, revision: Optional[str] = None, *, init: str = "pretrained", allow_pickle: bool = False
) -> Checkpoint:
    """Find the checkpoint that a recipe names: a folder, else an installed package that carries it, else the hub.

    Args:
        name: a path or a hub id.
        revision: a commit, branch or tag of the hub.
        init: with ``config``, the known sizes of a public architecture are enough.
        allow_pickle: also fetch pickled weights.

    Raises:
        DataError: it is in none of these places.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return Checkpoint(name, path, f"folder {name}")
    if path.is_absolute() or name.startswith((".", "~")):
        raise DataError(f"model.checkpoint={name}: there is no such folder")
    known = KNOWN.get(name)
    if known is not None and revision is None and (known.config is None or init == "config"):
        spec = importlib.util.find_spec(known.package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations))) / known.folder
            what = "known sizes, tokenizer of" if known.config else "package"
            return Checkpoint(name, folder, f"{what} {known.package}", None, known.sha256, known.config)
    folder = model_snapshot(name, revision, allow_pickle)
    return Checkpoint(name, folder, f"hub {name} at {folder.name}", folder.name)


def load_config(checkpoint: Checkpoint, dropout: Optional[float] = None) -> transformers.PretrainedConfig:
    """Load the model's config; `dropout` replaces its hidden and attention dropout where given."""
    if checkpoint.known_config is not None:
        sizes = dict(checkpoint.known_config)
        config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(str(checkpoint.folder))
        except (OSError, ValueError) as error:
            raise DataError(
                f"model.checkpoint={checkpoint.name} has no usable config.json ({_first_line(error)}); "
                "a checkpoint folder is what save_pretrained writes"
            ) from error
    if dropout is not None:
        names = [name for name in _DROPOUT_FIELDS if getattr(config, name, None) is not None]
        if not names:
            raise RecipeError([f"model.dropout={dropout}: {type(config).__name__} has no dropout that could be set"])
        for name in names:
            setattr(config, name, float(dropout))
    return config


_DROPOUT_FIELDS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "qa_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)


def load_tokenizer(checkpoint: Checkpoint) -> transformers.PreTrainedTokenizerFast:
    """Load the fast tokenizer that lies with the checkpoint."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(checkpoint.folder), use_fast=True, config=load_config(checkpoint)
        )
    except (OSError, ValueError) as error:
        raise DataError(f"model.checkpoint={checkpoint.name} has no usable tokenizer ({_first_line(error)})") from error
    if not tokenizer.is_fast:
        raise DataError(f"model.checkpoint={checkpoint.name} has no fast tokenizer, which offsets into the text need")
    return tokenizer


def build_model(
    checkpoint: Checkpoint,
    config: transformers.PretrainedConfig,
    auto_class: str,
    *,
    init: str = "pretrained",
    seed: int = 42,
    allow_pickle: bool = False,
) -> Tuple[transformers.PreTrainedModel, List[str]]:
    """Build a plain Transformers model in float32.

    Args:
        checkpoint: where the weights lie.
        config: of the model to build.
        auto_class: name of a Transformers auto class, e.g. ``AutoModelForQuestionAnswering``.
        init: ``pretrained`` loads the weights, ``config`` draws all of them.
        seed: of every weight that is drawn.
        allow_pickle: also take `pytorch_model.bin`, through ``torch.load(weights_only=True)``.

    Returns:
        The model, and the names of the weights that were drawn although others were loaded (the task's new head).

    Raises:
        DataError: weights are missing, damaged, or of another architecture.
    """
    auto = getattr(transformers, auto_class)
    torch.manual_seed(seed)
    if init == "config":
        return auto.from_config(config).float(), []
    model_class = auto._model_mapping.get(type(config), None)
    if model_class is None:
        raise RecipeError([f"{type(config).__name__} has no {auto_class}: choose another model for this task"])
    state = _read_weights(checkpoint, allow_pickle)
    with _quiet_transformers():
        model, info = model_class.from_pretrained(None, config=config, state_dict=state, output_loading_info=True)
    body = [name for name in info["missing_keys"] if name.startswith(model.base_model_prefix + ".")]
    if body or info["mismatched_keys"]:
        wrong = body or [str(key) for key in info["mismatched_keys"]]
        raise DataError(
            f"model.checkpoint={checkpoint.name} does not hold the weights of {model_class.__name__}: {len(wrong)} are "
            f"missing or of another shape, e.g. {', '.join(wrong[:3])}; check the checkpoint and its config.json"
        )
    return model.float(), sorted(info["missing_keys"])


def _read_weights(checkpoint: Checkpoint, allow_pickle: bool) -> Dict[str, torch.Tensor]:
    single = checkpoint.file("model.safetensors")
    if single is not None:
        _verify(single, checkpoint)
        return _read_safetensors(single)
    index = checkpoint.file("model.safetensors.index.json")
    if index is not None:
        return _read_parts(checkpoint, index, _read_safetensors)
    pickle = checkpoint.file("pytorch_model.bin")
    pickle_index = checkpoint.file("pytorch_model.bin.index.json")
    if pickle is None and pickle_index is None:
        raise DataError(
            f"model.checkpoint={checkpoint.name} has no model.safetensors ({checkpoint.source}); save it with "
            "save_pretrained(..., safe_serialization=True), give --allow-pickle if it has pickled weights only, or "
            "draw the weights with --set model.init=config"
        )
    if not allow_pickle:
        raise DataError(
            f"model.checkpoint={checkpoint.name} holds its weights only as a pickle, which can run code when it is "
            "loaded; convert it to safetensors, or give --allow-pickle (read with torch's weights_only loader)"
        )
    if pickle is not None:
        return _read_pickle(pickle)
    assert pickle_index is not None
    return _read_parts(checkpoint, pickle_index, _read_pickle)


def _read_parts(
    checkpoint: Checkpoint, index: Path, read: Callable[[Path], Dict[str, torch.Tensor]]
) -> Dict[str, torch.Tensor]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index.name} of {checkpoint.name} is not a weight index ({error})") from error
    state: Dict[str, torch.Tensor] = {}
    for name in names:
        if Path(str(name)).name != name:
            raise DataError(f"the weight index of {checkpoint.name} names {name!r}, which is outside the checkpoint")
        part = checkpoint.file(name)
        if part is None:
            raise DataError(f"the weight index of {checkpoint.name} names {name}, which is not there")
        state.update(read(part))
    return state


def _read_safetensors(path: Path) -> Dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(str(path))
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path.name} is damaged or not safetensors ({error}); fetch or save it again") from error


def _read_pickle(path: Path) -> Dict[str, torch.Tensor]:
    try:
        return torch.load(str(path), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises UnpicklingError, RuntimeError, EOFError or KeyError here, depending on where the file is bad.
        raise DataError(f"{path.name} cannot be read by torch's weights_only loader ({_first_line(error)})") from error


def _verify(path: Path, checkpoint: Checkpoint) -> None:
    if checkpoint.sha256 is None:
        return
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != checkpoint.sha256:
        raise DataError(
            f"model.safetensors of {checkpoint.name} ({checkpoint.source}) has SHA-256 {digest.hexdigest()}, expected "
            f"{checkpoint.sha256}; install the package again"
        )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hold back Transformers' warning about a new head: we report it in the words of the recipe."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
