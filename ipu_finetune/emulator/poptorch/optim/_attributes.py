# SPDX-License-Identifier: Apache-2.0
"""Which optimizer settings are compiled in and which can be changed by `setOptimizer`."""

from typing import Iterable, List

from ....errors import did_you_mean

__all__ = ["VariableAttributes"]


class VariableAttributes:
    """Marks settings as constant or variable; the learning rate is always variable.

    Args:
        variable: names that start as variable.
        allowed: every name that can be marked.
    """

    def __init__(self, variable: Iterable[str], allowed: Iterable[str]) -> None:
        # Named as in PopTorch: there are scripts that write to them.
        self._allowed_attributes: List[str] = list(allowed)
        self._variable_attributes: List[str] = [name for name in self._allowed_attributes if name in {*variable, "lr"}]

    def _check(self, name: str) -> None:
        if name not in self._allowed_attributes:
            raise AssertionError(f"Unknown attribute '{name}'{did_you_mean(name, self._allowed_attributes)}")

    def isConstant(self, name: str) -> bool:
        """Whether the setting is compiled in."""
        self._check(name)
        return name not in self._variable_attributes

    def markAsConstant(self, name: str) -> None:
        """Compile the setting's value in."""
        self._check(name)
        if name != "lr" and name in self._variable_attributes:
            self._variable_attributes.remove(name)

    def markAsVariable(self, name: str) -> None:
        """Let `setOptimizer` change the setting."""
        self._check(name)
        if name not in self._variable_attributes:
            self._variable_attributes.append(name)

    def constants(self) -> List[str]:
        """Every setting that is compiled in."""
        return sorted(set(self._allowed_attributes) - set(self._variable_attributes))
