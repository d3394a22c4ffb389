# SPDX-License-Identifier: Apache-2.0
"""A set of options that is open until it is first used and frozen from then on."""

import copy
from typing import Any, Dict

__all__ = ["OptionsDict"]


class OptionsDict:
    """Named values with checks on name, type and time.

    Args:
        values: every option with its default; these are the only names that `set` accepts.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = dict(values)
        self.__dict__["_is_frozen"] = False

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"{type(self).__name__} has no option '{name}', the options are: {sorted(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_open()
        if name in self._values:
            self._values[name] = value
        else:
            self.__dict__[name] = value

    def _check_open(self) -> None:
        if self.__dict__.get("_is_frozen"):
            raise AttributeError("Can't modify frozen Options")

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True
        for child in self._children().values():
            child._freeze()

    def _unfreeze(self) -> None:
        self.__dict__["_is_frozen"] = False
        for child in self._children().values():
            child._unfreeze()

    def _children(self) -> Dict[str, "OptionsDict"]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, OptionsDict)}

    def set(self, **values: Any) -> None:
        """Set several options by name.

        Raises:
            AssertionError: there is no such option, or the value's type is not that of the present value.
        """
        self._check_open()
        for name, value in values.items():
            if name not in self._values:
                raise AssertionError(f"Invalid option {name}, valid options are {sorted(self._values)}")
            present = self._values[name]
            if present is not None and not isinstance(value, type(present)):
                raise AssertionError(f"Unexpected type {type(value)} for option {name}. Expected {type(present)}")
            self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        """As `set`, but new names are added."""
        self._check_open()
        for name, value in values.items():
            if name in self._values:
                self.set(**{name: value})
            else:
                self._values[name] = value

    def exists(self, name: str) -> bool:
        """Whether the option is known and has a value."""
        return self._values.get(name) is not None

    def deleteIfExists(self, name: str) -> None:
        """Forget the option's value."""
        self._check_open()
        if name in self._values:
            self._values[name] = None

    def toDict(self) -> Dict[str, Any]:
        """Return every value that is set."""
        return {name: value for name, value in self._values.items() if value is not None}

    def __deepcopy__(self, memo: Dict[int, Any]) -> "OptionsDict":
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        for name, value in self.__dict__.items():
            clone.__dict__[name] = copy.deepcopy(value, memo)
        clone.__dict__["_is_frozen"] = False
        return clone

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.toDict()})"
