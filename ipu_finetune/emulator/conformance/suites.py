# SPDX-License-Identifier: Apache-2.0
"""The test suites that the conformance tool can run, as data."""

import os
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

from ...errors import UsageError, did_you_mean

__all__ = ["SUITES", "Suite", "find_files", "suite"]


class Suite(NamedTuple):
    """A suite of someone else's tests, obtained outside this repository.

    Attributes:
        name: what `--suite` calls it.
        title: how the report calls it.
        source: the public repository and tag.
        patterns: the files that count, relative to the tests folder; `--files` replaces them.
        left_out: files of the patterns that are not run unless `--files` names them, and why.
        marker: a file that the tests folder has, by which a wrong folder is noticed.
        start: where pytest is started, relative to the tests folder.
        arguments: what pytest is given besides the plugins.
        plugins: pytest plugins that the suite needs.
        adapted: what `plugins` and `environment` give back that PyTorch has dropped since the suite was written.
        environment: variables that the suite needs.
        hub: the module that builds a local hub of models, as `python -m MODULE DIR`, if the suite can use one.
        hub_plugins: pytest plugins to load beside it.
        hardware: whether hardware is always claimed, as the suite has few tests that run without.
        wanted: the number of items that should pass: without hardware, and with.
        note: what a reader of the report should know about its scope.
    """

    name: str
    title: str
    source: str
    patterns: Tuple[str, ...]
    marker: str
    left_out: Tuple[Tuple[str, str], ...] = ()
    start: str = "."
    arguments: Tuple[str, ...] = ()
    plugins: Tuple[str, ...] = ()
    adapted: Tuple[str, ...] = ()
    environment: Tuple[Tuple[str, str], ...] = ()
    hub: Optional[str] = None
    hub_plugins: Tuple[str, ...] = ()
    hardware: bool = False
    wanted: Tuple[Optional[int], Optional[int]] = (None, None)
    note: str = ""

    def folder(self, tests: Path) -> Path:
        """Return where pytest is started."""
        return (tests / self.start).resolve()

    def variables(self) -> Dict[str, str]:
        """Return the suite's environment variables."""
        return dict(self.environment)


SUITES: Dict[str, Suite] = {
    each.name: each
    for each in (
        Suite(
            name="poptorch",
            title="PopTorch",
            source="graphcore/poptorch, tag sdk/poptorch/3.4.0",
            patterns=("*_test.py", "test_*.py"),
            marker="helpers.py",
            plugins=(f"{__package__}.older_torch",),
            adapted=(
                "torch.utils.data.Sampler takes the argument data_source, as in PyTorch 2.0, and ignores it",
                "torch.load reads whole models, as in PyTorch 2.0",
            ),
            environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
            wanted=(2450, 2560),
            note="The folder `gnn` (PyTorch Geometric) and the C++ tests are not part of the count. The number wanted "
            "was set without `torch_nn_test.py`, which is collected where the package expecttest is installed, and "
            "without `half_test.py` and `fine_tuning_test.py`, which need torchvision.",
        ),
        Suite(
            name="optimum-graphcore",
            title="Optimum Graphcore",
            source="huggingface/optimum-graphcore, tag v0.7.1",
            patterns=("test_*.py", "generation/test_*.py", "pipelines/test_*.py"),
            marker="ipu_config_trainer_test.json",
            # The tests open files by paths that start at the repository's root.
            start="..",
            left_out=(
                ("test_examples.py", "trains full-size models on downloaded data sets"),
                ("test_examples_match_transformers.py", "clones a git repository"),
            ),
            environment=(
                ("HF_HUB_OFFLINE", "1"),
                ("TRANSFORMERS_OFFLINE", "1"),
                ("HF_DATASETS_OFFLINE", "1"),
                ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),
            ),
            adapted=("torch.load reads what the trainer resumes from, as in PyTorch 2.0",),
            hub=f"{__package__}.tiny_hub",
            hub_plugins=(f"{__package__}.tiny_hub.web",),
            hardware=True,
            wanted=(None, 230),
            note="Checkpoints come from the local hub of tiny random models; without it, few files can be collected.",
        ),
    )
}


def suite(name: str) -> Suite:
    """Return a suite by name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in SUITES:
        raise UsageError(f"no suite '{name}'{did_you_mean(name, SUITES)}")
    return SUITES[name]


def find_files(chosen: Suite, tests: Path, patterns: Optional[List[str]] = None) -> List[str]:
    """Return the suite's test files, relative to the tests folder and sorted.

    Raises:
        UsageError: the folder is not that of the suite's tests, or no file fits a pattern.
    """
    if not (tests / chosen.marker).is_file():
        raise UsageError(
            f"--tests {tests}: no {chosen.marker} in it, so it is not the tests folder of {chosen.source}; "
            "give the folder 'tests' of a checkout"
        )
    found: Set[str] = set()
    for pattern in patterns or chosen.patterns:
        matches = [path for path in tests.glob(pattern) if path.is_file() and path.suffix == ".py"]
        if not matches and patterns:
            raise UsageError(f"--files {pattern}: no such test file in {tests}")
        found.update(os.path.relpath(str(path), str(tests)) for path in matches)
    left_out = set() if patterns else {name for name, _ in chosen.left_out}
    return sorted(found - left_out)
