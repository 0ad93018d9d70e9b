"""The interface for launching kernels, and its implementation for a GPU.

    kernels = DeviceKernels(0)                                 # CuPy compiles kernels/*.cu for GPU 0
    kernels.run("hash_texts", kernels.threads(n), n, data, start, length, hash)

`tests/simulator/host_kernels.py` has another implementation, which compiles the same source for the host and runs it on
NumPy arrays. With it, everything in an engine except reading can be tested without a GPU.

A kernel cannot check its pointers: an argument of the wrong type silently reads or writes the wrong memory. So every
launch checks its arguments against the parameters in the source (`kernel_source.py`).
"""

import logging
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.core.arrays import Array
from gpuload.core.errors import DeviceError
from gpuload.core.files import cache_root
from gpuload.engines.device.cubins import shipped
from gpuload.engines.device.kernel_source import Parameter, signatures, source
from gpuload.engines.device.shared import SharedTables

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BLOCK = 256
"""Threads per block, as in `common.cuh`. The registers and the shared memory of each kernel allow at least half of the
threads that a multiprocessor can hold."""

MOST_BLOCKS = 1 << 20
"""Maximum number of blocks of a launch. Kernels loop over their items with the grid as stride, so any number will
do."""


class Kernels:
    """Kernels compiled for one kind of machine. The defaults are those of a machine without a GPU."""

    xp: ModuleType  # the array module whose arrays the kernels take, NumPy or CuPy
    segment = 16  # SEGMENT of `tiles.cu`, the bytes of each thread
    # Threads of a launch whose number of items only the device knows: more than it can hold at the same time.
    resident = 1 << 20
    device = "cpu"  # torch's name of the device that holds these arrays
    ids_limit: int | None = None  # bytes of device memory that a load leaves for the store of ids; None for any number
    chunk_bytes = 256 << 20  # about how large a chunk of prompts may be

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

    @cached_property
    def shared(self) -> SharedTables:
        """What later loads on this device use again."""
        return SharedTables()

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
        """Return a cuDF buffer, which may say that it has items of another type, as a uint8 array, zero-copy."""
        return self.xp.asarray(buffer).view(np.uint8)

    def pinned(self, array: np.ndarray[Any, Any]) -> int:
        """Pin a host array in place for as long as it exists, and return the address where kernels read it."""
        return int(array.ctypes.data)

    def synchronize(self) -> None:
        """Wait for all work submitted to the current stream."""

    def lost(self) -> str | None:
        """Return why this process cannot use the device any more, or None. Waits for all of its work."""
        return None

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


def load_cupy() -> ModuleType:
    """Import CuPy. It makes a directory for machine code as soon as it is imported, in the user's home unless
    `CUPY_CACHE_DIR` names another one: where that cannot be written, in gpuload's cache.

    Raises:
        DeviceError: CuPy is not installed, or cannot be imported.
    """
    if "cupy" not in sys.modules and "CUPY_CACHE_DIR" not in os.environ:
        own = cache_root() / "cupy"
        if not writable(Path(os.path.expanduser("~/.cupy"))):
            os.environ["CUPY_CACHE_DIR"] = str(own) if writable(own) else tempfile.mkdtemp(prefix="gpuload-cupy-")
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"the GPU engine needs CuPy ({error}): pip install 'gpuload[cu13]' (or cu12)") from error
    return cupy  # type: ignore[no-any-return]


def on_gpu(number: int) -> AbstractContextManager[Any]:
    """Makes a GPU the current one of this thread, in a block.

    CuPy's own block returns to the GPU before with `cudaSetDevice`, which since CUDA 12 makes a context there: on GPU 0
    for each rank, because 0 is the first current GPU of every thread. That takes memory from the rank whose GPU it is,
    and is an error in exclusive-process mode. torch returns only to a GPU on which this process has a context.
    """
    import torch

    return torch.cuda.device(number)


def writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, which is made if it is missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


@cache
def _shared_on(number: int) -> SharedTables:
    return SharedTables()


machine_code: dict[int, str] = {}
"""Number of a GPU → the file of the kernels that this process has loaded for it, or that they were compiled."""


@cache
def _functions(number: int) -> Callable[[str], Any]:
    """The kernels of a GPU by name, loaded once per process: from machine code that was shipped, or else compiled."""
    cupy = load_cupy()
    with on_gpu(number):
        if not waits_for_each() and (file := shipped(cupy.cuda.Device(number).compute_capability)) is not None:
            get = cupy.RawModule(path=str(file)).get_function
            try:
                get(next(iter(signatures())))
                machine_code[number] = file.name
                return lru_cache(maxsize=None)(get)
            except cupy.cuda.driver.CUDADriverError as error:  # the driver may be older than the compiler
                logger.info("gpuload: %s cannot be loaded (%s): kernels are compiled instead", file.name, error)
        machine_code[number] = "compiled here"
        module = cupy.RawModule(code=source(), options=("-std=c++17", *_DEBUG * waits_for_each()))
    return lru_cache(maxsize=None)(module.get_function)


_DEBUG = ("-DGPULOAD_MOST_SPINS=100000000",)
"""A thread that waits for another one gives up after seconds instead of never. Shipped code has no such bound."""


def waits_for_each() -> bool:
    """Return whether `GPULOAD_SYNC=1` asks to wait for each launch, so that an error is that of the launch it names."""
    return os.environ.get("GPULOAD_SYNC", "") not in ("", "0")


def _unpin(xp: Any, number: int, address: int) -> None:
    """Unpin host memory that is about to be freed. A batch that nobody waited for, because its loader was left early,
    may still read it."""
    runtime = xp.cuda.runtime
    with suppress(RuntimeError):  # of a context that is lost, or gone with the process
        with on_gpu(number):
            runtime.deviceSynchronize()
        runtime.hostUnregister(address)


def described(name: str, blocks: int, arguments: list[Any]) -> str:
    """Return a launch in words: its size, numbers, and the dtypes and shapes of its arrays."""
    pairs = zip(signatures()[name], arguments, strict=True)
    words = [f"{p.name}={f'{p.dtype}{list(a.shape)}' if p.is_array else a}" for p, a in pairs]
    return f"{blocks} blocks of {BLOCK} threads, {', '.join(words)}"


class DeviceKernels(Kernels):
    """Kernels for a GPU: from machine code that was shipped, or compiled by CuPy, which caches it on disk.

    Kernels run on CuPy's current stream; `current` sets it to torch's.

    Raises:
        DeviceError: CuPy is not installed.
    """

    def __init__(self, number: int) -> None:
        self.xp = load_cupy()
        self._number, self.device = number, f"cuda:{number}"
        self._function = _functions(number)
        self._side: Any = None

    @property
    def shared(self) -> SharedTables:
        return _shared_on(self._number)

    def current(self) -> AbstractContextManager[Any]:
        import torch

        cuda, stack, stream = self.xp.cuda, ExitStack(), torch.cuda.current_stream(self._number)
        stack.enter_context(on_gpu(self._number))
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
        weakref.finalize(array, _unpin, self.xp, self._number, address)
        # Pinned memory has the same address on host and device (unified virtual addressing).
        return address

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def lost(self) -> str | None:
        try:
            with on_gpu(self._number):
                self.xp.cuda.runtime.deviceSynchronize()
        except RuntimeError as error:  # of CuPy or of torch
            return str(error)
        return None

    def stream(self) -> Any:
        from rmm.pylibrmm.stream import Stream

        return Stream(self.xp.cuda.get_current_stream())

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        try:
            self._function(name)((blocks,), (BLOCK,), tuple(arguments))
            if waits_for_each():
                self.synchronize()
        except Exception as error:
            if not waits_for_each():  # it may be the error of an earlier launch
                raise
            raise DeviceError(f"kernel {name} failed ({error}): {described(name, blocks, arguments)}") from error

    def address(self, array: Array) -> int:
        return int(array.data.ptr)
