# SPDX-License-Identifier: Apache-2.0
"""Questions, and the checks that turn the raw rows of a data set into them.

Every row is checked before anything is reported: one error names each kind of fault, how many rows have it, and the
first few of them.
"""

import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_finetune.errors import DataError, did_you_mean
from ipu_finetune.tasks.qa_files import RawQuestion

__all__ = ["Question", "build_questions"]

_SHOWN = 3
_COLUMNS = ("id", "title", "context", "question", "answers", "answer_text", "answer_start", "is_impossible")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": None}


@dataclass(frozen=True)
class Question:
    """One question about one context.

    Attributes:
        id: the data set's own name for the question, unique in its file.
        question: the question's text.
        context: the text that holds the answer, exactly as in the file: the offsets count its characters.
        title: the title of the article, or "".
        answers: (text, start) of each acceptable answer, `start` in Python characters from 0.
        is_impossible: the context does not answer the question (SQuAD 2.0).
    """

    id: str
    question: str
    context: str
    title: str = ""
    answers: Tuple[Tuple[str, int], ...] = ()
    is_impossible: bool = False


class _Faults:
    """Faulty rows by kind, in the order in which the kinds turned up."""

    def __init__(self) -> None:
        self._kinds: Dict[str, List[str]] = {}
        self._rows: Dict[str, None] = {}

    def add(self, kind: str, where: str, detail: str) -> None:
        self._kinds.setdefault(kind, []).append(detail)
        self._rows[where] = None

    def raise_if_any(self, name: str, total: int) -> None:
        if not self._kinds:
            return
        lines = [f"{name}: {len(self._rows):,} of {total:,} questions cannot be used"]
        for kind, details in self._kinds.items():
            lines.append(f"  - {kind}: {len(details):,}")
            lines.extend(f"      {detail}" for detail in details[:_SHOWN])
            if len(details) > _SHOWN:
                lines.append(f"      … and {len(details) - _SHOWN:,} more")
        raise DataError("\n".join(lines))


def build_questions(name: str, rows: Sequence[RawQuestion], version_2: bool) -> List[Question]:
    """Check raw rows and return their questions, in order.

    Args:
        name: the file or data set, for messages.
        rows: the raw rows.
        version_2: whether questions without an answer are welcome.

    Raises:
        DataError: no rows, a missing column, or faulty rows (all of them are counted).
    """
    if not rows:
        raise DataError(f"{name}: the data set is empty: it holds no question")
    _check_columns(name, rows)
    faults = _Faults()
    questions: List[Question] = []
    first_use: Dict[str, str] = {}
    contexts: Dict[str, str] = {}
    for row in rows:
        question = _question(row, version_2, faults)
        if question is None:
            continue
        if question.id in first_use:
            detail = f"'{question.id}' ({row.where}), first used in {first_use[question.id]}"
            faults.add("id used more than once; give each question its own", row.where, detail)
            continue
        first_use[question.id] = row.where
        # Some files repeat the context for each question; one copy of each is kept in memory.
        object.__setattr__(question, "context", contexts.setdefault(question.context, question.context))
        questions.append(question)
    faults.raise_if_any(name, len(rows))
    return questions


def _check_columns(name: str, rows: Sequence[RawQuestion]) -> None:
    present: Dict[str, None] = {}
    for row in rows:
        present.update(dict.fromkeys(row.values))
    missing = [column for column in ("id", "context", "question") if column not in present]
    if "answers" not in present:
        pair = [column for column in ("answer_text", "answer_start") if column not in present]
        missing += ["answers"] if len(pair) == 2 else pair
    if not missing:
        return
    spare = [str(column) for column in present if column not in _COLUMNS]
    named = "; ".join(f"'{column}'{did_you_mean(column, spare) if spare else ''}" for column in missing)
    raise DataError(
        f"{name}: {'column' if len(missing) == 1 else 'columns'} missing: {named}. It has: "
        f"{', '.join(map(str, present))}. A question needs id, context, question and answers "
        '({"text": […], "answer_start": […]}), or answer_text and answer_start instead of answers; title and '
        "is_impossible are optional"
    )


def _question(row: RawQuestion, version_2: bool, faults: _Faults) -> Optional[Question]:
    values = row.values
    raw_id = values.get("id")
    if isinstance(raw_id, int) and not isinstance(raw_id, bool):
        raw_id = str(raw_id)
    if not isinstance(raw_id, str) or not raw_id:
        faults.add("id is not a text", row.where, f"{row.where}: {_short(values.get('id'))}")
        return None
    label = f"'{raw_id}' ({row.where})"
    asked, context = values.get("question"), values.get("context")
    for column, text in (("question", asked), ("context", context)):
        if not isinstance(text, str):
            faults.add(f"{column} is not a text", row.where, f"{label}: {_short(text)}")
    if not isinstance(asked, str) or not isinstance(context, str):
        return None
    if not context.strip():
        faults.add("context is empty", row.where, label)
        return None
    try:
        answers = _answers(values)
        flag = _flag(values.get("is_impossible"))
    except ValueError as error:
        faults.add("answers cannot be read", row.where, f"{label}: {error}")
        return None
    if flag is True and answers:
        kind = "is_impossible is true but there are answers; one of the two is wrong"
        faults.add(kind, row.where, f"{label}: {_short(answers[0][0])}")
        return None
    if flag is False and not answers:
        faults.add("is_impossible is false but there is no answer; one of the two is wrong", row.where, label)
        return None
    if not answers and not version_2:
        kind = "no answer (SQuAD 2.0), in a v1.1 run; set task.version_2=true or use the squad_v2 recipe"
        faults.add(kind, row.where, label)
        return None
    for text, start in answers:
        problem = _misplaced(context, text, start)
        if problem:
            faults.add("answer text is not at its offset (characters from 0)", row.where, f"{label}: {problem}")
            return None
    title = values.get("title")
    return Question(
        id=raw_id,
        question=asked,
        context=context,
        title=title if isinstance(title, str) else "",
        answers=tuple(answers),
        is_impossible=not answers,
    )


def _answers(values: Any) -> List[Tuple[str, int]]:
    """Return the (text, start) pairs of a row. Raises ValueError with what is wrong."""
    if "answers" not in values and "answer_text" in values:
        text, start = values["answer_text"], values.get("answer_start")
        if text in (None, "") and start in (None, ""):
            return []
        return [_pair(text, start)]
    answers = values.get("answers")
    if isinstance(answers, str):
        try:
            answers = json.loads(answers) if answers.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg}, character {error.pos}): {_short(answers)}") from None
    if answers is None:
        return []
    if isinstance(answers, list):
        for answer in answers:
            if not isinstance(answer, dict) or "text" not in answer or "answer_start" not in answer:
                raise ValueError(f"{_short(answer)} has no text and answer_start")
        return [_pair(answer["text"], answer["answer_start"]) for answer in answers]
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= set(answers):
        raise ValueError(f'{_short(answers)} is not {{"text": […], "answer_start": […]}}')
    texts, starts = answers["text"], answers["answer_start"]
    if isinstance(texts, str):
        texts, starts = [texts], [starts]
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise ValueError(f"text and answer_start are not two lists of the same length: {_short(answers)}")
    return [_pair(text, start) for text, start in zip(texts, starts)]


def _pair(text: Any, start: Any) -> Tuple[str, int]:
    if not isinstance(text, str) or not text:
        raise ValueError(f"the answer text is {_short(text)}, not a text of at least one character")
    if isinstance(start, float) and start.is_integer():  # a column of numbers with gaps is read as floats
        start = int(start)
    if isinstance(start, str) and start.strip().isdecimal():
        start = int(start)
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"answer_start is {_short(start)}, not a whole number")
    return text, start


def _flag(value: Any) -> Optional[bool]:
    if value is None or isinstance(value, bool):
        return value
    key = str(value).strip().lower()
    if key not in _FLAGS:
        raise ValueError(f"is_impossible is {_short(value)}, not true or false")
    return _FLAGS[key]


def _misplaced(context: str, text: str, start: int) -> str:
    """Say what stands at `start` instead of `text` and where `text` is; "" if it is where it should be."""
    if start >= 0 and context.startswith(text, start):
        return ""
    nearest, at = -1, context.find(text)
    while at >= 0:
        if nearest < 0 or abs(at - start) < abs(nearest - start):
            nearest = at
        at = context.find(text, at + 1)
    found = repr(context[start : start + len(text)]) if 0 <= start < len(context) else "nothing"
    if len(found) > 60:
        found = found[:59] + "…"
    hint = f"it is at {nearest}" if nearest >= 0 else "it is nowhere in the context"
    return f"expected {_short(text)} at {start}, found {found} (the context has {len(context):,}); {hint}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
