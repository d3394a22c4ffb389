# SPDX-License-Identifier: Apache-2.0
"""The emulator's log: one logger, and the levels and environment variables by which PopTorch's users control it.

Nothing is touched until `start` (which `emulator.install` calls) or `setLogLevel` asks for it.
"""

import datetime
import logging
import os
import sys
from typing import Iterator, Optional, Union

__all__ = ["TRACE", "logger", "setLogLevel", "setPopartLogLevel", "start", "stop"]

logger = logging.getLogger("ipu_finetune.emulator")

#: Below `logging.DEBUG`.
TRACE = 5

_LEVELS = {
    "TRACE": TRACE,
    "TRACE_ALL": TRACE,
    "DEBUG": logging.DEBUG,
    "DEBUG_IR": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}
_BY_NUMBER = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}
_VALID = "DEBUG, ERR, INFO, OFF, TRACE and WARN"


class _Output(logging.Handler):
    """Writes to the stream that `POPTORCH_LOG_DEST` names when a line is written, or to the file of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(clock)s] [%(name)s] [%(level)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        record.level = record.levelname.lower()
        record.clock = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")
        destination = os.environ.get("POPTORCH_LOG_DEST", "stderr")
        try:
            if destination not in ("stdout", "stderr"):
                with open(destination, "a", encoding="utf-8") as file:
                    print(self.format(record), file=file)
            elif not any(handler.stream in (sys.stdout, sys.stderr) for handler in _above()):
                print(self.format(record), file=getattr(sys, destination), flush=True)
        except Exception:
            self.handleError(record)


def _above() -> Iterator["logging.StreamHandler"]:
    """Yield the handlers that the program has set up itself and that get our lines as well."""
    above: Optional[logging.Logger] = logger
    while above is not None:
        yield from (handler for handler in above.handlers if isinstance(handler, logging.StreamHandler))
        above = above.parent if above.propagate else None


_output = _Output()
_level_before: Optional[int] = None


def start() -> None:
    """Write the log to stderr (or `POPTORCH_LOG_DEST`), from the level of `POPTORCH_LOG_LEVEL`, WARN by default."""
    setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))


def stop() -> None:
    """Undo `start` and every `setLogLevel`."""
    global _level_before
    if _level_before is None:
        return
    logger.removeHandler(_output)
    logger.setLevel(_level_before)
    _level_before = None


def setLogLevel(level: Union[str, int]) -> None:
    """Set how much the emulator logs, and write the log: one of TRACE, DEBUG, INFO, WARN, ERR, OFF.

    Raises:
        ValueError: no such level.
    """
    global _level_before
    if isinstance(level, int):
        if level not in _BY_NUMBER:
            raise ValueError(f"Invalid log level integer {level}: expected one of {sorted(_BY_NUMBER)}")
        level = _BY_NUMBER[level]
    if level not in _LEVELS:
        raise ValueError(f"Unknown log level: {level}. Valid values are {_VALID}")
    if _level_before is None:
        _level_before = logger.level
        logger.addHandler(_output)
    logger.setLevel(_LEVELS[level])


def setPopartLogLevel(level: str) -> None:
    """Accepted and checked; there is no PopART here that could log.

    Raises:
        ValueError: no such level, or not a string.
    """
    if not isinstance(level, str) or level not in _LEVELS:
        raise ValueError(f"Level must be one of {', '.join(_LEVELS)}, got {level!r}")
