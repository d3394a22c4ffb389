# SPDX-License-Identifier: Apache-2.0
"""Which optimizer settings are compiled in and which can be changed by `setOptimizer`."""

from typing import Iterable, List, Set

from ....errors import did_you_mean

__all__ = ["VariableAttributes"]


class VariableAttributes:
    """Marks settings as constant or variable; the learning rate is always variable.

    Args:
        variable: names that start as variable.
        allowed: every name that can be marked.
    """

    def __init__(self, variable: Iterable[str], allowed: Iterable[str]) -> None:
        self._allowed: List[str] = list(allowed)
        self._constant: Set[str] = set(self._allowed) - set(variable) - {"lr"}

    def _check(self, name: str) -> None:
        if name not in self._allowed:
            raise AssertionError(f"Unknown attribute '{name}'{did_you_mean(name, self._allowed)}")

    def isConstant(self, name: str) -> bool:
        """Whether the setting is compiled in."""
        return name in self._constant

    def markAsConstant(self, name: str) -> None:
        """Compile the setting's value in."""
        self._check(name)
        if name != "lr":
            self._constant.add(name)

    def markAsVariable(self, name: str) -> None:
        """Let `setOptimizer` change the setting."""
        self._check(name)
        self._constant.discard(name)

    def constants(self) -> List[str]:
        """Every setting that is compiled in."""
        return sorted(self._constant)
