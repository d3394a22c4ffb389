# SPDX-License-Identifier: Apache-2.0
"""A run's folder: where it lies, what may be in it, and files that are written whole or not at all."""

import dataclasses
import datetime
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, List, Mapping, Optional

import safetensors
import torch

from ipu_finetune.errors import CheckpointError
from ipu_finetune.inference.pipeline import SETTINGS_FILE

__all__ = ["prepare", "save_model", "to_resume", "write_json"]

_MARKS = ("recipe.json", "record.json", "checkpoints", "model")


def prepare(output: Optional[str], recipe_name: str, target: str, overwrite: bool) -> Path:
    """Return the folder of a new run, made and known to be writable.

    Args:
        output: the user's choice; None gives ``runs/<recipe>/<date>-<target>``.
        recipe_name: model and data set.
        target: where the run executes.
        overwrite: take a folder that holds a run, whose files are removed.

    Raises:
        CheckpointError: the folder holds a run or other files, or cannot be written.
    """
    if output is None:
        date = datetime.datetime.now().strftime("%Y%m%dT%H%M%S")
        output = str(Path("runs") / recipe_name / f"{date}-{target}")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--output {folder} is a file; give a folder")
    try:
        present = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise CheckpointError(f"--output {folder} cannot be read ({error})") from error
    if any(mark in present for mark in _MARKS):
        if not overwrite:
            raise CheckpointError(
                f"--output {folder} already holds a run; continue it with --resume, replace it with --overwrite, or "
                "give another folder"
            )
    elif present:
        raise CheckpointError(f"--output {folder} holds other files ({', '.join(sorted(present)[:3])}); give another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"--output {folder} cannot be written ({error.strerror or error})") from error
    return folder


def to_resume(resume: Any, output: Optional[str], recipe_name: str) -> Path:
    """Return the folder of the run to continue.

    Args:
        resume: True, or the folder.
        output: the user's --output, which names the run where `resume` does not.
        recipe_name: whose newest run below ``runs/`` is taken where neither does.

    Raises:
        CheckpointError: there is no such run.
    """
    if resume is not True:
        folder = Path(resume)
    elif output is not None:
        folder = Path(output)
    else:
        runs: List[Path] = sorted((Path("runs") / recipe_name).glob("*/recipe.json"))
        if not runs:
            raise CheckpointError(f"--resume: there is no run of {recipe_name} in runs/; give its folder: --resume DIR")
        folder = runs[-1].parent
    if not (folder / "recipe.json").is_file():
        raise CheckpointError(f"--resume {folder}: this is not a run's folder (it has no recipe.json)")
    return folder


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file aside and rename it, so that it is never half there.

    Raises:
        CheckpointError: it could not be written.
    """
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error})") from error


def save_model(
    folder: Path,
    model_class: Any,
    config: Any,
    state: Mapping[str, torch.Tensor],
    tokenizer: Any,
    layout: Mapping[str, Any],
    task: Any,
) -> None:
    """Write `model/`: a plain Transformers checkpoint, its IPU config and the task's settings; aside first.

    Raises:
        CheckpointError: it could not be written.
    """
    final, aside = folder / "model", folder / f".model-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        with torch.device("meta"):  # only the class and its config are needed, the weights are in `state`
            model = model_class(config)
        model.save_pretrained(
            str(aside), state_dict={name: tensor.float() for name, tensor in state.items()}, safe_serialization=True
        )
        tokenizer.save_pretrained(str(aside))
        write_json(aside / "ipu_config.json", layout)
        write_json(aside / SETTINGS_FILE, {"task": dataclasses.asdict(task)})
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
    # safetensors wraps the operating system's error into its own.
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be written to {final} ({error}); make room, then continue with --resume"
        ) from error
