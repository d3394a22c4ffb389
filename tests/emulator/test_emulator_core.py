# SPDX-License-Identifier: Apache-2.0
"""What scripts ask of PopTorch's compiled core: the hardware, the log and the errors."""

import logging
import sys

import pytest

from ipu_finetune import emulator
from ipu_finetune.emulator import poptorch


@pytest.mark.parametrize(("value", "version"), [(None, 2), ("2", 2), ("21", 21), ("1", 1)])
def test_the_generation_is_two_unless_the_environment_names_another(monkeypatch, value, version):
    monkeypatch.delenv("IPU_FINETUNE_EMULATED_HARDWARE", raising=False)
    if value is not None:
        monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", value)
    assert poptorch.ipuHardwareVersion() == version
    assert poptorch.ipuHardwareIsAvailable()


@pytest.mark.parametrize("variable", ["IPU_FINETUNE_EMULATED_HARDWARE=0", "POPTORCH_IPU_MODEL=1"])
def test_a_machine_without_an_ipu_can_be_claimed(monkeypatch, variable):
    monkeypatch.setenv(*variable.split("="))
    assert not poptorch.ipuHardwareIsAvailable()
    assert poptorch.poptorch_core.ipuHardwareVersion() == 0
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()


def test_an_unknown_generation_is_refused(monkeypatch):
    monkeypatch.setenv("IPU_FINETUNE_EMULATED_HARDWARE", "3")
    with pytest.raises(poptorch.Error, match="=3: expected 1, 2 or 21"):
        poptorch.ipuHardwareVersion()


@pytest.fixture
def log():
    yield poptorch._logging.logger
    poptorch._logging.stop()


def test_log_levels(log):
    poptorch.setLogLevel("ERR")
    assert log.level == logging.ERROR
    poptorch.setLogLevel(1)
    assert log.level == logging.DEBUG
    poptorch.setLogLevel("TRACE")
    assert log.level < logging.DEBUG
    poptorch.setLogLevel("OFF")
    assert not log.isEnabledFor(logging.CRITICAL)
    with pytest.raises(
        ValueError, match="Unknown log level: LOUD. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
    ):
        poptorch.setLogLevel("LOUD")
    with pytest.raises(ValueError, match="Invalid log level integer 5"):
        poptorch.setLogLevel(5)
    for level in (0, "LOUD"):
        with pytest.raises(ValueError, match="Level must be one of TRACE,"):
            poptorch._logging.setPopartLogLevel(level)
    poptorch._logging.setPopartLogLevel("DEBUG")


def test_the_log_is_written_to_stderr_once_a_level_is_set(log, capsys):
    log.warning("before")
    poptorch.setLogLevel("INFO")
    log.info("one")
    log.debug("none")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[ipu_finetune.emulator] [info] one" in shown.err
    assert "none" not in shown.err
    poptorch._logging.stop()
    log.info("after")
    assert "after" not in capsys.readouterr().err


def test_a_line_is_not_printed_twice_where_the_program_prints_the_log_itself(log, capsys):
    own = logging.StreamHandler(sys.stderr)
    poptorch.setLogLevel("INFO")
    logging.getLogger().addHandler(own)
    try:
        log.info("once")
    finally:
        logging.getLogger().removeHandler(own)
    assert capsys.readouterr().err.count("once") == 1


def test_the_log_goes_where_the_environment_says(log, capsys, monkeypatch, tmp_path):
    path = tmp_path / "log.txt"
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(path))
    poptorch.setLogLevel("INFO")
    log.info("to the file")
    monkeypatch.setenv("POPTORCH_LOG_DEST", "stdout")
    log.info("to stdout")
    shown = capsys.readouterr()
    assert "to the file" in path.read_text()
    assert (shown.out.count("to stdout"), shown.err) == (1, "")


def test_installing_takes_the_level_from_the_environment_and_gives_it_back(monkeypatch):
    logger = poptorch._logging.logger
    before = (logger.level, list(logger.handlers))
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "DEBUG")
    emulator.install()
    try:
        assert logger.level == logging.DEBUG
    finally:
        emulator.uninstall()
    assert (logger.level, list(logger.handlers)) == before
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="Unknown log level: LOUD"):
        emulator.install()
    assert not emulator.is_installed()


def test_errors_are_runtime_errors_and_part_of_our_tree():
    from ipu_finetune.errors import IpuFinetuneError

    error = poptorch.Error("text")
    assert isinstance(error, RuntimeError)
    assert isinstance(error, IpuFinetuneError)
    assert (error.message, error.type) == ("text", "poptorch_py_error")
    assert poptorch.poptorch_core.Error is poptorch.Error
    assert poptorch.RecoverableError("x", recovery_action="LINK_RESET").recovery_action == "LINK_RESET"


@pytest.mark.parametrize("kind", list(poptorch.poptorch_core.TestErrorType))
def test_an_error_of_every_layer_can_be_raised_and_says_where(kind):
    with pytest.raises(poptorch.Error) as raised:
        poptorch.poptorch_core._throwTestError(kind)
    error = raised.value
    text = str(error)
    assert error.type in text
    assert error.message in text
    assert "throwTestError" not in error.message
    for name in ("throwTestError::bottomLevel", "throwTestError::topLevel"):
        assert error.location.count(name) == 1
        assert name in text


def test_errors_that_a_program_can_act_on_have_their_class_and_action():
    kinds = poptorch.poptorch_core.TestErrorType
    with pytest.raises(poptorch.RecoverableError) as raised:
        poptorch.poptorch_core._throwTestError(kinds.PoplarRecoverableFullReset)
    assert raised.value.recovery_action == "FULL_RESET"
    assert raised.value.type == "poplar_recoverable_runtime_error"
    with pytest.raises(poptorch.UnrecoverableError) as raised:
        poptorch.poptorch_core._throwTestError(kinds.PoplarUnrecoverable)
    assert raised.value.type == "poplar_unrecoverable_runtime_error"
    with pytest.raises(poptorch.Error, match="-lfoo not found") as raised:
        poptorch.poptorch_core._throwTestError(kinds.PoplarLinkError)
    assert raised.value.type == "poplar_link_error"
