# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs to know of the environment: versions, the SDK, targets, the machine, variables.

Reading them imports no torch; only `available_targets` does.
"""

import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from ipu_finetune import targets
from ipu_finetune._versions import POPLAR_SDK, TESTED, Finding, check_versions
from ipu_finetune.errors import IpuFinetuneError, TargetUnavailableError

__all__ = ["available_targets", "find_versions", "machine", "poptorch_kind", "require_versions", "variables"]

_VARIABLES = re.compile(
    r"(POPTORCH|POPART|POPLAR|POPLIBS|PVTI|IPUOF|VIPU|POPRUN|IPU_FINETUNE|HF)_\w+"
    r"|PARTITION|NUM_AVAILABLE_IPU|GRAPHCORE_POD_TYPE|DATASETS_DIR|CHECKPOINT_DIR|RDMAV_FORK_SAFE|HUGGING_FACE_HUB_TOKEN"
    r"|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|XDG_STATE_HOME|TRANSFORMERS_OFFLINE"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
# What the emulator and the reference can profit from: vector width, and arithmetic of fewer than 32 bits.
_CPU_FEATURES = (
    *("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimdhp", "bf16", "i8mm", "sve"),
)


def find_versions() -> Dict[str, Optional[str]]:
    """Return the version of everything in `TESTED`; None for what is not installed."""
    found: Dict[str, Optional[str]] = {"Python": platform.python_version()}
    for name in TESTED:
        if name not in ("Python", POPLAR_SDK):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = None
    found[POPLAR_SDK] = sdk_version(os.environ)
    return found


def require_versions(target: str) -> List[str]:
    """Refuse versions with which a run on `target` cannot work, and return what to say about those nobody has tried.

    Raises:
        IpuFinetuneError: something is missing or too old; lists all of it with the commands that mend it.
    """
    found = find_versions()
    if target != "ipu":
        # The emulator stands in for both.
        found = {name: version for name, version in found.items() if name not in (POPLAR_SDK, "poptorch")}
    findings = check_versions(found)
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise IpuFinetuneError("\n".join(["this environment cannot run it:", *(f"  - {error}" for error in errors)]))
    return [f"warning: {finding.message}" for finding in findings]


def sdk_version(environment: Mapping[str, str]) -> Optional[str]:
    """Return the version of the Poplar SDK that is enabled, read from the path that its script exports."""
    path = environment.get("POPLAR_SDK_ENABLED", "")
    match = re.search(r"(?:poplar|sdk)[^/]*-(\d+\.\d+(?:\.\d+)?)", path)
    if match is not None:
        return match.group(1)
    return "of unknown version" if path else None


def poptorch_kind() -> str:
    """Return where `import poptorch` leads: a real one, or the emulator's."""
    spec = importlib.machinery.PathFinder.find_spec("poptorch")
    if spec is not None and spec.origin not in (None, "namespace"):
        return f"real ({spec.origin})"
    return f"emulated ({_look_alike_version()}); no real one is installed"


def _look_alike_version() -> str:
    # Its package cannot be imported here: it needs torch.
    path = Path(__file__).resolve().parent / "emulator" / "poptorch" / "_version.py"
    spec = importlib.util.spec_from_file_location("_ipu_finetune_look_alike_version", str(path))
    if spec is None or spec.loader is None:
        return "unknown"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


def available_targets(findings: List[Finding]) -> Dict[str, Dict[str, Any]]:
    """Return for each target whether it is available here, and what it says; adds what is broken to `findings`."""
    found: Dict[str, Dict[str, Any]] = {}
    for name in targets.TARGETS:
        if name == "auto":
            continue
        try:
            found[name] = {"available": True, "says": targets.choose(name).announcement}
        except TargetUnavailableError as error:
            found[name] = {"available": False, "says": str(error)}
        except Exception as error:
            # A library that is installed and cannot be imported raises anything; that is what a report is for.
            says = f"target {name} is broken: {type(error).__name__}: {error}"
            found[name] = {"available": False, "says": says}
            findings.append(Finding("error", name, says))
    return found


def machine() -> Dict[str, Any]:
    """Return the system, processor, cores that this process may use, memory in bytes, and features of the processor."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    processor, flags = _cpu_info()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor,
        "cores": cores,
        "cores_of_machine": os.cpu_count(),
        "memory_bytes": _memory(),
        "cpu_features": [name for name in _CPU_FEATURES if name in flags],
        "python": sys.executable,
    }


def _cpu_info() -> Tuple[str, Set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor(), set()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((values.get("flags") or values.get("Features") or "").split())
    return values.get("model name") or platform.processor(), flags


def _memory() -> Optional[int]:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def variables(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that change how a run behaves; of a token, only that it is set."""
    return {
        name: "(set, not shown)" if _SECRET.search(name) else _USER_IN_URL.sub("…@", value)
        for name, value in sorted(environment.items())
        if _VARIABLES.fullmatch(name)
    }
