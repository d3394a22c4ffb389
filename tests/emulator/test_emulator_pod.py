# SPDX-License-Identifier: Apache-2.0
"""The virtual pod: who has an IPU has it alone, across models, threads and processes, until it is released (U44)."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipu_finetune.emulator.device import pod
from ipu_finetune.emulator.device.errors import Error

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("IPU_FINETUNE_EMULATED_IPUS", "POPTORCH_WAIT_FOR_IPU", "IPUOF_VIPU_API_PARTITION_ID")


@pytest.fixture(autouse=True)
def _own_pod(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "16")


@pytest.fixture
def other_process():
    """Start Python code in another process and wait for the first line that it prints."""
    started = []

    def start(code):
        code = f"from ipu_finetune.emulator.device import pod\nimport os, sys, time\n{code}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


HOLD = "lease = pod.acquire({count}, holder='Theirs')\nprint(lease.ids, flush=True)\nsys.stdin.readline()"


def test_devices_are_numbered_as_gc_info_lists_a_partition_of_four(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "4")
    listed = {0: (0,), 1: (1,), 2: (2,), 3: (3,), 4: (0, 1), 5: (2, 3), 6: (0, 1, 2, 3)}
    assert {number: pod.device_members(number) for number in range(7)} == listed
    assert [pod.first_device(count) for count in (1, 2, 4)] == [0, 4, 6]
    with pytest.raises(Error, match=r"device Id 7.*0-3 \(1 IPU\), 4-5 \(2 IPUs\), 6 \(4 IPUs\)"):
        pod.device_members(7)


def test_a_pod_has_sixteen_ipus_and_gives_aligned_groups_beside_single_ones():
    assert pod.acquire(1, holder="A").ids == (0,)
    pair = pod.acquire(2, holder="B")
    assert (pair.ids, pair.device_id) == ((2, 3), 17)
    quad = pod.acquire(4, holder="C")
    assert (quad.ids, quad.device_id) == ((4, 5, 6, 7), 25)
    assert pod.acquire(8, holder="D").ids == tuple(range(8, 16))
    assert pod.acquire(1, holder="E").ids == (1,)


def test_use_ipu_id_takes_that_device_and_no_other():
    with pod.acquire(2, ipu_id=20, holder="A") as lease:
        assert lease.ids == (8, 9)
        with pytest.raises(Error, match=r"device Id 9 \(1 IPU\(s\)\): in use.\n  IPU 9: this process"):
            pod.acquire(1, ipu_id=9, holder="B")
        assert pod.acquire(1, ipu_id=10, holder="C").ids == (10,)


def test_a_device_that_is_too_small_is_refused_and_a_larger_one_is_held_whole(caplog):
    with pytest.raises(Error, match=r"replication factor \* used IPUs = 4 IPU\(s\), but .* has 2.* of 4 is 24"):
        pod.acquire(4, ipu_id=16, holder="A")
    assert pod.acquire(1, ipu_id=16, holder="A").ids == (0, 1)
    assert "not used" in caplog.text


def test_u44_one_device_two_models_names_the_holder_and_how_to_free_it(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    first = pod.acquire(1, holder="ModelA")
    with pytest.raises(Error) as caught:
        pod.acquire(1, holder="ModelB")
    text = str(caught.value)
    assert text.startswith("Failed to acquire 1 IPU(s)")
    program = os.path.basename(sys.argv[0])
    assert f"IPU 0: this process ({program}), model ModelA, since {time.strftime('%Y-%m-%d')}" in text
    for way in ("detachFromDevice()", "destroy()", "POPTORCH_WAIT_FOR_IPU=1"):
        assert way in text
    first.release()
    assert pod.acquire(1, holder="ModelB").ids == (0,)


def test_u44_after_an_exception_within_the_lease_the_device_is_free(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    with pytest.raises(ZeroDivisionError), pod.acquire(1, holder="A"):
        raise ZeroDivisionError
    assert pod.acquire(1, holder="B").ids == (0,)


def test_another_process_is_refused_while_this_one_holds_the_ipus_and_sees_who_does(other_process):
    lease = pod.acquire(16, holder="Ours")
    attempt = "try: pod.acquire(1, holder='x')\nexcept Exception as error: print(str(error).replace(chr(10), '|'))"
    text = other_process(attempt)[1]
    assert text.startswith("Failed to acquire 1 IPU(s): the emulated pod has 16, and none of them is free.|")
    assert f"IPUs 0-15: process {os.getpid()} ({os.path.basename(sys.argv[0])}), model Ours, since 20" in text
    lease.release()
    assert other_process("print(pod.acquire(16, holder='x').ids[-1])")[1] == "15"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_dies_gives_its_ipus_back(other_process, end):
    process, ids = other_process(HOLD.format(count=16))
    assert ids == str(tuple(range(16)))
    with pytest.raises(Error, match=f"process {process.pid} \\(python -c\\), model Theirs"):
        pod.acquire(1, holder="x")
    process.send_signal(end)
    process.wait(10)
    assert len(pod.acquire(16, holder="x").ids) == 16


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_ipus(other_process):
    code = "lease = pod.acquire(16, holder='x')\nchild = os.fork()\nif child: print(child, flush=True)\ntime.sleep(30)"
    process, child = other_process(code)
    try:
        process.kill()
        process.wait(10)
        os.kill(int(child), 0)  # it lives
        assert len(pod.acquire(16, holder="x").ids) == 16
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_forked_child_neither_owns_nor_ends_its_parents_lease(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    lease = pod.acquire(1, holder="Parent")
    child = os.fork()
    if child == 0:
        released = lease.released
        lease.release()
        try:
            pod.acquire(1, holder="Child")
            os._exit(1)
        except Error as error:
            os._exit(0 if released and f"process {os.getppid()} " in str(error) and "Parent" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not lease.released
    code = "from ipu_finetune.emulator.device import pod; print([row.pid for row in pod.listing()])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"[{os.getpid()}]"


def test_a_second_release_does_not_end_the_lease_of_the_next_holder(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    first = pod.acquire(1, holder="A")
    first.release()
    second = pod.acquire(1, holder="B")
    first.release()
    assert (first.released, second.released) == (True, False)
    with pytest.raises(Error, match="model B"):
        pod.acquire(1, holder="C")


def test_threads_never_hold_the_same_ipu(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "8")
    held, overlaps, taken, guard = set(), [], [], threading.Lock()

    def work(seed):
        chance = random.Random(seed)
        for _ in range(40):
            try:
                lease = pod.acquire(chance.choice([1, 2, 4]), holder=f"thread {seed}", wait=False)
            except Error:
                continue
            with guard:
                overlaps.extend(held.intersection(lease.ids))
                held.update(lease.ids)
                taken.append(lease.ids)
            with guard:
                held.difference_update(lease.ids)
                lease.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == []
    assert len(taken) > 30
    assert len(pod.acquire(8, holder="all").ids) == 8


def test_waiting_ends_when_another_process_lets_go_and_says_so_once(other_process, monkeypatch, caplog):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    monkeypatch.setattr(pod, "POLL_SECONDS", 0.02)
    process, _ = other_process(HOLD.format(count=16))
    threading.Timer(0.3, process.communicate, ["\n"]).start()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert pod.acquire(1, holder="x").ids == (0,)
    assert 0.2 < time.monotonic() - started < 10
    lines = [record.getMessage() for record in caplog.records if "No IPU available, sleeping" in record.getMessage()]
    assert len(lines) == 1
    assert f"process {process.pid}" in lines[0]


def test_the_argument_wins_over_the_variable_and_a_strange_value_is_refused(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    lease = pod.acquire(1, holder="A")
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    with pytest.raises(Error, match="Failed to acquire"):
        pod.acquire(1, holder="B", wait=False)
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "maybe")
    with pytest.raises(Error, match="POPTORCH_WAIT_FOR_IPU=maybe: expected 1"):
        pod.acquire(1, holder="B")
    lease.release()


@pytest.mark.parametrize("count", [0, 3, 6, 128])
def test_only_powers_of_two_up_to_64_can_be_had(monkeypatch, count):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "256")
    with pytest.raises(Error, match=rf"Failed to acquire {count} IPU\(s\).*power of two, and at most 64"):
        pod.acquire(count, holder="x")
    assert pod.acquire(64, holder="x").ids == tuple(range(64))


def test_more_than_the_pod_has_is_refused_at_once_even_when_waiting():
    with pytest.raises(Error, match="the emulated pod has 16. Set IPU_FINETUNE_EMULATED_IPUS=32"):
        pod.acquire(32, holder="x", wait=True)


@pytest.mark.parametrize("value", ["0", "12", "many", "-4", "8192"])
def test_a_pod_of_an_impossible_size_is_refused(monkeypatch, value):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", value)
    with pytest.raises(Error, match=f"IPU_FINETUNE_EMULATED_IPUS={value}: a pod has a power of two"):
        pod.acquire(1, holder="x")


def test_a_model_that_only_a_cycle_keeps_alive_does_not_block_the_next(monkeypatch):
    import weakref

    class Model:
        def __init__(self):
            self.me = self
            self.lease = pod.acquire(1, holder="forgotten")
            weakref.finalize(self, self.lease.release)

    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    gc.disable()
    try:
        Model()
        assert pod.acquire(1, holder="next").ids == (0,)
    finally:
        gc.enable()


def test_where_the_state_cannot_be_kept_models_of_this_process_still_exclude_each_other(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "1")
    lease = pod.acquire(1, holder="A")
    with pytest.raises(Error, match="model A"):
        pod.acquire(1, holder="B")
    lease.release()
    pod.acquire(1, holder="B")
    warnings = [record for record in caplog.records if "XDG_STATE_HOME" in record.getMessage()]
    assert len(warnings) == 1


def test_a_state_folder_that_is_deleted_in_between_does_not_let_others_in(tmp_path, other_process):
    import shutil

    lease = pod.acquire(4, holder="A")
    shutil.rmtree(tmp_path / "state")
    pod.acquire(1, holder="B")
    assert other_process("print(pod.acquire(4, holder='x').ids)")[1] == "(8, 9, 10, 11)"
    lease.release()


def test_the_listing_has_a_line_for_each_ipu_and_takes_none(monkeypatch, other_process):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "4")
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", "21")
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p1")
    process, _ = other_process(HOLD.format(count=2))
    mine = pod.acquire(1, holder="Mine")
    rows = pod.listing()
    assert [(row.partition, row.id, row.type) for row in rows] == [("p1", number, "ipu21") for number in range(4)]
    assert [(row.pid, row.model) for row in rows] == [
        (process.pid, "Theirs"),
        (process.pid, "Theirs"),
        (os.getpid(), "Mine"),
        (None, None),
    ]
    assert abs(rows[0].since - time.time()) < 60
    assert pod.acquire(1, holder="x").ids == (3,)
    mine.release()


def test_taking_and_giving_back_an_ipu_costs_less_than_a_millisecond():
    times = []
    for _ in range(200):
        started = time.perf_counter()
        pod.acquire(4, holder="x").release()
        times.append(time.perf_counter() - started)
    assert sorted(times)[100] < 1e-3
