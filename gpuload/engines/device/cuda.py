"""The engine of an NVIDIA GPU: cuDF reads, kernels render and make batches.

Memory. While a load runs, cuDF (through RMM) and CuPy take from one pool of CUDA's own stream-ordered allocator,
bounded by `gpu_memory_limit`; it is gone after the load, and everything in it. What stays is the store of
ids, in plain allocations of its own (or in pinned host memory, with `tokens_on="host"`). Batches are torch's tensors,
and what is needed to make one comes from torch's own pool too.

Streams. A load works on the legacy default stream, that of cuDF, CuPy and torch alike. A batch is made on the stream
that is torch's current one where it is asked for, so that it is ready for whatever torch does next.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import torch

from gpuload.engines.device.cudf import can_read, chunks, slices
from gpuload.engines.device.engine import DeviceEngine, Reader, side_by_side
from gpuload.engines.device.kernels import DeviceKernels, Kernels
from gpuload.engines.device.texts import laid_out, texts_at
from gpuload.errors import DeviceError
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, with_prompts

_MOST_CHUNK = 256 << 20
_INSTALL = "pip install 'gpuload[cu13]' (or cu12)"


def number_of(device: str) -> int:
    """The GPU that "auto", "cuda" or "cuda:N" names: torch's current one where it does not say."""
    _, _, number = device.partition(":")
    if number:
        return int(number)
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def obstacle(device: str) -> str | None:
    """Why this process cannot use that GPU, or None. CUDA is started last, and only where it is likely to work."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    if torch.cuda._is_in_bad_fork():
        return "this process was forked from one that had started CUDA: use the 'spawn' start method"
    count = torch.cuda.device_count()
    if not count:
        return "torch finds no NVIDIA GPU and driver: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    if (number := number_of(device)) >= count:
        return f"there is no GPU {number}: torch finds {count}"
    missing = [name for name in ("cupy", "pylibcudf", "rmm") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: {_INSTALL}"
    try:
        importlib.import_module("pylibcudf")  # whose libraries may not go with torch's
        kernels = CudaKernels(number, 0)
        with kernels.loading():
            self_test(kernels)
    except Exception as error:
        return f"GPU {number} does not work: {type(error).__name__}: {' '.join(str(error).split()):.200}"
    return None


def self_test(kernels: Kernels) -> None:
    """Compiles the kernels and copies three texts there and back.

    Raises:
        RuntimeError: they come back changed.
    """
    with kernels.current():
        if texts_at(kernels, laid_out(kernels, [b"ab", b"", b"c" * 1000]), [2, 1, 0]) != [b"c" * 1000, b"", b"ab"]:
            raise RuntimeError("a kernel gives wrong results")


def cuda_engine(options: Options, reference: Reference, exact_only: bool = False) -> DeviceEngine:
    """The `Engine` of a GPU that has no `obstacle`."""
    number = number_of(options.device)
    kernels = CudaKernels(number, options.gpu_memory_limit)
    device = torch.device("cuda", number)
    return DeviceEngine(kernels, device, reference, exact_only, reader(kernels), options.tokens_on)


def reader(kernels: "CudaKernels") -> Reader:
    """Reads the prompt column in device memory, where cuDF can, and the other columns on the host."""

    def read(source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        kind = source.schema.field(prompt_key).type
        if source.frame is not None and can_read(kind) and not pa.types.is_dictionary(kind):
            parts = slices(kernels, source.frame[prompt_key], kind, kernels.chunk_bytes)
        elif source.parquet is not None and can_read(kind):
            parts = chunks(kernels, source.parquet, prompt_key, kind, kernels.chunk_bytes)
        else:
            yield from with_prompts(source, prompt_key)
            return
        yield from side_by_side(_on_device(kernels, parts), source, prompt_key, keep_prompts)

    return read


def _on_device(kernels: DeviceKernels, parts: Iterator[Any]) -> Iterator[Any]:
    """The same parts, each made with that device as the thread's current one."""
    while True:
        with kernels.current():
            part = next(parts, None)
        if part is None:
            return
        yield part


class CudaKernels(DeviceKernels):
    """`DeviceKernels` with a bounded pool of memory while a load runs, and torch's memory after it.

    Args:
        number: of the GPU.
        limit: bytes; 0 for half of what is free when the load begins.

    Attributes:
        chunk_bytes: how large a chunk of the prompt column may be: it, its text, the numbers about it and the chunks
            that are being read and encoded meanwhile must fit into the limit.
    """

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(number)
        self._limit = limit
        self._loading: Callable[[int], Any] | None = None
        self._torchs = self.xp.cuda.PythonFunctionAllocator(_torch_memory, _give_back_to_torch).malloc
        self.chunk_bytes = _MOST_CHUNK

    @contextmanager
    def loading(self) -> Iterator[None]:
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator

        with self.xp.cuda.Device(self._number):
            limit = self._limit or self.xp.cuda.runtime.memGetInfo()[0] // 2
            self.chunk_bytes = min(_MOST_CHUNK, limit // 8)
            before = rmm.mr.get_per_device_resource(self._number)
            # What is freed stays in the pool until the load is over: given back at every synchronization, it would be
            # asked for again at once.
            pool = rmm.mr.CudaAsyncMemoryResource(release_threshold=limit)
            rmm.mr.set_per_device_resource(self._number, rmm.mr.LimitingResourceAdaptor(pool, limit))
        self._loading = rmm_cupy_allocator
        try:
            with self.current():
                yield
        finally:
            self._loading = None
            with self.xp.cuda.Device(self._number):
                self.xp.cuda.Stream.null.synchronize()
                self.xp.get_default_pinned_memory_pool().free_all_blocks()  # through which copies went
                rmm.mr.set_per_device_resource(self._number, before)

    def current(self) -> AbstractContextManager[Any]:
        cuda, stack = self.xp.cuda, ExitStack()
        stack.enter_context(super().current())
        if self._loading is not None:  # whatever torch's stream is in this thread
            stack.enter_context(cuda.Stream.null)
        stack.enter_context(cuda.using_allocator(self._loading or self._torchs))
        return stack

    @contextmanager
    def lasting(self) -> Iterator[None]:
        runtime = self.xp.cuda.runtime
        try:
            with self.xp.cuda.using_allocator(None):  # no pool: cudaMalloc itself
                yield
        except runtime.CUDARuntimeError as error:
            if error.status != runtime.errorMemoryAllocation:
                raise
            raise DeviceError("no room for the ids on the GPU: free memory, or set tokens_on='host'") from error


def _torch_memory(size: int, device: int) -> int:
    """Memory of torch's pool, in its current stream: torch hands it out again when all that was asked of it before the
    return has been asked for in that stream."""
    return int(torch.cuda.caching_allocator_alloc(size, device, torch.cuda.current_stream(device).cuda_stream))


def _give_back_to_torch(pointer: int, device: int) -> None:
    if sys.is_finalizing():
        return
    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
