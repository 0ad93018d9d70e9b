"""Streams in host memory: strict arrays that find races between streams, whether or not they occur in this run.

    kernels = StreamKernels()
    with kernels.loading():
        load ...
    assert kernels.races == []

Every operation on arrays, every launch of a kernel and every free is at a point in the order of one stream. Two such
points are ordered if they are on the same stream, or if events or waits of the host lie between them. So each stream
and each thread has a vector clock: for each stream, how many of its operations are known to be done before whatever
comes next.

    an operation       happens after all that its stream knows and all that its thread knows
    event, wait        `wait_event`: the stream learns what the event knows; `synchronize`: the thread learns from the
                       stream
    handing over       a task learns from the thread that submits it, and whoever asks for its result from the task
    free               happens in the order of the stream that allocated the memory. What any thread has waited for is
                       done: the last reference is dropped after all others

A race is a read that is not ordered after the last write, a write that is not ordered after the last write and all
reads since, a free that is not ordered after all of them, and work outside of `kernels.current()` in a load. A kernel
reads what its `const` parameters point to, and all memory whose address is among their numbers; it writes what its
other parameters point to. Memory is what was allocated as one array: parts of an array are not distinguished. What the
host has in its own memory, and what a tensor has, is not followed.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np

from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.shared import ThreadStreams
from simulator.strict_arrays import DeviceArray, StrictKernels, StrictModule

Clock = dict[int, int]
"""Number of a stream → how many of its operations are done."""


def _learn(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class HostStream:
    """A stream of `StreamKernels`, with the interface of CuPy's.

    Args:
        checker: of the kernels.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self.clock: Clock = {}
        with checker.lock:
            self.number = checker.streams = checker.streams + 1

    def __enter__(self) -> HostStream:
        self._checker.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._checker.current.pop()

    def synchronize(self) -> None:
        """Make the thread wait for the work on this stream."""
        _learn(self._checker.thread_clock(), self.clock)

    def record(self) -> Clock:
        """Return an event: all work on this stream so far."""
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        """Make later work on this stream wait for an event."""
        _learn(self.clock, event)


class _Memory:
    """One allocation.

    Attributes:
        address, nbytes: where it is.
        pool: the stream that it is freed on; None if a free waits for all work.
        written: stream, number and name of the last operation that wrote.
        read: stream → number and name of its last operation that read since.
    """

    def __init__(self, memory: np.ndarray[Any, Any], pool: HostStream | None, written: tuple[int, int, str]) -> None:
        self.address, self.nbytes, self.pool = memory.ctypes.data, memory.nbytes, pool
        self.written = written
        self.read: dict[int, tuple[int, str]] = {}

    def uses(self) -> list[tuple[int, int, str]]:
        """Stream, number and name of all uses that another one could race with."""
        return [self.written, *((stream, *one) for stream, one in self.read.items())]


class RaceChecker:
    """Clocks of streams and threads, and the last uses of all memory.

    Attributes:
        races: descriptions of all races so far.
        streams: how many streams there are.
        loading: whether work outside of `kernels.current()` is an error.
        lasting: whether memory is being allocated outside of the pool.
        default: the stream of threads that have entered none.
        lock: protects all of this, except from frees, which can happen while it is held.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.streams = 0
        self.loading = self.lasting = False
        self.lock = threading.RLock()
        self._here = threading.local()
        self._threads: list[Clock] = []
        self._memory: dict[int, _Memory] = {}
        self.default = HostStream(self)

    @property
    def current(self) -> list[HostStream]:
        """The streams that the calling thread has entered, the current one last."""
        if not hasattr(self._here, "entered"):
            self._here.entered = []
        entered: list[HostStream] = self._here.entered
        return entered

    def stream(self) -> HostStream:
        """Return the current stream of the calling thread."""
        if self.current:
            return self.current[-1]
        if self.loading:
            self.races.append("device work outside of kernels.current()")
        return self.default

    def thread_clock(self) -> Clock:
        """Return what is known to be done by the calling thread."""
        if not hasattr(self._here, "clock"):
            self._here.clock = {}
            with self.lock:
                self._threads.append(self._here.clock)
        clock: Clock = self._here.clock
        return clock

    def run(self, name: str, read: list[np.ndarray[Any, Any]], written: list[np.ndarray[Any, Any]]) -> None:
        """Note an operation on the current stream.

        Args:
            name: for messages.
            read, written: arrays; those that are not on memory of `allocate` are ignored.
        """
        with self.lock:
            stream, number = self._next()
            for array in read:
                if memory := self._memory.get(id(_base(array))):
                    self._check(f"read by {name}", stream, stream.clock, [memory.written])
                    memory.read[stream.number] = number, f"read by {name}"
            for array in written:
                if memory := self._memory.get(id(_base(array))):
                    self._check(f"written by {name}", stream, stream.clock, memory.uses())
                    memory.written, memory.read = (stream.number, number, f"written by {name}"), {}

    def allocate(self, array: np.ndarray[Any, Any]) -> None:
        """Note an array. If its memory is new, it has been allocated and written on the current stream."""
        base = _base(array)
        with self.lock:
            if base.base is None and base.nbytes and id(base) not in self._memory:
                stream, number = self._next()
                pool = None if self.lasting else stream
                self._memory[id(base)] = _Memory(base, pool, (stream.number, number, "allocated"))
                weakref.finalize(base, self._free, id(base)).atexit = False

    def at_addresses(self, numbers: np.ndarray[Any, Any]) -> list[int]:
        """Return the keys of all memory whose address is among some numbers."""
        places = sorted((memory.address, memory.nbytes, key) for key, memory in self._memory.copy().items())
        starts, sizes, keys = np.array(places, np.int64).reshape(-1, 3).T
        at = np.searchsorted(starts, numbers, side="right") - 1
        hit = at[(at >= 0) & (numbers < (starts + sizes)[at])]
        return [int(keys[i]) for i in np.unique(hit)]

    def read_memory(self, name: str, keys: list[int]) -> None:
        """Note that the latest operation on the current stream, a kernel, also reads some memory."""
        with self.lock:
            stream = self.stream()
            for memory in filter(None, map(self._memory.get, keys)):
                self._check(f"read by {name}", stream, stream.clock, [memory.written])
                memory.read[stream.number] = stream.clock[stream.number], f"read by {name}"

    def _next(self) -> tuple[HostStream, int]:
        """The current stream after another operation on it, and the number of this operation."""
        stream = self.stream()
        _learn(stream.clock, self.thread_clock())
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return stream, stream.clock[stream.number]

    def _check(self, now: str, here: HostStream, known: Clock, uses: list[tuple[int, int, str]]) -> None:
        for stream, number, before in uses:
            if known.get(stream, 0) < number:
                self.races.append(f"not ordered: {before} on stream {stream}, {now} on stream {here.number}")

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.pool is None:
            return
        known = memory.pool.clock.copy()
        for clock in self._threads.copy():
            _learn(known, clock.copy())
        self._check("freed", memory.pool, known, memory.uses())


def _base(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class _StreamArray(DeviceArray):
    """A device array whose copies to the host are operations on the current stream."""

    _xp: StreamModule

    def _number(self) -> Any:
        self._xp.checker.run("a copy to the host", [self.memory], [])
        return super()._number()

    def get(self) -> np.ndarray[Any, Any]:
        self._xp.checker.run("a copy to the host", [self.memory], [])
        return super().get()


class StreamModule(StrictModule):
    """NumPy's functions for device arrays on streams.

    Args:
        checker: learns of all operations.
    """

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()
        self.checker = checker
        self.ndarray = type("ndarray", (_StreamArray,), {"__module__": self.__name__})

    def note_memory(self, memory: np.ndarray[Any, Any]) -> None:
        super().note_memory(memory)
        self.checker.allocate(memory)

    def wait(self) -> None:
        super().wait()
        self.checker.stream().synchronize()

    def call(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        result = super().call(function, *arguments, **settings)
        owner = getattr(function, "__self__", None)  # of a ufunc's method
        name = owner.__name__ if isinstance(owner, np.ufunc) else function.__name__
        written = list(_arrays(settings.get("out")))
        if name == "__setitem__":
            written += _arrays(arguments[0])
        read = [array for array in _arrays([arguments, settings]) if all(array is not other for other in written)]
        if any(_base(array) is _base(other) for array in _arrays(result) for other in read):
            return result  # a view: nothing happens on the device
        self.checker.run(name, read, written)
        return result


def _arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The memory of all device arrays in a value."""
    if isinstance(value, DeviceArray):
        yield value.memory
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))


@cache
def _is_const() -> dict[str, list[bool]]:
    """Kernel → for each parameter, whether it is declared `const`."""
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', source())
    return {name: ["const" in one.split() for one in parameters.split(",")] for name, parameters in kernels}


class StreamKernels(StrictKernels):
    """`StrictKernels` that in a load use one stream per thread, as those of a GPU do, and find races."""

    xp: StreamModule

    def __init__(self) -> None:
        self._checker = RaceChecker()
        self.xp = StreamModule(self._checker)
        self._streams, self._side = ThreadStreams(self.new_stream), self.new_stream()

    @property
    def races(self) -> list[str]:
        """Descriptions of all races so far."""
        return self._checker.races

    def new_stream(self) -> HostStream:
        """Return another stream."""
        return HostStream(self._checker)

    def current(self) -> AbstractContextManager[Any]:
        return self._streams.current() if self._checker.loading else self._checker.stream()

    @contextmanager
    def loading(self) -> Iterator[None]:
        self._checker.loading = True
        try:
            with _hand_overs(self._checker), self.current():
                yield
        finally:
            self._checker.loading = False
            self._streams.release()

    @contextmanager
    def lasting(self) -> Iterator[None]:
        self._checker.lasting = True
        try:
            yield
        finally:
            self._checker.lasting = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._side.wait_event(self._checker.stream().record())
        with self._side:
            yield

    def rejoin(self) -> None:
        self._checker.stream().wait_event(self._side.record())

    def synchronize(self) -> None:
        self._checker.stream().synchronize()

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        super()._launch(name, blocks, arguments)
        read, written, keys = list[Any](), list[Any](), set[int]()
        for argument, const in zip(arguments, _is_const()[name], strict=True):
            if isinstance(argument, DeviceArray):
                (read if const else written).append(argument.memory)
                if const and argument.dtype == np.int64:
                    keys.update(self._checker.at_addresses(argument.memory))
        self._checker.run(name, read, written)
        self._checker.read_memory(name, sorted(keys))


@contextmanager
def _hand_overs(checker: RaceChecker) -> Iterator[None]:
    """In this context, tasks and those who wait for their results learn from each other what is done."""
    submit, result = ThreadPoolExecutor.submit, Future.result
    known = weakref.WeakKeyDictionary[Any, Clock]()

    def submitting(pool: Any, work: Any, /, *arguments: Any, **settings: Any) -> Any:
        before, after = dict(checker.thread_clock()), Clock()

        def working() -> Any:
            _learn(checker.thread_clock(), before)
            try:
                return work(*arguments, **settings)
            finally:
                after.update(checker.thread_clock())

        future = submit(pool, working)
        known[future] = after
        return future

    def waiting(future: Any, timeout: float | None = None) -> Any:
        try:
            return result(future, timeout)
        finally:
            _learn(checker.thread_clock(), known.get(future, {}))

    ThreadPoolExecutor.submit, Future.result = submitting, waiting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit, Future.result = submit, result  # type: ignore[method-assign]
