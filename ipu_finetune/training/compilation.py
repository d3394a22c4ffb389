# SPDX-License-Identifier: Apache-2.0
"""A compilation that does not look hung and does not outlive its time limit.

Poplar compiles a large model for minutes to hours, in native code that says nothing. So a thread reports that it is
alive and how much memory it takes, and stops it at the limit that the user has set.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Callable, Iterator, Optional

from ipu_finetune.errors import IpuFinetuneError, UsageError

__all__ = ["CompileTimeoutError", "watched"]

_GRACE = 10.0


class CompileTimeoutError(IpuFinetuneError):
    """Compiling took longer than the user allows."""


@contextlib.contextmanager
def watched(say: Callable[[str], None], limit: Optional[float] = None, every: float = 60.0) -> Iterator[None]:
    """Report on what runs inside, and stop it at a time limit.

    Args:
        say: is given one line after each `every` seconds.
        limit: seconds after which the work inside is interrupted; None for no limit. Native code that does not answer
            an interrupt within 10 s ends with the process, exit code 1, after the message has been said.
        every: seconds between two reports.

    Raises:
        CompileTimeoutError: the limit was reached.
        UsageError: a limit is set outside of the main thread, the only one that can be interrupted.
    """
    if limit is not None and threading.current_thread() is not threading.main_thread():
        raise UsageError("a time limit for compiling is only kept in the main thread; leave it out, or compile there")
    with _interruptible() if limit is not None else contextlib.nullcontext():
        watch = _Watch(say, limit, every)
        try:
            yield
            watch.stop()
        except KeyboardInterrupt:
            if watch.stop():
                raise CompileTimeoutError(watch.message) from None
            raise
        finally:
            watch.stop()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let an interrupt arrive, also in a process that was started in the background, where SIGINT is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Watch:
    def __init__(self, say: Callable[[str], None], limit: Optional[float], every: float) -> None:
        self._say, self._limit, self._every = say, limit, every
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._fired = False
        self._thread = threading.Thread(target=self._run, name="compile-watch", daemon=True)
        self._thread.start()

    @property
    def message(self) -> str:
        return (
            f"compiling took longer than --compile-timeout {self._limit:g} and was stopped after "
            f"{time.monotonic() - self._started:.0f} s. The run's folder and log are kept. "
            "Give it more time, compile ahead into a shared executable cache (--set ipu.executable_cache_dir=DIR), or "
            "make the graph smaller: fewer layers per IPU, a shorter task.max_length, fewer outputs."
        )

    def stop(self) -> bool:
        """End the watch; return whether it has interrupted the work."""
        with self._lock:
            fired, stopped = self._fired, self._done.is_set()
            self._done.set()
        if fired and not stopped:
            # The interrupt is on its way; it must not arrive in what comes next.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.2)
        return fired

    def _run(self) -> None:
        reported = self._started
        while True:
            now = time.monotonic()
            waits = [reported + self._every - now]
            if self._limit is not None:
                waits.append(self._started + self._limit - now)
            if self._done.wait(max(0.0, min(waits))):
                return
            now = time.monotonic()
            if self._limit is not None and now - self._started >= self._limit:
                return self._interrupt()
            reported = now
            self._say(f"still compiling after {now - self._started:.0f} s, {_resident()} of memory in use")

    def _interrupt(self) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._fired = True
            _thread.interrupt_main()
        if not self._done.wait(_GRACE):
            self._say(f"error: {self.message}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _resident() -> str:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not Linux
        return "an unknown amount"
    return f"{size / 2**30:.1f} GiB"
