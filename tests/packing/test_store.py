# SPDX-License-Identifier: Apache-2.0
"""The store: what is a hit, what is damage, and what processes that meet, or die, leave behind."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from ipu_finetune.packing.packs import Settings, pack
from ipu_finetune.packing.store import Content, Store, default_folder, packed

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings("classification", 32, 4)


def rows(seed=0, number=60):
    rng = np.random.default_rng(seed)
    mask = np.arange(20) < rng.integers(1, 21, number)[:, None]
    ids = np.where(mask, rng.integers(5, 99, mask.shape), 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": rng.integers(0, 3, number)}


def get(store, settings=SETTINGS, data="d", tokenizer="t", columns=None):
    return packed(rows() if columns is None else columns, settings, data=data, tokenizer=tokenizer, store=store)


def same(one, other):
    """Whether two are the same packs in all that packs have."""
    names = [field.name for field in dataclasses.fields(one)]
    return all(
        (
            getattr(one, name).keys() == getattr(other, name).keys()
            and all(np.array_equal(array, other.columns[key]) for key, array in one.columns.items())
            and all(array.dtype == other.columns[key].dtype for key, array in one.columns.items())
        )
        if name == "columns"
        else np.array_equal(getattr(one, name), getattr(other, name))
        if name in ("rows", "firsts")
        else getattr(one, name) == getattr(other, name)
        for name in names
    )


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_second_run_reads_what_the_first_has_written(tmp_path):
    store = Store(tmp_path)
    first = get(store)
    second = get(store, columns={})  # not looked at
    assert (first.hit, first.why) == (False, "no packs of this data, tokenizer and settings yet")
    assert (second.hit, second.why) == (True, "packed before from the same data and tokenizer with the same settings")
    expected = pack(rows(), "classification", 32, 4)
    assert same(first.packs, expected)
    assert same(second.packs, expected)
    assert first.folder == second.folder == tmp_path / Content("d", "t", SETTINGS).key
    assert all(isinstance(column, np.memmap) for column in second.packs.columns.values())
    assert not any(column.flags.writeable for column in second.packs.columns.values())
    assert left(tmp_path) == [first.folder.name]


def test_files_are_plain_npy_and_the_manifest_has_their_sizes_and_hashes(tmp_path):
    folder = get(Store(tmp_path)).folder
    expected = pack(rows(), "classification", 32, 4)
    body = json.loads((folder / "manifest.json").read_text())["body"]
    assert {f"{name}.npy" for name in body["files"]} | {"manifest.json"} == set(left(folder))
    for name, entry in body["files"].items():
        array = np.load(folder / f"{name}.npy")
        assert np.array_equal(array, {**expected.columns, "rows": expected.rows, "firsts": expected.firsts}[name])
        assert entry["bytes"] == (folder / f"{name}.npy").stat().st_size
        assert entry["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()
    assert body["content"]["settings"]["max_length"] == 32
    assert body["packs"] == {"sequences": 60, "kind": "classification", "choices": 1}


def test_everything_that_decides_the_packs_decides_the_key():
    base = Content("d", "t", SETTINGS)
    changed = {"kind": "regression", "max_length": 33, "max_sequences": 5, "algorithm": "lpfhp", "seed": 1}
    changed.update(pad_token_id=1, pad_token_type_id=1, pad_to_multiple_of=8, choices=1)
    assert set(changed) == {field.name for field in dataclasses.fields(Settings)}
    contents = [dataclasses.replace(base, settings=dataclasses.replace(SETTINGS, **{n: v})) for n, v in changed.items()]
    contents += [dataclasses.replace(base, **{name: value}) for name, value in (("data", "e"), ("tokenizer", "u"))]
    contents += [dataclasses.replace(base, window=8), base]
    assert len({content.key for content in contents}) == len(contents) == 13
    assert Content("d", "t", dataclasses.replace(SETTINGS, max_length=np.int64(32))).key == base.key


def test_the_key_is_the_same_in_every_process():
    assert Content("d", "t", SETTINGS).key == Content("d", "t", Settings("classification", 32, 4)).key
    assert (
        Content("d", "t", SETTINGS).key
        == hashlib.sha256(
            b'{"data": "d", "format": 1, "settings": {"algorithm": "best", "choices": null, "kind": "classification", '
            b'"max_length": 32, "max_sequences": 4, "pad_to_multiple_of": null, "pad_token_id": 0, "pad_token_type_id": 0, '
            b'"seed": 0}, "tokenizer": "t", "window": null}'
        ).hexdigest()
    )


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


DAMAGE = {
    "a bit of the values": (lambda f: flip(f / "input_ids.npy", 300), "input_ids.npy holds other values"),
    "the last bit": (
        lambda f: flip(f / "rows.npy", (f / "rows.npy").stat().st_size - 1),
        "rows.npy holds other values",
    ),
    "the shape in a header": (
        lambda f: (f / "labels.npy").write_bytes((f / "labels.npy").read_bytes().replace(b"4)", b"2)", 1)),
        "labels.npy holds <i8 .* instead of what was written",
    ),
    "the magic of a header": (lambda f: flip(f / "labels.npy", 1), "labels.npy cannot be read"),
    "a file cut short": (lambda f: os.truncate(f / "labels.npy", 200), "labels.npy has 200 bytes instead of"),
    "a file missing": (lambda f: (f / "firsts.npy").unlink(), "firsts.npy is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 100), "manifest.json cannot be read"),
    "an empty manifest": (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
    "a number in the manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace(": 60", ": 61", 1)),
        "manifest.json is not as it was written",
    ),
    "an empty folder": (lambda f: [path.unlink() for path in f.iterdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damage_is_noticed_and_the_entry_made_again_with_one_warning(tmp_path, damage):
    store = Store(tmp_path)
    first = get(store)
    harm, says = DAMAGE[damage]
    harm(first.folder)
    with pytest.warns(UserWarning, match=f"are damaged and made again: {says}") as warned:
        again = get(store)
    assert len(warned) == 1
    assert not again.hit
    assert again.why.startswith("damaged: ")
    assert same(again.packs, pack(rows(), "classification", 32, 4))
    assert get(store).hit
    assert left(tmp_path) == [first.folder.name]


def test_an_entry_under_the_name_of_another_is_damage(tmp_path):
    store = Store(tmp_path)
    get(store).folder.rename(store.entry(Content("other", "t", SETTINGS)))
    with pytest.warns(UserWarning, match="not as it was written"):
        assert not get(store, data="other").hit


def test_packs_in_use_survive_that_their_entry_is_made_again(tmp_path):
    store = Store(tmp_path)
    used = get(store)
    used = get(store).packs
    (tmp_path / Content("d", "t", SETTINGS).key / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="damaged"):
        get(store)
    assert same(used, pack(rows(), "classification", 32, 4))


def test_no_packs_are_kept_as_well_as_many(tmp_path):
    nothing = {name: column[:0] for name, column in rows().items()}
    assert len(get(Store(tmp_path), columns=nothing).packs) == 0
    found = get(Store(tmp_path))
    assert found.hit
    assert found.packs.columns["input_ids"].shape == (0, 32)


def test_a_store_that_cannot_be_written_to_costs_a_warning_not_the_packs(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="packs cannot be kept in .*/file/packs for the next run"):
        found = get(Store(tmp_path / "file" / "packs"))
    assert not found.hit
    assert "not kept" in found.why
    assert same(found.packs, pack(rows(), "classification", 32, 4))


def test_the_default_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == Store().folder == tmp_path / "ipu-finetune" / "packs"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for other in ("", "relative/cache"):  # the XDG specification has relative paths ignored
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert default_folder() == tmp_path / "home" / ".cache" / "ipu-finetune" / "packs"


PROCESS = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_store import get
    from ipu_finetune.packing.store import Store
    folder, begin = Path(sys.argv[1]), Path(sys.argv[2])
    print("ready", flush=True)
    while not begin.exists():
        time.sleep(0.001)
    found = get(Store(folder))
    print(found.hit, found.packs.fingerprint, flush=True)
"""


def start(code, *arguments):
    code = textwrap.dedent(code).format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_processes_that_pack_the_same_at_once_leave_one_whole_entry(tmp_path):
    folder = tmp_path / "packs"
    folder.mkdir()
    processes = [start(PROCESS, folder, tmp_path / "begin") for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "begin").touch()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert {answer[1] for answer in answers} == {pack(rows(), "classification", 32, 4).fingerprint}
    assert left(folder) == [Content("d", "t", SETTINGS).key]
    assert get(Store(folder)).hit


KILLED = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from test_store import SETTINGS, rows
    from pathlib import Path
    from ipu_finetune.packing.packs import pack
    from ipu_finetune.packing.store import Content, Store
    packs = pack(rows(), "classification", 32, 4)
    with Store(Path(sys.argv[1])).writer(Content("d", "t", SETTINGS)) as writer:
        writer.append({{**packs.columns, "rows": packs.rows, "firsts": packs.firsts}})
        print("half", flush=True)
        time.sleep(60)
"""


def test_a_writer_that_is_killed_leaves_no_entry_and_is_cleaned_up_only_when_dead(tmp_path):
    process = start(KILLED, tmp_path)
    try:
        assert process.stdout.readline() == "half\n"
        (aside,) = left(tmp_path)
        assert aside.startswith(".writing-")
        two_hours_ago = time.time() - 7200
        os.utime(tmp_path / aside, (two_hours_ago, two_hours_ago))
        found = get(Store(tmp_path))  # it lives: its folder stays, however old
        assert not found.hit
        assert left(tmp_path) == [aside, found.folder.name]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    get(Store(tmp_path), data="second")
    assert aside not in left(tmp_path)
    assert get(Store(tmp_path)).hit


def test_a_young_folder_without_an_owner_is_left_alone(tmp_path):
    (tmp_path / ".writing-new").mkdir()  # as between making the folder and locking it
    get(Store(tmp_path))
    assert ".writing-new" in left(tmp_path)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, TypeError])
def test_a_failure_while_writing_leaves_nothing(tmp_path, failure):
    def fail():
        with Store(tmp_path).writer(Content("d", "t", SETTINGS)) as writer:
            writer.append({"input_ids": np.ones((2, 3), np.int64)})
            if failure is KeyboardInterrupt:
                raise KeyboardInterrupt
            writer.append({"input_ids": np.ones((2, 4), np.int64)})

    with pytest.raises(failure):
        fail()
    assert left(tmp_path) == []


def test_sizes_alone_are_compared_where_hashes_are_not_wanted(tmp_path):
    folder = get(Store(tmp_path)).folder
    flip(folder / "input_ids.npy", 300)
    assert get(Store(tmp_path, verify=False)).hit
    os.truncate(folder / "input_ids.npy", 300)
    with pytest.warns(UserWarning, match="300 bytes"):
        assert not get(Store(tmp_path, verify=False)).hit
