# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin that the conformance tool loads beside a suite: a time limit per test, and a record of outcomes.

One line of JSON is written before a test starts and one when it has ended, so that whoever reads the record knows which
test a process was in when it died.
"""

import gc
import json
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set

import pytest
from _pytest.outcomes import Failed

__all__: List[str] = []

#: How much of an exception's message and of what a test printed is kept.
_MESSAGE = 4000
_FRAMES = 30
#: A test that catches the first alarm gets another each so many seconds.
_AGAIN = 10.0


class TimeLimit(Failed):
    """The test took longer than it may. Not an `Exception`, which the test might catch."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what the conformance tool passes."""
    group = parser.getgroup("conformance")
    group.addoption("--conformance-record", metavar="FILE", help="where to append outcomes, one JSON object a line")
    group.addoption("--conformance-done", metavar="FILE", help="ids of tests that have an outcome already, one a line")
    group.addoption("--conformance-limit", metavar="SECONDS", type=float, default=60.0, help="time limit per test")


def pytest_configure(config: pytest.Config) -> None:
    """Start recording."""
    path = config.getoption("--conformance-record")
    if path:
        config.pluginmanager.register(_Recorder(config, Path(path)), "conformance-recorder")


class _Recorder:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        done = config.getoption("--conformance-done")
        self._done: Set[str] = set(Path(done).read_text(encoding="utf-8").splitlines()) if done else set()
        self._limit: float = config.getoption("--conformance-limit")
        self._path = path
        self._deadline = 0.0
        self._current: Optional[Dict[str, Any]] = None

    def _write(self, event: str, **content: Any) -> None:
        line = json.dumps({"event": event, **content}) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)

    # ---- collection

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: List[pytest.Item]) -> None:
        """Say what there is, and leave out what an earlier process has done."""
        self._write("collected", ids=[item.nodeid for item in items])
        done = [item for item in items if item.nodeid in self._done]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say why a file gave no tests."""
        if report.outcome == "passed":
            return
        event = "not-collected" if report.failed else "module-skipped"
        self._write(event, id=report.nodeid, message=report.longreprtext[-_MESSAGE:])

    def pytest_collection_finish(self) -> None:
        """Keep what was imported out of later collections: a suite may call gc.collect before each of its tests."""
        gc.collect()
        gc.freeze()

    # ---- running

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Bracket one test with two lines."""
        self._deadline = time.monotonic() + self._limit
        self._current = {"id": item.nodeid, "outcome": "passed", "fixtures": list(getattr(item, "fixturenames", ()))}
        self._write("start", id=item.nodeid)
        started = time.monotonic()
        result = yield
        error = result.excinfo[1] if result.excinfo else None  # type: ignore[attr-defined]
        if error is not None:
            # The test ended the whole session: by KeyboardInterrupt or pytest.exit.
            self._current.update(outcome="failed", exception=type(error).__name__, message=str(error), frames=[])
        self._write("outcome", seconds=round(time.monotonic() - started, 3), **self._current)
        self._current = None

    @contextmanager
    def _limited(self) -> Iterator[None]:
        usual = signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, max(self._deadline - time.monotonic(), 0.01), _AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, usual)

    def _alarm(self, *_: Any) -> None:
        raise TimeLimit(f"the test took longer than {self._limit:g} s", pytrace=True)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Let fixtures count."""
        with self._limited():
            yield

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Let the test itself count."""
        with self._limited():
            yield

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Give the clean-up as long again: it may have to end what the test left hanging."""
        self._deadline = time.monotonic() + self._limit
        with self._limited():
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        """Take down what a phase came to; the first that did not pass decides."""
        outcome = yield
        report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
        current = self._current
        if current is None or report.outcome == "passed" or current["outcome"] == "failed":
            return
        current["outcome"] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        current["phase"] = report.when
        if report.outcome == "skipped":
            current["message"] = _skip_reason(report)
        elif call.excinfo is not None:
            current.update(_evidence(call.excinfo))
        else:
            current["message"] = report.longreprtext[:_MESSAGE]
        if report.failed and report.capstderr:
            current["stderr"] = report.capstderr[-_MESSAGE:]


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return str(getattr(report, "wasxfail", "") or reason)[:_MESSAGE]


def _evidence(excinfo: "pytest.ExceptionInfo[BaseException]") -> Dict[str, Any]:
    """What kind of failure it was, and where: from the test's own line to the one that raised."""
    frames = []
    for entry in list(excinfo.traceback)[-_FRAMES:]:
        try:
            text = str(entry.statement).strip()
        except Exception:  # generated code has no source to quote
            text = ""
        frames.append({"file": str(entry.path), "line": entry.lineno + 1, "function": entry.name, "text": text[:300]})
    chain: List[str] = []
    error: Optional[BaseException] = excinfo.value
    while error is not None and len(chain) < 5:
        chain.append(type(error).__name__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "exception": type(excinfo.value).__name__,
        "chain": chain,
        "message": str(excinfo.value)[:_MESSAGE],
        "frames": frames,
    }
