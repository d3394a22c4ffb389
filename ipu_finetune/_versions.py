# SPDX-License-Identifier: Apache-2.0
"""Which versions this package was tested with, as one table, and what is wrong with the versions that were found."""

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Tuple

__all__ = ["POPLAR_SDK", "TESTED", "Finding", "Tested", "check_versions"]

POPLAR_SDK = "Poplar SDK"


@dataclass(frozen=True)
class Tested:
    """The versions of one thing that are known to work.

    Attributes:
        lowest: the oldest; an older one does not work. None where no oldest one is known.
        highest: the newest that was tried; 3.11 means any 3.11.x.
        required: whether nothing works without it.
        remedy: what to do where it is missing or outside, after the version.
    """

    lowest: Optional[str]
    highest: str
    required: bool = True
    remedy: str = ""

    def __str__(self) -> str:
        if self.lowest is None:
            return f"up to {self.highest}"
        return self.highest if self.lowest == self.highest else f"{self.lowest}–{self.highest}"


# `pyproject.toml` has the lowest ones, `constraints.txt` what the tests run with; a test compares the three.
TESTED: Dict[str, Tested] = {
    "Python": Tested("3.8", "3.11"),
    "optimum-graphcore": Tested("0.7.1", "0.7.1"),
    "optimum": Tested("1.6.1", "1.6.1"),
    "transformers": Tested("4.29.2", "4.29.2"),
    "tokenizers": Tested("0.13.3", "0.13.3"),
    "torch": Tested("2.0.1", "2.13"),
    "numpy": Tested(None, "1.23"),
    "accelerate": Tested("0.20", "1.15"),
    "datasets": Tested("2.16", "3.6"),
    "pyarrow": Tested(None, "20"),
    "safetensors": Tested("0.3.1", "0.8"),
    "tqdm": Tested("4.60", "4.70"),
    POPLAR_SDK: Tested("3.3", "3.4", required=False, remedy="enable an SDK of that range, or use the emulator"),
    "poptorch": Tested("3.3", "3.4", required=False, remedy="install the wheel of the SDK that is enabled"),
}


@dataclass(frozen=True)
class Finding:
    """Something about the environment that a user should know.

    Attributes:
        level: ``error`` where something will not work, ``warning`` where nobody has tried.
        name: of what it is about.
        message: what was found, what is wanted, what to do.
    """

    level: str
    name: str
    message: str


def check_versions(found: Mapping[str, Optional[str]]) -> List[Finding]:
    """Return what is wrong with the versions in `found`, worst first.

    Args:
        found: by the names of `TESTED`; None for what is not installed. What is not named is not judged.
    """
    findings = []
    for name, tested in TESTED.items():
        if name in found:
            finding = _judge(name, tested, found[name])
            if finding is not None:
                findings.append(finding)
    return sorted(findings, key=lambda finding: finding.level)


def _judge(name: str, tested: Tested, version: Optional[str]) -> Optional[Finding]:
    remedy = tested.remedy or _install(name, tested)
    if version is None:
        return Finding("error", name, f"{name} is not installed; {remedy}") if tested.required else None
    release = _release(version)
    if release is None:
        return Finding("warning", name, f"{name} {version}: not a version that can be compared; tested with {tested}")
    if tested.lowest is not None and release < _wanted(tested.lowest):
        return Finding("error", name, f"{name} {version} < {tested.lowest}: tested with {tested}; {remedy}")
    highest = _wanted(tested.highest)
    if release[: len(highest)] > highest:
        return Finding("warning", name, f"{name} {version} > {tested.highest}: tested with {tested}; {remedy}")
    return None


def _install(name: str, tested: Tested) -> str:
    if name == "Python":
        return f"make an environment with Python {tested.highest}"
    if tested.lowest == tested.highest:
        return f"pip install '{name}=={tested.highest}'"
    floor = f">={tested.lowest}," if tested.lowest else ""
    head, last = tested.highest.rsplit(".", 1) if "." in tested.highest else ("", tested.highest)
    ceiling = ".".join(part for part in (head, str(int(last) + 1)) if part)
    return f"pip install '{name}{floor}<{ceiling}'"


def _wanted(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _release(version: str) -> Optional[Tuple[int, ...]]:
    """Return the numbers of a version such as ``2.13.0+cpu``; None where it has none."""
    match = re.match(r"\d+(\.\d+)*", version.strip())
    return _wanted(match.group()) if match else None
