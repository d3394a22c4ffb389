# SPDX-License-Identifier: Apache-2.0
"""U38: a compilation says that it is alive, and ends at the user's limit with a message."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipu_finetune.errors import UsageError
from ipu_finetune.training import compilation
from ipu_finetune.training.compilation import CompileTimeoutError, watched


def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_u38_a_long_compilation_reports_its_time_and_memory():
    said = []
    with watched(said.append, every=0.05):
        busy(0.3)
    assert len(said) >= 2
    assert all(re.fullmatch(r"still compiling after 0 s, \d+\.\d GiB of memory in use", line) for line in said)


def test_u38_at_the_limit_it_is_stopped_with_a_clean_message():
    started = time.monotonic()
    message = r"--compile-timeout 0\.2 .* folder and log are kept"
    with pytest.raises(CompileTimeoutError, match=message) as caught, watched(print, limit=0.2):
        busy(60)
    assert time.monotonic() - started < 5
    assert caught.value.exit_code == 1


def test_the_limit_holds_in_a_process_that_ignores_interrupts_as_in_the_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(CompileTimeoutError), watched(print, limit=0.2):
            busy(60)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_ends_in_time_is_left_alone():
    with watched(print, limit=0.3):
        busy(0.05)
    busy(0.5)  # an interrupt would arrive here


def test_the_users_own_interrupt_stays_one():
    with pytest.raises(KeyboardInterrupt), watched(print, limit=60):
        raise KeyboardInterrupt


def test_an_error_of_the_compilation_passes():
    with pytest.raises(ZeroDivisionError), watched(print, limit=60):
        raise ZeroDivisionError


def test_a_limit_needs_the_main_thread():
    caught = []

    def work():
        try:
            with watched(print, limit=1):
                pass
        except UsageError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_u38_native_code_that_answers_no_interrupt_ends_with_the_process():
    text = (
        "import signal, time\n"
        "from ipu_finetune.training import compilation\n"
        "compilation._GRACE = 0.3\n"
        "signal.signal(signal.SIGINT, lambda *_: None)  # as while a C++ call runs\n"
        "with compilation.watched(print, limit=0.2): time.sleep(60)\n"
    )
    root = Path(compilation.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("error: compiling took longer than --compile-timeout 0.2")
