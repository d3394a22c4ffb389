# SPDX-License-Identifier: Apache-2.0
"""Packs: hand-written ones, the user cases, and over random rows a slow packer that reads like the definition."""

import time

import numpy as np
import pytest

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing.packs import KINDS, Settings, pack, unpack_slots, unpack_tokens
from ipu_finetune.packing.plan import Assignment

TOKEN_KINDS = ("token-classification", "masked-lm", "causal-lm")


def padded(sequences, length, side="right"):
    """Return ids and mask of sequences, padded with 99, which no packed row may hold."""
    ids = np.full((len(sequences), length), 99)
    mask = np.zeros((len(sequences), length), np.int64)
    for row, tokens in enumerate(sequences):
        begin = 0 if side == "right" else length - len(tokens)
        ids[row, begin : begin + len(tokens)] = tokens
        mask[row, begin : begin + len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def chosen(*packs):
    return Assignment(
        np.concatenate([np.array(one, np.int64) for one in packs]), np.cumsum([0, *(len(one) for one in packs)])
    )


def random_rows(kind, rng, rows=40, length=30, side=None):
    """Return source columns of a kind with labels, padded on a random side."""
    choices = 3 if kind == "multiple-choice" else 1
    lengths = rng.integers(1, length // choices + 1, rows * choices)
    sides = rng.choice(["right", "left"], rows * choices) if side is None else [side] * rows * choices
    single = [padded([rng.integers(100, 1000, n)], length, s) for n, s in zip(lengths, sides)]
    columns = {name: np.concatenate([one[name] for one in single]) for name in single[0]}
    columns["token_type_ids"] = rng.integers(0, 2, columns["input_ids"].shape)
    if kind == "question-answering":
        firsts = columns["attention_mask"].argmax(axis=1)
        columns["start_positions"] = firsts + rng.integers(0, lengths)
        columns["end_positions"] = firsts + rng.integers(0, lengths)
    elif kind in ("classification", "multiple-choice"):
        columns["labels"] = rng.integers(0, 5, rows)
    elif kind == "multi-label":
        columns["labels"] = rng.integers(0, 2, (rows, 4)).astype(np.float64)
    elif kind == "regression":
        columns["labels"] = rng.random(rows)
    else:
        columns["labels"] = np.where(rng.random((rows, length)) < 0.5, rng.integers(0, 9, (rows, length)), -100)
    if choices > 1:
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            columns[name] = columns[name].reshape(rows, choices, length)
    return columns


def in_slot(packs, number, slot):
    """Return where a slot's tokens are, as the columns for the model say."""
    start, length = packs.columns["slot_starts"][number, slot], packs.columns["slot_lengths"][number, slot]
    return slice(start, start + length)


def test_u11_positions_restart_in_each_sequence():
    packs = pack(padded([[7, 8, 9], [5, 6]], 4), "classification", 8, 3)
    assert packs.columns["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert packs.columns["position_ids"].max() < 4  # a table of four positions is enough
    assert packs.columns["input_ids"].tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert packs.columns["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert packs.columns["slot_starts"].tolist() == [[0, 3, 0]]
    assert packs.columns["slot_lengths"].tolist() == [[3, 2, 0]]
    assert packs.columns["slot_valid"].tolist() == [[True, True, False]]
    assert packs.rows.tolist() == [[0, 1, -1]]


def test_u13_results_come_back_in_input_order_whatever_the_packing():
    texts = [[1] * 9, [2] * 2, [3] * 5, [2] * 2]  # rows 1 and 3 are the same text
    packs = pack(padded(texts, 10), "regression", 10, 2)
    assert len(packs) == 3
    scores = packs.columns["slot_lengths"].astype(np.float32)  # a stub model that scores a sequence by its length
    assert unpack_slots(packs, scores).tolist() == [9, 2, 5, 2]
    assert unpack_slots(packs, np.stack([scores, -scores], axis=2)).tolist() == [[9, -9], [2, -2], [5, -5], [2, -2]]


def test_u13_a_text_of_one_token_and_many_duplicates_each_have_their_own_result():
    texts = [[4], [4], [4, 4, 4], [4], [4, 4]]
    packs = pack(padded(texts, 4), "classification", 4, 4)
    ids = packs.rows * 10.0  # a stub model whose result tells which row it saw
    assert unpack_slots(packs, ids).tolist() == [0, 10, 20, 30, 40]


def test_u17_no_sequence_is_trained_to_predict_the_first_token_of_the_next():
    packs = pack(padded([[1, 2, 3], [4, 5]], 3), "causal-lm", 5, 2)
    assert packs.columns["labels"].tolist() == [[-100, 2, 3, -100, 5]]
    assert (packs.columns["labels"][:, 1:] != -100).sum() == 3  # what a shift over the whole pack counts: 2 + 1


def test_u17_holds_for_given_labels_left_padding_and_padding_positions():
    columns = padded([[1, 2, 3], [4, 5]], 3, side="left")
    columns["labels"] = np.array([[-100, -100, 3], [7, 4, 5]])
    packs = pack(columns, "causal-lm", 7, 2)
    assert packs.columns["labels"].tolist() == [[-100, -100, 3, -100, 5, -100, -100]]


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_u19_every_column_with_a_value_per_token_is_padded_to_the_multiple(kind):
    columns = padded([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1]], 6)
    columns["labels"] = columns["input_ids"] * 10
    columns["token_type_ids"] = columns["attention_mask"]
    packs = pack(columns, kind, 10, 2, pad_to_multiple_of=8, pad_token_id=50, pad_token_type_id=3)
    per_token = ("input_ids", "labels", "position_ids", "sequence_ids", "token_type_ids")
    assert {packs.columns[name].shape for name in per_token} == {(1, 16)}
    tails = {name: packs.columns[name][0, 10:].tolist() for name in per_token}
    fills = {"input_ids": 50, "labels": -100, "position_ids": 0, "sequence_ids": 0, "token_type_ids": 3}
    assert tails == {name: [fill] * 6 for name, fill in fills.items()}
    assert packs.columns["labels"][0, 1:6].tolist() == [20, 30, 40, 50, 60]
    assert (packs.length, packs.plan.max_length) == (16, 10)
    assert packs.figures()["efficiency"] == 10 / 16  # what the device does, not what was planned


def test_each_kinds_labels_are_where_the_losses_look_for_them():
    rows = padded([[1, 2, 3], [4, 5]], 3)
    both = chosen([1, 0])  # the second row first
    qa = {**rows, "start_positions": np.array([1, 0]), "end_positions": np.array([2, 1])}
    packs = pack(qa, "question-answering", 6, 3, assignment=both)
    assert packs.columns["start_positions"].tolist() == [[0, 3, 0]]  # token 1 of the sequence that begins at 2
    assert packs.columns["end_positions"].tolist() == [[1, 4, 0]]
    packs = pack({**rows, "labels": [4, 7]}, "classification", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[7, 4, -100]]
    packs = pack({**rows, "labels": [[1.0, 0.0], [0.0, 1.0]]}, "multi-label", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[[0, 1], [1, 0], [0, 0]]]
    assert packs.columns["labels"].dtype == np.float32
    packs = pack({**rows, "labels": [0.5, 2.5]}, "regression", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[2.5, 0.5, 0]]
    packs = pack({**rows, "labels": [[0.5], [2.5]]}, "regression", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[[2.5], [0.5], [0]]]
    packs = pack({**rows, "labels": [[1, -100, 3], [4, 5, 6]]}, "token-classification", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[4, 5, 1, -100, 3, -100]]
    packs = pack({**rows, "labels": [[-100, 8, -100], [9, -100, 6]]}, "masked-lm", 6, 3, assignment=both)
    assert packs.columns["labels"].tolist() == [[9, -100, -100, 8, -100, -100]]
    assert "labels" not in pack(rows, "masked-lm", 6, 3).columns


def test_the_choices_of_an_item_lie_in_slots_side_by_side():
    ids = np.array([[[1, 1], [2, 99]], [[3, 3], [4, 4]], [[5, 99], [6, 99]]])
    columns = {"input_ids": ids, "attention_mask": (ids != 99).astype(int), "labels": np.array([1, 0, 1])}
    packs = pack(columns, "multiple-choice", 6, 4, assignment=chosen([1], [2, 0]))
    assert packs.columns["input_ids"].tolist() == [[3, 3, 4, 4, 0, 0], [5, 6, 1, 1, 2, 0]]
    assert packs.rows.tolist() == [[2, 3, -1, -1], [4, 5, 0, 1]]
    assert packs.columns["labels"].tolist() == [[0, -100], [1, 1]]
    assert unpack_slots(packs, packs.columns["labels"]).tolist() == [1, 0, 1]
    scores = np.arange(8.0).reshape(2, 2, 2)  # [packs, items, choices], as the model gives them
    assert unpack_slots(packs, scores).tolist() == [[6, 7], [0, 1], [4, 5]]
    flat = {name: column.reshape(6, 2) if column.ndim == 3 else column for name, column in columns.items()}
    same = pack(flat, "multiple-choice", 6, 4, choices=2, assignment=chosen([1], [2, 0]))
    assert same.fingerprint == packs.fingerprint


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(4))
def test_random_rows_keep_each_token_and_label_once_and_in_place(kind, seed):
    rng = np.random.default_rng([seed, *kind.encode()])
    columns = random_rows(kind, rng)
    choices = 3 if kind == "multiple-choice" else 1
    slots = 6
    packs = pack(columns, kind, 37, slots, seed=seed, pad_to_multiple_of=8)
    width = columns["input_ids"].shape[-1]
    ids, mask = columns["input_ids"].reshape(-1, width), columns["attention_mask"].reshape(-1, width).astype(bool)
    types = columns["token_type_ids"].reshape(-1, width)
    assert packs.columns["input_ids"].shape == (len(packs), 40)
    assert sorted(packs.rows[packs.rows >= 0].tolist()) == list(range(len(ids)))
    covered = np.zeros((len(packs), 40), int)
    for number in range(len(packs)):
        for slot in range(slots):
            row, place = packs.rows[number, slot], in_slot(packs, number, slot)
            assert packs.columns["slot_valid"][number, slot] == (row >= 0)
            if row < 0:
                assert place == slice(0, 0)
                continue
            covered[number, place] += 1
            length = mask[row].sum()
            assert packs.columns["input_ids"][number, place].tolist() == ids[row][mask[row]].tolist()
            assert packs.columns["token_type_ids"][number, place].tolist() == types[row][mask[row]].tolist()
            assert packs.columns["position_ids"][number, place].tolist() == list(range(length))
            assert packs.columns["sequence_ids"][number, place].tolist() == [slot + 1] * length
            label = columns["labels"][row // choices] if "labels" in columns else None
            if kind == "question-answering":
                for name in ("start_positions", "end_positions"):
                    token = packs.columns["input_ids"][number, packs.columns[name][number, slot]]
                    assert token == ids[row, columns[name][row]]
                    assert place.start <= packs.columns[name][number, slot] < place.stop
            elif kind in TOKEN_KINDS:
                expected = label[mask[row]]
                expected[0] = -100 if kind == "causal-lm" else expected[0]
                assert packs.columns["labels"][number, place].tolist() == expected.tolist()
            else:
                packed = packs.columns["labels"][number, slot // choices]
                np.testing.assert_array_equal(packed, np.asarray(label, packed.dtype))
    padding = covered == 0
    assert covered.max() == 1
    assert (packs.columns["sequence_ids"][padding] == 0).all()
    assert (packs.columns["input_ids"][padding] == 0).all()
    if kind in TOKEN_KINDS:
        assert (packs.columns["labels"][padding] == -100).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("side", ["left", "right", None])
def test_packing_and_unpacking_is_the_identity(kind, side):
    rng = np.random.default_rng([5, *kind.encode()])
    columns = random_rows(kind, rng, rows=200, side=side)
    packs = pack(columns, kind, 32, 6)
    mask = columns["attention_mask"].astype(bool)
    width = mask.shape[-1]
    source = np.where(mask, columns["input_ids"], -7).reshape(-1, width)
    np.testing.assert_array_equal(unpack_tokens(packs, packs.columns["input_ids"], width, -7), source)
    doubled = np.stack([packs.columns["input_ids"], packs.columns["token_type_ids"]], axis=2).astype(np.float32)
    back = unpack_tokens(packs, doubled, width, -7)
    np.testing.assert_array_equal(back[..., 0], source)
    assert back.dtype == np.float32
    if kind in ("classification", "multi-label", "regression", "multiple-choice"):
        back = unpack_slots(packs, packs.columns["labels"])
        np.testing.assert_array_equal(back, columns["labels"].astype(back.dtype))


def test_the_same_arguments_give_the_same_packs_and_another_seed_others():
    columns = random_rows("classification", np.random.default_rng(1), rows=300)
    first, again, other = (pack(columns, "classification", 64, 8, seed=seed) for seed in (3, 3, 4))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (first.rows == again.rows).all()
    assert sorted(first.rows[first.rows >= 0].tolist()) == sorted(other.rows[other.rows >= 0].tolist())


def test_figures_are_those_of_the_arrays():
    columns = random_rows("classification", np.random.default_rng(2), rows=100)
    packs = pack(columns, "classification", 30, 3, algorithm="lpfhp")
    tokens, positions = int(columns["attention_mask"].sum()), packs.columns["input_ids"].size
    figures = packs.figures()
    assert (figures["tokens"], figures["wasted_positions"], figures["sequences"]) == (tokens, positions - tokens, 100)
    assert figures["efficiency"] == tokens / positions == packs.plan.efficiency
    assert figures["sequences_per_pack"] == figures["speed_up"] == 100 / len(packs) == packs.plan.sequences_per_pack
    assert f"100 sequences in {len(packs)} packs of 30" in str(packs)
    given = pack(columns, "classification", 30, 3, assignment=chosen(*([row] for row in range(100))))
    assert (given.plan.packs, given.plan.tokens, given.plan.algorithm) == (100, tokens, "given")
    assert sorted(packs[0]) == sorted(packs.columns)
    assert packs[0]["input_ids"].shape == (30,)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_rows_make_no_packs(kind):
    columns = {name: column[:0] for name, column in random_rows(kind, np.random.default_rng(0)).items()}
    packs = pack(columns, kind, 32, 6)
    assert len(packs) == 0
    assert packs.columns["input_ids"].shape == (0, 32)
    assert packs.columns["slot_valid"].shape == (0, 6)
    assert unpack_tokens(packs, packs.columns["input_ids"], 30, 0).shape == (0, 30)
    assert unpack_slots(packs, packs.columns["slot_lengths"]).shape == (0,)


def test_a_row_that_does_not_fit_is_refused_with_its_number_length_limit_and_fix():
    columns = padded([[1, 2], [1, 2, 3, 4, 5], [3]], 6)
    with pytest.raises(
        DataError, match=r"row 1 \(5 tokens\) is longer than a pack of 4.* max_length to 5, or drop or truncate such"
    ):
        pack(columns, "classification", 4, 2)
    with pytest.raises(DataError, match="drop or truncate or split"):
        pack(columns, "causal-lm", 4, 2)
    many = padded([[1, 2, 3, 4, 5]] * 5, 6)
    with pytest.raises(DataError, match=r"rows 0 \(5 tokens\), 1 .*, 2 .* and 2 more are longer than a pack of 4"):
        pack(many, "causal-lm", 4, 2)
    item = {name: column.reshape(1, 3, 6) for name, column in columns.items()}
    with pytest.raises(DataError, match=r"row 0 \(8 tokens\) is longer than a pack of 7"):  # its choices stay together
        pack(item, "multiple-choice", 7, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_mask": [[1, 0, 1], [1, 1, 0]]}, "row 0 has padding between its tokens"),
        ({"attention_mask": [[1, 1, 1], [0, 0, 0]]}, "row 1 has no token"),
        ({"attention_mask": [[1, 1, 1]]}, r"'attention_mask' has the shape \(1, 3\)"),
        ({"attention_mask": None}, "needs the column 'attention_mask'"),
        ({"end_positions": None}, "needs all of the columns"),
        ({"start_positions": [0, 2]}, "row 1: start_positions 2 is none of its tokens, which are at 0 to 1"),
        (
            {"attention_mask": [[1, 1, 1], [0, 1, 1]]},
            "row 1: start_positions 0 is none of its tokens, which are at 1 to 2",
        ),
        ({"start_positions": [0.0, 1.0]}, "'start_positions' of question-answering must hold whole numbers"),
        ({"start_positions": [[0], [1]]}, r"must have the shape \[items\]"),
        ({"start_position": [0, 1]}, "does not know the column 'start_position'.*did you mean 'start_positions'"),
        ({"position_ids": [[0, 1, 2], [0, 1, 2]]}, "does not know the column 'position_ids'"),
    ],
)
def test_columns_that_cannot_be_packed_are_refused(change, says):
    columns = {
        **{"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]},
        **{"start_positions": [0, 0], "end_positions": [2, 1]},
    }
    pack(columns, "question-answering", 6, 2)
    columns = {name: value for name, value in {**columns, **change}.items() if value is not None}
    with pytest.raises(DataError, match=says):
        pack(columns, "question-answering", 6, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "classify"}, "no kind 'classify' .did you mean 'classification'"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1; got 0"),
        ({"max_sequences": 2.0}, r"max_sequences must be a whole number of at least 1; got 2\.0"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be"),
        ({"choices": 2}, "choices=2 is for multiple-choice"),
        ({"algorithm": "beste"}, "did you mean 'best'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        pack(padded([[1]], 2), **{"kind": "classification", "max_length": 8, "max_sequences": 2, **settings})


def test_slots_that_the_choices_do_not_fill_are_refused():
    columns = {"input_ids": np.ones((2, 4, 3), int), "attention_mask": np.ones((2, 4, 3), int)}
    with pytest.raises(UsageError, match="max_sequences=6 counts sequences, and an item is 4 of them: use 4 or 8"):
        pack(columns, "multiple-choice", 24, 6)
    with pytest.raises(UsageError, match="use 4$"):
        pack(columns, "multiple-choice", 24, 3)
    with pytest.raises(DataError, match=r"must have the shape \[items, choices, tokens\]"):
        pack(columns, "multiple-choice", 24, 4, choices=2)
    assert Settings("multiple-choice", 24, 4, pad_to_multiple_of=16).length == 32


@pytest.mark.parametrize(
    ("packs", "says"),
    [
        (chosen([0, 1]), "does not hold each of the 3 rows once"),
        (chosen([0, 1], [1, 2]), "does not hold each of the 3 rows once"),
        (chosen([0, 1, 2]), "puts 3 sequences into pack 0; it holds 2"),
        (chosen([2], [0, 1]), "puts 7 tokens into pack 1; it holds 6"),
        (Assignment(np.arange(3), np.array([0, 2])), "offsets"),
    ],
)
def test_an_assignment_for_other_rows_is_refused(packs, says):
    with pytest.raises(DataError, match=says):
        pack(padded([[1, 2, 3, 4], [5, 6, 7], [8]], 4), "classification", 6, 2, assignment=packs)


def test_taking_back_refuses_values_of_other_packs_missing_rows_and_a_length_that_cuts():
    import dataclasses

    packs = pack(padded([[1, 2, 3, 4], [5, 6, 7], [8]], 5, side="left"), "classification", 6, 2)
    values = packs.columns["input_ids"]
    with pytest.raises(DataError, match=r"the shape is \(1, 6\); they have \[2, 6, …\]"):
        unpack_tokens(packs, values[:1], 5, 0)
    with pytest.raises(DataError, match=r"they have \[2, 2, …\]"):
        unpack_slots(packs, values)
    with pytest.raises(DataError, match="length=4 cuts rows whose tokens reach up to 5"):
        unpack_tokens(packs, values, 4, 0)
    columns = {name: column[:1] for name, column in packs.columns.items()}
    half = dataclasses.replace(packs, columns=columns, rows=packs.rows[:1], firsts=packs.firsts[:1])
    missing = min({0, 1, 2} - set(packs.rows[0].tolist()))
    with pytest.raises(DataError, match=f"of 3 rows are not in exactly one slot: the first is row {missing}, in 0"):
        unpack_slots(half, half.columns["slot_lengths"])
    doubled = dataclasses.replace(packs, rows=np.where(packs.rows == 1, 0, packs.rows))
    with pytest.raises(DataError, match="2 of 3 rows are not in exactly one slot: the first is row 0, in 2"):
        unpack_tokens(doubled, values, 5, 0)


def test_many_rows_pack_fast_and_in_many_blocks():
    rng = np.random.default_rng(0)
    rows, length = 20_000, 384
    mask = np.arange(length) < np.clip(rng.gamma(6, 28, rows).astype(int), 8, length)[:, None]
    mask[::2] = mask[::2, ::-1]  # padded on the left
    ids = np.where(mask, rng.integers(5, 30_000, mask.shape), 0)
    times = []
    for _ in range(3):
        begin = time.process_time()
        packs = pack({"input_ids": ids, "attention_mask": mask}, "classification", length, 6, algorithm="lpfhp")
        times.append(time.process_time() - begin)
    np.testing.assert_array_equal(unpack_tokens(packs, packs.columns["input_ids"], length, 0), ids)
    assert packs.columns["position_ids"].max() < length
    # 0.13 s of a processor, and 100,000 rows 1 to 2 s with the memory for them; one token at a time takes minutes
    assert min(times) < 0.8
