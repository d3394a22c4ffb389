# SPDX-License-Identifier: Apache-2.0
"""Checkpoints stay whole: rotation, damage, a disk that is full."""

import multiprocessing
import resource

import pytest
import torch

from ipu_finetune.errors import CheckpointError
from ipu_finetune.training import checkpoint
from ipu_finetune.training.checkpoint import Progress
from ipu_finetune.training.engine import TrainingState


def write(folder, step, size=4, keep=2):
    tied = torch.full((size,), float(step))
    state = TrainingState({"moment": torch.full((size,), step / 2)}, {"scaler": {"scale": 2.0}})
    return checkpoint.save(folder, {"a": tied, "b": tied}, state, Progress(step=step), {"seed": 1}, keep)


def test_the_newest_checkpoint_comes_back_as_it_was_written(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    last, notes = checkpoint.latest(tmp_path)
    assert notes == []
    assert last.progress.step == 3
    assert last.model["a"].tolist() == last.model["b"].tolist() == [3.0] * 4
    assert last.training.tensors["moment"].tolist() == [1.5] * 4
    assert last.training.values == {"scaler": {"scale": 2.0}}
    assert last.identity == {"seed": 1}


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path):
    write(tmp_path, 1)
    path = write(tmp_path, 2) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    last, notes = checkpoint.latest(tmp_path)
    assert last.progress.step == 1
    assert notes == ["step-00000002 is damaged: model.safetensors does not match its hash"]


def test_no_readable_checkpoint_is_an_error_and_none_at_all_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) == (None, [])
    (write(tmp_path, 1) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="no checkpoint can be read: step-00000001 is damaged"):
        checkpoint.latest(tmp_path)


def _write_with_little_room(folder, queue):
    # A write beyond this size fails in the operating system, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write(folder, 2, size=200_000)
        queue.put("written")
    except CheckpointError as error:
        queue.put(str(error))


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path):
    write(tmp_path, 1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_write_with_little_room, args=(tmp_path, queue))
    process.start()
    message = queue.get(timeout=60)
    process.join()
    assert "step-00000002 could not be written" in message
    assert "the checkpoint before it is whole: step-00000001" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    last, notes = checkpoint.latest(tmp_path)
    assert (last.progress.step, notes) == (1, [])


def test_what_a_killed_run_wrote_aside_is_removed(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / ".step-00000002-77").mkdir()
    checkpoint.remove_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
