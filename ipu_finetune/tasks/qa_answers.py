# SPDX-License-Identifier: Apache-2.0
"""From start and end logits to one answer per question.

A span is a start token and an end token of the same window, end not before start, at most `max_answer_length` tokens;
its score is the sum of the two logits. All spans of a window compete, not only those of its best starts and ends. A
span that two windows share counts once, with its better score. The `n_best` spans of a question share its probability.

With SQuAD 2.0, [CLS] to [CLS] is the answer "there is none". Its score is the lowest over the question's windows: it
must hold everywhere. It wins if it exceeds the best span by more than `null_threshold`.
"""

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ipu_finetune.errors import IpuFinetuneError
from ipu_finetune.tasks.qa_features import Features
from ipu_finetune.tasks.qa_questions import Question

__all__ = ["Answer", "best_answers"]

_ROWS = 64  # rows per block: at 384 tokens and 30-token answers a block of span scores stays in the cache


@dataclass(frozen=True)
class Answer:
    """The answer to one question; `text` is `context[start:end]`.

    Attributes:
        id: the question's id.
        text: the answer, "" for no answer.
        start: first character.
        end: the character after the last; equal to `start` for no answer.
        score: start logit plus end logit.
        probability: the answer's share in a softmax over the scores of the n best spans, and of "no answer" with
            SQuAD 2.0.
    """

    id: str
    text: str
    start: int
    end: int
    score: float
    probability: float


class _Spans(NamedTuple):
    """Candidate spans, one entry per span: question, characters [start, end), score."""

    question: np.ndarray
    start: np.ndarray
    end: np.ndarray
    score: np.ndarray


def best_answers(
    questions: Sequence[Question],
    features: Features,
    start_logits: Any,
    end_logits: Any,
    max_answer_length: int = 30,
    n_best: int = 20,
    version_2: bool = False,
    null_threshold: float = 0.0,
) -> List[Answer]:
    """Return one answer per question, in the order of the questions.

    Args:
        questions: the questions from which `features` was made.
        features: the rows that were given to the model, in this order.
        start_logits: [rows, max_length], the model's output for each row.
        end_logits: [rows, max_length].
        max_answer_length: longest answer in tokens.
        n_best: spans per question that share its probability.
        version_2: whether "no answer" competes.
        null_threshold: by how much "no answer" must exceed the best span.

    Raises:
        IpuFinetuneError: logits of another shape than the features, questions without a row, or logits that are NaN
            or infinite where they count.
    """
    start, end = _as_float32(start_logits), _as_float32(end_logits)
    usable = features.offsets[..., 1] > features.offsets[..., 0]
    _check(questions, features, start, end, usable)
    spans = _rank(_window_spans(features, start, end, usable, max_answer_length, n_best), n_best)

    count = len(questions)
    first = np.searchsorted(spans.question, np.arange(count))  # spans are sorted by question, then best first
    best = spans.score[first].astype(np.float64)
    top = best
    null = np.full(count, -np.inf)
    if version_2:
        rows = np.arange(len(features))
        at_cls = start[rows, features.cls_positions] + end[rows, features.cls_positions]
        null = np.full(count, np.inf)
        np.minimum.at(null, features.row_question, at_cls)
        top = np.maximum(best, null)
    weights = np.exp(spans.score - top[spans.question])
    total = np.bincount(spans.question, weights, minlength=count) + np.exp(null - top)
    no_answer = null - best > null_threshold
    scores = np.where(no_answer, null, best)
    probabilities = np.exp(scores - top) / total

    answers: List[Answer] = []
    for index, question in enumerate(questions):
        begin, stop = (0, 0) if no_answer[index] else (int(spans.start[first[index]]), int(spans.end[first[index]]))
        text = question.context[begin:stop]
        answers.append(Answer(question.id, text, begin, stop, float(scores[index]), float(probabilities[index])))
    return answers


def _as_float32(logits: Any) -> np.ndarray:
    return np.asarray(logits).astype(np.float32, copy=False)


def _check(
    questions: Sequence[Question], features: Features, start: np.ndarray, end: np.ndarray, usable: np.ndarray
) -> None:
    if start.shape != usable.shape or end.shape != usable.shape:
        raise IpuFinetuneError(
            f"start logits of shape {list(start.shape)} and end logits of shape {list(end.shape)} for features of "
            f"shape {list(usable.shape)}; every row needs its own logits, in the order of the features"
        )
    if len(questions) != features.questions:
        raise IpuFinetuneError(f"{len(questions):,} questions, but the features were made of {features.questions:,}")
    # Only rows with a usable token can answer; a selection of rows may have lost a question's last one.
    answered = np.zeros(len(questions), dtype=bool)
    answered[features.row_question[usable.any(axis=1)]] = True
    if not answered.all():
        lost = [questions[index].id for index in np.flatnonzero(~answered)[:3]]
        raise IpuFinetuneError(
            f"{int((~answered).sum()):,} of {len(questions):,} questions have no row to answer from: {', '.join(lost)}"
        )
    counts = usable.copy()
    counts[np.arange(len(counts)), features.cls_positions] = True
    broken = ((~np.isfinite(start) | ~np.isfinite(end)) & counts).any(axis=1)
    if broken.any():
        ids = [questions[features.row_question[row]].id for row in np.flatnonzero(broken)[:3]]
        raise IpuFinetuneError(
            f"logits are NaN or infinite in {int(broken.sum()):,} of {len(broken):,} rows, first in questions "
            f"{', '.join(ids)}: the model's weights or activations overflowed. "
            "Train again with a lower learning rate or loss scale, or in float32"
        )


def _window_spans(
    features: Features, start: np.ndarray, end: np.ndarray, usable: np.ndarray, max_answer_length: int, n_best: int
) -> _Spans:
    """Return the n best spans of every row."""
    longest = min(max_answer_length, start.shape[1])
    kept: List[_Spans] = []
    for begin in range(0, len(start), _ROWS):
        block = slice(begin, begin + _ROWS)
        starts = np.where(usable[block], start[block], -np.inf)
        ends = np.where(usable[block], end[block], -np.inf)
        ends = np.pad(ends, ((0, 0), (0, longest - 1)), constant_values=-np.inf)
        # scores[row, s, d]: the span from token s to token s + d
        scores = starts[:, :, None] + sliding_window_view(ends, longest, axis=1)
        flat = scores.reshape(len(scores), -1)
        size = min(n_best, flat.shape[1])
        picked = np.argpartition(flat, flat.shape[1] - size, axis=1)[:, flat.shape[1] - size :]
        row, place = np.repeat(np.arange(len(flat)), size), picked.ravel()
        score = flat[row, place]
        real = np.isfinite(score)
        row, place, score = row[real], place[real], score[real]
        first, length = np.divmod(place, longest)
        row = row + begin
        kept.append(
            _Spans(
                features.row_question[row],
                features.offsets[row, first, 0],
                features.offsets[row, first + length, 1],
                score,
            )
        )
    return _Spans(*(np.concatenate(column) for column in zip(*kept)))


def _rank(spans: _Spans, n_best: int) -> _Spans:
    """Sort by question and then best first, drop repeated spans, keep `n_best` per question."""
    spans = _take(spans, np.lexsort((-spans.score, spans.end, spans.start, spans.question)))
    fresh = np.ones(len(spans.score), dtype=bool)
    fresh[1:] = (np.diff(spans.question) != 0) | (np.diff(spans.start) != 0) | (np.diff(spans.end) != 0)
    spans = _take(spans, fresh)
    # Ties go to the span that starts first, then to the shorter one.
    spans = _take(spans, np.lexsort((spans.end, spans.start, -spans.score, spans.question)))
    place = np.arange(len(spans.question)) - np.searchsorted(spans.question, spans.question)
    return _take(spans, place < n_best)


def _take(spans: _Spans, selection: np.ndarray) -> _Spans:
    return _Spans(*(column[selection] for column in spans))
