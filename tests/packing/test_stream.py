# SPDX-License-Identifier: Apache-2.0
"""Packing as a stream is read: nothing lost or doubled, the same packs however rows arrive, memory of one window."""

import json
import tracemalloc

import numpy as np
import pytest

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing.packs import Settings, pack, unpack_slots, unpack_tokens
from ipu_finetune.packing.store import Store
from ipu_finetune.packing.stream import pack_stream

SETTINGS = Settings("classification", 40, 5, seed=3)
WIDTH = 24


def source(rows, seed=0, width=WIDTH):
    """Return rows whose labels are their numbers, padded on either side."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    left = rng.random(rows) < 0.3
    mask[left] = mask[left][:, ::-1]
    ids = np.where(mask, rng.integers(5, 30_000, mask.shape), 0)
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "labels": np.arange(rows)}


def chunks(columns, sizes):
    begin = 0
    for size in sizes:
        yield {name: column[begin : begin + size] for name, column in columns.items()}
        begin += size
    assert begin == len(columns["input_ids"])


def stream(rows, folder, settings=SETTINGS, data="d", **arguments):
    return pack_stream(rows, settings, data=data, tokenizer="t", store=Store(folder), **arguments)


def test_nothing_is_lost_or_doubled_and_rows_count_through_the_stream(tmp_path):
    columns = source(1000)
    found = stream(chunks(columns, [130] * 7 + [90]), tmp_path, window=64)
    packs = found.packs
    assert (found.hit, packs.sequences) == (False, 1000)
    assert sorted(packs.rows[packs.rows >= 0].tolist()) == list(range(1000))
    np.testing.assert_array_equal(unpack_tokens(packs, packs.columns["input_ids"], WIDTH, 0), columns["input_ids"])
    assert unpack_slots(packs, packs.columns["labels"]).tolist() == list(range(1000))
    assert packs.tokens == columns["attention_mask"].sum() == packs.plan.tokens
    assert packs.plan.packs == len(packs)
    assert (packs.plan.sequences, packs.plan.algorithm, packs.plan.max_sequences) == (1000, "best", 5)
    assert packs.plan.lower_bound <= len(packs)
    assert all(isinstance(column, np.memmap) for column in packs.columns.values())
    # a pack's rows are all of one window
    windows = np.where(packs.rows >= 0, packs.rows // 64, packs.rows.max(axis=1, keepdims=True) // 64)
    assert (windows == windows[:, :1]).all()


def test_the_packs_do_not_depend_on_how_the_rows_arrive(tmp_path):
    columns = source(300)
    arrivals = {
        "at once": [columns],
        "in chunks": chunks(columns, [1, 99, 0, 150, 50]),
        "one by one": ({name: column[row] for name, column in columns.items()} for row in range(300)),
        "as lists": [{name: column.tolist() for name, column in chunk.items()} for chunk in chunks(columns, [100] * 3)],
        "both": [*chunks({n: c[:100] for n, c in columns.items()}, [100])]
        + [{name: column[row] for name, column in columns.items()} for row in range(100, 300)],
    }
    prints = {how: stream(rows, tmp_path / how, window=70).packs.fingerprint for how, rows in arrivals.items()}
    assert len(set(prints.values())) == 1, prints
    assert stream([columns], tmp_path / "other", window=71).packs.fingerprint not in prints.values()


def test_a_window_that_holds_everything_packs_as_pack_does(tmp_path):
    columns = source(300)
    found = stream([columns], tmp_path)
    whole = pack(columns, "classification", 40, 5, seed=3)
    assert found.packs.fingerprint == whole.fingerprint
    assert found.packs.plan == whole.plan
    assert (found.packs.firsts == whole.firsts).all()


def test_rows_may_be_as_wide_as_they_like(tmp_path):
    columns = source(200)
    wide = {"input_ids": np.pad(columns["input_ids"], ((0, 0), (0, 9)))}
    wide.update(attention_mask=np.pad(columns["attention_mask"], ((0, 0), (0, 9))), labels=columns["labels"])
    mixed = [{name: column[row] for name, column in (wide if row % 3 else columns).items()} for row in range(200)]
    found = stream(mixed, tmp_path, window=70)
    assert found.packs.fingerprint == stream([columns], tmp_path / "other", window=70).packs.fingerprint


def test_large_numbers_and_labels_per_token_survive(tmp_path):
    columns = {"input_ids": np.array([[1, 2**40], [3, 4]]), "attention_mask": np.ones((2, 2), int)}
    columns["labels"] = np.array([[-100, 2**35], [6, 7]])
    rows = [{name: column[row] for name, column in columns.items()} for row in range(2)]
    found = stream([{n: c[None] for n, c in row.items()} for row in rows], tmp_path, Settings("masked-lm", 4, 2))
    assert found.packs.columns["input_ids"].tolist() in ([[1, 2**40, 3, 4]], [[3, 4, 1, 2**40]])
    np.testing.assert_array_equal(unpack_tokens(found.packs, found.packs.columns["labels"], 2, 0), columns["labels"])


def test_the_choices_of_an_item_are_never_in_two_windows(tmp_path):
    rng = np.random.default_rng(0)
    mask = np.arange(10) < rng.integers(1, 11, (50, 4))[..., None]
    ids = np.where(mask, rng.integers(5, 99, mask.shape), 0)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": rng.integers(0, 4, 50)}
    done = []
    settings = Settings("multiple-choice", 48, 8)
    found = stream(chunks(columns, [7] * 7 + [1]), tmp_path, settings, window=30, progress=done.append)
    packs = found.packs
    assert done[-1] == 50
    assert (packs.sequences, packs.choices) == (200, 4)
    # 30 sequences are 7 items, 28 of them
    of_window = [set((rows[rows >= 0] // 28).tolist()) for rows in packs.rows]
    assert all(len(windows) == 1 for windows in of_window)
    assert set().union(*of_window) == set(range(8))
    assert unpack_slots(packs, packs.columns["labels"]).tolist() == columns["labels"].tolist()
    np.testing.assert_array_equal(unpack_tokens(packs, packs.columns["input_ids"], 10, 0), ids.reshape(200, 10))
    single = ({name: column[row] for name, column in columns.items()} for row in range(50))
    assert stream(single, tmp_path / "single", settings, window=30).packs.fingerprint == packs.fingerprint


def test_progress_counts_rows_up_to_the_last(tmp_path):
    done = []
    stream([source(1000)], tmp_path, window=100, progress=done.append)
    assert done == sorted(done)
    assert len(done) >= 10
    assert done[-1] == 1000


def test_packs_that_are_there_are_used_and_the_stream_is_not_read(tmp_path):
    def untouched():
        raise AssertionError("read")
        yield

    first = stream([source(200)], tmp_path, window=50)
    second = stream(untouched(), tmp_path, window=50)
    assert (second.hit, second.packs.fingerprint) == (True, first.packs.fingerprint)
    assert second.packs.plan == first.packs.plan
    (first.folder / "rows.npy").unlink()
    with pytest.warns(UserWarning, match=r"damaged and made again: rows\.npy is missing"):
        third = stream([source(200)], tmp_path, window=50)
    assert (third.hit, third.packs.fingerprint) == (False, first.packs.fingerprint)


def peak(windows, folder):
    """Return the most memory that Python and numpy held while so many windows of 512 rows were packed."""

    def rows():
        for number in range(2 * windows):
            yield source(256, seed=number, width=128)

    tracemalloc.start()
    try:
        found = stream(rows(), folder, Settings("classification", 128, 6, algorithm="lpfhp"), window=512)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.packs.sequences == 512 * windows
    return most, sum(path.stat().st_size for path in found.folder.iterdir())


def test_memory_does_not_grow_with_the_stream(tmp_path):
    peak(1, tmp_path / "warm")
    few, small = peak(4, tmp_path / "few")
    many, large = peak(16, tmp_path / "many")
    assert large > 3.9 * small
    assert large - small > few  # so that what was kept of the packs would show
    assert many < 1.1 * few


def test_errors_name_the_row_in_the_stream(tmp_path):
    columns = source(300)
    columns["attention_mask"][250] = 0
    with pytest.raises(DataError, match="row 250 has no token"):
        stream(chunks(columns, [40] * 7 + [20]), tmp_path, window=64)
    mask = np.arange(WIDTH) < np.where(np.arange(300) == 201, WIDTH, 9)[:, None]
    columns = {**source(300), "attention_mask": mask}
    with pytest.raises(DataError, match=r"row 201 \(24 tokens\) is longer than a pack of 10"):
        stream(chunks(columns, [50] * 6), tmp_path, Settings("classification", 10, 2), window=64)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "the stream has no rows"),
        ([{"ids": [1]}], "needs the column 'input_ids'"),
        ([{"input_ids": [[1], [2]], "attention_mask": [[1]]}], "from row 0 on, has 2 rows of 'input_ids'"),
        (
            [
                {"input_ids": [[1]], "attention_mask": [[1]], "labels": [0]},
                {"input_ids": [[1]], "attention_mask": [[1]]},
            ],
            "the rows from number 1 on have other columns",
        ),
    ],
)
def test_streams_that_cannot_be_packed_are_refused_and_leave_nothing(tmp_path, rows, says):
    with pytest.raises(DataError, match=says):
        stream(rows, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_breaks_off_leaves_nothing_and_its_own_error(tmp_path):
    def broken():
        yield source(100)
        raise OSError("the connection was lost")

    with pytest.raises(OSError, match="the connection was lost"):
        stream(broken(), tmp_path, window=10)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="window must be at least 1; got 0"):
        stream([], tmp_path, window=0)


def test_a_stream_needs_a_place_to_write_to(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="packs cannot be written to .*set XDG_CACHE_HOME"):
        stream([source(10)], tmp_path / "file" / "packs")


def test_the_manifest_says_what_the_packs_are_of(tmp_path):
    found = stream([source(10)], tmp_path, window=5)
    body = json.loads((found.folder / "manifest.json").read_text())["body"]
    assert (body["content"]["data"], body["content"]["tokenizer"], body["content"]["window"]) == ("d", "t", 5)
