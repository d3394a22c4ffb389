# SPDX-License-Identifier: Apache-2.0
"""`cache ls` and `cache clean`: what is in the folder, and nothing removed that is not the cache's own."""

import fcntl
import json
import os
import time

import pytest

from ipu_finetune import cli
from ipu_finetune.emulator.device.cache import ExecutableCache

pytestmark = pytest.mark.pure

DAY = 86400


def compiled(folder, length, model="Bert"):
    return ExecutableCache(str(folder)).look_up({"shapes": {"x": [1, length]}}, lambda: b"x" * 500, model=model)


def age(path, days):
    moment = time.time() - days * DAY
    os.utime(path, (moment, moment))


def cache(words, capsys):
    code = cli.main(["cache", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_ls_shows_model_hits_size_and_shapes_newest_first(tmp_path, capsys):
    old = compiled(tmp_path, 128)
    age(old.path, 3)
    for _ in range(2):
        new = compiled(tmp_path, 384, model="Gpt")
    code, text, _ = cache(["ls", tmp_path, "--json"], capsys)
    assert (code, text.count("\n")) == (0, 1)
    rows = json.loads(text)["executables"]
    assert [row["key"] for row in rows] == [new.key, old.key]
    assert [(row["model"], row["hits"], row["shapes"]) for row in rows] == [
        ("Gpt", 1, {"x": [1, 384]}),
        ("Bert", 0, {"x": [1, 128]}),
    ]
    assert rows[0]["bytes"] == new.path.stat().st_size > 500
    table = [line.split() for line in cache(["ls", tmp_path], capsys)[1].splitlines()]
    assert table[1] == [new.key[:12], "Gpt", "0s", str(new.path.stat().st_size), "1", '{"x":[1,384]}']


def test_ls_shows_what_is_damaged(tmp_path, capsys):
    path = compiled(tmp_path, 1).path
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged: it has 499 bytes of payload, 500 were written" in cache(["ls", tmp_path], capsys)[1]


def test_the_folder_is_that_of_the_environment_else_that_of_the_runs_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)
    assert cache(["ls"], capsys)[1] == "exe_cache: no executables\n"
    key = compiled(tmp_path / "exe_cache", 1).key
    assert json.loads(cache(["ls", "--json"], capsys)[1])["executables"][0]["key"] == key
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert json.loads(cache(["ls", "--json"], capsys)[1])["executables"] == []


def test_the_folder_of_runs_is_what_the_built_in_configs_name():
    from ipu_finetune.cli.cache import default_folder
    from ipu_finetune.ipu_config import config_names, read

    named = {os.path.normpath(read(name).values["executable_cache_dir"]) for name in config_names()}
    assert named == {os.path.normpath(default_folder())} or "POPTORCH_CACHE_DIR" in os.environ


def test_clean_removes_the_caches_files_and_no_others(tmp_path, capsys):
    answer = compiled(tmp_path, 1)
    compiled(tmp_path, 1)  # a hit, which is counted in a file beside it
    (tmp_path / f"{'a' * 64}.hits").write_bytes(b".")
    (tmp_path / f"{'a' * 64}.lock").write_bytes(b"")
    (tmp_path / f"{'b' * 64}.emulated").write_bytes(b"")
    first_format = tmp_path / f"{'c' * 64}.emulated.json"
    first_format.write_text(json.dumps({"key": "c" * 64, "ipus": 1}))
    abandoned = tmp_path / f".{'d' * 64}.emulated-1-2"
    abandoned.write_bytes(b"half")
    age(abandoned, 1)
    theirs = {
        f"{'e' * 64}.emulated": b"written by somebody else",
        f"{'e' * 64}.emulated.json": b'{"key": "other"}',
        f".{'f' * 64}.emulated-1-2": b"being written now",
        "model.popef": b"x",
        "notes.txt": b"x",
        "readme.lock": b"",
    }
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / f"{'1' * 64}.hits").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(answer.path.read_bytes())
    (tmp_path / f"{'2' * 64}.emulated").symlink_to(outside)
    code, text, _ = cache(["clean", tmp_path, "--json"], capsys)
    report = json.loads(text)
    assert code == 0
    assert sorted(report["removed"]) == sorted([answer.path.name, f"{'b' * 64}.emulated", first_format.name])
    assert names(tmp_path) == sorted([*theirs, f"{'1' * 64}.hits", f"{'2' * 64}.emulated"])
    assert outside.exists()


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path, capsys):
    path = compiled(tmp_path, 1).path
    size = path.stat().st_size
    before = names(tmp_path)
    text = cache(["clean", tmp_path, "--dry-run"], capsys)[1]
    assert text.splitlines() == [
        f"would remove {path.name} ({size} bytes)",
        f"{tmp_path}: would remove 1 executables, {size} bytes",
    ]
    assert names(tmp_path) == before
    assert cache(["clean", tmp_path], capsys)[1] == text.replace("would remove", "removed")
    assert names(tmp_path) == []


def test_older_than_goes_by_the_last_use(tmp_path, capsys):
    unused, used, new = compiled(tmp_path, 1), compiled(tmp_path, 2), compiled(tmp_path, 3)
    age(unused.path, 40)
    age(used.path, 40)
    assert compiled(tmp_path, 2).outcome == "hit"
    report = json.loads(cache(["clean", tmp_path, "--older-than", "30d", "--json"], capsys)[1])
    assert report["removed"] == [unused.path.name]
    assert {used.path.name, new.path.name} < set(names(tmp_path))


def test_a_lock_that_somebody_holds_stays(tmp_path, capsys):
    path = tmp_path / f"{'a' * 64}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache(["clean", tmp_path], capsys)
        assert names(tmp_path) == [path.name]
    cache(["clean", tmp_path], capsys)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list"], "cannot list a cache (did you mean 'ls'?)"),
        (["clean", "--older-than", "soon"], "--older-than soon: write a number and a unit, such as 30d"),
        (["ls", "--dry-run"], "belong to cache clean"),
        (["ls", "no/such/folder"], "cache ls no/such/folder: there is no such folder"),
    ],
)
def test_wrong_usage_is_explained(words, message, capsys):
    code, _, error = cache(words, capsys)
    assert (code, message in error) == (2, True)
