# SPDX-License-Identifier: Apache-2.0
"""Targets: a named one is taken or refused, only `auto` chooses (U21), and a push needs a token (U70)."""

import importlib.util
import sys
import types

import pytest

from ipu_finetune import targets
from ipu_finetune.errors import TargetUnavailableError, UsageError

pytestmark = pytest.mark.pure

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def poptorch_on_path(tmp_path, monkeypatch):
    """Put a poptorch of the given source on the path, as an SDK would, and forget it afterwards."""

    def write(source):
        (tmp_path / "poptorch.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    yield write
    sys.modules.pop("poptorch", None)


@pytest.fixture
def torch_installed(monkeypatch):
    """Targets that only ask whether torch is there are told that it is."""
    monkeypatch.setattr(targets, "_require_torch", lambda target: None)


@pytest.fixture
def no_poptorch(monkeypatch):
    """The machine has no Poplar SDK, whatever machine this is."""
    monkeypatch.setattr(targets, "_poptorch_is_installed", lambda: False)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("POPLAR_SDK_ENABLED", "IPUOF_VIPU_API_PARTITION_ID", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)


@pytest.mark.usefixtures("no_poptorch")
def test_ipu_without_poptorch_is_refused_and_says_what_is_missing():
    with pytest.raises(TargetUnavailableError) as caught:
        targets.choose("ipu")
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert "poptorch is not installed" in text
    assert "POPLAR_SDK_ENABLED is not set" in text
    assert "IPUOF_VIPU_API_PARTITION_ID is not set" in text


@pytest.mark.usefixtures("no_poptorch")
def test_ipu_shows_the_variables_that_are_set(monkeypatch):
    monkeypatch.setenv("POPLAR_SDK_ENABLED", "/opt/poplar")
    with pytest.raises(TargetUnavailableError, match="POPLAR_SDK_ENABLED is '/opt/poplar'"):
        targets.choose("ipu")


def test_ipu_with_a_broken_poptorch_carries_the_original_error(poptorch_on_path):
    poptorch_on_path("raise ImportError('libpoplar.so: cannot open shared object file')")
    with pytest.raises(TargetUnavailableError, match=r"libpoplar\.so: cannot open shared object file") as caught:
        targets.choose("ipu")
    assert isinstance(caught.value.__cause__, ImportError)


def test_ipu_with_poptorch_but_no_device_is_refused(poptorch_on_path):
    poptorch_on_path("def ipuHardwareIsAvailable(num_ipus=1):\n    return False\n")
    with pytest.raises(TargetUnavailableError, match="poptorch finds no IPU"):
        targets.choose("ipu")


def test_ipu_and_auto_take_a_real_poptorch_with_a_device(poptorch_on_path):
    poptorch_on_path("__version__ = '3.3.0'\ndef ipuHardwareIsAvailable(num_ipus=1):\n    return True\n")
    for requested in ("ipu", "auto"):
        chosen = targets.choose(requested)
        assert (chosen.name, chosen.emulated) == ("ipu", False)
        assert "poptorch 3.3.0" in chosen.announcement


def test_the_emulators_poptorch_is_never_taken_for_a_real_one(monkeypatch):
    ours = types.ModuleType("poptorch")
    ours.__file__ = str(targets._PACKAGE / "emulator" / "poptorch" / "__init__.py")
    ours.ipuHardwareIsAvailable = lambda: True
    monkeypatch.setitem(sys.modules, "poptorch", ours)
    with pytest.raises(TargetUnavailableError, match="emulator's poptorch"):
        targets.choose("ipu")


@pytest.mark.usefixtures("torch_installed", "no_poptorch")
def test_auto_without_an_ipu_takes_the_emulator_and_says_so_and_why():
    chosen = targets.choose("auto")
    assert (chosen.name, chosen.emulated) == ("emulator", True)
    assert chosen.announcement.startswith("target: emulator (no IPU found: poptorch is not installed")
    assert "emulated: numerics and layout only, not IPU speed" in chosen.announcement


@pytest.mark.usefixtures("torch_installed")
def test_auto_with_a_broken_sdk_says_why_it_was_passed_over(poptorch_on_path):
    poptorch_on_path("raise OSError('version GLIBC_2.99 not found')")
    assert "GLIBC_2.99 not found" in targets.choose("auto").announcement


@pytest.mark.usefixtures("torch_installed")
def test_a_named_emulator_or_cpu_looks_for_no_ipu(poptorch_on_path):
    poptorch_on_path("raise SystemError('must not be imported')")
    assert targets.choose("emulator").emulated is True
    assert (targets.choose("cpu").name, targets.choose("cpu").emulated) == ("cpu", False)
    assert "poptorch" not in sys.modules


@pytest.mark.parametrize("requested", ["cpu", "emulator", "cuda", "auto"])
@pytest.mark.usefixtures("no_poptorch")
def test_without_torch_the_message_says_so(monkeypatch, requested):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailableError, match="torch is not installed"):
        targets.choose(requested)


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.parametrize("available", [True, False])
def test_cuda_needs_a_device_that_torch_finds(monkeypatch, available):
    torch = types.ModuleType("torch")
    torch.__version__ = "2.13.0"
    torch.cuda = types.SimpleNamespace(is_available=lambda: available, get_device_name=lambda: "H200")
    monkeypatch.setitem(sys.modules, "torch", torch)
    if available:
        assert targets.choose("cuda") == targets.Target("cuda", False, "target: cuda (H200)")
    else:
        with pytest.raises(TargetUnavailableError, match=r"torch 2\.13\.0 finds no CUDA device"):
            targets.choose("cuda")


def test_an_unknown_target_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="unknown target 'emulater'.*'emulator'"):
        targets.choose("emulater")


@needs_torch
def test_choosing_a_target_that_needs_no_device_imports_no_torch():
    import subprocess

    code = "import sys; from ipu_finetune import targets; targets.choose('emulator'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- U70: nothing asks for a login; a push without a token stops at the start


def test_the_hub_token_comes_from_the_environment_or_the_hubs_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    assert targets.hub_token() is None
    (tmp_path / "token").write_text("from-file\n")
    assert targets.hub_token() == "from-file"
    monkeypatch.setenv("HF_TOKEN", "from-environment")
    assert targets.hub_token() == "from-environment"


def test_an_empty_token_file_is_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    (tmp_path / "token").write_text("\n")
    assert targets.hub_token() is None


def test_u70_a_push_without_a_token_is_refused_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    targets.require_hub_token(None)
    with pytest.raises(UsageError, match=r"push_to_hub=me/mine needs a token.*HF_TOKEN.*nothing was started"):
        targets.require_hub_token("me/mine")
    monkeypatch.setenv("HF_TOKEN", "x")
    targets.require_hub_token("me/mine")
