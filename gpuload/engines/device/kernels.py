"""The interface for launching kernels, and its implementation for a GPU.

    kernels = DeviceKernels(0)                                 # CuPy compiles kernels/*.cu for GPU 0
    kernels.run("hash_texts", kernels.threads(n), n, data, start, length, hash)

`tests/simulator/host_kernels.py` has another implementation, which compiles the same source for the host and runs it on
NumPy arrays. With it, everything in an engine except reading can be tested without a GPU.

A kernel cannot check its pointers: an argument of the wrong type silently reads or writes the wrong memory. So the
parameters of all kernels are parsed from the source, and every launch checks its arguments against them.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.core.arrays import Array
from gpuload.core.errors import DeviceError

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""Threads per block, as in `common.cuh`. The registers and the shared memory of each kernel allow at least half of the
threads that a multiprocessor can hold."""

MOST_BLOCKS = 1 << 20
"""Maximum number of blocks of a launch. Kernels loop over their items with the grid as stride, so any number will
do."""

FILES = (
    "common.cuh",
    "text.cuh",
    "scan.cuh",
    "gather.cu",
    "strings.cu",
    "shapes.cu",
    "pad.cu",
    "pack.cu",
    "pairs.cu",
    "answers.cu",
    "added.cu",
    "nfc.cu",
    "rewrite.cu",
    "split.cu",
    "words.cu",
    "merges.cu",
    "merges_long.cu",
    "tiles.cu",
    "ids.cu",
)

_TYPES = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "u16": np.uint16, "u8": np.uint8, "bool": np.bool_}
_TYPES |= {"float": np.float32}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as in the source.
        dtype: type of the number, or of the array's items.
        is_array: whether the parameter is a pointer.
    """

    name: str
    dtype: np.dtype[Any]
    is_array: bool


@cache
def source() -> str:
    """Return all kernels as one CUDA C++ source. `#line` makes compilers report the files' own line numbers."""
    directory = resources.files("gpuload.engines.kernels")
    return "".join(f'#line 1 "{name}"\n{(directory / name).read_text()}' for name in FILES)


@cache
def signatures() -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel by its name."""
    return parsed(source())


def parsed(text: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every kernel in a source by its name."""
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', text)
    return {name: tuple(map(_parameter, parameters.split(","))) for name, parameters in kernels}


def _parameter(declaration: str) -> Parameter:
    kind, pointer, name = re.fullmatch(r"\s*(?:const )?(\w+)\s*(\*?)\s*(\w+)\s*", declaration).groups()  # type: ignore[union-attr]
    return Parameter(name, np.dtype(_TYPES[kind]), bool(pointer))


class ThreadStreams:
    """The streams of a load, one per thread.

    Each stage of a load has a thread, so each has a stream, and the stages of successive batches run on the device at
    the same time. There are no events between the streams. Instead, a thread hands over nothing but finished work, see
    `current`: so whoever gets an array may use it on another stream, and free it.

    Args:
        make: makes a stream. It is called by the thread that will use the stream.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._of = make, threading.local()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the thread's stream its current one. When the context ends, the work on it is done."""
        if not hasattr(self._of, "thread"):
            self._of.thread = self._make()
        stream = self._of.thread
        with stream:
            try:
                yield
            finally:  # also after an error, which frees arrays
                stream.synchronize()


class Kernels:
    """Kernels compiled for one kind of machine. The defaults are those of a machine without a GPU.

    Attributes:
        xp: the array module whose arrays the kernels take, NumPy or CuPy.
        device: torch's name of the device that holds these arrays.
        ids_limit: bytes of device memory that are left for the store of ids during a load; None for any number.
        segment: SEGMENT of `tiles.cu`, the bytes of each thread.
        resident: number of threads for a launch whose number of items only the device knows: more than it can hold at
            the same time.
    """

    xp: ModuleType
    segment = 16
    resident = 1 << 20
    device = "cpu"
    ids_limit: int | None = None

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread uses this device: on torch's current stream there, or in a load
        on a stream of the thread's own, with which the context waits for the work at its end."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[Any]:
        """Return a context for a load, whose end releases the device memory that was allocated inside."""
        return nullcontext()

    def lasting(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays are allocated in memory that outlives the load."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which work goes to a side stream, after all work submitted to the current one so far."""
        return nullcontext()

    def rejoin(self) -> None:
        """Make the current stream wait for the side stream."""

    def tensor(self, *shape: int) -> tuple["torch.Tensor", Array]:
        """Return an uninitialized int64 tensor on this device, and an array for kernels that shares its memory."""
        import torch

        made = torch.empty(shape, dtype=torch.int64, device=self.device)
        return made, self.xp.from_dlpack(made) if made.numel() else self.xp.empty(shape, np.int64)

    def view(self, buffer: Any) -> Array:
        """Return a cuDF buffer as a uint8 array, zero-copy."""
        return self.xp.asarray(buffer)

    def pinned(self, array: np.ndarray[Any, Any]) -> int:
        """Pin a host array in place for as long as it exists, and return the address where kernels read it."""
        return int(array.ctypes.data)

    def synchronize(self) -> None:
        """Wait for all work submitted to the current stream."""

    def stream(self) -> Any:
        """Return the current stream as cuDF takes it; None for its default one."""
        return None

    def run(self, name: str, threads: int, *arguments: Any) -> None:
        """Launch a kernel.

        Args:
            name: the kernel's name.
            threads: number of threads in total, rounded up to whole blocks and limited by `MOST_BLOCKS`; 0 launches
                nothing. See `threads`, `warps` and `blocks`.
            *arguments: numbers, and contiguous arrays of `xp` with the parameters' dtypes.

        Raises:
            TypeError: the arguments do not match the kernel's parameters.
        """
        self.prepare(name)(threads, *arguments)

    def prepare(self, name: str, *constants: Any) -> Callable[..., None]:
        """Check a kernel's first arguments once, for many launches.

        Returns:
            A function of `threads` and the other arguments, which launches the kernel as `run` does.
        """
        parameters = signatures()[name]
        first = [self._checked(name, *pair) for pair in zip(parameters, constants, strict=False)]
        others = parameters[len(constants) :]

        def launch(threads: int, *arguments: Any) -> None:
            if len(arguments) != len(others):
                given = len(constants) + len(arguments)
                raise TypeError(f"kernel {name} takes {len(parameters)} arguments, not {given}")
            checked = [self._checked(name, *pair) for pair in zip(others, arguments, strict=True)]
            if threads:
                self._launch(name, min(-(-threads // BLOCK), MOST_BLOCKS), first + checked)

        return launch

    def _checked(self, kernel: str, parameter: Parameter, argument: Any) -> Any:
        if not parameter.is_array:
            return parameter.dtype.type(argument)
        if not isinstance(argument, self.xp.ndarray) or argument.dtype != parameter.dtype:
            found = f"{type(argument).__module__}.{type(argument).__name__} {getattr(argument, 'dtype', '')}"
            expected = f"a {self.xp.__name__} array of {parameter.dtype}"
            raise TypeError(f"kernel {kernel}: {parameter.name} must be {expected}, not {found}")
        if not argument.flags.c_contiguous:
            raise TypeError(f"kernel {kernel}: {parameter.name} is not contiguous")
        return argument

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        raise NotImplementedError

    def address(self, array: Array) -> int:
        """Return the address of an array's first item."""
        raise NotImplementedError

    @staticmethod
    def threads(items: int) -> int:
        """Number of threads for a kernel with one thread per item."""
        return items

    @staticmethod
    def warps(items: int) -> int:
        """Number of threads for a kernel with one warp per item."""
        return 32 * items

    @staticmethod
    def blocks(items: int) -> int:
        """Number of threads for a kernel with one block per item."""
        return BLOCK * items


@cache
def _functions(number: int) -> Callable[[str], Any]:
    """The kernels of a GPU by name, compiled once per process."""
    import cupy

    with cupy.cuda.Device(number):
        module = cupy.RawModule(code=source(), options=("-std=c++17",))
    return lru_cache(maxsize=None)(module.get_function)


class DeviceKernels(Kernels):
    """Kernels for a GPU, compiled by CuPy at the first launch; CuPy caches the machine code on disk.

    Kernels run on CuPy's current stream; `current` sets it to torch's.

    Args:
        number: the GPU's index.

    Raises:
        DeviceError: CuPy is not installed.
    """

    def __init__(self, number: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceError("the GPU engine needs CuPy: pip install 'gpuload[cu13]' (or cu12)") from error
        self.xp = cupy
        self._number, self.device = number, f"cuda:{number}"
        self._function = _functions(number)
        self._side: Any = None

    def current(self) -> AbstractContextManager[Any]:
        import torch

        cuda, stack, stream = self.xp.cuda, ExitStack(), torch.cuda.current_stream(self._number)
        stack.enter_context(cuda.Device(self._number))
        if not stream.cuda_stream:
            stack.enter_context(cuda.Stream.null)
        elif hasattr(stream, "__cuda_stream__"):
            stack.enter_context(cuda.Stream.from_external(stream))
        else:  # older versions of torch
            stack.enter_context(cuda.ExternalStream(stream.cuda_stream, self._number))
        return stack

    @contextmanager
    def aside(self) -> Iterator[None]:
        import torch

        if self._side is None:
            self._side = torch.cuda.Stream(self._number)  # type: ignore[no-untyped-call]
        # torch may hand out memory that work on the current stream still uses: run after that work.
        self._side.wait_stream(torch.cuda.current_stream(self._number))
        with torch.cuda.stream(self._side):
            yield

    def rejoin(self) -> None:
        import torch

        torch.cuda.current_stream(self._number).wait_stream(self._side)

    def pinned(self, array: np.ndarray[Any, Any]) -> int:
        if not array.size:
            return 0
        runtime, address = self.xp.cuda.runtime, int(array.ctypes.data)
        try:
            runtime.hostRegister(address, array.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"cannot pin {array.nbytes:,} bytes of host memory ({error}): set tokens_on='device'"
            ) from error
        weakref.finalize(array, runtime.hostUnregister, address)
        # Pinned memory has the same address on host and device (unified virtual addressing).
        return address

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def stream(self) -> Any:
        from rmm.pylibrmm.stream import Stream

        return Stream(self.xp.cuda.get_current_stream())

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        self._function(name)((blocks,), (BLOCK,), tuple(arguments))

    def address(self, array: Array) -> int:
        return int(array.data.ptr)
