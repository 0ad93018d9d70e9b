"""Kernels, clock and `gpuload.load` of a GPU record.

A rehearsal uses kernels compiled for the host and no clock: it records counts only.
"""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from simulator import engine_on, load_chats_with, load_pairs_with, load_with
from simulator.host_kernels import COMPILER, HostKernels

from bench.gpu.section import MissingError, Task
from gpuload import ChatDataset, PairDataset, load, load_chats, load_pairs
from gpuload.core.arrays import Array
from gpuload.engines.device import cuda
from gpuload.engines.device.kernel_source import signatures
from gpuload.engines.device.kernels import DeviceKernels, Kernels
from gpuload.kinds.prompts import PromptDataset
from gpuload.reference.reference import Reference
from gpuload.template import ChatProgram


def absent(names: Iterable[str]) -> str | None:
    """Return a sentence on the packages that are not installed, or None if all are."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def cudf_missing() -> str | None:
    """Return why cuDF cannot read on this machine, or None. Loads its libraries, which fails if versions clash."""
    try:
        import pylibcudf  # noqa: F401
        import rmm  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
    return None


@dataclass
class Launch:
    """One launch of a kernel.

    Attributes:
        name: Name of the kernel.
        nbytes: Bytes of its arrays, see `moved`.
        arrays: Parameter → address of the array.
        events: CUDA events before and after it; empty in a rehearsal.
        seconds: Time between the events.
    """

    name: str
    nbytes: int
    arrays: dict[str, int]
    events: tuple[Any, ...] = ()
    seconds: float | None = None


@dataclass
class Rig:
    """Machine to measure on.

    Attributes:
        kernels: Kernels of the device.
        device: The device in torch.
        rehearsal: There is no GPU.
        cudf: cuDF reads the files.
    """

    kernels: Kernels
    device: torch.device
    rehearsal: bool
    cudf: bool = field(default=False)

    def load(self, files: Any, tokenizer: Any, **options: Any) -> PromptDataset:
        """Load with the device engine. Without cuDF, Arrow reads and the prompts are copied to the device.

        The token cache is off: its tokens could be those of another engine.
        """
        options = {"token_cache": False} | options
        if self.cudf:
            return load(files, tokenizer, device="cuda", **options)
        return load_with(engine_on(self.kernels), files, tokenizer, device="cpu", **options)

    def load_chats(self, files: Any, tokenizer: Any, **options: Any) -> ChatDataset:
        """As `load`, data for SFT."""
        options = {"token_cache": False} | options
        if self.cudf:
            return load_chats(files, tokenizer, device="cuda", **options)
        return load_chats_with(self.kernels, files, tokenizer, **options)

    def load_pairs(self, files: Any, tokenizer: Any, **options: Any) -> PairDataset:
        """As `load`, preference data."""
        options = {"token_cache": False} | options
        if self.cudf:
            return load_pairs(files, tokenizer, device="cuda", **options)
        return load_pairs_with(self.kernels, files, tokenizer, **options)

    def timed(
        self, work: Callable[[], Any], nbytes: int = 0, rows: int = 0, repeats: int = 5, warm_up: bool = True
    ) -> dict[str, Any]:
        """Return cells about a piece of work: its bytes and rows, and, on a GPU, median seconds and rates.

        The device is synchronized before and after each repeat.

        Args:
            work: Function to measure.
            nbytes: Bytes it moves or makes.
            rows: Rows it moves or makes.
            repeats: Measured calls.
            warm_up: Call it once more before the clock starts.
        """
        sizes = {name: size for name, size in (("bytes", nbytes), ("rows", rows)) if size}
        if warm_up:
            work()
        if self.rehearsal:
            return sizes
        took = []
        for _ in range(repeats):
            self.kernels.synchronize()
            started = time.perf_counter()
            work()
            self.kernels.synchronize()
            took.append(time.perf_counter() - started)
        return sizes | rates(statistics.median(took), nbytes, rows)

    @contextmanager
    def launches(self) -> Iterator[list[Launch]]:
        """Record every launch of a kernel within the block. Their seconds are set at its end."""
        recorded: list[Launch] = []
        launch_kernel = self.kernels._launch

        def recording(name: str, blocks: int, arguments: list[Any]) -> None:
            arrays = {
                parameter.name: self.kernels.address(argument)
                for parameter, argument in zip(signatures()[name], arguments, strict=True)
                if parameter.is_array
            }
            launch = Launch(name, moved(name, arguments), arrays, self._events())
            recorded.append(launch)
            if launch.events:
                launch.events[0].record()
            launch_kernel(name, blocks, arguments)
            if launch.events:
                launch.events[1].record()

        with mock.patch.object(self.kernels, "_launch", recording):
            yield recorded
        for launch in recorded:
            if launch.events:
                launch.events[1].synchronize()
                launch.seconds = self.kernels.xp.cuda.get_elapsed_time(*launch.events) / 1e3

    def _events(self) -> tuple[Any, ...]:
        return () if self.rehearsal else (self.kernels.xp.cuda.Event(), self.kernels.xp.cuda.Event())

    def in_a_pool(self) -> AbstractContextManager[Any]:
        """Allocate arrays within the block from a memory pool of CuPy instead of the pool of a load."""
        if self.rehearsal:
            return nullcontext()
        allocator: AbstractContextManager[Any] = self.kernels.xp.cuda.using_allocator(
            self.kernels.xp.cuda.MemoryPool().malloc
        )
        return allocator

    def peak(self, work: Callable[[], Any]) -> int:
        """Return the peak bytes of arrays that a piece of work allocates."""
        if self.rehearsal:
            import tracemalloc  # NumPy reports its allocations to it

            tracemalloc.start()
            try:
                work()
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        class Meter(self.kernels.xp.cuda.MemoryHook):  # type: ignore[name-defined,misc]
            name = "peak"
            held = most = 0

            def malloc_postprocess(self, **about: Any) -> None:
                self.held += about["mem_size"]
                self.most = max(self.most, self.held)

            def free_postprocess(self, **about: Any) -> None:
                self.held -= about["mem_size"]

        meter = Meter()
        with self.in_a_pool(), meter:
            work()
        return int(meter.most)


def open_rig(task: Task) -> Rig:
    """Open the GPU, or in a rehearsal the host.

    Raises:
        MissingError: There is no usable GPU, or in a rehearsal no C++ compiler.
    """
    if task.rehearsal:
        if COMPILER is None:
            raise MissingError("no C++ compiler, which a rehearsal needs")
        return Rig(HostKernels(), torch.device("cpu"), True)
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise MissingError(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU")
    if why := absent(["cupy"]):
        raise MissingError(why)
    device = torch.device("cuda", torch.cuda.current_device())
    if not task.cudf or cudf_missing():
        return Rig(DeviceKernels(device.index), device, False)
    return Rig(cuda.CudaKernels(device.index, 0), device, False, cudf=True)


def rates(seconds: float, nbytes: int = 0, rows: int = 0) -> dict[str, float]:
    """Return cells with seconds, GB/s and rows/s."""
    cells = {"seconds": seconds}
    if nbytes:
        cells["gb_per_s"] = nbytes / seconds / 1e9
    if rows:
        cells["rows_per_s"] = rows / seconds
    return cells


def moved(name: str, arguments: list[Any]) -> int:
    """Return the bytes that a kernel must at least move: each of its arrays is counted once.

    Some kernels read only those parts of an array that addresses or row numbers point to. For `copy_pieces` the array
    that it writes is counted twice, as read and as written. For kernels that make batches the ids that they read are
    not counted.
    """
    arrays: list[Array] = [argument for argument in arguments if hasattr(argument, "nbytes") and argument.ndim]
    if name in ("pad", "pack"):
        arrays = arrays[-2:]  # places of pieces, and the batch
    again = arrays[-1].nbytes if name == "copy_pieces" else 0
    return int(sum(array.nbytes for array in arrays)) + again


def by_kernel(recorded: Iterable[Launch]) -> dict[str, dict[str, Any]]:
    """Return, for each kernel, cells with launches, bytes, and, if measured, seconds."""
    table: dict[str, dict[str, Any]] = {}
    for launch in recorded:
        cells = table.setdefault(launch.name, {"launches": 0, "bytes": 0})
        cells["launches"] += 1
        cells["bytes"] += launch.nbytes
        if launch.seconds is not None:
            cells["seconds"] = cells.get("seconds", 0.0) + launch.seconds
    for cells in table.values():
        if cells.get("seconds"):
            cells |= rates(cells["seconds"], cells["bytes"])
    return table


@functools.cache
def tokenizer_of(directory: str) -> Any:
    """Open a transformers tokenizer, once per process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def program_of(directory: str) -> ChatProgram:
    """Compile a tokenizer's chat template.

    Raises:
        TokenizerError: It has no chat template.
    """
    return ChatProgram(Reference(tokenizer_of(directory)).call)


def copy_bandwidth(rig: Rig, nbytes: int = 4 << 30) -> dict[str, Any]:
    """Return cells about one large copy within device memory; bytes are those read plus those written."""
    xp = rig.kernels.xp
    size = 1 << 16 if rig.rehearsal else nbytes // 2
    with rig.kernels.current():
        source, target = xp.ones(size, np.uint8), xp.empty(size, np.uint8)
        return rig.timed(lambda: xp.copyto(target, source), 2 * size)


def name_of(path: str) -> str:
    """Return a file with its directory's name, or the name of a tokenizer's directory."""
    place = Path(path)
    return f"{place.parent.name}/{place.stem}" if place.suffix == ".parquet" else place.name
