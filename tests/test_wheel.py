# SPDX-License-Identifier: Apache-2.0
"""A wheel built from the tree works away from it: its recipes, configs and data travel inside."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

torch = pytest.importorskip("torch")

from tests.conftest import ROOT  # noqa: E402


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The wheel's content in a folder of its own, as an installer would lay it down."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(unpacked, cwd, *arguments):
    environ = {**os.environ, "PYTHONPATH": str(unpacked), "HF_HUB_OFFLINE": "1"}
    code = (
        "import sys, ipu_finetune; from ipu_finetune.cli import main; "
        "print(ipu_finetune.__file__, file=sys.stderr); sys.exit(main(sys.argv[1:]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=str(cwd), env=environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.startswith(str(unpacked)), "the tree was imported, not the wheel"
    return answer.stdout


def test_ls_and_show_find_what_travels_in_the_wheel(unpacked, tmp_path):
    listed = run(unpacked, tmp_path, "ls")
    here = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert len(here) >= 7
    assert len([line for line in listed.splitlines() if "question-answering" in line]) == len(here)
    assert "bert-large" in run(unpacked, tmp_path, "ls", "configs")
    assert "3, 7, 7, 7" in run(unpacked, tmp_path, "show", "bert-large", "squad")


def test_the_demo_starts_from_the_wheel(unpacked, tmp_path):
    summary = run(unpacked, tmp_path, "minilm", "squad-sample", "--max-steps", "1", "--output", "out")
    assert "minilm-squad-sample on emulator: f1" in summary
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    # The learning rate of the first update is 0, so this is the untrained model.
    assert json.loads((tmp_path / "out" / "record.json").read_text())["metrics"]["f1"] < 10
