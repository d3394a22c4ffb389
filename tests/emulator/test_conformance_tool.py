# SPDX-License-Identifier: Apache-2.0
"""The conformance tool counts what happened, loses nothing to a crash or a hang, and blames no one without evidence."""

import json
import textwrap

import pytest

from ipu_finetune.emulator.conformance import __main__ as tool
from ipu_finetune.emulator.conformance import reasons, records, report, runner, sources
from ipu_finetune.emulator.conformance.suites import SUITES

FILES = {
    # By this file the tool knows the tests folder of the suite.
    "helpers.py": """
        class LogChecker:
            def __init__(self, capfd):
                self._log = "".join(capfd.readouterr())
            def assert_contains(self, text):
                assert text in self._log
        """,
    "conftest.py": """
        import gc, pytest

        @pytest.fixture(autouse=True)
        def collects():
            gc.collect()
        """,
    "plain_test.py": """
        import gc, os, pytest
        from helpers import LogChecker

        def test_no_hardware(): assert os.environ["IPU_FINETUNE_EMULATED_HARDWARE"] == "0"
        def test_own_pod(): assert "conformance-" in os.environ["XDG_STATE_HOME"]
        @pytest.mark.parametrize("n", [1, 2])
        def test_pass(n): pass
        def test_fail(): assert 1 == 2, "one is not two"
        def test_skip(): pytest.skip("no reason | at all")
        @pytest.mark.xfail
        def test_expected(): assert False
        def test_log(capfd):
            LogChecker(capfd).assert_contains("From PopART")
        def test_other_mistake_with_the_same_helper(capfd):
            LogChecker(capfd)
            {}["key"]
        def test_collections_pass_by_what_was_imported():
            assert gc.get_freeze_count() > 10000
        @pytest.fixture
        def broken():
            yield
            raise ValueError("in teardown")
        def test_fixture(broken): pass
        """,
    "stuck_test.py": """
        import queue, signal, time
        def test_before(): pass
        def test_slow():
            try:
                time.sleep(60)
            except Exception:
                pass
        def test_waits(): queue.Queue().get()
        def test_between(): pass
        def test_deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(60)
        def test_after(): pass
        """,
    "dies_test.py": """
        import os, pytest
        def test_before(): pass
        def test_dies(): os.abort()
        def test_interrupts(): raise KeyboardInterrupt
        @pytest.fixture
        def leaves():
            yield
            os._exit(0)
        def test_leaves(leaves): pass
        def test_after(): pass
        """,
    "test_import.py": "import no_such_package\n",
    "test_skipped.py": "import pytest\npytest.skip('not today', allow_module_level=True)\n",
}


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    """A folder of tests that end in every way there is."""
    folder = tmp_path_factory.mktemp("checkout") / "tests"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def without_torch(patch):
    """Have the tool's processes start, and notice a hang, in a fraction of a second."""
    patch.setattr(runner, "_PLUGINS", runner._PLUGINS[1:])
    patch.setattr(runner, "_GRACE", 0.5)
    patch.setitem(SUITES, "poptorch", SUITES["poptorch"]._replace(plugins=()))


@pytest.fixture(scope="module")
def ran(tests, tmp_path_factory):
    """The results file and the report of a run, two files at a time and a second per test, without the emulator."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        without_torch(patch)
        words = ["--tests", str(tests), "--jobs", "2", "--time-limit", "1"]
        assert tool.main([*words, "--json", str(out / "all.jsonl"), "--out", str(out / "docs" / "report.md")]) == 0
    return out / "all.jsonl", (out / "docs" / "report.md").read_text(encoding="utf-8")


def outcomes(path, file):
    return {test.id.split("::")[1]: test.outcome for test in records.read(path).files[file].tests.values()}


def test_every_outcome_is_recorded(ran):
    assert outcomes(ran[0], "plain_test.py") == {
        "test_no_hardware": "passed",
        "test_own_pod": "passed",
        "test_pass[1]": "passed",
        "test_pass[2]": "passed",
        "test_fail": "failed",
        "test_skip": "skipped",
        "test_expected": "xfailed",
        "test_log": "failed",
        "test_other_mistake_with_the_same_helper": "failed",
        "test_collections_pass_by_what_was_imported": "passed",
        "test_fixture": "failed",
    }
    tests = records.read(ran[0]).files["plain_test.py"].tests
    failed = tests["plain_test.py::test_fail"]
    assert failed.evidence["exception"] == "AssertionError"
    assert failed.evidence["message"].startswith("one is not two")
    assert failed.evidence["frames"][-1]["text"].startswith("def test_fail(): assert 1 == 2")
    assert tests["plain_test.py::test_fixture"].evidence["phase"] == "teardown"


def test_a_test_that_hangs_fails_and_the_rest_is_run(ran):
    found = outcomes(ran[0], "stuck_test.py")
    assert list(found.values()) == ["passed", "failed", "failed", "passed", "failed", "passed"]
    tests = records.read(ran[0]).files["stuck_test.py"].tests.values()
    assert {test.evidence["exception"] for test in tests if test.outcome == "failed"} == {"TimeLimit"}
    assert all(test.seconds < 3 for test in tests)


def test_a_process_that_dies_costs_one_test(ran):
    assert outcomes(ran[0], "dies_test.py") == {
        "test_before": "passed",
        "test_dies": "failed",
        "test_interrupts": "failed",
        "test_leaves": "failed",
        "test_after": "passed",
    }
    tests = records.read(ran[0]).files["dies_test.py"].tests
    assert "SIGABRT" in tests["dies_test.py::test_dies"].evidence["message"]
    assert "exit code 0" in tests["dies_test.py::test_leaves"].evidence["message"]


def test_a_file_that_cannot_be_collected_is_not_lost(ran):
    files = records.read(ran[0]).files
    assert "No module named 'no_such_package'" in files["test_import.py"].not_collected
    assert "not today" in files["test_skipped.py"].skipped_module
    assert all(file.done for file in files.values())


def test_the_report_adds_up(ran):
    # 11 + 6 + 5 tests; an expected failure counts as passed.
    line = "22 items: 11 passed, 10 failed, 1 skipped; 1 of 5 files not collected"
    assert line in ran[1]
    rows = {row.split(" | ")[0].strip("| "): row for row in ran[1].splitlines() if row.startswith("| ")}
    assert rows["plain_test.py"] == "| plain_test.py | 11 | 6 | 4 | 1 | 0 |  | emulator gap 3, log or IR 1 |"
    assert "| 0 | 0 | 0 | 0 | 0 | yes | not collected: package, imports a package" in rows["test_import.py"]
    assert rows["**total**"] == "| **total** | **22** | **11** | **10** | **1** | **0** | **1** |  |"
    assert "Claiming no hardware" in ran[1]
    assert "- 1: no reason \\| at all" in ran[1]
    failed = {test.id.split("::")[1] for file in records.read(ran[0]).files.values() for test in file.tests.values()
              if test.outcome == "failed"}  # fmt: skip
    assert all(f"- `{name}`" in ran[1] for name in failed)


def test_reasons_follow_the_evidence_and_not_the_file(ran, tests):
    section = report.Section.of(records.read(ran[0]), SUITES["poptorch"], tests)
    found = {test.id.split("::")[1]: finding.reason for test, finding in section.failures}
    assert found == {
        "test_fail": "emulator gap",
        "test_log": "log or IR",
        "test_other_mistake_with_the_same_helper": "emulator gap",
        "test_fixture": "emulator gap",
        "test_slow": "timing",
        "test_waits": "emulator gap",
        "test_deaf": "emulator gap",
        "test_dies": "emulator gap",
        "test_interrupts": "emulator gap",
        "test_leaves": "emulator gap",
    }


def test_resuming_runs_what_is_missing_and_keeps_the_rest(ran, tests, tmp_path, monkeypatch, capsys):
    lines = ran[0].read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    kept = [
        line
        for line, event in zip(lines, events)
        if event.get("file") != "dies_test.py" or event.get("id", "").endswith(("test_before", "test_dies"))
    ]
    path = tmp_path / "part.jsonl"
    path.write_text("\n".join(kept) + '\n{"event": "outc', encoding="utf-8")  # killed in the middle of a line
    without_torch(monkeypatch)
    words = ["--tests", str(tests), "--time-limit", "1", "--json", str(path), "--resume"]
    assert tool.main(words) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0].startswith("dies_test.py: 2 failed, 1 passed")
    assert len(shown.err.splitlines()) == 1
    assert shown.out.startswith("22 items: 11 passed, 10 failed, 1 skipped;")


def test_the_suite_runs_on_the_emulator_and_claims_hardware_where_asked(tmp_path, capsys):
    (tmp_path / "helpers.py").write_text("", encoding="utf-8")
    text = """
        import poptorch, torch
        def test_hardware(): assert poptorch.ipuHardwareVersion() == 2
        def test_sampler_of_torch_2_0(): torch.utils.data.Sampler([1])
        """
    (tmp_path / "a_test.py").write_text(textwrap.dedent(text), encoding="utf-8")
    assert tool.main(["--tests", str(tmp_path), "--files", "a_*.py", "--hardware"]) == 0
    assert capsys.readouterr().out == "2 items: 2 passed, 0 failed, 0 skipped\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--tests DIR is missing"),
        (["--tests", "."], "no helpers.py in it"),
        (["--tests", ".", "--suite", "poptorhc"], "no suite 'poptorhc' (did you mean 'poptorch'?)"),
        (["--tests", ".", "--jobs", "0"], "--jobs 0: at least 1"),
        (["--tests", ".", "--time-limit", "0"], "--time-limit 0: a test needs some seconds"),
        (["--tests", ".", "--resume"], "--resume needs the --json FILE"),
    ],
)
def test_wrong_usage_is_told(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(words) == 2
    assert message in capsys.readouterr().err


def failure(message="", exception="AssertionError", frames=(), fixtures=(), name="some_test.py::test_it"):
    evidence = {
        "exception": exception,
        "chain": [exception],
        "message": message,
        "frames": [{"file": file, "function": function, "line": 1, "text": text} for file, function, text in frames],
        "fixtures": list(fixtures),
    }
    return records.TestResult("some_test.py", name, "failed", 1.0, evidence)


READS_IR = (
    "def test_it():\n    ir = json.loads(model._debugGetPopartIR())\n    assert ir['maingraph']\n    assert x == 1\n"
)
CAPTURES = "def test_it(capfd):\n    out, err = capfd.readouterr()\n    assert 'x' in out\n    assert loss < 1\n"


@pytest.mark.parametrize(
    ("failed", "source", "reason"),
    [
        (failure("We couldn't connect to 'https://huggingface.co'", "OSError"), "", "network"),
        (failure("No module named 'torchvision'", "ModuleNotFoundError"), "", "package"),
        (failure("No module named 'poptorch_geometric'", "ModuleNotFoundError"), "", "package"),
        (failure("No module named 'poptorch.experimental'", "ModuleNotFoundError"), "", "emulator gap"),
        (failure("No module named 'popdist'", "ModuleNotFoundError"), "", "emulator gap"),
        (failure(frames=[("t/some_test.py", "test_it", "assert ir['maingraph']")]), READS_IR, "log or IR"),
        (failure(frames=[("t/some_test.py", "test_it", "assert x == 1")]), READS_IR, "emulator gap"),
        (failure(frames=[("t/helpers.py", "assert_matches", "raise ValueError(")]), "", "log or IR"),
        (failure(frames=[("t/helpers.py", "assert_allclose", "assert_close(")]), "", "emulator gap"),
        (
            failure(frames=[("t/some_test.py", "test_it", "assert 'x' in out")], fixtures=["capfd"]),
            CAPTURES,
            "log or IR",
        ),
        (
            failure(frames=[("t/some_test.py", "test_it", "assert loss < 1")], fixtures=["capfd"]),
            CAPTURES,
            "emulator gap",
        ),
        (failure("Weights only load failed", "UnpicklingError"), "", "library version"),
        (failure("module 'poptorch' has no attribute 'CPU'", "AttributeError"), "", "emulator gap"),
        (failure(exception="TimeLimit", frames=[("t/threading.py", "wait", "waiter.acquire()")]), "", "emulator gap"),
        (failure(exception="TimeLimit", frames=[("t/some_test.py", "test_it", "f(x)")]), "", "timing"),
    ],
)
def test_a_reason_needs_its_evidence(failed, source, reason):
    assert reasons.classify(failed, source).reason == reason


def test_every_rule_names_a_reason_and_says_why():
    assert {rule.reason for rule in reasons.RULES} == set(reasons.REASONS)
    for rule in reasons.RULES:
        assert rule.why
        assert any(rule[2:]), rule


def test_the_source_of_a_test_has_what_it_uses():
    text = textwrap.dedent(
        """
        def unused(): pass
        def deep(): return 1
        def helper(): return deep()
        @mark
        def test_it(x):
            return helper()
        """
    )
    found = sources.source_of(text, "f.py::test_it[1-::]")
    assert "@mark" in found
    assert "def deep" in found
    assert "unused" not in found


def test_folders_of_the_machine_stay_out_of_the_report():
    assert report._plain("in /home/me/x/tests/a_test.py and <b|c>") == "in a_test.py and &lt;b\\|c>"
    assert report._plain("see https://example.org/a/b.html or a/b") == "see https://example.org/a/b.html or a/b"
