# SPDX-License-Identifier: Apache-2.0
"""The Markdown report of a run: totals, reasons, one row per file, and every test that failed."""

import re
from collections import Counter
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from .reasons import GAP, REASONS, Finding, classify, classify_file
from .records import FileResult, Results, TestResult
from .suites import Suite

__all__ = ["Section", "markdown", "totals"]


class Section(NamedTuple):
    """One run, counted.

    Attributes:
        results: what was recorded.
        suite: of which suite.
        failures: each failed test and why it failed.
        broken: each file that could not be collected and why.
    """

    results: Results
    suite: Suite
    failures: List[Tuple[TestResult, Finding]]
    broken: List[Tuple[FileResult, Finding]]

    @classmethod
    def of(cls, results: Results, suite: Suite, tests: Optional[Path]) -> "Section":
        """Class the failures of a run; without the tests folder, by what was recorded alone."""
        failures = []
        broken = []
        for file in results.files.values():
            path = None if tests is None else tests / file.name
            source = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
            failures += [(test, classify(test, source)) for test in file.tests.values() if test.outcome == "failed"]
            if file.not_collected is not None:
                broken.append((file, classify_file(file.not_collected)))
        return cls(results, suite, failures, broken)

    def counts(self) -> "Counter[str]":
        """Return the number of tests by outcome, and of those that were never run."""
        return sum((_counts(file) for file in self.results.files.values()), Counter())


def _counts(file: FileResult) -> "Counter[str]":
    found = Counter(_OUTCOMES.get(test.outcome, test.outcome) for test in file.tests.values())
    found["not run"] = len(set(file.ids) - set(file.tests))
    found["items"] = len(set(file.ids) | set(file.tests))
    return found


# A test that its authors expect to fail says the same of both implementations whether it does or not.
_OUTCOMES = {"xfailed": "passed", "xpassed": "passed"}


def totals(section: Section) -> str:
    """Return the result in one line."""
    counts = section.counts()
    text = f"{counts['items']} items: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    if counts["not run"]:
        text += f", {counts['not run']} not run"
    if section.broken:
        text += f"; {len(section.broken)} of {len(section.results.files)} files not collected"
    reasons = Counter(finding.reason for _, finding in section.failures)
    if reasons:
        text += " (failed: " + ", ".join(f"{name} {reasons[name]}" for name in REASONS if reasons[name]) + ")"
    return text


def markdown(sections: List[Section]) -> str:
    """Return the report of one or more runs of a suite."""
    suite = sections[0].suite
    lines = [
        f"# {suite.title}'s own tests on the emulator",
        "",
        f"The tests are those of {suite.source}. They are not part of this repository and run unedited. {suite.note}",
        "",
        *(f"Adapted to the installed PyTorch: {what}.\n" for what in suite.adapted),
        *(f"Left out: {name}, which {why}.\n" for name, why in suite.left_out),
        "This file is written by `python -m ipu_finetune.emulator.conformance`. The rules in",
        "`ipu_finetune/emulator/conformance/reasons.py` class each failure by its evidence; what none of them explains",
        "counts as the emulator's.",
    ]
    for section in sections:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> List[str]:
    run = section.results.run
    claimed = bool(run["hardware"])
    heading = "Claiming IPU hardware" if claimed else "Claiming no hardware"
    wanted = section.suite.wanted[int(claimed)]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    absent = [name for name, version in run["versions"].items() if not version]
    lines = [
        f"## {heading}",
        "",
        f"**{totals(section)}.**" + (f" At least {wanted} are wanted." if wanted else ""),
        "",
        f"{run['date']}; time limit {run['time_limit']:g} s per test; {versions}"
        + (f"; not installed: {', '.join(absent)}." if absent else "."),
        "",
        *_reasons(section),
        "",
        *_files(section),
        "",
        *_skips(section),
        "",
        *_failures(section),
    ]
    return lines


def _reasons(section: Section) -> List[str]:
    tests = Counter(finding.reason for _, finding in section.failures)
    files = Counter(finding.reason for _, finding in section.broken)
    rows = [
        [reason, meaning, str(tests[reason]), str(files[reason])]
        for reason, meaning in REASONS.items()
        if tests[reason] or files[reason] or reason == GAP
    ]
    return _table(["reason", "what it means", "tests failed", "files not collected"], rows, numbers=2)


def _files(section: Section) -> List[str]:
    reasons: Dict[str, Counter[str]] = {}
    for test, finding in section.failures:
        reasons.setdefault(test.file, Counter())[finding.reason] += 1
    broken = {file.name: finding for file, finding in section.broken}
    rows = []
    for name, file in sorted(section.results.files.items()):
        counts = _counts(file)
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.get(name, Counter()).most_common())
        if name in broken:
            why = f"not collected: {broken[name].reason}, {broken[name].why}"
        elif file.skipped_module is not None and not counts["items"]:
            why = "skips itself"
        columns = [str(counts[each]) for each in ("items", "passed", "failed", "skipped", "not run")]
        rows.append([name, *columns, "yes" if name in broken else "", why])
    counts = section.counts()
    sums = [f"**{counts[each]}**" for each in ("items", "passed", "failed", "skipped", "not run")]
    rows.append(["**total**", *sums, f"**{len(broken)}**", ""])
    head = ["file", "items", "passed", "failed", "skipped", "not run", "not collected", "reasons"]
    return _table(head, rows)


def _skips(section: Section) -> List[str]:
    reasons = Counter(
        test.evidence.get("message", "").replace("Skipped: ", "", 1).splitlines()[0][:120]
        for file in section.results.files.values()
        for test in file.tests.values()
        if test.outcome == "skipped" and test.evidence.get("message")
    )
    lines = [f"- {count}: {_plain(reason)}" for reason, count in reasons.most_common()]
    return ["### Skipped by the suite itself", "", *(lines or ["None."])]


def _failures(section: Section) -> List[str]:
    lines = ["### Every test that failed"]
    for reason in REASONS:
        groups: Dict[Tuple[str, str], List[TestResult]] = {}
        for test, finding in section.failures:
            if finding.reason == reason:
                groups.setdefault((test.file, finding.why), []).append(test)
        if not groups:
            continue
        lines += ["", f"#### {reason} ({sum(map(len, groups.values()))})"]
        for (file, why), tests in sorted(groups.items()):
            lines += ["", f"{file}: {why}", "", *_by_function(tests, with_message=reason == GAP)]
    return lines if section.failures else [*lines, "", "None."]


def _by_function(tests: List[TestResult], with_message: bool) -> List[str]:
    """Return a line per test function and message, with the parametrisations that failed so."""
    groups: Dict[Tuple[str, str], List[str]] = {}
    for test in tests:
        name, bracket, parameters = test.id.split("::", 1)[-1].partition("[")
        groups.setdefault((name, _what(test) if with_message else ""), []).append(bracket + parameters)
    lines = []
    for (name, what), parametrisations in groups.items():
        each = " ".join(f"`{text}`" for text in parametrisations if text)
        count = f" ({len(parametrisations)})" if len(parametrisations) > 1 else ""
        lines.append(f"- `{name}`{count}{what}{' ' if each else ''}{each}")
    return lines


def _what(test: TestResult) -> str:
    return f": {test.evidence.get('exception')}: {_plain(str(test.evidence.get('message', '')))[:200]}"


def _plain(text: str) -> str:
    """Keep Markdown, and the folders of the machine that ran it, out of a quoted text."""
    text = re.sub(r"(?<![\w.:/])(?:/[\w.@+-]+)+/(?=[\w.@+-])", "", text)
    return " ".join(text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;").split())


def _table(head: List[str], rows: List[List[str]], numbers: int = 0) -> List[str]:
    rule = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    return ["| " + " | ".join(cells) + " |" for cells in [head, rule, *rows]]
