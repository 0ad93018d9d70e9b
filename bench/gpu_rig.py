"""What a GPU record measures with: the kernels, a clock, and `gpuload.load` on them.

A rehearsal has the kernels compiled for the host, and no clock: what it notes are counts.
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

from bench.gpu_run import MissingError, Task
from bench.inputs import ROOT
from gpuload import load
from gpuload.arrays import Array
from gpuload.dataset import PromptDataset
from gpuload.engines.device import cuda
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.kernels import DeviceKernels, Kernels, signatures
from gpuload.engines.protocol import Engine
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.template import ChatProgram
from gpuload.testing import load_with


def absent(names: Iterable[str]) -> str | None:
    """Which of these packages are not installed, in words; None where all are."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def cudf_missing() -> str | None:
    """Why cuDF cannot read here, None where it can: its libraries are loaded, which fails where versions clash."""
    try:
        import pylibcudf  # noqa: F401
        import rmm  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"
    return None


def host_kernels() -> Kernels:
    """Those of the tests: compiled for the host, on NumPy arrays.

    Raises:
        MissingError: there is no C++ compiler.
    """
    spec = importlib.util.spec_from_file_location("host_kernels", ROOT / "tests" / "host_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.COMPILER is None:
        raise MissingError("no C++ compiler, which a rehearsal needs")
    kernels: Kernels = module.HostKernels()
    return kernels


@dataclass
class Launch:
    """One run of a kernel.

    Attributes:
        name: of the kernel.
        nbytes: see `moved`.
        arrays: where the arrays that it was given lie, by the parameters' names.
        events: before and after it; nothing in a rehearsal.
        seconds: between them.
    """

    name: str
    nbytes: int
    arrays: dict[str, int]
    events: tuple[Any, ...] = ()
    seconds: float | None = None


@dataclass
class Rig:
    """A machine to measure on.

    Attributes:
        kernels: for the device.
        device: torch's name of it.
        rehearsal: there is no GPU.
        cudf: whether cuDF can read here.
    """

    kernels: Kernels
    device: torch.device
    rehearsal: bool
    cudf: bool = field(default=False)

    def load(self, files: Any, tokenizer: Any, **options: Any) -> PromptDataset:
        """`gpuload.load` by the device's engine; without cuDF, Arrow reads and the prompts are copied over. Tokens
        are always made: from the cache they could be another engine's."""
        options = {"token_cache": False} | options
        if self.cudf:
            return load(files, tokenizer, device="cuda", **options)

        def engine(chosen: Options, reference: Reference, exact_only: bool = False) -> Engine:
            return DeviceEngine(self.kernels, self.device, reference, exact_only, None, chosen.tokens_on)

        return load_with(engine, files, tokenizer, device="cpu", **options)

    def timed(self, work: Callable[[], Any], nbytes: int = 0, rows: int = 0, repeats: int = 5) -> dict[str, Any]:
        """Cells about some work: what it moves or makes, and, where there is a GPU, its median seconds and rates.

        The work is done once before the clock runs, and the device is waited for before and after.
        """
        sizes = {name: size for name, size in (("bytes", nbytes), ("rows", rows)) if size}
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
        """Within, every run of a kernel is noted. Their seconds are there afterwards."""
        noted: list[Launch] = []
        run = self.kernels.run

        def noting(name: str, threads: int, *arguments: Any) -> None:
            arrays = {
                parameter.name: self.kernels.address(argument)
                for parameter, argument in zip(signatures()[name], arguments, strict=True)
                if parameter.is_array
            }
            launch = Launch(name, moved(name, arguments), arrays, self._events())
            noted.append(launch)
            if launch.events:
                launch.events[0].record()
            run(name, threads, *arguments)
            if launch.events:
                launch.events[1].record()

        with mock.patch.object(self.kernels, "run", noting):
            yield noted
        for launch in noted:
            if launch.events:
                launch.events[1].synchronize()
                launch.seconds = self.kernels.xp.cuda.get_elapsed_time(*launch.events) / 1e3

    def _events(self) -> tuple[Any, ...]:
        return () if self.rehearsal else (self.kernels.xp.cuda.Event(), self.kernels.xp.cuda.Event())

    def in_a_pool(self) -> AbstractContextManager[Any]:
        """Within, arrays are made in a pool of CuPy's rather than in the one of a load."""
        if self.rehearsal:
            return nullcontext()
        allocator: AbstractContextManager[Any] = self.kernels.xp.cuda.using_allocator(
            self.kernels.xp.cuda.MemoryPool().malloc
        )
        return allocator

    def peak(self, work: Callable[[], Any]) -> int:
        """The bytes of arrays that some work held at once, beyond those that were there before."""
        if self.rehearsal:
            import tracemalloc  # NumPy tells it what it takes

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
    """The GPU, or in a rehearsal the host.

    Raises:
        MissingError: there is none, with the reason.
    """
    if task.rehearsal:
        return Rig(host_kernels(), torch.device("cpu"), True)
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise MissingError(f"no GPU: torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds none")
    if why := absent(["cupy"]):
        raise MissingError(why)
    device = torch.device("cuda", torch.cuda.current_device())
    if not task.cudf or cudf_missing():
        return Rig(DeviceKernels(device.index), device, False)
    return Rig(cuda.CudaKernels(device.index, 0), device, False, cudf=True)


def rates(seconds: float, nbytes: int = 0, rows: int = 0) -> dict[str, float]:
    """Cells of a table: seconds, and what they are worth."""
    cells = {"seconds": seconds}
    if nbytes:
        cells["gb_per_s"] = nbytes / seconds / 1e9
    if rows:
        cells["rows_per_s"] = rows / seconds
    return cells


def moved(name: str, arguments: tuple[Any, ...]) -> int:
    """Bytes that a kernel must move at least: each array it is given counted once.

    Two kernels take of an array only what addresses or row numbers point to: of `copy_pieces` what it writes is
    counted twice, as read and as written; of `pad` the ids that it reads are left out.
    """
    arrays: list[Array] = [argument for argument in arguments if hasattr(argument, "nbytes") and argument.ndim]
    if name == "pad":
        arrays = [arrays[0], *arrays[-3:]]
    again = arrays[-1].nbytes if name == "copy_pieces" else 0
    return int(sum(array.nbytes for array in arrays)) + again


def by_kernel(noted: Iterable[Launch]) -> dict[str, dict[str, Any]]:
    """Kernel → cells: how often it ran, what it moved, and, where that was measured, in what time."""
    table: dict[str, dict[str, Any]] = {}
    for launch in noted:
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
def tokenizer_of(folder: str) -> Any:
    """A transformers tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def program_of(folder: str) -> ChatProgram:
    """A tokenizer's chat template, compiled.

    Raises:
        TokenizerError: it has none.
    """
    return ChatProgram(Reference(tokenizer_of(folder)).call)


def copy_bandwidth(rig: Rig, nbytes: int = 4 << 30) -> dict[str, Any]:
    """Cells about one large copy within the device's memory: bytes read plus bytes written."""
    xp = rig.kernels.xp
    size = 1 << 16 if rig.rehearsal else nbytes // 2
    with rig.kernels.current():
        source, target = xp.ones(size, np.uint8), xp.empty(size, np.uint8)
        return rig.timed(lambda: xp.copyto(target, source), 2 * size)


def name_of(path: str) -> str:
    """A file with its folder, or a tokenizer's folder; nothing more of this machine."""
    place = Path(path)
    return f"{place.parent.name}/{place.stem}" if place.suffix == ".parquet" else place.name
