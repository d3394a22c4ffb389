# SPDX-License-Identifier: Apache-2.0
"""What PopART would say about a set of options when a model is compiled, and which of them mean nothing here."""

import os
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping

from ..device.errors import Error
from ..popart import PatternsLevel
from ..popart._session_options import EFFECTIVE, ENUMERATIONS, NUMBERED_ITEMS, POPTORCH, TYPES
from ._logging import logger
from ._options_base import nearest
from .blocks import ParallelPhasedExecution, SerialPhasedExecution, _ExecutionStrategy
from .enums import Liveness, SyncPattern

if TYPE_CHECKING:
    from .options import Options

__all__ = ["check_session_options", "check_values", "note_device_only_options", "strategy_values"]

# Read in Python, or together with another option.
_ELSEWHERE = ("anchored_tensors", "compilation_progress_bar_fn", "patterns_level")
_LOCATION_SETTINGS = (
    "minElementsForOffChip",
    "minElementsForReplicatedTensorSharding",
    "onChip",
    "useIOTilesToLoad",
    "useIOTilesToStore",
    "useReplicatedTensorSharding",
)
_OF_POPTORCH = {name for names in POPTORCH.values() for name in names}
_LARGEST = 2**64 - 1


def check_session_options(options: "Options") -> None:
    """Refuse options that PopART would refuse when it compiles a model.

    Each option is logged at debug level.

    Raises:
        Error: an unknown option, or a value that the option does not take.
        AssertionError: no output mode was picked, or `_Popart.set` names an option that `Options` has a method for.
    """
    if options.use_model is not None:
        logger.info("From the user configuration: Ipu model: %s", "Enabled" if options.use_model else "Disabled")
    check_values(options.toDict())


def check_values(values: Mapping[str, Any]) -> None:
    """As `check_session_options`, for what `Options.toDict` returns."""
    for name, value in values.items():
        if name == "patterns":
            _check_patterns(value, values.get("patterns_level"))
        elif name == "available_memory_proportion":
            _check_memory(value)
        elif name.startswith("location_"):
            _check_location(name, value)
        elif name not in _ELSEWHERE:
            _check(name, value)


def _kind_of(name: str, value: Any) -> str:
    # A bool is an int for Python, not for PopART.
    for kind, types in (
        ("bool", bool),
        ("floating point", float),
        ("uint64", int),
        ("string", str),
        ("set / vector", (set, frozenset, list, tuple)),
        ("map", dict),
    ):
        if isinstance(value, types):
            return kind
    raise Error(
        f"Unknown value type {type(value).__module__}.{type(value).__qualname__} for option {name}: PopART takes a "
        "bool, int, float, str, set, list, tuple or dict"
    )


def _check(name: str, value: Any) -> None:
    kind = _kind_of(name, value)
    if TYPES.get(name) != kind:
        raise Error(_unknown(name, value, kind))
    if kind == "uint64":
        _check_number(name, int(value))
        _log_value(name, int(value))
    elif kind == "bool":
        _log_value(name, str(value).lower())
    elif kind == "map":
        for key, item in value.items():
            logger.debug("poptorch.Options set %s[%s] to %s", name, key, item)
    elif kind == "set / vector":
        _check_items(name, value)
        for item in value:
            logger.debug("poptorch.Options added %s to %s", item, name)
    else:
        _log_value(name, value)


def _log_value(name: str, value: Any) -> None:
    logger.debug("poptorch.Options set %s to value %s", name, value)


def _unknown(name: str, value: Any, kind: str) -> str:
    if name in TYPES:
        hint = f": its value is of type {TYPES[name]}, got {value!r}"
        if (kind, TYPES[name]) == ("uint64", "floating point"):
            hint += f"; write {float(value)!r}"
        return f"Unknown {kind} option {name}{hint}"
    return f"Unknown {kind} option {name}: PopART has no session option of that name{nearest(name, TYPES)}"


def _check_number(name: str, value: int) -> None:
    if not 0 <= value <= _LARGEST:
        raise Error(f"Value for {name} out of range: {value} is not a number from 0 to 2**64 - 1")
    _check_member(name, value)


def _check_member(name: str, value: int) -> None:
    enumeration = ENUMERATIONS.get(name)
    if enumeration is not None and value not in set(map(int, enumeration)):
        members = ", ".join(f"{int(member)} {member.name}" for member in enumeration)
        raise Error(f"Value for {enumeration.__name__} out of range: {name} takes one of {members}, got {value}")


def _check_items(name: str, items: Iterable[Any]) -> None:
    if name not in NUMBERED_ITEMS:
        return
    for item in items:
        try:
            number = int(item)
        except (TypeError, ValueError):
            raise Error(f"{name} takes a container of numbers, got {item!r} in it") from None
        _check_member(name, number)


def _check_patterns(patterns: Any, level: Any) -> None:
    if level is None:
        raise Error("PopART option 'patterns' should not be set without 'patterns_level': call _Popart.setPatterns")
    if level not in set(map(int, PatternsLevel)):
        raise Error(f"setPatterns: level {level} is none of {[int(member) for member in PatternsLevel]}")
    for pattern, enabled in patterns.items():
        if not isinstance(pattern, str) or not isinstance(enabled, bool):
            raise Error(f"setPatterns takes a dictionary of names to bools, got {pattern!r}: {enabled!r}")
        logger.debug("poptorch.Options set patterns[%s] to %s", pattern, enabled)


def _check_memory(proportions: Mapping[int, Any]) -> None:
    for ipu, proportion in proportions.items():
        if not isinstance(proportion, (int, float)):
            raise Error(f"setAvailableMemoryProportion takes a number for each IPU, got {proportion!r} for IPU{ipu}")


def _check_location(name: str, settings: Any) -> None:
    for setting, value in settings.items():
        if setting not in _LOCATION_SETTINGS:
            raise Error(f"Unknown option '{setting}' for tensor location {name}{nearest(setting, _LOCATION_SETTINGS)}")
        if not isinstance(value, int) or value < 0:
            raise Error(f"{name}: {setting} takes a number from 0, got {value!r}")
        logger.debug("Setting %s to %s for location %s", setting, int(value), name)


def note_device_only_options(options: "Options") -> None:
    """Name, in one line at info level, the options that were set and that only a real IPU uses."""
    names = _device_only(options)
    if names:
        logger.info(
            "These options are accepted and have no effect on the emulator, only on a real IPU: %s", ", ".join(names)
        )
    if os.environ.get("POPTORCH_EXPORT_PROTO_FILE"):
        logger.warning("POPTORCH_EXPORT_PROTO_FILE is set, but the emulator has no PopART graph: no file is written")


def _device_only(options: "Options") -> List[str]:
    names = {name for name in options._Popart.options if name not in EFFECTIVE | _OF_POPTORCH and name in TYPES}
    if set(options._Popart.options.get("convolutionOptions", ())) == {"partialsType"}:
        names.discard("convolutionOptions")  # what partialsTypeMatMuls says for matrix products
    names |= {"patterns"} & options._Popart.options.keys()
    names |= options.TensorLocations.toDict().keys()
    if options.available_memory_proportion:
        names.add("available_memory_proportion")
    if options.sync_pattern != SyncPattern.Full:
        names.add("sync_pattern")
    return sorted(names)


def strategy_values(strategy: _ExecutionStrategy) -> Dict[str, Any]:
    """Return an execution strategy as PopART is given it: 0 pipelined, 1 sharded, 2 phased."""
    if strategy.pipelined:
        return {"execution_mode": 0}
    if not isinstance(strategy, (SerialPhasedExecution, ParallelPhasedExecution)):
        return {"execution_mode": 1}
    parallel = isinstance(strategy, ParallelPhasedExecution)
    liveness = getattr(strategy, "_liveness", Liveness.AlwaysLive)
    if parallel and getattr(strategy, "_off_chip", False):
        liveness = Liveness.OffChipAfterFwd
    return {
        "execution_mode": 2,
        "separate_backward_phase": strategy._separate_backward,
        "tensors_liveness": int(liveness),
        "serial_phases_execution": not parallel,
    }
