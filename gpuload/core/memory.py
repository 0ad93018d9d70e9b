"""How much memory this process may still take, and whether that is enough."""

import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuload.core.errors import HostMemoryError

_CGROUP = Path("/sys/fs/cgroup")

_PER_BYTE = 150  # bytes that tokenizers 0.23 takes while it encodes a byte of text: 110 to 150 were measured
LONG_TEXT = 1 << 22  # bytes of text: below, nobody asks the system
_reserved: dict[int, int] = {}  # thread → bytes that it may be taking now to encode a long text
_released = threading.Condition()


class NoRoomError(HostMemoryError):
    """There is too little memory for `tokenizers` to encode one text."""

    def __init__(self, place: str, why: str):
        super().__init__(f"{place} {why}")
        self.why = why  # the message without the text's place


@contextmanager
def room_to_encode(nbytes: int, place: str = "a text") -> Iterator[None]:
    """Checks that there is memory for `tokenizers` to encode one text; without it, the system kills the process.

    What other threads may be taking at the same time counts as well. If there is too little because of them, this one
    waits until they are done: whether a row is encoded does not depend on its neighbors.

    Raises:
        NoRoomError: there is too little; `place` says which text it is.
    """
    me, needed = threading.get_ident(), _PER_BYTE * nbytes
    if nbytes <= LONG_TEXT or needed <= _reserved.get(me, 0):  # the latter: a call within a call, for the same text
        yield
        return
    with _released:
        while (free := free_memory()) is not None:
            # What others have taken already counts twice, which is on the safe side.
            others = sum(held for thread, held in _reserved.items() if thread != me)
            if needed + others <= free:
                break
            if not others:
                raise NoRoomError(
                    place,
                    f"has {nbytes:,} bytes: to encode it, tokenizers takes about {needed:,} bytes of memory, and "
                    f"{free:,} are free: split the row or remove it",
                )
            _released.wait()
        before = _reserved.get(me, 0)
        _reserved[me] = needed
    try:
        yield
    finally:
        with _released:
            _reserved[me] = before
            if not before:
                del _reserved[me]
            _released.notify_all()


def free_memory() -> int | None:
    """Bytes that are free on this machine, or in this container or for this process if that is less; None if the system
    does not say.

    From `/proc/meminfo`, the limits of the second version of Linux' control groups, and that of the address space.
    """
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        with suppress(OSError, KeyError, ValueError):  # "max": no limit
            limit = int((_CGROUP / "memory.max").read_text())
            held = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            free = min(free, limit - int(held["anon"]))  # other pages can be dropped
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free = min(free, limit - pages * resource.getpagesize())
        return max(free, 0)
    return None


_pausing = threading.Lock()
_paused = 0  # blocks that are open in all threads


def _in_child() -> None:
    """A process that was forked has none of the threads that were inside."""
    global _pausing, _paused
    _pausing = threading.Lock()
    if _paused:
        _paused = 0
        gc.enable()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Makes no garbage collections in a block that creates many objects without cycles, such as those of JSON.

    A full collection looks at every object of the process, for a fifth of a second with torch and transformers, and
    some hundred thousand new objects cause one. Several threads may be inside; the last one that leaves ends the pause.
    """
    global _paused
    with _pausing:
        was_enabled = _paused > 0 or gc.isenabled()
        _paused += was_enabled
        gc.disable()
    try:
        yield
    finally:
        with _pausing:
            _paused = max(_paused - was_enabled, 0)  # 0 already in a process that was forked in this block
            if was_enabled and not _paused:
                gc.enable()
