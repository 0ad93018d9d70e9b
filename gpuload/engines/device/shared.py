"""What the loads of a process share on a device: streams, and tables of tokenizers."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

_Made = TypeVar("_Made")


class OnDevice:
    """Tables on a device, with kernels that work on them: loads share the tables, and each has kernels of its own."""

    _kernels: Any

    def on(self, kernels: Any) -> Self:
        """The same tables, for other kernels of the device."""
        made = copy.copy(self)
        made._kernels = kernels
        return made


class ThreadStreams:
    """The streams of a load, one per thread.

    Each stage of a load has a thread, so each has a stream, and the stages of successive batches run on the device at
    the same time. There are no events between the streams. Instead, a thread hands over nothing but finished work, see
    `current`: so whoever gets an array may use it on another stream, and free it. `idle` are streams that no load uses,
    which are taken first; others are made by the thread that will use them.
    """

    def __init__(self, make: Callable[[], Any], idle: list[Any] | None = None) -> None:
        self._make, self._of = make, threading.local()
        self._idle: list[Any] = [] if idle is None else idle
        self._used: list[Any] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the thread's stream its current one. When the context ends, the work on it is done."""
        if (stream := getattr(self._of, "thread", None)) is None:
            try:
                stream = self._idle.pop()
            except IndexError:
                stream = self._make()
            self._of.thread = stream
            self._used.append(stream)
        with stream:
            try:
                yield
            finally:  # also after an error, which frees arrays
                stream.synchronize()

    def release(self) -> None:
        """Give the streams to later loads."""
        self._of = threading.local()
        while self._used:
            self._idle.append(self._used.pop())


class SharedTables:
    """What the loads of a process share in the memory of a device: the tables of the last `most` tokenizers. Those of
    others are freed when the last load that uses them is over."""

    def __init__(self, most: int = 2) -> None:
        self._most, self._lock = most, threading.Lock()
        self._made: dict[bytes, dict[str, Any]] = {}  # the tokenizer that was used last comes last

    def get(self, digest: bytes, what: str, make: Callable[[], _Made]) -> _Made:
        """Return what was made before of the same digest and kind, or make it."""
        with self._lock:
            of_tokenizer = self._made[digest] = self._made.pop(digest, {})
            while len(self._made) > self._most:
                del self._made[next(iter(self._made))]
            if what not in of_tokenizer:
                of_tokenizer[what] = make()
            found: _Made = of_tokenizer[what]
            return found
