# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written aside and renamed, verified by hash when they are read, the newest few kept.

```
checkpoints/step-00000120/
  model.safetensors      the weights under their Transformers names
  training.safetensors   optimizer state and random state
  state.json             counters, and the SHA-256 of the two files
```
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import safetensors
import safetensors.torch
import torch

from ipu_finetune.errors import CheckpointError
from ipu_finetune.training.engine import TrainingState

__all__ = ["Checkpoint", "Progress", "checkpoints", "latest", "remove_unfinished", "save"]

SCHEMA = 1
_TENSOR_FILES = ("model.safetensors", "training.safetensors")


@dataclass
class Progress:
    """How far a run has come; everything that a resumed run continues counting from.

    Attributes:
        step: weight updates made (skipped ones included).
        applied: weight updates that changed the weights; what the schedule counts.
        epoch: that the next host call belongs to.
        host_batch: number of the next host call within that epoch.
        nonfinite_steps: updates whose loss was NaN or infinite.
        skipped_steps: updates that overflowed in float16 and left the weights alone.
        restarts: times that the run was resumed.
        seconds: spent so far, by phase.
        step_seconds: of each host call, first calls after a start left out.
        real_tokens: non-padding tokens that the updates saw.
        sequences: real rows that the updates saw.
    """

    step: int = 0
    applied: int = 0
    epoch: int = 0
    host_batch: int = 0
    nonfinite_steps: int = 0
    skipped_steps: int = 0
    restarts: int = 0
    seconds: Dict[str, float] = field(default_factory=dict)
    step_seconds: List[float] = field(default_factory=list)
    real_tokens: int = 0
    sequences: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    model: Dict[str, torch.Tensor]
    training: TrainingState
    progress: Progress
    identity: Dict[str, Any]


def checkpoints(folder: Path) -> List[Path]:
    """Return the finished checkpoints of a run, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.is_dir())


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run had written aside."""
    for path in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def save(
    folder: Path,
    model: Dict[str, torch.Tensor],
    training: TrainingState,
    progress: Progress,
    identity: Dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Args:
        folder: of the run.
        model: plain weights.
        training: of the engine.
        progress: of the loop.
        identity: what a run must share with this one to continue it.
        keep: checkpoints to keep, this one included.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); earlier checkpoints are whole.
    """
    root = folder / "checkpoints"
    final = root / f"step-{progress.step:08d}"
    aside = root / f".step-{progress.step:08d}-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        safetensors.torch.save_file(_separate(model), str(aside / _TENSOR_FILES[0]))
        safetensors.torch.save_file(_separate(training.tensors), str(aside / _TENSOR_FILES[1]))
        state = {
            "schema": SCHEMA,
            "progress": progress.__dict__,
            "values": training.values,
            "identity": identity,
            "sha256": {name: _sha256(aside / name) for name in _TENSOR_FILES},
        }
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for name in (*_TENSOR_FILES, "state.json"):
            _flush(aside / name)
        if final.exists():
            shutil.rmtree(final)
        os.rename(aside, final)
        _flush(root)
    # safetensors wraps the operating system's error into its own.
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        before = checkpoints(folder)
        whole = f"the checkpoint before it is whole: {before[-1].name}" if before else "there is none before it"
        raise CheckpointError(
            f"checkpoint {final.name} could not be written to {root} ({error}); {whole}. Make room or give another "
            "--output, then continue with --resume"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest(folder: Path) -> Tuple[Optional[Checkpoint], List[str]]:
    """Read the newest checkpoint that is whole.

    Returns:
        The checkpoint, or None where the run has none; and a sentence for each damaged one that was passed over.
    """
    notes: List[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return _read(path), notes
        except CheckpointError as error:
            notes.append(str(error))
    if notes:
        raise CheckpointError("no checkpoint can be read: " + "; ".join(notes))
    return None, notes


def _read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["schema"] != SCHEMA:
            raise CheckpointError(f"{path.name} has schema {state['schema']}, this version reads {SCHEMA}")
        for name in _TENSOR_FILES:
            if _sha256(path / name) != state["sha256"][name]:
                raise CheckpointError(f"{path.name} is damaged: {name} does not match its hash")
        model = safetensors.torch.load_file(str(path / _TENSOR_FILES[0]))
        tensors = safetensors.torch.load_file(str(path / _TENSOR_FILES[1]))
        return Checkpoint(
            path, model, TrainingState(tensors, state["values"]), Progress(**state["progress"]), state["identity"]
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error


def _separate(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Give every name its own contiguous memory; safetensors refuses tensors that share some (tied weights)."""
    seen = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        address = tensor.data_ptr()
        result[name] = tensor.clone() if address in seen and tensor.numel() else tensor
        seen.add(address)
    return result


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
