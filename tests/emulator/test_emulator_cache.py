# SPDX-License-Identifier: Apache-2.0
"""The executable cache: hit, miss and why, safe with several processes, off where its folder cannot be used (U36, U37)."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipu_finetune.emulator.device import cache, cache_entries
from ipu_finetune.emulator.device.cache import ExecutableCache, key_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


def parts(length=128, dropout=0.1, version="0.1", accumulation=4):
    """Return what a model's key is made of; its graph has every one of the other values in it, as a real one has."""
    content = {
        "shapes": {"input_ids": [1, length], "labels": [1]},
        "dropout": {f"layer.{number}.dropout": dropout for number in range(24)},
        "options": {"Training": {"gradientAccumulation": accumulation}},
        "version": version,
    }
    return {"graph": hashlib.sha256(json.dumps(content).encode()).hexdigest(), **content}


def look_up(folder, model="Bert", payload=b"traced", **changes):
    return ExecutableCache(str(folder)).look_up(parts(**changes), lambda: payload, model=model)


def run_python(code, *arguments, **options):
    code = f"from ipu_finetune.emulator.device.cache import ExecutableCache\nimport os, sys, time\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_u37_other_length_misses_other_learning_rate_hits_other_dropout_misses_and_says_why(tmp_path):
    first, second = look_up(tmp_path, length=128), look_up(tmp_path, length=384)
    again, dropout = look_up(tmp_path, length=128), look_up(tmp_path, length=128, dropout=0.2)
    assert [answer.outcome for answer in (first, second, again, dropout)] == ["miss", "miss", "hit", "miss"]
    assert first.reason.startswith("the first executable in ")
    assert second.reason == "input shapes input_ids [1,128] -> [1,384]"
    assert dropout.reason == "dropout 0.1 -> 0.2 (24 places)"
    assert str(dropout) == f"miss {dropout.key[:12]} (dropout 0.1 -> 0.2 (24 places))"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.2"}, "version 0.1 -> 0.2"),
        ({"accumulation": 8}, "options Training.gradientAccumulation 4 -> 8"),
        ({"accumulation": 8, "version": "0.2"}, "options Training.gradientAccumulation 4 -> 8, version 0.1 -> 0.2"),
    ],
)
def test_a_miss_names_what_differs(tmp_path, change, reason):
    look_up(tmp_path)
    assert look_up(tmp_path, **change).reason == reason


def test_a_miss_is_compared_with_the_most_similar_executable_of_the_same_model(tmp_path):
    look_up(tmp_path, length=384, version="0.0", dropout=0.3)
    look_up(tmp_path, length=256)
    look_up(tmp_path, length=128, dropout=0.5, model="Other")
    assert look_up(tmp_path, length=128).reason == "input shapes input_ids [1,256] -> [1,128]"
    assert look_up(tmp_path, model="New", accumulation=9).reason.startswith("no executable of model New in ")


def test_the_graph_is_named_only_when_nothing_else_differs(tmp_path):
    look_up(tmp_path)
    answer = ExecutableCache(str(tmp_path)).look_up({**parts(), "graph": "other"}, model="Bert")
    assert answer.reason == "the traced graph differs; everything else is the same"


def test_a_part_that_is_new_or_gone_and_inputs_without_names_are_told(tmp_path):
    store = ExecutableCache(str(tmp_path))
    store.look_up({"shapes": [[1, 128], [4]], "half": True})
    answer = store.look_up({"shapes": [[1, 128], [8]], "precision": "fp16"})
    assert answer.reason == "half true -> nothing, precision nothing -> fp16, input shapes [4] -> [8]"


def test_the_key_does_not_depend_on_order_and_refuses_what_two_runs_would_not_agree_on():
    assert key_of({"a": 1, "b": [1, 2]}) == key_of({"b": (1, 2), "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
    with pytest.raises(TypeError, match="not JSON serializable"):
        key_of({"a": object()})


def test_a_hit_returns_the_stored_bytes_and_makes_nothing(tmp_path):
    payload = os.urandom(100_000) + b"\n\n"
    missed = look_up(tmp_path, payload=payload)
    assert (missed.outcome, missed.payload) == ("miss", payload)

    def must_not_run():
        raise AssertionError("compiled again")

    hit = ExecutableCache(str(tmp_path)).look_up(parts(), must_not_run)
    assert (hit.outcome, hit.payload, hit.path) == ("hit", payload, missed.path)
    assert "compiled 0 seconds ago" in hit.reason


def test_a_hit_does_not_read_the_other_entries(tmp_path, monkeypatch):
    look_up(tmp_path, length=1)
    look_up(tmp_path, length=2)
    monkeypatch.setattr(cache_entries.os, "scandir", lambda *_: pytest.fail("the folder was scanned"))
    assert look_up(tmp_path, length=1).outcome == "hit"


def test_hits_are_counted(tmp_path):
    for _ in range(4):
        look_up(tmp_path)
    (entry,) = cache_entries.survey(tmp_path)
    assert (entry.hits, entry.model, entry.damage) == (3, "Bert", None)


def test_without_a_folder_it_is_off_and_the_payload_is_made_each_time():
    made = []
    for folder in (None, ""):
        answer = ExecutableCache(folder).look_up(parts(), lambda: made.append(1) or b"x")
        assert (answer.outcome, answer.path, answer.payload) == ("off", None, b"x")
    assert len(made) == 2


def spoil_byte(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


DAMAGE = {
    "one bit of the payload": (spoil_byte, "hash"),
    "truncated payload": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "hash"),
    "truncated description": (lambda path: path.write_bytes(path.read_bytes()[:120]), "hash"),
    "empty": (lambda path: path.write_bytes(b""), "does not begin as an entry"),
    "something else": (lambda path: path.write_bytes(b"\x00" * 5000), "does not begin as an entry"),
    "a later format": (lambda path: path.write_bytes(path.read_bytes().replace(b" 2 ", b" 9 ", 1)), "format 9"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_named_and_made_again(tmp_path, caplog, name):
    damage, words = DAMAGE[name]
    path = look_up(tmp_path).path
    damage(path)
    answer = look_up(tmp_path, payload=b"made again")
    assert (answer.outcome, answer.payload) == ("miss", b"made again")
    assert answer.reason.startswith("the entry was damaged: ")
    assert words in answer.reason
    assert f"entry {path} is damaged" in caplog.text
    healed = look_up(tmp_path)
    assert (healed.outcome, healed.payload) == ("hit", b"made again")


def test_an_entry_under_another_ones_name_is_damage(tmp_path):
    path, other = look_up(tmp_path).path, look_up(tmp_path, length=384).path
    path.write_bytes(other.read_bytes())
    answer = look_up(tmp_path)
    assert answer.outcome == "miss"
    assert f"it is the entry of {other.name[:12]}" in answer.reason


def test_an_entry_without_executable_serves_those_who_need_none(tmp_path):
    store = ExecutableCache(str(tmp_path))
    assert [store.look_up(parts()).outcome, store.look_up(parts()).outcome] == ["miss", "hit"]
    assert look_up(tmp_path).reason == "the entry was stored without an executable"
    assert look_up(tmp_path).payload == b"traced"


def test_storing_replaces_what_turned_out_to_be_unusable(tmp_path):
    look_up(tmp_path, payload=b"bad")
    ExecutableCache(str(tmp_path)).store(parts(), b"good", model="Bert")
    assert look_up(tmp_path).payload == b"good"


def test_what_the_compilation_raises_is_passed_on_and_nothing_is_stored(tmp_path):
    def fail():
        raise ValueError("unsupported operator")

    with pytest.raises(ValueError, match="unsupported operator"):
        ExecutableCache(str(tmp_path)).look_up(parts(), fail)
    assert list(tmp_path.iterdir()) == []
    assert look_up(tmp_path).outcome == "miss"


SLOW = """
def compile():
    print("compiling", flush=True)
    time.sleep(float(sys.argv[2]))
    return b"from " + str(os.getpid()).encode()
answer = ExecutableCache(sys.argv[1]).look_up({"graph": "g"}, compile)
print(answer.outcome, answer.payload.decode())
"""


def test_of_several_processes_one_compiles_and_the_others_take_it_from_the_cache(tmp_path):
    processes = [run_python(SLOW, tmp_path, 0.5) for _ in range(4)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert sorted(len(lines) for lines in said) == [1, 1, 1, 2]
    (compiler,) = (process for process, lines in zip(processes, said) if len(lines) == 2)
    assert sorted(lines[-1] for lines in said) == [f"hit from {compiler.pid}"] * 3 + [f"miss from {compiler.pid}"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".emulated", ".hits"]


def test_threads_of_one_process_compile_once_as_well(tmp_path):
    made, answers = [], []

    def compile():
        made.append(1)
        time.sleep(0.1)
        return b"x"

    def work():
        answers.append(ExecutableCache(str(tmp_path)).look_up({"graph": "g"}, compile).outcome)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert sorted(answers) == ["hit", "hit", "hit", "miss"]


def test_a_process_that_was_killed_while_it_compiled_blocks_nobody(tmp_path):
    process = run_python(SLOW, tmp_path, 60)
    assert process.stdout.readline().strip() == "compiling"
    process.kill()
    process.communicate()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    started = time.monotonic()
    assert ExecutableCache(str(tmp_path)).look_up({"graph": "g"}, lambda: b"x").outcome == "miss"
    assert time.monotonic() - started < 5
    assert [path.suffix for path in tmp_path.iterdir()] == [".emulated"]


def test_the_compilation_lock_lets_one_in_at_a_time(tmp_path):
    store, inside, most = ExecutableCache(str(tmp_path)), [], []

    def work():
        with store.compilation_lock("Bert(...)"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5
    assert list(tmp_path.iterdir()) == []
    with ExecutableCache(None).compilation_lock("off"):
        pass


def test_u36_a_missing_folder_is_made(tmp_path):
    folder = tmp_path / "not" / "there"
    assert [look_up(folder).outcome, look_up(folder).outcome] == ["miss", "hit"]


def test_u36_hit_and_miss_are_logged_with_key_and_path(tmp_path, caplog):
    caplog.set_level("INFO", logger="ipu_finetune.emulator")
    answers = [look_up(tmp_path), look_up(tmp_path)]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[2] for line in lines] == ["miss", "hit"]
    assert all(answers[0].key[:12] in line and str(answers[0].path) in line for line in lines)


def a_file(path):
    path.write_text("")


UNUSABLE = {
    "a file": (a_file, "is a file"),
    "a broken symbolic link": (lambda path: path.symlink_to(path.parent / "gone"), "which does not exist"),
    "below a file": (lambda path: a_file(path.parent), "cannot be made"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_u36_a_folder_that_cannot_be_used_switches_it_off_with_one_warning(tmp_path, caplog, name):
    spoil, words = UNUSABLE[name]
    folder = tmp_path / "folder"
    if name == "below a file":
        folder = folder / "inside"
    spoil(folder)
    answers = [look_up(folder), look_up(folder)]
    assert [(answer.outcome, answer.payload) for answer in answers] == [("off", b"traced")] * 2
    assert words in answers[0].reason
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("executable cache off: ")


def test_u36_in_a_read_only_folder_what_is_there_is_used_and_the_rest_is_off(tmp_path):
    look_up(tmp_path, payload=b"there")
    os.chmod(tmp_path, 0o555)
    code = f"""
import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for parts in ({parts()!r}, {parts(length=384)!r}, {parts(length=512)!r}):
    answer = ExecutableCache(sys.argv[1]).look_up(parts, lambda: b"made")
    print(answer.outcome, answer.payload.decode())
"""
    for folder in tmp_path.parents:  # the account that the test falls to must come this far
        if folder.owner() == tmp_path.owner() and os.getuid() == 0 and not folder.stat().st_mode & 0o001:
            os.chmod(folder, folder.stat().st_mode | 0o011)
    try:
        said = run_python(code, tmp_path).communicate(timeout=60)[0].splitlines()
    finally:
        os.chmod(tmp_path, 0o755)
    assert said == [
        "hit there",
        f"executable cache off: {tmp_path} cannot be written (permission denied)",
        "off made",
        "off made",
    ]


def test_a_full_disk_costs_the_entry_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_entries.os, "replace", full)
    answer = look_up(tmp_path)
    assert (answer.outcome, answer.path, answer.payload) == ("miss", None, b"traced")
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []
