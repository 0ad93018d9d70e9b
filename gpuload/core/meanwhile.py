"""Work that keeps the interpreter lock for a tenth of a second, done while another thread encodes without it."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Meanwhile(Generic[Result]):
    """Work that begins with the next `without_lock`, or when its result is asked for, in a thread of its own."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._made: Future[Result] | None = None
        _waiting.add(self)

    def begin(self) -> None:
        """Begins the work, unless it has begun. It waits for the interpreter lock until the caller gives it up."""
        with self._lock:
            if self._made is None:
                # A new thread runs before the one that has started it, unless it waits.
                go, thread = threading.Event(), ThreadPoolExecutor(1, "meanwhile")
                self._made = thread.submit(lambda: (go.wait(), self._work())[1])
                thread.shutdown(wait=False)
                go.set()

    def result(self) -> Result:
        """The result of the work; an error if it had one."""
        self.begin()
        assert self._made is not None
        return self._made.result()


_waiting: "weakref.WeakSet[Meanwhile[Any]]" = weakref.WeakSet()


def without_lock() -> None:
    """Begins what waits. The caller is about to call what gives up the interpreter lock for long."""
    while _waiting:
        try:
            _waiting.pop().begin()
        except KeyError:  # another thread has taken the last one
            return
