# SPDX-License-Identifier: Apache-2.0
"""Answer questions from a fine-tuned model: one question from the options, or a JSON object per line."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipu_finetune.cli._parser import add_target_option
from ipu_finetune.errors import DataError, UsageError, did_you_mean
from ipu_finetune.recipe import TASKS

__all__ = ["configure", "run"]

_KEYS = ("question", "context")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("task", metavar="TASK", help=f"one of: {', '.join(TASKS)}")
    parser.add_argument("file", metavar="FILE", nargs="?", help='lines of {"question", "context", "id"?}; - is stdin')
    parser.add_argument("--model", metavar="DIR", required=True, help="a checkpoint, such as RUN/model")
    add_target_option(parser)
    parser.add_argument("--question", metavar="TEXT", help="the question, with --context")
    parser.add_argument("--context", metavar="TEXT", help="the text that holds the answer")
    parser.add_argument(
        "--max-sequences", type=int, default=1, metavar="N", help="windows that may share a row (packing; %(default)s)"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="also load weights that exist only as a pickle")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of one per answer")


def run(arguments: argparse.Namespace) -> int:
    """Read the questions, answer them, print the answers in the same order."""
    if arguments.task not in TASKS:
        raise UsageError(f"unknown task '{arguments.task}'{did_you_mean(arguments.task, TASKS)}")
    questions = _questions(arguments)

    from ipu_finetune import pipeline

    # Libraries print to stdout now and then; only answers belong there.
    with contextlib.redirect_stdout(sys.stderr):
        answer = pipeline(
            arguments.task,
            model=arguments.model,
            target=arguments.target,
            allow_pickle=arguments.allow_pickle,
            max_sequences=arguments.max_sequences,
        )
        print("\n".join([answer.target.announcement, *answer.notes]))
        try:
            found = answer([{key: question[key] for key in _KEYS} for question in questions])
        finally:
            answer.close()
    answers = [_labelled(question, each) for question, each in zip(questions, found)]
    if arguments.json:
        whole: Dict[str, Any] = {"task": arguments.task, "model": arguments.model}
        whole.update(target=answer.target.name, emulated=answer.target.emulated, answers=answers)
        print(json.dumps(whole, ensure_ascii=False))
    else:
        for each in answers:
            print(json.dumps(each, ensure_ascii=False))
    return 0


def _labelled(question: Dict[str, Any], answer: Dict[str, Any]) -> Dict[str, Any]:
    return {"id": question["id"], **answer} if "id" in question else dict(answer)


def _questions(arguments: argparse.Namespace) -> List[Dict[str, Any]]:
    given: List[Optional[str]] = [arguments.question, arguments.context]
    if arguments.file is not None:
        if any(text is not None for text in given):
            raise UsageError("give a FILE, or --question and --context; not both")
        return _from_lines(arguments.file)
    if any(text is None for text in given):
        raise UsageError("give --question TEXT and --context TEXT, or a FILE of JSON lines (- for stdin)")
    return [dict(zip(_KEYS, given))]


def _from_lines(file: str) -> List[Dict[str, Any]]:
    """Read every line, and name all that are no question before anything is loaded."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    questions, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            problems.append(f"line {number}: not JSON ({error})")
            continue
        if isinstance(content, dict) and all(isinstance(content.get(key), str) for key in _KEYS):
            questions.append(content)
        else:
            problems.append(f'line {number}: must be an object with the texts "question" and "context"')
    if problems:
        raise DataError(f"{file}: {'; '.join(problems)}")
    if not questions:
        raise DataError(f"{file}: holds no question")
    return questions
