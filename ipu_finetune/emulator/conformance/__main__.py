# SPDX-License-Identifier: Apache-2.0
"""`python -m ipu_finetune.emulator.conformance`: run a suite of someone else's tests on the emulator and report."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

from ... import __version__
from ...errors import IpuFinetuneError, UsageError
from . import records, report, runner
from .suites import SUITES, Suite, find_files, suite

__all__ = ["main"]

_PROG = "python -m ipu_finetune.emulator.conformance"
#: What a suite's outcome may depend on.
_PACKAGES = ("torch", "numpy", "pytest", "transformers", "optimum", "optimum-graphcore", "torchvision", "expecttest")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--tests", type=Path, metavar="DIR", help="the tests folder of a checkout of the suite's project"
    )
    parser.add_argument("--suite", default="poptorch", metavar="|".join(SUITES), help="which suite (%(default)s)")
    parser.add_argument("--files", nargs="+", metavar="PATTERN", help="only these test files, relative to DIR")
    parser.add_argument("--hub", type=Path, metavar="DIR", help="local hub of tiny models; built there if DIR is empty")
    parser.add_argument("--hardware", action="store_true", help="claim IPU hardware, so that tests marked for it run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="files to run at once (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="per test (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every outcome there, one JSON object a line")
    parser.add_argument("--resume", action="store_true", help="run only what has no outcome in the --json file")
    parser.add_argument("--report-only", action="store_true", help="run nothing; report on the --json file")
    parser.add_argument("--also", type=Path, nargs="+", default=[], metavar="FILE", help="--json of runs to add to it")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the Markdown report there, else print its totals"
    )
    return parser


def _checked(arguments: argparse.Namespace) -> None:
    if arguments.tests is None:
        raise UsageError("--tests DIR is missing: the tests folder of a checkout of the suite's project")
    if not arguments.report_only and importlib.util.find_spec("pytest") is None:
        raise UsageError("pytest is not installed, and the suites run under it: pip install pytest")
    if arguments.jobs < 1:
        raise UsageError(f"--jobs {arguments.jobs}: at least 1 file must be run at a time")
    if arguments.time_limit <= 0:
        raise UsageError(f"--time-limit {arguments.time_limit:g}: a test needs some seconds, e.g. 60")
    if (arguments.resume or arguments.report_only) and (arguments.json is None or not arguments.json.is_file()):
        raise UsageError(
            f"{'--resume' if arguments.resume else '--report-only'} needs the --json FILE of an earlier run"
        )


def _run_event(arguments: argparse.Namespace) -> Dict[str, Any]:
    versions: Dict[str, Optional[str]] = {"python": platform.python_version(), "ipu-finetune": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "event": "run",
        "suite": arguments.suite,
        "hardware": arguments.hardware,
        "time_limit": arguments.time_limit,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def _run(arguments: argparse.Namespace, out: Path) -> None:
    chosen = suite(arguments.suite)
    tests = arguments.tests.resolve()
    files = find_files(chosen, tests, arguments.files)
    done: Dict[str, Set[str]] = {}
    if arguments.resume:
        records.mend(out)
        before = records.read(out)
        if (before.run["suite"], before.run["hardware"]) != (arguments.suite, arguments.hardware):
            raise UsageError(f"--resume: {out} is of another suite or of the other choice of --hardware")
        files = [each for each in files if each not in before.files or not before.files[each].done]
        done = {name: set(each.tests) for name, each in before.files.items()}
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("", encoding="utf-8")
        records.append(out, [_run_event(arguments)])
    plugins, environment = _with_hub(chosen, arguments.hub)
    job = runner.Job(chosen, tests, out, arguments.time_limit, arguments.hardware, plugins, environment, _tell)
    runner.run_files(job, files, done, arguments.jobs)


def _with_hub(chosen: Suite, folder: Optional[Path]) -> Tuple[Tuple[str, ...], Dict[str, str]]:
    """Return the plugins and the environment with which a suite uses a local hub, built where it is missing."""
    if folder is None:
        return (), {}
    if chosen.hub is None:
        raise UsageError(f"--hub {folder}: the tests of {chosen.title} use no models from a hub; leave it out")
    folder = folder.resolve()
    if not folder.is_dir() or not any(folder.iterdir()):
        command = [sys.executable, "-m", chosen.hub, str(folder)]
        built = subprocess.run(command, check=False, env=runner.environment_of_child())
        if built.returncode:
            raise IpuFinetuneError(f"{' '.join(command)} ended with exit code {built.returncode}; its message is above")
    return chosen.hub_plugins, {"HF_HOME": str(folder)}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line and return its exit code: 0 whatever the tests came to, as the table is the result."""
    arguments = _parser().parse_args(argv)
    try:
        _checked(arguments)
        arguments.hardware = arguments.hardware or suite(arguments.suite).hardware
        with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
            out = arguments.json or Path(scratch) / "results.jsonl"
            if not arguments.report_only:
                _run(arguments, out)
            sections = [
                report.Section.of(results, suite(results.run["suite"]), arguments.tests)
                for results in map(records.read, [out, *arguments.also])
            ]
        text = report.markdown(sections)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(text, encoding="utf-8")
        for section in sections:
            print(report.totals(section))
    except IpuFinetuneError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
