# SPDX-License-Identifier: Apache-2.0
"""Running a suite file by file, each in a process of its own, so that a crash or a hang costs one test."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from . import records
from .suites import Suite

__all__ = ["Job", "environment_of_child", "run_files"]

#: The folder that has our package.
_ROOT = Path(__file__).resolve().parents[3]
_PLUGINS = ("ipu_finetune.emulator.pytest_plugin", "ipu_finetune.emulator.conformance.recorder")
#: Collecting a file imports torch and builds up to some hundred parametrisations.
_COLLECTION_LIMIT = 300.0
#: How long after its limit a test may take to notice; native code and stuck workers never do.
_GRACE = 15.0
_POLL = 0.2
_OUTPUT = 4000

_Event = Dict[str, Any]


class Job(NamedTuple):
    """How to run files.

    Attributes:
        suite: which suite.
        tests: its tests folder.
        out: the results file to append to.
        limit: seconds per test.
        hardware: whether to claim IPU hardware.
        plugins: further pytest plugins.
        environment: further environment variables.
        tell: is given one line for each file that is finished.
    """

    suite: Suite
    tests: Path
    out: Path
    limit: float
    hardware: bool
    plugins: Tuple[str, ...]
    environment: Dict[str, str]
    tell: Callable[[str], None]


def run_files(job: Job, files: List[str], done: Dict[str, Set[str]], jobs: int) -> None:
    """Run test files, `jobs` of them at once, leaving out tests that are done."""
    lock = Lock()

    def append(events: List[_Event]) -> None:
        with lock:
            records.append(job.out, events)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for _ in pool.map(lambda file: _File(job, file, done.get(file, set()), append).run(), files):
            pass


def environment_of_child() -> Dict[str, str]:
    """Return the environment for a Python process that finds this very package, and leaves cores to others."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class _File:
    """One test file, run in as many processes as it takes: one more after each that dies."""

    def __init__(self, job: Job, name: str, done: Set[str], append: Callable[[List[_Event]], None]) -> None:
        self._job = job
        self._name = name
        self._done = set(done)
        self._append = append
        self._ids: Set[str] = set()
        self._counts: Dict[str, int] = {}

    def run(self) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
            for attempt in itertools.count():
                had = len(self._done)
                process = _Process(self._job, self._name, self._done, Path(scratch) / str(attempt))
                died_in = process.follow(self._take)
                if died_in is not None:
                    self._take([died_in])
                # Where a process came no further, another would not either.
                if self._ids <= self._done or len(self._done) == had:
                    break
        seconds = round(time.monotonic() - started, 1)
        self._append([{"event": "file-done", "file": self._name, "seconds": seconds}])
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))
        self._job.tell(f"{self._name}: {counts or 'nothing was run'} ({seconds:g} s)")

    def _take(self, events: List[_Event]) -> None:
        for event in events:
            event["file"] = self._name
            if event["event"] == "outcome":
                self._done.add(event["id"])
                self._counts[event["outcome"]] = self._counts.get(event["outcome"], 0) + 1
            elif event["event"] == "collected":
                self._ids.update(event["ids"])
        self._append([event for event in events if event["event"] != "start"])


class _Process:
    """One pytest process over the rest of one file."""

    def __init__(self, job: Job, file: str, done: Set[str], scratch: Path) -> None:
        scratch.mkdir()
        self._limit = job.limit
        self._record = scratch / "record.jsonl"
        self._record.touch()
        self._output = scratch / "output.txt"
        finished = scratch / "done.txt"
        finished.write_text("\n".join(sorted(done)), encoding="utf-8")
        folder = job.suite.folder(job.tests)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
        command += [word for plugin in (*_PLUGINS, *job.suite.plugins, *job.plugins) for word in ("-p", plugin)]
        command += [f"--conformance-record={self._record}", f"--conformance-done={finished}"]
        command += [f"--conformance-limit={job.limit}", *job.suite.arguments, str(job.tests / file)]
        environment = {**environment_of_child(), **job.suite.variables(), **job.environment}
        environment["IPU_FINETUNE_EMULATED_HARDWARE"] = "2" if job.hardware else "0"
        # A virtual pod of its own, so that files run side by side take no IPUs from each other.
        environment["XDG_STATE_HOME"] = str(scratch / "state")
        with self._output.open("wb") as output:
            # A session of its own, so that workers that a test leaves behind end with it.
            self._child = subprocess.Popen(
                command,
                cwd=str(folder),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def follow(self, take: Callable[[List[_Event]], None]) -> Optional[_Event]:
        """Pass on events until the process ends; return an outcome for the test in which it died, if it did."""
        running: Optional[_Event] = None
        collected = False
        since = time.monotonic()
        hung = False
        read = 0
        while True:
            ended = self._child.poll() is not None
            data = self._record.read_bytes()[read:]
            data = data[: data.rfind(b"\n") + 1]
            read += len(data)
            events = [json.loads(line) for line in data.decode("utf-8").splitlines()]
            for event in events:
                collected = collected or event["event"] in ("collected", "not-collected", "module-skipped")
                if event["event"] == "start":
                    running = event
                elif event["event"] == "outcome":
                    running = None
            if events:
                take(events)
                since = time.monotonic()
            if ended:
                break
            # Setup and call share one limit, and the teardown has another.
            limit = 2 * self._limit + _GRACE if collected else _COLLECTION_LIMIT
            if time.monotonic() - since > limit:
                hung = True
                self._kill()
            time.sleep(_POLL)
        self._kill()
        return self._verdict(running, collected, hung)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all of it has ended
            os.killpg(self._child.pid, signal.SIGKILL)

    def _verdict(self, running: Optional[_Event], collected: bool, hung: bool) -> Optional[_Event]:
        output = self._output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT:]
        if hung:
            kind, what = "TimeLimit", f"hung: neither ended nor noticed its limit of {self._limit:g} s, and was killed"
        else:
            kind, what = "ProcessDied", f"the process died ({_how(self._child.returncode)})"
        message = f"{what}\n{output}"
        if running is not None:
            outcome = {"event": "outcome", "id": running["id"], "outcome": "failed", "seconds": self._limit}
            return {**outcome, "exception": kind, "chain": [kind], "message": message, "frames": [], "fixtures": []}
        if not collected:
            return {"event": "not-collected", "id": "", "message": message}
        return None


def _how(code: Optional[int]) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
