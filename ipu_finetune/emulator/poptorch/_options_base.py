# SPDX-License-Identifier: Apache-2.0
"""A set of options that is open until it is first used and frozen from then on."""

import copy
import difflib
from typing import Any, Dict, Iterable, Optional

__all__ = ["OptionsDict", "check_count", "check_type", "nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known names that look like `name`, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise AssertionError unless `value` is a `kind`; a bool is not an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise AssertionError(f"Unexpected type {type(value)} for option {name}. Expected {kind}, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise AssertionError unless `value` is an int from 1."""
    check_type(name, value, int)
    if value < 1:
        raise AssertionError(f"{name} must be at least 1, got {value}")


class OptionsDict:
    """Named values with checks on name, type and time.

    Args:
        values: every option with its default; together with `optional` these are the only names that `set` accepts.
        optional: the type of each option that has no value until it is set, by name.
    """

    def __init__(self, optional: Optional[Dict[str, type]] = None, **values: Any) -> None:
        kinds = {name: type(value) for name, value in values.items()}
        self.__dict__["_kinds"] = {**kinds, **(optional or {})}
        self.__dict__["_values"] = {**values, **{name: None for name in optional or {}}}
        self.__dict__["_is_frozen"] = False

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes of an object that has none yet.
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"Invalid attribute {name}: {type(self).__name__} has no option '{name}'{nearest(name, dir(self))}"
        )

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *self.__dict__.get("_values", {})})

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_open()
        if name == "__class__":
            super().__setattr__(name, value)
        elif name in self.__dict__ and name.startswith("_"):
            self.__dict__[name] = value
        else:
            self.set(**{name: value})

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Raise if the options are in use already.

        Raises:
            AttributeError: they are frozen.
        """
        if option != "_is_frozen" and self.__dict__.get("_is_frozen"):
            raise AttributeError(
                "Can't modify frozen Options: a model or a DataLoader uses them already. Set every option before that, "
                "or change a copy, options.clone(), and make a new model with it."
            )

    _check_open = checkIsFrozen

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, state: bool) -> None:
        self.__dict__["_is_frozen"] = state
        for child in self._children().values():
            child._set_frozen(state)

    def _children(self) -> Dict[str, "OptionsDict"]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, OptionsDict)}

    def set(self, **values: Any) -> None:
        """Set several options by name.

        Raises:
            AssertionError: there is no such option, or the value is of another type than the option's.
            AttributeError: the options are frozen.
        """
        self._check_open()
        for name, value in values.items():
            if name not in self._values:
                hint = nearest(name, self._values)
                raise AssertionError(f"Invalid option {name}, valid options are {sorted(self._values)}{hint}")
            if not isinstance(value, self._kinds[name]):
                raise AssertionError(f"Unexpected type {type(value)} for option {name}. Expected {self._kinds[name]}")
            self._values[name] = value

    def createOrSet(self, **values: Any) -> None:
        """As `set`, but new names are added."""
        self._check_open()
        for name, value in values.items():
            if name not in self._values:
                self._kinds[name] = type(value)
                self._values[name] = None
            self.set(**{name: value})

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
        return self.update({})

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add every value that is set to `other` and return it.

        Raises:
            AssertionError: `other` has a value of the same name.
        """
        own = {name: value for name, value in self._values.items() if value is not None}
        common = sorted(own.keys() & other.keys())
        if common:
            raise AssertionError(f"Can't merge dictionaries, they have some keys in common: {common}")
        other.update(own)
        return other

    def __deepcopy__(self, memo: Dict[int, Any]) -> "OptionsDict":
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        for name, value in self.__dict__.items():
            clone.__dict__[name] = copy.deepcopy(value, memo)
        clone.__dict__["_is_frozen"] = False
        return clone

    def __getstate__(self) -> Dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __call__(self, option: str) -> Any:
        """Return an option's value by its name."""
        return getattr(self, option)

    def __repr__(self) -> str:
        shown = {**self._values, **self._children()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
