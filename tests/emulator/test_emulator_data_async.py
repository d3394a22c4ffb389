# SPDX-License-Identifier: Apache-2.0
"""The worker process: what it hands over, how it follows, and how it ends."""

import gc
import glob
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy
import pytest
import torch
from emulator_data_sets import (
    Calls,
    Numbers,
    Pair,
    PairParser,
    Stream,
    backwards_dictionary,
    batches,
    broken,
    broken_from_two,
    dictionary,
    gone,
    growing,
    nested,
    process_id,
    stuck_from_one,
    to_pair,
    to_tuple,
    values,
    words,
)
from emulator_oracle import options

from ipu_finetune.emulator import poptorch
from ipu_finetune.emulator.device.nested import custom_parsers
from ipu_finetune.emulator.poptorch import AsynchronousDataAccessor, DataLoader, DataLoaderMode, SharingStrategy
from ipu_finetune.emulator.poptorch import _worker_handle as worker_handle

ASYNC, REBATCHED = DataLoaderMode.Async, DataLoaderMode.AsyncRebatched


def loader_of(dataset, batch_size=1, mode=ASYNC, collate_fn=None, workers=0, **async_options):
    return DataLoader(
        options(),
        dataset,
        batch_size,
        mode=mode,
        async_options=async_options,
        collate_fn=collate_fn,
        num_workers=workers,
    )


def worker_of(loader):
    return int(next(iter(loader)))


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# ---- what is handed over


def test_batches_come_from_a_process_of_its_own():
    loader = loader_of(Calls(3, process_id))
    found = set(values(loader))
    assert len(found) == 1
    assert found != {os.getpid()}


@pytest.mark.parametrize("strategy", list(SharingStrategy))
def test_every_sharing_strategy_hands_over_the_data_set(strategy):
    before = set(glob.glob(os.path.join(tempfile.gettempdir(), "poptorch-*")))
    loader = loader_of(Numbers(6), batch_size=2, sharing_strategy=strategy)
    assert batches(loader) == [[0, 1], [2, 3], [4, 5]]
    assert batches(loader) == [[0, 1], [2, 3], [4, 5]]
    assert set(glob.glob(os.path.join(tempfile.gettempdir(), "poptorch-*"))) == before


def test_three_buffers_are_used_in_turn():
    addresses = [batch.data_ptr() for batch in loader_of(Numbers(30), batch_size=3)]
    assert len(set(addresses)) == 3
    assert len({batch.data_ptr() for batch in loader_of(Numbers(30), batch_size=3, buffer_size=5)}) == 5


def test_a_batch_is_valid_until_the_next_one_is_asked_for():
    loader = loader_of(Numbers(4), batch_size=2, buffer_size=1)
    entries = iter(loader)
    first = next(entries)
    kept = first.clone()
    time.sleep(0.05)
    assert first.tolist() == [0, 1]
    assert next(entries).tolist() == [2, 3]
    assert first.tolist() == [2, 3]
    assert kept.tolist() == [0, 1]


def test_an_epoch_that_begins_anew_leaves_the_last_batch_alone():
    loader = loader_of(Numbers(8), batch_size=2)
    held = next(iter(loader))
    entries = iter(loader)
    time.sleep(0.05)
    assert held.tolist() == [0, 1]
    assert [batch.tolist() for batch in entries] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_left_early_starts_anew(mode, workers):
    loader = loader_of(Numbers(12), batch_size=2, mode=mode, workers=workers)
    for _ in range(3):
        entries = iter(loader)
        assert [next(entries).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert values(loader) == list(range(12))
    assert values(loader) == list(range(12))


def test_an_epoch_that_has_ended_stays_ended():
    entries = iter(loader_of(Numbers(2)))
    assert [int(batch) for batch in entries] == [0, 1]
    assert next(entries, None) is None
    assert next(entries, None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.float64])
def test_every_type_of_element_keeps_its_values(dtype):
    data = torch.tensor([[0, 1, 3], [1, 0, 2]]).to(dtype)
    for expected, found in zip(data, AsynchronousDataAccessor(list(data), sharing_strategy=SharingStrategy.Fork)):
        assert found.dtype == dtype
        assert torch.equal(found, expected)


def test_containers_keep_their_form():
    first = next(iter(loader_of(Calls(4, dictionary), batch_size=2)))
    assert type(first) is dict
    assert {name: tensor.tolist() for name, tensor in first.items()} == {"a": [0, 1], "b": [[0.0], [1.0]]}
    pair = next(iter(loader_of(Numbers(4), batch_size=2, collate_fn=to_tuple)))
    assert [tensor.tolist() for tensor in pair] == [[0, 1], [0, 2]]
    empty = next(iter(loader_of(Calls(1, lambda index: torch.zeros(0)), sharing_strategy=SharingStrategy.Fork)))
    assert empty.shape == (1, 0)


def test_a_dictionarys_keys_may_come_in_any_order():
    second = list(loader_of(Calls(2, backwards_dictionary), buffer_size=1))[1]
    assert {name: tensor.tolist() for name, tensor in second.items()} == {"a": [1], "b": [[1.0]]}


@pytest.mark.parametrize("mode", [ASYNC, REBATCHED])
def test_a_registered_type_of_the_users_is_put_together_again(mode, monkeypatch):
    monkeypatch.setitem(custom_parsers, Pair, PairParser())
    loader = loader_of(Numbers(5), batch_size=2, mode=mode, collate_fn=to_pair)
    found = [(pair.left.tolist(), pair.right.tolist()) for pair in loader]
    assert found == [([0, 1], [0, 2]), ([2, 3], [4, 6])]


@pytest.mark.parametrize(("make", "named"), [(nested, "dict"), (words, "list")])
def test_what_is_not_flat_is_refused(make, named):
    with pytest.raises(poptorch.Error, match="flat 1D container of tensors") as caught:
        loader_of(Calls(2, make))
    assert f"is not a torch tensor (<class '{named}'>)" in str(caught.value)


def test_batches_of_another_shape_are_refused():
    entries = iter(loader_of(Calls(2, growing)))
    assert next(entries).shape == (1, 1)
    with pytest.raises(poptorch.Error, match=r"expected \[\[1, 1\]\], got \[\[1, 2\]\]"):
        next(entries)


@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
def test_the_worker_goes_on_from_this_process_random_state(strategy):
    def drawn(loader):
        return [int(value) for value in values(loader)]

    seeds = (torch.manual_seed, random.seed, numpy.random.seed)
    for seed in seeds:
        seed(7)
    expected = drawn(DataLoader(options(), Calls(4, draw), shuffle=True))
    for seed in seeds:
        seed(7)
    assert drawn(loader_of_shuffled(strategy)) == expected


def draw(index):
    return torch.tensor(
        [index, random.getrandbits(30), numpy.random.randint(1 << 30), torch.randint(1 << 30, ()).item()]
    )


def loader_of_shuffled(strategy):
    return DataLoader(options(), Calls(4, draw), shuffle=True, mode=ASYNC, async_options={"sharing_strategy": strategy})


# ---- loading ahead


@pytest.mark.parametrize("early", [False, True])
def test_buffers_are_filled_at_once_only_on_request(early):
    data = Numbers(10)
    loader = loader_of(data, early_preload=early, buffer_size=4)
    # The batch after the last that fits is read as well, and waits.
    assert eventually(lambda: int(data.read) == (5 if early else 1))
    time.sleep(0.1)
    assert int(data.read) == (5 if early else 1)
    assert sum(loader._accessor._worker._data_buffers.indices_mem) == (4 if early else 1)
    assert values(loader) == list(range(10))


@pytest.mark.parametrize("ahead", [True, False])
def test_the_next_epoch_is_prepared_before_it_is_asked_for_unless_told_not_to(ahead):
    data = Numbers(10)
    loader = loader_of(data, load_indefinitely=ahead)
    assert values(loader) == list(range(10))
    assert eventually(lambda: int(data.read) == (14 if ahead else 10))
    time.sleep(0.1)
    assert int(data.read) == (14 if ahead else 10)
    assert values(loader) == list(range(10))
    assert values(loader) == list(range(10))


def test_an_epoch_without_a_whole_batch_is_not_repeated_by_itself():
    data = Numbers(3)
    loader = loader_of(data, batch_size=4, mode=REBATCHED)
    assert batches(loader) == batches(loader) == []
    time.sleep(0.1)
    assert int(data.read) <= 9


# ---- the accessor by itself


def test_an_accessor_reads_a_loader_or_anything_that_can_be_iterated():
    accessor = AsynchronousDataAccessor(DataLoader(options(), Numbers(7), batch_size=2))
    assert batches(accessor) == [[0, 1], [2, 3], [4, 5]]
    assert len(accessor) == 3
    fork = SharingStrategy.Fork
    assert values(AsynchronousDataAccessor(Numbers(3), sharing_strategy=fork)) == [0, 1, 2]
    assert values(AsynchronousDataAccessor(Stream(3), sharing_strategy=fork)) == [0, 1, 2]
    assert values(AsynchronousDataAccessor([torch.tensor(4)], sharing_strategy=fork)) == [4]


def test_an_accessor_puts_batches_together():
    loader = DataLoader(options(), Numbers(10), batch_size=2)
    accessor = AsynchronousDataAccessor(loader, rebatched_size=4)
    assert batches(accessor) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(accessor) == 2
    with_rest = AsynchronousDataAccessor(
        DataLoader(options(), Numbers(10), batch_size=2, drop_last=False), rebatched_size=4
    )
    assert batches(with_rest) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(with_rest) == 3


def test_a_rest_needs_a_size_to_be_put_together_to():
    with pytest.raises(AssertionError, match="'drop_last=False' option .* only works if 'rebatched_size' is specified"):
        AsynchronousDataAccessor(DataLoader(options(), Numbers(10), batch_size=2, drop_last=False))


def test_an_asynchronous_loader_is_not_wrapped_again():
    with pytest.raises(poptorch.Error, match="already uses an AsynchronousDataAccessor internally"):
        AsynchronousDataAccessor(loader_of(Numbers(4)))


# ---- failures


def test_a_failure_at_the_start_is_reported_with_the_workers_traceback(capfd):
    with pytest.raises(poptorch.Error, match="worker thread failed to start") as caught:
        loader_of(Calls(4, broken))
    assert "in broken\n" in str(caught.value)
    assert "KeyError: 'no such sample'" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_later_on_is_reported_as_often_as_it_is_met(workers):
    loader = loader_of(Calls(4, broken_from_two), workers=workers)
    entries = iter(loader)
    assert [int(next(entries)) for _ in range(2)] == [0, 1]
    for attempt in (lambda: next(entries), lambda: next(entries), lambda: list(loader)):
        with pytest.raises(poptorch.Error, match="An error occurred in the data fetcher") as caught:
            attempt()
        assert "in broken_from_two\n" in str(caught.value)
        assert "no such sample" in str(caught.value)


def test_a_worker_that_is_killed_is_missed():
    loader = loader_of(Calls(100, process_id))
    entries = iter(loader)
    os.kill(int(next(entries)), signal.SIGKILL)
    with pytest.raises(poptorch.Error, match="was killed by signal 9"):
        list(entries)


def test_a_worker_that_leaves_is_missed():
    with pytest.raises(poptorch.Error, match="ended with exit code 3"):
        loader_of(Calls(2, lambda index: os._exit(3)), sharing_strategy=SharingStrategy.Fork)


def test_an_empty_data_set_is_named():
    with pytest.raises(poptorch.Error, match="The Dataset is empty"):
        loader_of(Numbers(3), batch_size=4)


@pytest.mark.parametrize("strategy", [SharingStrategy.ForkServer, SharingStrategy.FileSystem])
def test_what_cannot_be_pickled_must_be_forked(strategy):
    data = Calls(2, lambda index: torch.tensor(index))
    with pytest.raises(poptorch.Error, match=r"cannot be sent .*SharingStrategy\.Fork"):
        loader_of(data, sharing_strategy=strategy)
    assert values(loader_of(data, sharing_strategy=SharingStrategy.Fork)) == [0, 1]


# ---- the end


def test_terminate_ends_the_worker_and_the_use():
    loader = loader_of(Calls(100, process_id))
    worker = worker_of(loader)
    loader.terminate()
    assert gone(worker, 0.1)
    loader.terminate()
    with pytest.raises(poptorch.Error, match="was terminated"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_nobody_uses_any_more_takes_its_processes_with_it(workers):
    gc.collect()
    gc.disable()  # without help
    try:
        loader = loader_of(Calls(100, with_parent_id), workers=workers)
        worker, its_parent = next(iter(loader))[0].tolist()
        del loader
        processes = {worker, its_parent} - {os.getpid()}
        assert len(processes) >= 1 + workers
        for process in processes - {forkserver_id()}:
            assert gone(process)
    finally:
        gc.enable()


def with_parent_id(index):
    return torch.tensor([os.getpid(), os.getppid()])


def forkserver_id():
    from multiprocessing import forkserver

    return forkserver._forkserver._forkserver_pid


def test_a_worker_that_does_not_listen_is_ended_all_the_same(monkeypatch):
    monkeypatch.setattr(worker_handle, "_PATIENCE", 0.2)
    loader = loader_of(Calls(4, stuck_from_one))
    assert int(next(iter(loader))) == 0
    worker = loader._accessor._worker._process.pid
    start = time.monotonic()
    loader.terminate()
    assert time.monotonic() - start < 2
    assert gone(worker, 0.1)


def test_two_loaders_do_not_disturb_each_other():
    fork = SharingStrategy.Fork
    one = loader_of(Numbers(6), sharing_strategy=fork)
    other = loader_of(Numbers(6), sharing_strategy=fork)
    assert [(int(a), int(b)) for a, b in zip(one, other)] == [(i, i) for i in range(6)]
    one.terminate()
    assert values(other) == list(range(6))


SCRIPT = textwrap.dedent(
    """
    import os, sys, time
    import torch
    import poptorch

    class Ids(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            return torch.tensor([os.getpid(), isinstance(poptorch.DataLoaderMode.Async, poptorch.enums.DataLoaderMode)])

    if __name__ == "__main__":
        loader = poptorch.DataLoader(
            poptorch.Options(),
            Ids(),
            num_workers=1,
            mode=poptorch.DataLoaderMode.Async,
            async_options={"sharing_strategy": poptorch.SharingStrategy[sys.argv[1]]},
        )
        entries = iter(loader)
        try:
            print(loader._accessor._worker._process.pid, *next(entries)[0].tolist(), flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            pass
    """
)


def test_a_script_that_is_interrupted_or_killed_leaves_no_process_and_no_noise(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    interrupted, killed = (
        subprocess.Popen(
            [sys.executable, "-m", "ipu_finetune.emulator", str(script), strategy],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for strategy in ("ForkServer", "Fork")
    )
    lines = [process.stdout.readline() for process in (interrupted, killed)]
    os.killpg(interrupted.pid, signal.SIGINT)  # what Ctrl-C does, to the workers too
    killed.kill()
    errors = [process.communicate(timeout=60)[1] for process in (interrupted, killed)]
    assert all(lines), errors
    for line in lines:
        worker, loading, emulated = [int(word) for word in line.split()]
        assert emulated == 1
        assert gone(worker)
        # PyTorch's own worker, below ours, looks for its parent every few seconds.
        assert gone(loading, 10)
    assert (interrupted.returncode, killed.returncode) == (0, -signal.SIGKILL)
    assert [line for text in errors for line in text.splitlines() if not line.startswith("emulated: ")] == []
