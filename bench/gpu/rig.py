"""Kernels, clock and loads of a GPU record.

A rehearsal uses kernels compiled for the host and no clock: it records counts only.
"""

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from simulator import engine_on, load_chats_with, load_pairs_with, load_with
from simulator.host_kernels import COMPILER, HostKernels

import gpuload
from bench.gpu.section import MissingError, Task
from gpuload.core.arrays import Array
from gpuload.engines.device import cuda
from gpuload.engines.device.kernels import Kernels

LOADS: dict[str, Callable[..., Any]] = {
    "prompts": gpuload.load,
    "chats": gpuload.load_chats,
    "pairs": gpuload.load_pairs,
}
DEFAULTS: dict[str, Any] = {"verify": "off", "progress": False, "token_cache": False}
"""Of all loads: the token cache could have tokens of another engine."""


def absent(names: Iterable[str]) -> str | None:
    """Return a sentence on the packages that are not installed, or None if all are."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@dataclass
class Launch:
    """One launch of a kernel.

    Attributes:
        name: Name of the kernel.
        nbytes: Bytes of its arrays, see `moved`.
        events: CUDA events before and after it; empty in a rehearsal.
    """

    name: str
    nbytes: int
    events: tuple[Any, ...] = ()
    seconds: float | None = None


@dataclass
class Rig:
    """Machine to measure on.

    Attributes:
        kernels: Kernels of the device.
        device: The device in torch.
        rehearsal: There is no GPU.
    """

    kernels: Kernels
    device: torch.device
    rehearsal: bool

    @property
    def cudf(self) -> bool:
        """Whether cuDF reads parquet files."""
        return not self.rehearsal and cuda.without_cudf() is None

    def load(self, files: Any, tokenizer: Any, kind: str = "prompts", **options: Any) -> Any:
        """Load one of the kinds with the device engine; in a rehearsal as `load_here` does."""
        if self.rehearsal:
            return self.load_here(files, tokenizer, kind, **options)
        return LOADS[kind](files, tokenizer, device="cuda", **DEFAULTS | options)

    def load_here(self, files: Any, tokenizer: Any, kind: str = "prompts", **options: Any) -> Any:
        """Load with the kernels of the rig, whose launches can be recorded. Arrow reads."""
        options = DEFAULTS | options
        if kind == "prompts":
            return load_with(engine_on(self.kernels), files, tokenizer, **options)
        return {"chats": load_chats_with, "pairs": load_pairs_with}[kind](self.kernels, files, tokenizer, **options)

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
            event = None if self.rehearsal else self.kernels.xp.cuda.Event
            launch = Launch(name, moved(name, arguments), (event(), event()) if event else ())
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
    if why := absent(["cupy", "rmm"]):
        raise MissingError(why)
    device = torch.device("cuda", torch.cuda.current_device())
    return Rig(cuda.CudaKernels(device.index, 0), device, False)


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
