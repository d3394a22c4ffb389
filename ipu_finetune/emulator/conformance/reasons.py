# SPDX-License-Identifier: Apache-2.0
"""Why a test failed: a table of rules, each over the evidence of the failure, and none over hopes.

The first rule that fits decides, and its explanation is printed beside the test. A failure that no rule explains is the
emulator's, so a rule is written only for what the evidence shows: the exception, where it was raised, the line of the
test that failed, or what the test reads.
"""

import re
from typing import Dict, List, NamedTuple, Tuple

from .records import TestResult
from .sources import source_of

__all__ = ["GAP", "REASONS", "RULES", "Finding", "Rule", "classify", "classify_file"]

#: The classes of reasons, and what they mean.
REASONS: Dict[str, str] = {
    "custom ops": "needs an operator compiled against PopART or Poplar; there is no Poplar to run it",
    "log or IR": "compares the text of PopART's log, of Poplar's, or of PopART's intermediate representation",
    "network": "downloads something",
    "timing": "measures or depends on speed, or takes longer than the time limit",
    "package": "needs a package that is not installed",
    "library version": "depends on behaviour of another version of PyTorch or pytest than the installed one",
    "device figures": "wants cycle counts, Poplar profiles or PopART's own files, which are those of a real device",
    "checkpoint": "wants the answers of one published checkpoint; those of the local hub are drawn at random",
    "suite": "contradicts the code that it tests, on any device",
    "emulator gap": "the emulator does not do what PopTorch does",
}
GAP = "emulator gap"


class Rule(NamedTuple):
    """A reason, and the evidence that shows it: regular expressions, of which each that is given must be found.

    Attributes:
        reason: one of `REASONS`.
        why: the explanation, for the report.
        exception: in the name of the exception or of one that caused it.
        message: in the exception's message, or in why a file was not collected.
        trace: in the lines `file:function` of the traceback, outermost first.
        line: in the statement of the test file where it failed.
        source: in the source of the test and of the functions and classes of its file that it uses.
        test: in the test's id.
        fixtures: in the names of the fixtures that the test takes.
    """

    reason: str
    why: str
    exception: str = ""
    message: str = ""
    trace: str = ""
    line: str = ""
    source: str = ""
    test: str = ""
    fixtures: str = ""


class Finding(NamedTuple):
    """What was concluded of one failure."""

    reason: str
    why: str


_OFFLINE = (
    r"couldn't connect to|Temporary failure in name resolution|Name or service not known|Could not resolve host|"
    r"Max retries exceeded|Network is unreachable|Connection refused|offline mode|URLError|ConnectionError|"
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled"
)
_WAITING = r"(threading|queues?|connection|popen_fork|popen_spawn_posix|selectors|subprocess|synchronize)\.py:\w+$"

RULES: Tuple[Rule, ...] = (
    Rule("network", "a model, a data set or a page is downloaded", message=_OFFLINE),
    Rule("custom ops", "a compiled PopART operator is loaded", message=r"Failed to find libcustom"),
    Rule("custom ops", "an operator of PopART or Poplar is compiled", message=r"(cppimport|popart/\S+\.hpp)"),
    Rule(
        "package",
        "imports a package that is not installed",
        message=r"No module named '(?!(poptorch|popart|popdist|horovod)\b)\w",
    ),
    Rule("package", "asks for a package that is not installed", message=r"requires the \S+ library but it was not"),
    Rule(
        "library version",
        "imports a name that the installed PyTorch no longer has",
        exception=r"ImportError|^$",
        message=r"cannot import name '\w+' from 'torch",
    ),
    Rule(
        "library version",
        "loads a file by torch.load, which since PyTorch 2.6 reads tensors only unless told otherwise",
        message=r"Weights only load failed",
    ),
    Rule(
        "library version",
        "passes arguments to torch.utils.data.Sampler, which takes none in the installed PyTorch",
        message=r"^object\.__init__\(\) takes exactly one argument",
        source=r"torch\.utils\.data\.Sampler\)",
    ),
    Rule(
        "library version",
        "uses a mask of bytes, which the installed PyTorch refuses",
        message=r"only supports boolean masks, but got mask with dtype unsigned char",
    ),
    Rule(
        "library version",
        "expects pytest's own message of an earlier pytest",
        message=r"Expected regex: 'Regex pattern",
    ),
    Rule(
        "device figures",
        "cycles are counted by IPU hardware; the emulator refuses to make some up",
        message=r"Cycle count logging is only supported on actual IPU hardware",
    ),
    Rule("device figures", "expects a profile that Poplar writes", message=r"profile\.pop"),
    Rule("device figures", "expects a file in PopART's own format", message=r"my_model\.proto"),
    Rule(
        "log or IR",
        "counts how PopART fused operators in its intermediate representation",
        message=r"where \d+ = len\(\[\]\)",
        source=r"helpers\.is_running_tests|scatter_reduce",
    ),
    Rule(
        "device figures",
        "expects the result of PopART's group norm to be wrong; the emulator's is PyTorch's",
        test=r"test_groupNorm_exfail",
    ),
    Rule(
        "checkpoint",
        "wants what one published checkpoint answers; the local hub's are drawn at random",
        exception=r"AssertionError",
        test=r"^tests/(pipelines|generation)/",
        source=r"(hf-internal-testing|sshleifer)/",
    ),
    # Its cases are in another file, and load checkpoints by name too.
    Rule(
        "checkpoint",
        "wants what published checkpoints generate; the local hub's are drawn at random",
        exception=r"AssertionError",
        test=r"::GenerationIntegrationTests::",
    ),
    Rule(
        "checkpoint",
        "wants recorded sound; the local hub's is generated and stored as plain lists",
        message=r"^We expect a numpy ndarray as input, got `<class 'float'>`",
    ),
    Rule(
        "suite",
        "passes a batch size to a model of Optimum Graphcore that takes none",
        message=r"parallelize\(\) got an unexpected keyword argument 'batch_size'",
    ),
    Rule(
        "timing",
        "kills a process at a moment that this machine does not reach in time",
        test=r"test_KeyboardInterrupt_in_async_data_accessor",
    ),
    Rule(
        "library version",
        "compares fp16 with a tolerance of 1e-4, which the installed PyTorch's own fp16 kernel misses by 1e-4",
        test=r"test_nn_Conv1d_reflect_stride2_pad2",
        message=r"Tensor-likes are not close",
    ),
    Rule(
        "log or IR",
        "reads PopART's intermediate representation",
        line=r"_debugGetPopartIR|\bir(_as_json)?\b|\ball_ops\b|\bas_json\b",
        source=r"_debugGetPopartIR",
    ),
    Rule(
        "log or IR",
        "expects lines in the log",
        trace=r"helpers\.py:(assert_(contains|contains_after|not_contains|matches|no_matches|isEmpty)|findNext|findAll)$",
    ),
    Rule(
        "log or IR",
        "searches what was printed or logged",
        exception=r"AssertionError|IndexError|AttributeError|TypeError|StopIteration|ValueError",
        line=r"\b(logs?|log_\w+|std_?out|std_?err|readouterr|captured|findall|capfd|caplog)\b",
        fixtures=r"^(capfd|capsys|caplog)$",
    ),
    Rule(
        "log or IR",
        "searches what was printed or logged",
        exception=r"AssertionError",
        line=r"\b(out|err)\b",
        source=r"\b(out|err)\b[^\n=]*=[^\n]*readouterr",
    ),
    Rule("timing", "measures how long something takes", test=r"^io_performance_test\.py"),
    Rule(
        "timing",
        "compares measured times",
        exception=r"AssertionError",
        line=r"\b(elapsed|duration|time|seconds|latency|perf_counter|\w+_time|time_\w+)\b",
    ),
    Rule(
        GAP,
        "takes what the old constructor torch.LongTensor makes as a constant, where PopTorch refuses it",
        test=r"^misc_test\.py::test_error_on_cpu_tensor$",
    ),
    Rule(
        GAP,
        "returns batch-norm statistics as they are after the batch; PopTorch returns those from before it",
        test=r"^half_test\.py::test_buffers$",
    ),
    Rule(
        GAP,
        "wants an error that `pytest.raises(RuntimeError)` lets through; the emulator's is a RuntimeError",
        test=r"^tensor_ops_test\.py::test_fastgather_3dim$",
    ),
    # Being stuck is no matter of speed.
    Rule(GAP, "waits for something that does not come", exception=r"^TimeLimit$", trace=_WAITING),
    Rule(GAP, "hangs", exception=r"^TimeLimit$", message=r"^hung"),
    Rule("timing", "takes longer than the time limit", exception=r"^TimeLimit$"),
)


def classify(result: TestResult, source: str) -> Finding:
    """Return why a test failed, given the text of its file."""
    evidence = result.evidence
    frames: List[Dict[str, str]] = evidence.get("frames") or []
    own = [frame["text"] for frame in frames if frame["file"].endswith(result.file)]
    return _first(
        {
            "exception": "\n".join(evidence.get("chain") or [str(evidence.get("exception", ""))]),
            "message": str(evidence.get("message", "")),
            "trace": "\n".join(f"{frame['file'].rsplit('/', 1)[-1]}:{frame['function']}" for frame in frames),
            "line": own[-1] if own else "",
            "source": source_of(source, result.id),
            "test": result.id,
            "fixtures": "\n".join(evidence.get("fixtures") or []),
        }
    )


def classify_file(message: str) -> Finding:
    """Return why a file could not be collected."""
    return _first({**dict.fromkeys(Rule._fields[2:], ""), "message": message})


def _first(evidence: Dict[str, str]) -> Finding:
    for rule in RULES:
        wanted = {field: getattr(rule, field) for field in evidence if getattr(rule, field)}
        if all(re.search(pattern, evidence[field], re.MULTILINE) for field, pattern in wanted.items()):
            return Finding(rule.reason, rule.why)
    return Finding(GAP, "no rule explains it")
