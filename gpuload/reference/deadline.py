"""A limit of time for one call, on any thread.

Chat templates are programs, and transformers runs them without limits. A signal reaches the main thread only, but
rows are rendered in other threads, so a watching thread raises an exception in the thread that is late
(`PyThreadState_SetAsyncExc`). That stops every loop, macro and recursion, because these are Python code. It does not
stop a single operation in C while it runs (`'x' * 10**10`): the tracer bounds these in advance, see
`template/bounds.py`.

    1. The caller enters its deadline in `_running`. Assigning to a dict is atomic, no lock is needed.
    2. The watching thread looks at all entries several times a second, while it holds `_round`.
    3. The caller removes its entry, waits for a round in progress, and withdraws an exception that was raised too late
       to be delivered. So none is ever delivered after the call.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gpuload.core.records import dataclass

_Result = TypeVar("_Result")

FIRST_SECONDS, LATER_SECONDS = 15.0, 2.0
"""Limit for one row; after a row has exceeded it, the limit for others. Rows take milliseconds."""

MOST_LATE = 16
"""After so many late rows the template is not tried any more."""

_INTERVAL = 0.1


class EndlessError(Exception):
    """The template exceeded a limit of steps, seconds or size."""


class _LateError(BaseException):
    """Raised in a thread that is late. Not an `Exception`: no handler in a template's way may catch it."""


@dataclass(eq=False)
class _Timed:
    deadline: float
    late: bool = False


_running: dict[int, _Timed] = {}  # thread → what it is doing
_round = threading.Lock()
_watching: list[int] = []  # the process whose watching thread runs, if any


class Deadline:
    """Limits the time of calls that render one row each.

    Attributes:
        late: how many calls exceeded their limit.
    """

    def __init__(self) -> None:
        self.late = 0

    def within(self, call: Callable[[], _Result], more: float = 0.0) -> _Result:
        """Return the result of `call`.

        Args:
            call: what has a limit.
            more: seconds that are added to the limit, for what is not the template's work.

        Raises:
            EndlessError: it took too long.
            Exception: whatever `call` raises.
        """
        if self.late >= MOST_LATE:
            raise EndlessError(f"the template did not finish for {self.late} other rows, so this one was not rendered")
        seconds = (LATER_SECONDS if self.late else FIRST_SECONDS) + more
        thread = threading.get_ident()
        if thread in _running:  # a call inside another one, which has a deadline already
            return call()
        _watch()
        entry = _Timed(time.monotonic() + seconds)
        try:
            _running[thread] = entry
            try:
                return call()
            finally:
                _running.pop(thread, None)
                with _round:
                    pass
                if entry.late:
                    _raise_in(thread, None)
        except _LateError:
            _running.pop(thread, None)
            self.late += 1
            raise EndlessError(f"the template did not finish within {seconds:g} s") from None


def _watch() -> None:
    """Start the watching thread, once in each process."""
    if _watching != [os.getpid()]:
        _watching[:] = [os.getpid()]
        threading.Thread(target=_look, name="gpuload-deadline", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_INTERVAL)
        with _round:
            now = time.monotonic()
            for thread, entry in list(_running.items()):
                if now > entry.deadline and _running.get(thread) is entry:
                    entry.late = True
                    entry.deadline = now + 1.0  # again, if the exception was raised where it is ignored (`__del__`)
                    _raise_in(thread, _LateError)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread; None withdraws one that it has not seen yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


def _after_fork() -> None:
    """A forked child has one thread, and the lock may have been held by another."""
    global _round
    _round = threading.Lock()
    _running.clear()
    _watching.clear()


os.register_at_fork(after_in_child=_after_fork)
