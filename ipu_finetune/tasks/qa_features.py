# SPDX-License-Identifier: Apache-2.0
"""Features of questions: windows of fixed length over each context, with the answer's token positions.

A context that is too long for one row is cut into overlapping windows, never shortened. With room for 5 context
tokens and `doc_stride` 2, a context of 9 tokens gives

```
[CLS] question [SEP] c0 c1 c2 c3 c4 [SEP]
[CLS] question [SEP]          c3 c4 c5 c6 c7 [SEP]
[CLS] question [SEP]                   c6 c7 c8 [SEP] [PAD] [PAD]
```

A window that holds the whole answer is labelled with the answer's first and last token; any other window, and every
window of a question without an answer, with the [CLS] token twice.
"""

import hashlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ipu_finetune.errors import DataError, IpuFinetuneError, RecipeError
from ipu_finetune.tasks.qa_questions import Question

__all__ = ["Features", "Progress", "make_features"]

Progress = Callable[[int, int], None]
_BATCH = 256  # questions per tokenizer call: large enough to keep its threads busy, small enough for a smooth bar
_SHOWN = 3


class Features:
    """Rows for a question-answering model: a map-style data set over numpy arrays.

    Attributes:
        columns: name -> int64 array. `input_ids`, `attention_mask` and, if the tokenizer gives them, `token_type_ids`
            of shape [rows, max_length]; `start_positions` and `end_positions` of shape [rows], absent if the
            questions carry no answers.
        row_question: [rows], the position of each row's question. Rows are in the order of the questions.
        offsets: [rows, max_length, 2] int32, the characters of the context from which each token comes; -1 outside
            the context.
        cls_positions: [rows], where the [CLS] token is.
        questions: number of questions.
        answers_outside: windows of answerable questions that do not hold the whole answer.
        unanswerable_by_windows: answerable questions whose answer no window holds whole, for example because it is
            longer than a window.
    """

    def __init__(
        self,
        columns: Dict[str, np.ndarray],
        row_question: np.ndarray,
        offsets: np.ndarray,
        cls_positions: np.ndarray,
        questions: int,
        answers_outside: int = 0,
        unanswerable_by_windows: int = 0,
    ) -> None:
        self.columns = columns
        self.row_question = row_question
        self.offsets = offsets
        self.cls_positions = cls_positions
        self.questions = questions
        self.answers_outside = answers_outside
        self.unanswerable_by_windows = unanswerable_by_windows
        self._fingerprint = ""

    def __len__(self) -> int:
        return len(self.row_question)

    def __getitem__(self, row: int) -> Dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}

    @property
    def real_tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.columns["attention_mask"].sum())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the columns: names, shapes and values, in the order of the rows."""
        if not self._fingerprint:
            digest = hashlib.sha256()
            for name in sorted(self.columns):
                column = np.ascontiguousarray(self.columns[name])
                digest.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
                digest.update(column.data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


class _Window(NamedTuple):
    """What one row takes from its encoding; `first` is the column of the first context token."""

    question: int
    ids: List[int]
    types: List[int]
    first: int
    offsets: np.ndarray  # [context tokens, 2]
    cls: int
    start: int
    end: int


def make_features(
    questions: Sequence[Question],
    tokenizer: Any,
    max_length: int,
    doc_stride: int,
    labelled: bool,
    progress: Optional[Progress] = None,
) -> Features:
    """Tokenize questions and contexts into windows of `max_length` tokens.

    Args:
        questions: the questions.
        tokenizer: a fast tokenizer with a [CLS] and a padding token.
        max_length: tokens per row, question and special tokens included.
        doc_stride: tokens that two neighbouring windows share.
        labelled: whether to make the label columns, from each question's first answer.
        progress: called with (questions done, questions in all).

    Raises:
        RecipeError: `max_length` and `doc_stride` leave no room.
        DataError: a question too long to leave room for its context, or a context without tokens.
        IpuFinetuneError: the tokenizer is not fast, or has no [CLS] or padding token.
    """
    _check_tokenizer(tokenizer)
    _check_lengths(questions, tokenizer, max_length, doc_stride)
    parts: List[Dict[str, np.ndarray]] = []
    outside = nowhere = 0
    empty: List[str] = []
    for begin in range(0, len(questions), _BATCH):
        batch = questions[begin : begin + _BATCH]
        encoded = tokenizer(
            [question.question.strip() for question in batch],
            [question.context for question in batch],
            truncation="only_second",
            max_length=max_length,
            stride=doc_stride,
            padding=False,
            return_overflowing_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        encodings: List[List[Any]] = [[] for _ in batch]
        for encoding, index in zip(encoded.encodings, encoded["overflow_to_sample_mapping"]):
            encodings[index].append(encoding)
        windows: List[_Window] = []
        for index, question in enumerate(batch):
            own = _windows(begin + index, question, encodings[index], tokenizer.cls_token_id, doc_stride)
            if not len(own[0].offsets):
                empty.append(question.id)
            if question.answers:
                missed = sum(window.start == window.cls for window in own)
                outside += missed
                nowhere += missed == len(own)
            windows.extend(own)
        parts.append(_arrays(windows, tokenizer, max_length))
        if progress is not None:
            progress(begin + len(batch), len(questions))
    if empty:
        raise DataError(
            f"{len(empty):,} contexts have no token under this tokenizer: {_listed(empty)}. "
            "Remove these questions, or use a model whose vocabulary covers their text"
        )
    merged = _concatenate(parts, max_length)
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if "token_type_ids" in tokenizer.model_input_names else []
    names += ["start_positions", "end_positions"] if labelled else []
    return Features(
        columns={name: merged[name] for name in names},
        row_question=merged["row_question"],
        offsets=merged["offsets"],
        cls_positions=merged["cls_positions"],
        questions=len(questions),
        answers_outside=outside,
        unanswerable_by_windows=nowhere,
    )


def _check_tokenizer(tokenizer: Any) -> None:
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise IpuFinetuneError(
            f"tokenizer {name} is not a fast tokenizer; question answering needs one for its character offsets. "
            "Load it with AutoTokenizer.from_pretrained(…, use_fast=True), or use a model that has one"
        )
    if tokenizer.cls_token_id is None or tokenizer.cls_token_id not in tokenizer("a", "b")["input_ids"]:
        raise IpuFinetuneError(
            f"tokenizer {name} puts no [CLS] token in a row, the label of a window without the answer"
        )
    if tokenizer.pad_token_id is None:
        raise IpuFinetuneError(f"tokenizer {name} has no padding token; set one: rows have a fixed length")


def _check_lengths(questions: Sequence[Question], tokenizer: Any, max_length: int, doc_stride: int) -> None:
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if doc_stride < 0 or max_length - special - doc_stride < 1:
        raise RecipeError(
            [
                f"task.doc_stride={doc_stride} with task.max_length={max_length}: the overlap must be from 0 to "
                f"{max(max_length - special - 1, 0)} tokens, so that a window moves on ({special} tokens are special)"
            ]
        )
    plain = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    too_long: List[str] = []
    for begin in range(0, len(questions), _BATCH):
        batch = questions[begin : begin + _BATCH]
        asked = tokenizer([question.question.strip() for question in batch], verbose=False, **plain)["input_ids"]
        for question, ids in zip(batch, asked):
            room = max_length - special - len(ids)
            if room > doc_stride:
                continue
            # A context that fits as it is needs no second window, hence no room for an overlap.
            if len(tokenizer(question.context, verbose=False, **plain)["input_ids"]) > room:
                too_long.append(f"{question.id} ({len(ids)} tokens)")
    if too_long:
        raise DataError(
            f"{len(too_long):,} questions are so long that no window can move over their context "
            f"(max_length {max_length} - {special} special - question < doc_stride {doc_stride} + 1): "
            f"{_listed(too_long)}. Raise task.max_length, lower task.doc_stride, or shorten them"
        )


def _windows(number: int, question: Question, encodings: List[Any], cls_id: int, doc_stride: int) -> List[_Window]:
    """Take apart the encodings of one question, and place its answer in them."""
    firsts: List[int] = []
    offsets: List[np.ndarray] = []
    for encoding in encodings:
        sequences = encoding.sequence_ids
        length = sequences.count(1)
        first = sequences.index(1) if length else len(sequences)
        firsts.append(first)
        offsets.append(np.array(encoding.offsets[first : first + length], dtype=np.int32).reshape(length, 2))
    begin, end = _token_span(question, offsets, doc_stride)
    windows: List[_Window] = []
    shift = 0  # position in the context of the window's first token
    for encoding, first, places in zip(encodings, firsts, offsets):
        ids = encoding.ids
        cls = _cls_position(ids, encoding.sequence_ids, cls_id)
        inside = 0 <= begin <= end and shift <= begin and end < shift + len(places)
        start_label = first + begin - shift if inside else cls
        end_label = first + end - shift if inside else cls
        windows.append(_Window(number, ids, encoding.type_ids, first, places, cls, start_label, end_label))
        shift += len(places) - doc_stride
    return windows


def _cls_position(ids: List[int], sequences: List[Optional[int]], cls_id: int) -> int:
    position = ids.index(cls_id)
    while sequences[position] is not None:  # the text itself may spell the token
        position = ids.index(cls_id, position + 1)
    return position


def _token_span(question: Question, offsets: List[np.ndarray], doc_stride: int) -> Tuple[int, int]:
    """Return the first and last context token that hold a character of the first answer, (0, -1) if none does."""
    if not question.answers:
        return 0, -1
    text, start = question.answers[0]
    # Neighbours share exactly doc_stride tokens, so the whole context is the first window and each later rest.
    whole = np.concatenate([offsets[0], *(window[doc_stride:] for window in offsets[1:])])
    touched = np.flatnonzero((whole[:, 1] > start) & (whole[:, 0] < start + len(text)) & (whole[:, 1] > whole[:, 0]))
    return (int(touched[0]), int(touched[-1])) if len(touched) else (0, -1)


def _arrays(windows: List[_Window], tokenizer: Any, max_length: int) -> Dict[str, np.ndarray]:
    rows = len(windows)
    result: Dict[str, np.ndarray] = {
        "input_ids": np.full((rows, max_length), tokenizer.pad_token_id, dtype=np.int64),
        "attention_mask": np.zeros((rows, max_length), dtype=np.int64),
        "token_type_ids": np.full((rows, max_length), tokenizer.pad_token_type_id, dtype=np.int64),
        "offsets": np.full((rows, max_length, 2), -1, dtype=np.int32),
        "row_question": np.array([window.question for window in windows], dtype=np.int64),
        "cls_positions": np.empty(rows, dtype=np.int64),
        "start_positions": np.empty(rows, dtype=np.int64),
        "end_positions": np.empty(rows, dtype=np.int64),
    }
    for row, window in enumerate(windows):
        length = len(window.ids)
        begin = max_length - length if tokenizer.padding_side == "left" else 0
        result["input_ids"][row, begin : begin + length] = window.ids
        result["attention_mask"][row, begin : begin + length] = 1
        result["token_type_ids"][row, begin : begin + length] = window.types
        first = begin + window.first
        result["offsets"][row, first : first + len(window.offsets)] = window.offsets
        result["cls_positions"][row] = begin + window.cls
        result["start_positions"][row] = begin + window.start
        result["end_positions"][row] = begin + window.end
    return result


def _concatenate(parts: List[Dict[str, np.ndarray]], max_length: int) -> Dict[str, np.ndarray]:
    if not parts:
        raise DataError("no questions to make features of")
    merged = {}
    for name in list(parts[0]):
        # One column at a time, freeing as it goes: SQuAD's columns take a gigabyte.
        merged[name] = np.concatenate([part.pop(name) for part in parts])
    return merged


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN:,} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
