# SPDX-License-Identifier: Apache-2.0
"""Policies for sequences that are too long: the user case's numbers, and over random data what must always hold."""

import numpy as np
import pytest

from ipu_finetune.errors import DataError, UsageError
from ipu_finetune.packing.packs import KINDS, pack, unpack_tokens
from ipu_finetune.packing.policies import POLICIES, allowed, cut, fit

LENGTHS = [5, 2, 3, 1]


def rows_of(lengths, width):
    """Return rows whose tokens all differ, so that each can be followed."""
    mask = np.arange(width) < np.array(lengths)[:, None]
    ids = np.arange(1, mask.size + 1).reshape(mask.shape)
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)}


def test_u12_error_names_the_sequence_and_the_numbers():
    with pytest.raises(DataError) as caught:
        fit(LENGTHS, 4, "error")
    assert str(caught.value) == (
        "sequence 0 is too long for a pack (5 > 4), as are 0 of the other 3 (11 tokens in all): raise max_length to 5, "
        "or choose the policy drop or truncate or split"
    )


@pytest.mark.parametrize(
    ("policy", "pieces", "report", "says"),
    [
        (
            "drop",
            [(1, 0, 2), (2, 0, 3), (3, 0, 1)],
            {"sequences_kept": 3, "sequences_dropped": 1, "tokens_kept": 6, "tokens_lost": 5},
            "drop: 3 of 4 sequences and 6 of 11 tokens kept, 5 tokens lost; 1 longer than 4, 1 dropped",
        ),
        (
            "truncate",
            [(0, 0, 4), (1, 0, 2), (2, 0, 3), (3, 0, 1)],
            {"sequences_kept": 4, "sequences_dropped": 0, "tokens_kept": 10, "tokens_lost": 1},
            "truncate: 4 of 4 sequences and 10 of 11 tokens kept, 1 tokens lost; 1 longer than 4, 1 truncated",
        ),
        (
            "split",
            [(0, 0, 4), (0, 4, 1), (1, 0, 2), (2, 0, 3), (3, 0, 1)],
            {"sequences_kept": 4, "sequences_dropped": 0, "tokens_kept": 11, "tokens_lost": 0},
            "split: 4 of 4 sequences and 11 of 11 tokens kept, 0 tokens lost; 1 longer than 4, 1 split, 5 pieces in all",
        ),
    ],
)
def test_u12_what_is_kept_and_lost_is_reported(policy, pieces, report, says):
    result = fit(LENGTHS, 4, policy)
    assert list(zip(result.rows.tolist(), result.starts.tolist(), result.lengths.tolist())) == pieces
    assert {name: result.report()[name] for name in report} == report
    assert str(result) == says


@pytest.mark.parametrize("policy", POLICIES)
def test_u12_sequences_that_fit_are_left_alone_by_every_policy(policy):
    result = fit([4, 1, 4], 4, policy)
    assert (result.rows.tolist(), result.starts.tolist(), result.lengths.tolist()) == ([0, 1, 2], [0, 0, 0], [4, 1, 4])
    assert (result.tokens_lost, result.sequences_dropped, result.too_long) == (0, 0, 0)
    assert f"{policy}: 3 of 3 sequences and 9 of 9 tokens kept, 0 tokens lost; 0 longer than 4" in str(result)
    assert len(fit([], 4, policy).rows) == 0


def test_u12_only_language_models_split_and_choices_are_never_cut():
    assert {kind for kind in KINDS if "split" in allowed(kind)} == {"masked-lm", "causal-lm"}
    assert allowed("multiple-choice") == ("error", "drop")
    assert allowed("question-answering") == allowed("classification") == ("error", "drop", "truncate")
    with pytest.raises(UsageError, match="classification cannot split .* use error or drop or truncate"):
        fit(LENGTHS, 4, "split", "classification")
    with pytest.raises(UsageError, match="multiple-choice cannot truncate .* use error or drop"):
        fit(LENGTHS, 4, "truncate", "multiple-choice")
    with pytest.raises(DataError, match="choose the policy drop$"):
        fit(LENGTHS, 4, "error", "multiple-choice")
    with pytest.raises(UsageError, match="no kind 'clm'"):
        allowed("clm")


@pytest.mark.parametrize("seed", range(5))
def test_split_covers_every_token_once_in_order(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 50)
    result = fit(lengths, 9, "split")
    tokens = [
        (row, token)
        for row, start, length in zip(result.rows, result.starts, result.lengths)
        for token in range(start, start + length)
    ]
    assert tokens == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    assert result.lengths.min() >= 1
    assert result.lengths.max() == 9
    assert len(result.rows) == sum(-(-length // 9) for length in lengths.tolist())


@pytest.mark.parametrize("side", ["right", "left"])
def test_split_rows_pack_and_come_back_where_their_tokens_were(side):
    columns = rows_of([5, 2, 3, 9, 4], 9)
    if side == "left":
        columns = {name: column[:, ::-1] for name, column in columns.items()}
    pieces, result = cut(columns, "causal-lm", 4, "split")
    packs = pack(pieces, "causal-lm", 4, 2)
    assert packs.tokens == 23
    back = unpack_tokens(packs, packs.columns["input_ids"], 9, 0)
    whole = np.zeros_like(columns["input_ids"])
    np.add.at(whole, result.rows, back)
    np.testing.assert_array_equal(whole, columns["input_ids"])
    # each piece loses the label of its first token, and nothing else
    assert (packs.columns["labels"] != -100).sum() == 23 - len(result.rows)


def test_truncated_and_dropped_rows_pack():
    columns = {**rows_of([5, 2, 9], 9), "labels": np.array([1, 2, 3])}
    kept, result = cut(columns, "classification", 4, "truncate")
    packs = pack(kept, "classification", 4, 2)
    assert unpack_tokens(packs, packs.columns["input_ids"], 9, 0).tolist() == [
        [1, 2, 3, 4, 0, 0, 0, 0, 0],
        [10, 11, 0, 0, 0, 0, 0, 0, 0],
        [19, 20, 21, 22, 0, 0, 0, 0, 0],
    ]
    assert result.tokens_lost == 6
    kept, result = cut(columns, "classification", 4, "drop")
    assert (kept["labels"].tolist(), result.rows.tolist()) == ([2], [1])
    items = {name: column[None] for name, column in rows_of([5, 2, 9], 9).items()}
    assert cut(items, "multiple-choice", 16, "error")[1].lengths.tolist() == [16]
    assert len(cut(items, "multiple-choice", 15, "drop")[0]["input_ids"]) == 0


def test_an_answer_that_truncation_cuts_off_is_not_kept_in_silence():
    columns = {**rows_of([5, 2], 5), "start_positions": np.array([3, 0]), "end_positions": np.array([4, 0])}
    kept, _ = cut(columns, "question-answering", 4, "truncate")
    with pytest.raises(DataError, match="row 0: end_positions 4 is none of its tokens"):
        pack(kept, "question-answering", 4, 2)


@pytest.mark.parametrize(
    ("lengths", "max_length", "policy", "says"),
    [
        ([1], 4, "trunc", "unknown policy 'trunc' .did you mean 'truncate'"),
        ([1], 0, "drop", "max_length must be at least 1; got 0"),
        ([1, -2], 4, "drop", "that of sequence 1 is -2"),
        ([1.5], 4, "drop", "whole numbers"),
    ],
)
def test_what_cannot_be_is_refused(lengths, max_length, policy, says):
    with pytest.raises((DataError, UsageError), match=says):
        fit(lengths, max_length, policy)
