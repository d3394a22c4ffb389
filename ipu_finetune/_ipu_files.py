# SPDX-License-Identifier: Apache-2.0
"""`ipu_config.json` files: reading them strictly, and finding the built-in one that fits a model.

The schema is optimum-graphcore 0.7.1's, which takes a `from_pretrained` of each folder. Reading one here needs neither
that package nor a network.
"""

import json
import re
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ipu_finetune._fields import hints, render, rule_broken
from ipu_finetune._ipu_fields import DERIVED, Ipu
from ipu_finetune._shipped import shipped_folder
from ipu_finetune.errors import RecipeError, did_you_mean

__all__ = ["AUTO", "Facts", "IpuConfigFile", "config_names", "config_path", "facts", "match", "read", "settle"]

FILE_NAME = "ipu_config.json"
AUTO = "auto"

OWN_FIELDS = ("config", "pod")
SETTINGS = {each.name: each for each in fields(Ipu) if each.name not in OWN_FIELDS}

# What writers of the file leave in it beside settings.
METADATA = ("optimum_version", "transformers_version", "architectures", "model_type", "_name_or_path", "_commit_hash")
RETIRED = {
    "enable_half_first_order_momentum": "it does nothing in optimum-graphcore 0.7.1, which chooses the optimizer's "
    "types itself; remove it",
    "sharded_execution_for_inference": "inference always uses sharded execution; remove it",
}
ENCODER_ON_CPU = "execute_encoder_on_cpu_for_generation"


@dataclass(frozen=True)
class IpuConfigFile:
    """An `ipu_config.json` that has been read and found valid.

    Attributes:
        name: of the built-in config, or the path that was given.
        path: of the file.
        values: the settings that it makes, by `IPUConfig`'s names.
        architectures: models that it was written for, as Hub configs name them.
    """

    name: str
    path: Path
    values: Dict[str, Any]
    architectures: Tuple[str, ...] = ()

    @property
    def layers(self) -> Optional[int]:
        """Encoder layers that it places; None where wildcards leave that open."""
        layers = self.values.get("layers_per_ipu", [-1])
        return None if -1 in layers else sum(layers)


@dataclass(frozen=True)
class Facts:
    """What a layout needs to know of a model.

    Attributes:
        model_type: Transformers' name of the architecture, e.g. ``bert``.
        layers: encoder layers.
        vocab_size: rows of the embedding; None where the config does not say.
    """

    model_type: str
    layers: int
    vocab_size: Optional[int] = None


def config_names() -> List[str]:
    """Return the names of the built-in configs."""
    return sorted(path.parent.name for path in shipped_folder("ipu_configs").glob(f"*/{FILE_NAME}"))


def config_path(name: str) -> Path:
    """Return the file of a built-in config, or of a path to a folder or file.

    Raises:
        RecipeError: there is none; the message names the near ones and those that work offline.
    """
    built_in = shipped_folder("ipu_configs") / name / FILE_NAME
    if name in config_names():
        return built_in
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / FILE_NAME
    if path.is_file():
        return path
    # Configs on the hub are called Graphcore/<model>-ipu: compare what names the model.
    short = re.sub(r"-ipu$", "", name.rsplit("/", 1)[-1].lower())
    offline = f"built in, and there offline: {', '.join(config_names())}"
    near = did_you_mean(short, config_names())
    if near.startswith(" (known"):
        near = ""
    problem = f"there is no IPU config '{name}'{near}; {offline}; or give the path of a folder with an {FILE_NAME}"
    raise RecipeError([problem], where="ipu config")


def read(name_or_path: str) -> IpuConfigFile:
    """Read and check an `ipu_config.json`.

    Retired keys are warned of; the versions and other metadata that writers leave in the file are not.

    Raises:
        RecipeError: no such config, not JSON, or keys and values that the schema does not have; all of them at once.
    """
    path = config_path(str(name_or_path))
    where = f"ipu config {path}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError([f"cannot be read as JSON: {error}"], where=where) from error
    if not isinstance(content, dict):
        raise RecipeError(["must be a JSON object"], where=where)
    problems: List[str] = []
    values: Dict[str, Any] = {}
    for key, value in content.items():
        if key in SETTINGS:
            problems += setting_problem(key, value)
            if value is not None:  # save_pretrained writes null for what is left to the default
                values[key] = value
        elif key in RETIRED:
            warnings.warn(f"{where}: {key} is retired: {RETIRED[key]}", stacklevel=2)
        elif key in DERIVED:
            if value != 1:
                warnings.warn(f"{where}: {key}={render(value)} is not used: it {DERIVED[key]}", stacklevel=2)
        elif key == ENCODER_ON_CPU:
            if value:
                problems.append(f"{key}={render(value)}: optimum-graphcore 0.7.1 cannot do it; remove it")
        elif key not in METADATA:
            problems.append(f"{key}: unknown key{did_you_mean(key, SETTINGS)}")
    if problems:
        raise RecipeError(problems, where=where)
    return IpuConfigFile(str(name_or_path), path, values, tuple(content.get("architectures") or ()))


def setting_problem(key: str, value: Any, label: str = "") -> List[str]:
    """Return, as a list of none or one, what is wrong with a setting's type or range."""
    rule = rule_broken(value, hints(Ipu)[key], SETTINGS[key].metadata)
    return [f"{label}{key}={render(value)}: {rule}"] if rule else []


def facts(checkpoint: str) -> Optional[Facts]:
    """Read a model's facts from the `config.json` of a local folder; None where there is none to read."""
    path = Path(checkpoint).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        # DistilBERT and GPT-2 have names of their own for the number of layers.
        layers = next(config[key] for key in ("num_hidden_layers", "n_layers", "n_layer") if key in config)
        return Facts(str(config["model_type"]), int(layers), config.get("vocab_size"))
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def match(architecture: str, layers: int) -> Tuple[IpuConfigFile, str]:
    """Find the built-in config for an architecture and a number of layers.

    Args:
        architecture: a model type (``bert``) or class name (``BertForQuestionAnswering``).
        layers: encoder layers of the model.

    Returns:
        The config, and the line that tells the user which one was chosen and why.

    Raises:
        RecipeError: no built-in config fits; none is taken in its place.
    """
    built_in = [read(name) for name in config_names()]
    for each in built_in:
        if each.layers == layers and _family(architecture) in map(_family, each.architectures):
            return each, f"ipu config: built-in '{each.name}', chosen for {architecture} with {layers} layers"
    there = "; ".join(f"{each.name} ({', '.join(each.architectures)}, {each.layers} layers)" for each in built_in)
    problem = (
        f"no built-in IPU config fits {architecture} with {layers} layers; there are: {there}; name one with "
        "ipu.config and lay the layers out with ipu.layers_per_ipu"
    )
    raise RecipeError([problem], where="ipu config")


def _family(architecture: str) -> str:
    """``BertForQuestionAnswering`` and ``bert`` are the same family."""
    stem = re.sub(r"(LMHeadModel|For[A-Z]\w*|Model)$", "", architecture)
    return re.sub(r"[^a-z0-9]", "", stem.lower())


def settle(ipu: Ipu, checkpoint: str, known: Optional[Facts] = None) -> Tuple[Ipu, Optional[str]]:
    """Replace ``config="auto"`` by the config that lies with the checkpoint, else by the built-in one that fits.

    Args:
        ipu: the recipe's section; returned as it is where it names a config.
        checkpoint: the model's folder.
        known: the model's facts, where the caller has them; otherwise read from the folder.

    Returns:
        The section with a config named, and the line that announces the choice (None where nothing was chosen).

    Raises:
        RecipeError: nothing fits, or the model is not known.
    """
    if ipu.config != AUTO:
        return ipu, None
    beside = Path(checkpoint).expanduser() / FILE_NAME
    if beside.is_file():
        return replace(ipu, config=str(beside)), f"ipu config: {beside}, which lies with the checkpoint"
    known = known or facts(checkpoint)
    if known is None:
        problem = f"ipu.config=auto: {checkpoint} has no config.json to choose by; name one of {config_names()}"
        raise RecipeError([problem], where="ipu config")
    chosen, announcement = match(known.model_type, known.layers)
    return replace(ipu, config=chosen.name), announcement
