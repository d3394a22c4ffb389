# SPDX-License-Identifier: Apache-2.0
"""A foreign test suite runs under `-p ipu_finetune.emulator.pytest_plugin` without a line of its own for that."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def suite(tmp_path):
    """A folder with a conftest that needs poptorch at import, and a test that trains, forks and starts a process."""
    files = {
        "conftest.py": """
            import poptorch
            AT_IMPORT = poptorch.ipuHardwareIsAvailable()
            """,
        "test_scale.py": """
            import importlib.metadata, subprocess, sys
            import conftest, poptorch, torch
            from poptorch.optim import SGD

            class Scale(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.factor = torch.nn.Parameter(torch.tensor(2.0))

                def forward(self, x):
                    return poptorch.identity_loss(self.factor * x, "sum")

            def test_training():
                model = Scale()
                training = poptorch.trainingModel(model, optimizer=SGD(model.parameters(), lr=0.5))
                assert training(torch.tensor([1.0, 2.0])) == 6
                assert model.factor.item() == 0.5

            def test_hardware():
                assert conftest.AT_IMPORT is False

            def test_started_process():
                code = "import poptorch; print(poptorch.__name__)"
                out = subprocess.check_output([sys.executable, "-c", code], text=True)
                assert out.split() == [poptorch.__name__]
            """,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def run(folder, *words, hardware="0"):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPU_FINETUNE_EMULATED_HARDWARE": hardware}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_a_suite_runs_and_the_header_says_emulated(suite):
    done = run(suite, "-p", "ipu_finetune.emulator.pytest_plugin")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("emulated: "))
    assert "claims no IPU hardware" in header
    assert "nothing runs on an IPU" in header


def test_without_the_plugin_the_same_suite_cannot_be_collected(suite):
    done = run(suite)
    assert done.returncode == 4
    assert "No module named 'poptorch'" in done.stderr


def test_a_real_poptorch_is_not_hidden(suite):
    (suite / "poptorch").mkdir()
    (suite / "poptorch" / "__init__.py").write_text("REAL = True\n", encoding="utf-8")
    done = run(suite, "-p", "ipu_finetune.emulator.pytest_plugin")
    assert done.returncode == 4
    assert "a real installation is here" in done.stderr


def test_the_emulator_is_there_from_loading_to_the_end_of_the_session(monkeypatch, request):
    from ipu_finetune import emulator
    from ipu_finetune.emulator import pytest_plugin

    before = os.environ.get("PYTHONPATH"), sys.path[:]
    pytest_plugin.pytest_addoption(None)
    try:
        assert emulator.is_installed()
        assert "claims IPU hardware of version 2" in pytest_plugin.pytest_report_header(request.config)[0]
    finally:
        pytest_plugin.pytest_unconfigure(request.config)
    assert not emulator.is_installed()
    assert (os.environ.get("PYTHONPATH"), sys.path[:]) == before

    emulator.install()
    try:
        pytest_plugin.pytest_addoption(None)
        pytest_plugin.pytest_unconfigure(request.config)
        assert emulator.is_installed()  # who installed it before takes it away
    finally:
        emulator.uninstall()
