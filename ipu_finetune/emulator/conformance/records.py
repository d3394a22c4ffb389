# SPDX-License-Identifier: Apache-2.0
"""The results file: one JSON object a line, appended to as tests finish, read again to resume or to report."""

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from ...errors import DataError

__all__ = ["FileResult", "Results", "TestResult", "append", "mend", "read"]

Event = Dict[str, Any]


class TestResult(NamedTuple):
    """How one test ended.

    Attributes:
        file: the test file, relative to the tests folder.
        id: pytest's id of the test.
        outcome: passed, failed, skipped, xfailed or xpassed.
        seconds: how long it took.
        evidence: for a failure, `exception`, `chain`, `message`, `frames`, `fixtures`, `phase`, `stderr`.
    """

    file: str
    id: str
    outcome: str
    seconds: float
    evidence: Dict[str, Any]


class FileResult(NamedTuple):
    """What is known of one test file.

    Attributes:
        name: the file, relative to the tests folder.
        ids: the tests that were collected, or found done.
        tests: those that have an outcome, by id.
        not_collected: why the file could not be collected, if so.
        skipped_module: why the file skipped itself as a whole, if so.
        done: whether the file was run to its end.
        seconds: how long it took.
    """

    name: str
    ids: List[str]
    tests: Dict[str, TestResult]
    not_collected: Optional[str]
    skipped_module: Optional[str]
    done: bool
    seconds: float


class Results(NamedTuple):
    """A results file's content: how the run was made, and each file's outcomes."""

    run: Event
    files: Dict[str, FileResult]


def append(path: Path, events: List[Event]) -> None:
    """Add events to a results file."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def mend(path: Path) -> None:
    """Cut off the half of a line that a run left when it was killed, so that more can be appended."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def _events(path: Path) -> List[Event]:
    lines = path.read_text(encoding="utf-8").splitlines()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except ValueError:
            # Only the last may be cut short, by a run that is going on or was killed.
            if number != len(lines):
                raise DataError(f"{path}:{number}: not a JSON object; delete the file to run all of it anew") from None
    return events


def read(path: Path) -> Results:
    """Read a results file; of a test that ran twice, the later outcome counts.

    Raises:
        DataError: a line cannot be read.
    """
    run: Event = {}
    files: Dict[str, FileResult] = {}
    for event in _events(path):
        kind = event["event"]
        if kind == "run":
            run = event
            continue
        name = event["file"]
        known = files.setdefault(name, FileResult(name, [], {}, None, None, False, 0.0))
        if kind == "collected":
            known.ids.extend(each for each in event["ids"] if each not in set(known.ids))
        elif kind == "not-collected":
            files[name] = known._replace(not_collected=event["message"])
        elif kind == "module-skipped":
            files[name] = known._replace(skipped_module=event["message"])
        elif kind == "outcome":
            evidence = {key: event[key] for key in event.keys() - {"event", "file", "id", "outcome", "seconds"}}
            known.tests[event["id"]] = TestResult(name, event["id"], event["outcome"], event["seconds"], evidence)
        elif kind == "file-done":
            files[name] = known._replace(done=True, seconds=known.seconds + event["seconds"])
    return Results(run, files)
