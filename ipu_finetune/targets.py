# SPDX-License-Identifier: Apache-2.0
"""Where a run executes: what is available on this machine, and the choice with the line that announces it.

A target that is named is taken or refused; only `auto` chooses.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Optional, Tuple

from ipu_finetune.errors import TargetUnavailableError, UsageError, did_you_mean

__all__ = ["TARGETS", "Target", "choose", "hub_token", "require_hub_token"]

TARGETS = ("auto", "ipu", "emulator", "cuda", "cpu")

_PACKAGE = Path(__file__).resolve().parent
# What a Poplar installation sets, and what a job on a pod needs: the first things to look at when no IPU is found.
_VARIABLES = ("POPLAR_SDK_ENABLED", "IPUOF_VIPU_API_PARTITION_ID")


@dataclass(frozen=True)
class Target:
    """Where a run executes.

    Attributes:
        name: `ipu`, `emulator`, `cuda` or `cpu`.
        emulated: whether IPUs are emulated: numerics and layout are theirs, speed is not.
        announcement: the first line of the run.
    """

    name: str
    emulated: bool
    announcement: str


def choose(requested: str = "auto") -> Target:
    """Return the target that was asked for; `auto` takes real IPUs where there are any, else the emulator.

    Raises:
        UsageError: there is no target of that name.
        TargetUnavailableError: it is not available here; the message says what is missing.
    """
    if requested not in TARGETS:
        raise UsageError(
            f"unknown target '{requested}'{did_you_mean(requested, TARGETS)}; targets: {', '.join(TARGETS)}"
        )
    if requested == "auto":
        poptorch, missing, _ = _find_ipu()
        return _ipu(poptorch) if poptorch else _emulator(f"no IPU found: {missing}")
    if requested == "ipu":
        poptorch, missing, error = _find_ipu()
        if poptorch is None:
            variables = ", ".join(f"{name} {_state(name)}" for name in _VARIABLES)
            raise TargetUnavailableError(
                f"target ipu is not available: {missing}; environment: {variables}; enable a Poplar SDK and a "
                "partition with IPUs, or use --target emulator"
            ) from error
        return _ipu(poptorch)
    _require_torch(requested)
    if requested == "emulator":
        return _emulator("as requested")
    if requested == "cuda":
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise TargetUnavailableError(
                f"target cuda is not available: torch {torch.__version__} finds no CUDA device (CUDA_VISIBLE_DEVICES "
                f"{_state('CUDA_VISIBLE_DEVICES')}); use --target cpu"
            )
        return Target("cuda", False, f"target: cuda ({torch.cuda.get_device_name()})")
    return Target("cpu", False, "target: cpu (plain PyTorch, the reference)")


def _ipu(poptorch: ModuleType) -> Target:
    return Target("ipu", False, f"target: ipu (poptorch {getattr(poptorch, '__version__', 'of unknown version')})")


def _emulator(why: str) -> Target:
    _require_torch("emulator")
    return Target("emulator", True, f"target: emulator ({why}); emulated: numerics and layout only, not IPU speed")


def _require_torch(target: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise TargetUnavailableError(
            f"target {target} is not available: torch is not installed in {sys.prefix}; install ipu-finetune with its "
            "dependencies"
        )


def _state(variable: str) -> str:
    return f"is {os.environ[variable]!r}" if variable in os.environ else "is not set"


def _find_ipu() -> Tuple[Optional[ModuleType], str, Optional[Exception]]:
    """Return the real poptorch where it finds an IPU; else None, what is missing, and the error behind it."""
    loaded = sys.modules.get("poptorch")
    if loaded is not None and _is_ours(loaded):
        return None, "this process already runs the emulator's poptorch, start a new one", None
    if loaded is None and not _poptorch_is_installed():
        return None, "poptorch is not installed (it comes with the Poplar SDK)", None
    try:
        poptorch = importlib.import_module("poptorch")
        available = poptorch.ipuHardwareIsAvailable()
    except Exception as error:
        # Whatever a broken SDK raises (a missing shared library, a version clash): its own words are the useful ones.
        return None, f"poptorch cannot be used ({type(error).__name__}: {error})", error
    if not available:
        return None, "poptorch finds no IPU on this machine", None
    return poptorch, "", None


def _poptorch_is_installed() -> bool:
    return importlib.machinery.PathFinder.find_spec("poptorch") is not None


def _is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and _PACKAGE in Path(file).resolve().parents


def hub_token() -> Optional[str]:
    """Return the Hugging Face hub's token from the environment or the hub's own file; None where there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return os.environ[name].strip()
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    path = Path(os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token"))).expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def require_hub_token(repository: Optional[str]) -> None:
    """Stop, before anything heavy, where a push to the hub is asked for and there is no token.

    Raises:
        UsageError: `repository` is given and no token is found.
    """
    if repository is not None and hub_token() is None:
        raise UsageError(
            f"model.push_to_hub={repository} needs a token of the hub, and there is none: set HF_TOKEN or log in with "
            "huggingface-cli, or leave push_to_hub out (the model is saved in the run's folder either way); nothing "
            "was started"
        )
