# SPDX-License-Identifier: Apache-2.0
"""`doctor`: versions against what was tested (U55, U56), what is available, and who holds the emulated IPUs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipu_finetune import _environment, cli
from ipu_finetune._versions import TESTED, check_versions
from ipu_finetune.emulator.device import pod
from ipu_finetune.errors import IpuFinetuneError

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
WORKING = {
    "Python": "3.11.7",
    "optimum-graphcore": "0.7.1",
    "optimum": "1.6.1",
    "transformers": "4.29.2",
    "tokenizers": "0.13.3",
    "torch": "2.13.0+cpu",
    "numpy": "1.23.5",
    "accelerate": "1.15.0",
    "datasets": "3.6.0",
    "pyarrow": "20.0.0",
    "safetensors": "0.8.0",
    "tqdm": "4.70.1",
    "Poplar SDK": "3.3.0",
    "poptorch": "3.3.0+113432_960e9c294b_ubuntu_20_04",
}


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if re.match(r"POPTORCH_|POPLAR_|IPUOF_|IPU_FINETUNE_|HF_TOKEN", name):
            monkeypatch.delenv(name)


@pytest.fixture
def versions_are(monkeypatch):
    """Pretend that these versions are installed beside `WORKING`."""

    def pretend(**changes):
        found = {**WORKING, **{name.replace("_", " "): version for name, version in changes.items()}}
        monkeypatch.setattr(_environment, "find_versions", lambda: found)
        monkeypatch.setattr(_environment, "available_targets", lambda findings: {})

    return pretend


def doctor(words, capsys):
    code = cli.main(["doctor", *words])
    return code, capsys.readouterr().out


def test_versions_that_the_tests_run_with_are_fine():
    assert check_versions(WORKING) == []


def test_u55_sdk_2_4_is_an_error_before_anything_is_compiled(versions_are, capsys):
    (finding,) = check_versions({**WORKING, "Poplar SDK": "2.4.0"})
    assert (finding.level, finding.name) == ("error", "Poplar SDK")
    assert finding.message.startswith("Poplar SDK 2.4.0 < 3.3: tested with 3.3–3.4; enable an SDK of that range")
    versions_are(Poplar_SDK="2.4.0")
    code, text = doctor([], capsys)
    assert code == 1
    assert "error: Poplar SDK 2.4.0 < 3.3" in text


def test_u55_a_run_on_ipus_is_refused_with_everything_that_is_wrong(versions_are):
    versions_are(Poplar_SDK="2.4.0", transformers="4.20.0", datasets="3.7.0")
    with pytest.raises(IpuFinetuneError, match=r"this environment cannot run it:\n") as caught:
        _environment.require_versions("ipu")
    assert "  - Poplar SDK 2.4.0 < 3.3" in str(caught.value)
    assert "  - transformers 4.20.0 < 4.29.2" in str(caught.value)
    versions_are(Poplar_SDK="2.4.0", datasets="3.7.0")
    # No SDK takes part in a run on the emulator; what nobody has tried is a warning.
    (warning,) = _environment.require_versions("emulator")
    assert warning.startswith("warning: datasets 3.7.0 > 3.6")


def test_u56_a_version_above_the_ceiling_is_a_warning_with_the_tested_range_and_the_command(versions_are, capsys):
    (finding,) = check_versions({**WORKING, "transformers": "4.31.0"})
    assert (finding.level, finding.name) == ("warning", "transformers")
    assert finding.message == ("transformers 4.31.0 > 4.29.2: tested with 4.29.2; pip install 'transformers==4.29.2'")
    versions_are(transformers="4.31.0")
    code, text = doctor([], capsys)
    assert code == 0
    assert "warning: transformers 4.31.0 > 4.29.2" in text


@pytest.mark.parametrize(
    ("name", "version", "level", "words"),
    [
        ("torch", "1.13.1", "error", "torch 1.13.1 < 2.0.1: tested with 2.0.1–2.13; pip install 'torch>=2.0.1,<2.14'"),
        ("torch", "2.14.0", "warning", "torch 2.14.0 > 2.13"),
        ("torch", "3.0", "warning", "torch 3.0 > 2.13"),
        ("numpy", "1.26.4", "warning", "numpy 1.26.4 > 1.23: tested with up to 1.23; pip install 'numpy<1.24'"),
        ("pyarrow", "21.0.0", "warning", "pip install 'pyarrow<21'"),
        ("Python", "3.12.1", "warning", "tested with 3.8–3.11; make an environment with Python 3.11"),
        ("optimum-graphcore", None, "error", "is not installed; pip install 'optimum-graphcore==0.7.1'"),
        ("optimum-graphcore", "0.7.0", "error", "0.7.0 < 0.7.1"),
        ("Poplar SDK", "of unknown version", "warning", "not a version that can be compared"),
    ],
)
def test_what_is_outside_the_tested_range_is_found(name, version, level, words):
    (finding,) = check_versions({**WORKING, name: version})
    assert (finding.level, finding.name) == (level, name)
    assert words in finding.message


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.0.1"), ("torch", "2.13.4"), ("numpy", "1.21.0"), ("poptorch", None), ("Poplar SDK", None)],
)
def test_what_is_inside_or_may_be_missing_is_not(name, version):
    assert check_versions({**WORKING, name: version}) == []


def test_errors_come_before_warnings():
    found = {**WORKING, "Python": "3.12.0", "tqdm": None}
    assert [finding.level for finding in check_versions(found)] == ["error", "warning"]


def test_the_tested_ranges_are_those_of_the_package_and_its_constraints():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL).group(1)
    declared = {}
    for requirement in re.findall(r'"(.+?)"', block):
        name, rules = re.match(r"([A-Za-z0-9-]+)(.*)", requirement).groups()
        declared[name] = dict(re.findall(r"(==|>=|<)([0-9.]+)", rules))
    declared["Python"] = dict(re.findall(r"(>=|<)([0-9.]+)", re.search(r"requires-python = \"(.+)\"", text).group(1)))
    assert set(declared) == set(TESTED) - {"Poplar SDK", "poptorch"}
    pins = dict(re.findall(r"^([\w-]+)==([0-9.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, rules in declared.items():
        assert TESTED[name].lowest == rules.get("==", rules.get(">=")), name
        if name in pins:
            assert (pins[name] + ".").startswith(TESTED[name].highest + "."), name
        if "<" in rules:
            highest, ceiling = (tuple(map(int, text.split("."))) for text in (TESTED[name].highest, rules["<"]))
            assert highest < ceiling, name


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/opt/gc/poplar_sdk-ubuntu_20_04-3.3.0+1403-208993bbb7/poplar-ubuntu_20_04-3.3.0+7857-b67b751185", "3.3.0"),
        ("/opt/gc/sdk-3.4.0/poplar", "3.4.0"),
        ("/opt/poplar", "of unknown version"),
        ("", None),
    ],
)
def test_the_sdk_is_recognised_by_the_path_that_it_exports(path, version):
    assert _environment.sdk_version({"POPLAR_SDK_ENABLED": path}) == version


def test_variables_are_shown_and_tokens_are_not():
    shown = _environment.variables(
        {
            "POPTORCH_LOG_LEVEL": "DEBUG",
            "HF_TOKEN": "hf_secret",
            "HUGGING_FACE_HUB_TOKEN": "hf_secret",
            "IPUOF_VIPU_API_PARTITION_ID": "p1",
            "HF_ENDPOINT": "https://me:hf_secret@hub.example/x",
            "HOME": "/home/me",
            "AWS_SECRET_ACCESS_KEY": "hf_secret",
        }
    )
    assert list(shown) == [
        "HF_ENDPOINT",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "IPUOF_VIPU_API_PARTITION_ID",
        "POPTORCH_LOG_LEVEL",
    ]
    assert shown["POPTORCH_LOG_LEVEL"] == "DEBUG"
    assert shown["HF_TOKEN"] == "(set, not shown)"
    assert "hf_secret" not in str(shown)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_report_says_what_is_here(capsys, monkeypatch, tmp_path):
    import torch

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path / "cache"))
    lease = pod.acquire(4, holder="Mine")
    code, text = doctor(["--json"], capsys)
    lease.release()
    assert text.count("\n") == 1
    assert "hf_secret" not in text
    report = json.loads(text)
    assert report["versions"]["torch"]["found"] == torch.__version__
    assert report["targets"]["cpu"]["available"]
    assert report["targets"]["emulator"]["available"]
    assert report["targets"]["cuda"]["available"] == torch.cuda.is_available()
    assert report["machine"]["cores"] >= 1
    assert report["pod"] == {"ipus": 64, "in_use": 4}
    assert report["cache"]["state"] == "not there yet"
    assert report["ok"] == (code == 0) == (not [each for each in report["findings"] if each["level"] == "error"])


def test_a_library_that_cannot_be_imported_is_an_error(monkeypatch):
    def broken(name):
        raise OSError("libpoplar.so: cannot open shared object file")

    monkeypatch.setattr(_environment.targets, "choose", broken)
    findings = []
    found = _environment.available_targets(findings)
    assert not found["cuda"]["available"]
    assert {finding.level for finding in findings} == {"error"}
    assert "OSError: libpoplar.so" in findings[0].message


@pytest.mark.parametrize("spoil", ["file", "link"])
def test_a_cache_folder_that_cannot_be_used_is_found(versions_are, capsys, tmp_path, monkeypatch, spoil):
    folder = tmp_path / "cache"
    if spoil == "file":
        folder.write_text("")
    else:
        folder.symlink_to(tmp_path / "gone")
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(folder))
    versions_are()
    code, text = doctor([], capsys)
    words = {"file": "not a folder", "link": "a broken symbolic link"}[spoil]
    assert (code, f"warning: executable cache off: {folder} is {words}" in text) == (0, True)


def test_a_pod_of_an_impossible_size_is_found(versions_are, capsys, monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "5")
    versions_are()
    code, text = doctor([], capsys)
    assert (code, "error: IPU_FINETUNE_EMULATED_IPUS=5" in text) == (1, True)


def test_ipus_lists_each_with_its_holder(capsys, monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_IPUS", "4")
    with pod.acquire(2, holder="BertForQA"):
        code, text = doctor(["--ipus"], capsys)
        rows = json.loads(doctor(["--ipus", "--json"], capsys)[1])["ipus"]
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == "emulated pod, partition emulated: 4 IPUs, 2 in use"
    assert lines[1].split() == ["partition", "id", "type", "pid", "program", "model", "since"]
    assert lines[2].split()[:4] == ["emulated", "0", "ipu2", str(os.getpid())]
    assert "BertForQA" in lines[3]
    assert lines[4].split() == ["emulated", "2", "ipu2", "-", "-", "-", "-"]
    assert [row["model"] for row in rows] == ["BertForQA", "BertForQA", None, None]


def test_ipus_and_help_import_no_torch_and_answer_in_half_a_second():
    code = (
        "import sys; from ipu_finetune import cli; cli.main(sys.argv[1:]); "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'poptorch'} & set(sys.modules)))"
    )
    for words in (["doctor", "--ipus"], ["doctor", "--help"], ["cache", "--help"]):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert time.perf_counter() - started < 2.0  # 0.2 s when the machine has nothing else to do
