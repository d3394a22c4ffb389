# SPDX-License-Identifier: Apache-2.0
"""Answers from logits, against a search of every span in plain Python."""

import math

import numpy as np
import pytest

from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.tasks.qa_answers import best_answers
from ipu_finetune.tasks.qa_features import Features
from ipu_finetune.tasks.qa_questions import Question

_LENGTH = 14


def _case(seed, count=40):
    """Questions of one to four windows of a context of three-character words, and random logits."""
    rng = np.random.default_rng(seed)
    questions, row_question, offsets, cls = [], [], [], []
    for number in range(count):
        words = int(rng.integers(3, 25))
        questions.append(
            Question(f"q{number}", "?", " ".join(f"{word:02d}x" for word in range(words)), answers=(("x", 2),))
        )
        begin = 0
        while True:
            row = np.full((_LENGTH, 2), -1, dtype=np.int32)
            first = int(rng.integers(2, 5))
            shown = min(words - begin, _LENGTH - first - 1)
            for place in range(shown):
                row[first + place] = 4 * (begin + place), 4 * (begin + place) + 3
            offsets.append(row)
            row_question.append(number)
            cls.append(int(rng.integers(0, 2)))
            if begin + shown == words:
                break
            begin += shown - 2
    rows = len(offsets)
    features = Features(
        {"attention_mask": np.ones((rows, _LENGTH), dtype=np.int64)},
        np.array(row_question),
        np.stack(offsets),
        np.array(cls),
        questions=count,
    )
    start, end = rng.normal(scale=3, size=(2, rows, _LENGTH)).astype(np.float32)
    return questions, features, start, end


def _search(questions, features, start, end, longest, n_best, version_2, threshold):
    """The definition, word for word: all spans of all windows, one score per character span, best first."""
    result = []
    for number, question in enumerate(questions):
        spans, nulls = {}, []
        for row in np.flatnonzero(features.row_question == number):
            nulls.append(float(start[row, features.cls_positions[row]] + end[row, features.cls_positions[row]]))
            for s in range(_LENGTH):
                for e in range(s, min(s + longest, _LENGTH)):
                    if features.offsets[row, s, 0] >= 0 and features.offsets[row, e, 0] >= 0:
                        key = int(features.offsets[row, s, 0]), int(features.offsets[row, e, 1])
                        spans[key] = max(spans.get(key, -math.inf), float(start[row, s] + end[row, e]))
        ranked = sorted(spans.items(), key=lambda item: -item[1])[:n_best]
        (begin, stop), best = ranked[0]
        total = sum(math.exp(score) for _, score in ranked)
        if version_2:
            total += math.exp(min(nulls))
            if min(nulls) - best > threshold:
                begin, stop, best = 0, 0, min(nulls)
        result.append((question.id, question.context[begin:stop], begin, stop, best, math.exp(best) / total))
    return result


@pytest.mark.parametrize("n_best", [1, 5, 20, 10_000])
@pytest.mark.parametrize("longest", [1, 3, 30])
@pytest.mark.parametrize(("version_2", "threshold"), [(False, 0.0), (True, 0.0), (True, -4.0), (True, 2.5)])
def test_answers_equal_a_search_of_every_span(n_best, longest, version_2, threshold):
    case = _case(seed=n_best + longest)
    found = best_answers(*case, longest, n_best, version_2, threshold)
    expected = _search(*case, longest, n_best, version_2, threshold)
    assert [(a.id, a.text, a.start, a.end) for a in found] == [row[:4] for row in expected]
    np.testing.assert_allclose([a.score for a in found], [row[4] for row in expected], rtol=1e-6)
    np.testing.assert_allclose([a.probability for a in found], [row[5] for row in expected], rtol=1e-4)


def test_the_cases_hold_no_answers_and_shared_spans():
    case = _case(seed=23)
    texts = [answer.text for answer in best_answers(*case, 30, 20, True, -4.0)]
    assert 0 < texts.count("") < len(texts)
    assert np.bincount(case[1].row_question).max() > 2


def test_one_answer_per_question_in_their_order_however_the_rows_lie():
    questions, features, start, end = _case(seed=5)
    expected = best_answers(questions, features, start, end)
    order = np.random.default_rng(0).permutation(len(features))
    mixed = Features(
        features.columns,
        features.row_question[order],
        features.offsets[order],
        features.cls_positions[order],
        len(questions),
    )
    assert best_answers(questions, mixed, start[order], end[order]) == expected
    assert [answer.id for answer in expected] == [question.id for question in questions]


def test_no_answer_must_win_in_every_window():
    questions, features, start, end = _case(seed=6, count=30)
    start[:], end[:] = 0.0, 0.0
    rows = np.arange(len(features))
    start[rows, features.cls_positions] = 5.0
    assert {answer.text for answer in best_answers(questions, features, start, end, version_2=True)} == {""}
    several = int(np.flatnonzero(np.bincount(features.row_question) > 1)[0])
    row = int(np.flatnonzero(features.row_question == several)[-1])
    start[row, features.cls_positions[row]] = -1.0
    answers = best_answers(questions, features, start, end, version_2=True)
    assert [index for index, answer in enumerate(answers) if answer.text] == [several]
    # without SQuAD 2.0 there is always an answer
    assert all(answer.text for answer in best_answers(questions, features, start, end))


def test_tied_spans_go_to_the_first_and_shortest():
    questions, features, start, end = _case(seed=7)
    start[:], end[:] = 0.0, 0.0
    for answer in best_answers(questions, features, start, end, n_best=10_000):
        assert (answer.start, answer.end) == (0, 3)


def test_logits_outside_the_context_never_count():
    questions, features, start, end = _case(seed=8)
    expected = best_answers(questions, features, start, end)
    outside = features.offsets[..., 0] < 0
    outside[np.arange(len(features)), features.cls_positions] = False
    start[outside], end[outside] = np.inf, np.nan
    assert best_answers(questions, features, start, end, version_2=False) == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_counted_and_named(value):
    questions, features, start, end = _case(seed=9)
    for row in (3, 8):
        column = int(np.flatnonzero(features.offsets[row, :, 0] >= 0)[0])
        (start if row == 3 else end)[row, column] = value
    start[11, features.cls_positions[11]] = value
    first = questions[features.row_question[3]].id
    with pytest.raises(
        IpuFinetuneError, match=rf"NaN or infinite in 3 of {len(features)} rows, first in questions {first},"
    ):
        best_answers(questions, features, start, end)


def test_lost_rows_and_questions_are_errors():
    questions, features, start, end = _case(seed=10)
    with pytest.raises(IpuFinetuneError, match="every row needs its own logits"):
        best_answers(questions, features, start[:-1], end[:-1])
    with pytest.raises(IpuFinetuneError, match="39 questions, but the features were made of 40"):
        best_answers(questions[:-1], features, start, end)
    kept = features.row_question != 4
    fewer = Features(
        {}, features.row_question[kept], features.offsets[kept], features.cls_positions[kept], len(questions)
    )
    with pytest.raises(IpuFinetuneError, match="1 of 40 questions have no row to answer from: q4"):
        best_answers(questions, fewer, start[kept], end[kept])


def test_half_precision_logits_are_summed_in_float32():
    questions, features, start, end = _case(seed=11)
    half = start.astype(np.float16), end.astype(np.float16)
    assert best_answers(questions, features, *half) == best_answers(
        questions, features, half[0].astype(np.float32), half[1].astype(np.float32)
    )
