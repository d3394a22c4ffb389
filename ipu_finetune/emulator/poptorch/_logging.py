# SPDX-License-Identifier: Apache-2.0
"""The `poptorch` logger and its level; nothing is touched until somebody asks."""

import logging
from typing import Union

logger = logging.getLogger("ipu_finetune.emulator")

_LEVELS = {
    "TRACE": logging.DEBUG,
    "TRACE_ALL": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "DEBUG_IR": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}
_BY_NUMBER = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}


def setLogLevel(level: Union[str, int]) -> None:
    """Set how much the emulator logs: one of TRACE, DEBUG, INFO, WARN, ERR, OFF.

    Raises:
        ValueError: no such level.
    """
    if isinstance(level, int):
        if level not in _BY_NUMBER:
            raise ValueError(f"Invalid log level integer {level}: expected one of {sorted(_BY_NUMBER)}")
        level = _BY_NUMBER[level]
    if level not in _LEVELS:
        raise ValueError(f"Unknown log level {level}: expected one of {', '.join(_LEVELS)}")
    logger.setLevel(_LEVELS[level])


def setPopartLogLevel(level: Union[str, int]) -> None:
    """Accepted and checked; there is no PopART here that could log."""
    if isinstance(level, str) and level not in _LEVELS:
        raise ValueError(f"Unknown log level {level}: expected one of {', '.join(_LEVELS)}")
