"""Launching kernels: one interface, whoever compiled them.

    kernels = DeviceKernels()                                  # CuPy compiles kernels/*.cu for the GPU
    kernels.run("hash_texts", kernels.threads(n), n, data, start, length, hash)

The tests have another `Kernels` that compiles the same source for the host and runs it on NumPy arrays, so that all of
an engine but the reading can be tested where there is no GPU.

A kernel believes every pointer it is given: a wrong type is silently wrong memory. So the parameters are read from the
source, and each argument is held against them before every launch.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuload.arrays import Array
from gpuload.errors import DeviceError

if TYPE_CHECKING:
    import torch

BLOCK = 256
"""Threads in a block. Few registers a thread and no shared memory: nothing asks for another number."""

MOST_BLOCKS = 1 << 20
"""Kernels step by the size of the grid: more blocks than this gain nothing."""

FILES = (
    "common.cuh",
    "gather.cu",
    "strings.cu",
    "shapes.cu",
    "pad.cu",
    "text.cuh",
    "added.cu",
    "nfc.cu",
    "rewrite.cu",
    "split.cu",
    "words.cu",
    "merges.cu",
)

_TYPES = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "u16": np.uint16, "u8": np.uint8, "bool": np.bool_}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as in the source.
        dtype: of the number, or of the array's items.
        is_array: whether it is a pointer.
    """

    name: str
    dtype: np.dtype[Any]
    is_array: bool


@cache
def source() -> str:
    """All kernels as one CUDA C++ source. Line numbers in a compiler's messages are those of the files."""
    folder = resources.files("gpuload.engines.kernels")
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in FILES)


@cache
def signatures() -> dict[str, tuple[Parameter, ...]]:
    """Every kernel's parameters, by its name."""
    kernels = re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', source())
    return {name: tuple(map(_parameter, parameters.split(","))) for name, parameters in kernels}


def _parameter(declaration: str) -> Parameter:
    kind, pointer, name = re.fullmatch(r"\s*(?:const )?(\w+)\s*(\*?)\s*(\w+)\s*", declaration).groups()  # type: ignore[union-attr]
    return Parameter(name, np.dtype(_TYPES[kind]), bool(pointer))


class Kernels:
    """Kernels compiled for one kind of machine.

    Attributes:
        xp: the array module whose arrays they take.
        device: torch's name of where these lie.
    """

    xp: ModuleType
    device = "cpu"

    def current(self) -> AbstractContextManager[Any]:
        """Within, the calling thread works on these kernels' device, in torch's current stream there."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[Any]:
        """Around a load: what is taken meanwhile is given back after it."""
        return nullcontext()

    def lasting(self) -> AbstractContextManager[Any]:
        """Within, arrays are made in memory that stays when the load is over."""
        return nullcontext()

    def aside(self) -> AbstractContextManager[Any]:
        """Within, work goes to a stream of its own, behind all that the current one has been asked for."""
        return nullcontext()

    def rejoin(self) -> None:
        """Makes the current stream wait for what was asked for aside."""

    def tensor(self, *shape: int) -> tuple["torch.Tensor", Array]:
        """A tensor of int64 on this device, not yet written, and the same memory as an array for kernels (DLPack)."""
        import torch

        made = torch.empty(shape, dtype=torch.int64, device=self.device)
        return made, self.xp.from_dlpack(made) if made.numel() else self.xp.empty(shape, np.int64)

    def view(self, buffer: Any) -> Array:
        """A buffer of cuDF's as an array of uint8, with no copy."""
        return self.xp.asarray(buffer)

    def pinned(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of a host array in memory that the device can reach into."""
        return array

    def reached(self, pinned: np.ndarray[Any, Any]) -> Array:
        """What `pinned` gave as an array for kernels: the same memory, read across the bus."""
        return pinned

    def synchronize(self) -> None:
        """Waits for all that was asked of the device in the current stream."""

    def run(self, name: str, threads: int, *arguments: Any) -> None:
        """Runs a kernel on (at least) so many threads; none for 0.

        Args:
            name: of the kernel.
            threads: of all blocks together; see `threads`, `warps` and `blocks`.
            *arguments: contiguous arrays of `xp` of the parameters' types, and numbers.

        Raises:
            TypeError: an argument is not what the kernel takes.
        """
        parameters = signatures()[name]
        if len(arguments) != len(parameters):
            raise TypeError(f"kernel {name} takes {len(parameters)} arguments, not {len(arguments)}")
        checked = [self._checked(name, *pair) for pair in zip(parameters, arguments, strict=True)]
        if threads:
            self._launch(name, min(-(-threads // BLOCK), MOST_BLOCKS), checked)

    def _checked(self, kernel: str, parameter: Parameter, argument: Any) -> Any:
        if not parameter.is_array:
            return parameter.dtype.type(argument)
        if not isinstance(argument, self.xp.ndarray) or argument.dtype != parameter.dtype:
            found = f"{type(argument).__module__}.{type(argument).__name__} {getattr(argument, 'dtype', '')}"
            raise TypeError(
                f"kernel {kernel}: {parameter.name} is {parameter.dtype} of {self.xp.__name__}, not {found}"
            )
        if not argument.flags.c_contiguous:
            raise TypeError(f"kernel {kernel}: {parameter.name} is not contiguous")
        return argument

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        raise NotImplementedError

    def address(self, array: Array) -> int:
        """Where an array's first item lies, as a kernel's pointer."""
        raise NotImplementedError

    @staticmethod
    def threads(items: int) -> int:
        """For a kernel with a thread per item."""
        return items

    @staticmethod
    def warps(items: int) -> int:
        """For a kernel with a warp per item."""
        return 32 * items

    @staticmethod
    def blocks(items: int) -> int:
        """For a kernel with a block per item."""
        return BLOCK * items


class DeviceKernels(Kernels):
    """Compiled by CuPy for a GPU, at first use; CuPy keeps the machine code on disk.

    Kernels run on CuPy's current stream, which `current` makes torch's. In a thread that has chosen none, and so in all
    threads of a load, that is the legacy default stream: cuDF's too.

    Args:
        number: of the GPU.

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
        self._module = cupy.RawModule(code=source(), options=("-std=c++17",))
        self._function = lru_cache(maxsize=None)(self._module.get_function)
        self._side: Any = None

    def current(self) -> AbstractContextManager[Any]:
        import torch

        cuda, stack, stream = self.xp.cuda, ExitStack(), torch.cuda.current_stream(self._number)
        stack.enter_context(cuda.Device(self._number))
        if not stream.cuda_stream:
            stack.enter_context(cuda.Stream.null)
        elif hasattr(stream, "__cuda_stream__"):
            stack.enter_context(cuda.Stream.from_external(stream))
        else:  # a torch that does not know this way yet
            stack.enter_context(cuda.ExternalStream(stream.cuda_stream, self._number))
        return stack

    @contextmanager
    def aside(self) -> Iterator[None]:
        import torch

        if self._side is None:
            self._side = torch.cuda.Stream(self._number)  # type: ignore[no-untyped-call]
        # Memory that the last user of a batch has given back may be written to again as soon as this stream is here.
        self._side.wait_stream(torch.cuda.current_stream(self._number))
        with torch.cuda.stream(self._side):
            yield

    def rejoin(self) -> None:
        import torch

        torch.cuda.current_stream(self._number).wait_stream(self._side)

    def pinned(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not array.size:
            return array
        # Not of CuPy's pool, which takes a power of two and keeps it.
        memory = self.xp.cuda.PinnedMemoryPointer(self.xp.cuda.PinnedMemory(array.nbytes), 0)
        copy = np.frombuffer(memory, array.dtype, array.size)
        copy[:] = array
        return copy

    def reached(self, pinned: np.ndarray[Any, Any]) -> Array:
        if not pinned.size:
            return self.xp.asarray(pinned)
        # Pinned memory has one address for host and device (unified addressing), so a kernel takes it as it is.
        memory = self.xp.cuda.UnownedMemory(pinned.ctypes.data, pinned.nbytes, pinned, self._number)
        return self.xp.ndarray(pinned.shape, pinned.dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        self._function(name)((blocks,), (BLOCK,), tuple(arguments))

    def address(self, array: Array) -> int:
        return int(array.data.ptr)
