"""The engine of an NVIDIA GPU: cuDF reads, kernels render, encode and make batches.

Memory. During a load, cuDF (through RMM) and CuPy allocate from one pool of CUDA's stream-ordered allocator, bounded by
`gpu_memory_limit`. A process has one pool per GPU. Loads at the same time on one GPU share the limit of the first of
them. After the last of them, the pool is empty. What remains, in plain allocations of its own, is the store of ids (or
it is in pinned host memory, with `tokens_on="host"`), and the tables of the last two tokenizers (`SharedTables`).
Batches are torch tensors, and the temporary memory of a batch comes from torch's pool too.

Streams. In a load, each thread has a non-blocking stream of its own, and so has each stage: cuDF reads a chunk while
the one before it is rendered and the one before that is encoded. Later loads use these streams again. A batch is made
on torch's current stream, so that it is ready for whatever torch does next.

Lifetime of memory that crosses streams. The pool frees memory in the order of the stream that it was allocated on,
whichever streams use it. It would be a race to free what another stream still reads. Two rules exclude this:

    1. All device work of a load is inside a `kernels.current()`, and that context ends with a wait for its stream. So
       whatever a thread hands over is complete, and whatever it lets go of is no longer in use.
    2. A thread lets go of what another one has handed to it only after the context in which it used it.

    memory                                allocated by         used by                freed
    chunks of prompts, cuDF's buffers     read                 read, render, verify   with their batch
    rendered text, offsets and answers    render               encode, verify, main   with its batch
    ids of a batch and their offsets      encode               verify, main           with their batch
    tables of the tokenizer               encode, not pooled   encode                 with the last load; CUDA waits
    temporary arrays                      any                  the same thread        inside its context
    segments of the store                 main, not pooled     main, then batches     with the dataset; CUDA waits
    where rows are, weights of losses     batches, not pooled  batches                with the dataset; CUDA waits
    columns of a `cudf.DataFrame`         the caller           read, render, verify   by the caller

A batch is freed by the thread that holds it last, which is after all others have let go of it. RMM's buffers keep the
streams alive that they were allocated on. For main, the whole load is one such context: there it filters rows and
writes the token cache, work that ends with copies to the host, which wait too. `tests/simulator/stream_checks.py` finds
what breaks the rules.

The limit of the pool counts memory in use. What one stream has freed may not be available to another one at once, so
for a moment the pool can hold more.
"""

import importlib
import importlib.util
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import torch

from gpuload.core.errors import DeviceError, GpuloadError
from gpuload.core.options import TokensOn
from gpuload.engines.conversations import Conversations
from gpuload.engines.device.cudf import can_read, chunks, slices
from gpuload.engines.device.engine import DeviceEngine, Reader
from gpuload.engines.device.kernels import DeviceKernels, Kernels, on_gpu
from gpuload.engines.device.parts import MISREAD, arrow_prompts, chunk_sizes
from gpuload.engines.device.present import absent_reason, number_of
from gpuload.engines.device.shared import ThreadStreams
from gpuload.engines.device.texts import DeviceTexts, texts_to_device
from gpuload.engines.device.verdict import UNCHECKED, distrust
from gpuload.engines.failures import context_lost, one_line, release
from gpuload.engines.protocol import Prompts
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source

_CHUNK, _MOST_CHUNK = 256 << 20, 1 << 30
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, for which CuPy has no name in Python
_INSTALL = "pip install 'gpuload[cu13]' (or cu12)"


def unavailable_reason(device: str) -> str | None:
    """Why this process cannot use that GPU, or None. CUDA is initialized last, and only if it is likely to work.

    Raises:
        ContextLostError: the GPU worked, and does not any more: nor will anything else in this process that uses it.
    """
    if reason := absent_reason(device):
        return reason
    number = number_of(device)
    missing = [name for name in ("cupy", "rmm") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed: {_INSTALL}"
    if os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0":
        return "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set: torch shares no tensors with such streams: unset it"
    if number in _WORKING:
        return None
    kernels = None
    try:
        if wrong := distrust(number):
            return f"GPU {number} is not trusted: {wrong}"
        kernels = CudaKernels(number, 0)
        if never_worked := kernels.lost():
            return f"GPU {number} does not work: {never_worked}"
        with kernels.loading():
            self_test(kernels)
        _WORKING.add(number)
    except Exception as error:
        release(error)
        if kernels is not None and (lost := kernels.lost()):
            raise context_lost(f"cuda:{number}", error, lost) from error
        return f"GPU {number} does not work: {one_line(error)}"
    return None


_WORKING: set[int] = set()  # the GPUs that this process has tested. A forked process does not come this far.


def self_test(kernels: Kernels) -> None:
    """Compiles the kernels and copies three texts to the device and back; a `RuntimeError` if the texts come back
    changed."""
    with kernels.current():
        texts = texts_to_device(kernels, [b"ab", b"", b"c" * 1000])
        if DeviceTexts(kernels).bytes_at(texts, [2, 1, 0]) != [b"c" * 1000, b"", b"ab"]:
            raise RuntimeError("a kernel returns wrong results")


def cuda_engine(
    reference: Reference,
    device: str = "cuda",
    gpu_memory_limit: int = 0,
    tokens_on: TokensOn = "auto",
    exact_only: bool = False,
    make: Callable[..., DeviceEngine] = DeviceEngine,
) -> DeviceEngine:
    """The `Engine` of a GPU for which `unavailable_reason` returns None, as `make` makes it. For the other arguments
    see `Options`."""
    number = number_of(device)
    kernels = CudaKernels(number, gpu_memory_limit)
    why_not, notes = without_cudf(), [UNCHECKED[number]] if number in UNCHECKED else []
    if why_not:
        notes.append(f"prompts are read by Arrow: {why_not}")
    read = None if why_not else reader(kernels, notes)
    return make(kernels, torch.device("cuda", number), reference, exact_only, read, tokens_on, notes=notes)


def without_cudf() -> str | None:
    """Why Arrow reads prompts instead of cuDF, or None. Loads cuDF's libraries, which may not fit those of torch."""
    if importlib.util.find_spec("pylibcudf") is None:
        return "pylibcudf is not installed"
    try:
        importlib.import_module("pylibcudf")
    except Exception as error:
        return f"pylibcudf cannot be imported ({one_line(error)})"
    return None


def reader(kernels: DeviceKernels, notes: list[str]) -> Reader:
    """Reads the prompt column into device memory where cuDF can. Of a source that it cannot read although it should,
    Arrow reads the rest, and `notes` get a line."""

    def read(source: Source, prompt_key: str) -> Iterator[Prompts] | None:
        kind = source.schema.field(prompt_key).type
        if source.parquet in MISREAD:
            notes.append(f"{source.name}: read by Arrow: cuDF reads another number of rows")
        elif source.frame is not None and can_read(kind) and not pa.types.is_dictionary(kind):
            return or_by_arrow(slices(kernels, source.frame[prompt_key], kind, kernels.chunk_bytes), source, prompt_key)
        elif source.parquet is not None and can_read(kind):
            if source.file is not None:
                source.file.check()  # cuDF opens the path: it would wait for somebody who writes to a named pipe
            first, then = chunk_sizes(source, prompt_key, kernels.chunk_bytes)
            return or_by_arrow(chunks(kernels, source.parquet, prompt_key, kind, then, first), source, prompt_key)
        return None

    def or_by_arrow(parts: Iterator[Conversations], source: Source, prompt_key: str) -> Iterator[Prompts]:
        done = 0
        try:
            for part in _on_device(kernels, parts):
                done += len(part)
                yield part
        except (MemoryError, GpuloadError):
            raise
        except Exception as error:
            if kernels.lost():
                raise
            notes.append(f"{source.name}: read by Arrow from row {done:,} on: cuDF cannot ({one_line(error)})")
        else:
            return
        yield from arrow_prompts(source, prompt_key, done)

    return read


def _on_device(kernels: DeviceKernels, parts: Iterator[Any]) -> Iterator[Any]:
    """The same parts, each made while that device is the thread's current one."""
    while True:
        with kernels.current():
            part = next(parts, None)
        if part is None:
            return
        yield part


class Pools:
    """Which GPUs' pools RMM allocates from: it has one resource per GPU and process, so loads that run at the same time
    share it. The first of them installs it, the last one gives its memory back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed: dict[int, tuple[int, Callable[[], None]]] = {}  # by the GPU's number
        self._users: Counter[int] = Counter()

    @contextmanager
    def use(self, number: int, install: Callable[[], tuple[int, Callable[[], None]]]) -> Iterator[int]:
        """Yields the limit in bytes of a GPU's pool. If there is none, `install` does so, and returns its limit and a
        function that removes it."""
        with self._lock:
            if number not in self._installed:
                self._installed[number] = install()
            self._users[number] += 1
            limit, remove = self._installed[number]
        try:
            yield limit
        finally:
            with self._lock:
                self._users[number] -= 1
                if not self._users[number]:
                    del self._installed[number]
                    remove()


_POOLS = Pools()

_HANDLES: dict[int, int] = {}
"""The number of a GPU → its `cudaMemPool_t`. It is never destroyed: memory that outlives its load is freed to it."""

_IDLE_STREAMS: defaultdict[int, list[Any]] = defaultdict(list)  # the number of a GPU → streams of loads that are over


class CudaKernels(DeviceKernels):
    """`DeviceKernels` with a bounded memory pool during a load, and torch's memory after it.

    Args:
        number: of the GPU.
        limit: bytes; 0 for half of what is free when the load begins.

    Attributes:
        chunk_bytes: how large a chunk of the prompt column may be. The chunk, its text, the numbers about it and the
            chunks being read and encoded at the same time must fit into the limit: hence an eighth of it. On large GPUs
            a thirty-second, up to 1 GiB: templates may write many times as much text as a chunk has.
    """

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(number)
        self._limit = limit
        self._loading: Callable[[int], Any] | None = None
        # Non-blocking: a load neither waits for the legacy default stream, nor does that wait for a load.
        self._streams = ThreadStreams(partial(self.xp.cuda.Stream, non_blocking=True), _IDLE_STREAMS[number])
        self._torchs = self.xp.cuda.PythonFunctionAllocator(_torch_memory, _give_back_to_torch).malloc
        self.chunk_bytes = _CHUNK

    @contextmanager
    def loading(self) -> Iterator[None]:
        from rmm.allocators.cupy import rmm_cupy_allocator

        with _POOLS.use(self._number, self._install_pool) as limit:
            self.chunk_bytes = min(limit // 8, max(_CHUNK, min(_MOST_CHUNK, limit // 32)))
            self.ids_limit = max(0, self._free() - limit)
            with on_gpu(self._number):
                # The columns of a `cudf.DataFrame` may be work in progress, on whichever streams.
                self.xp.cuda.runtime.deviceSynchronize()
            self._loading = rmm_cupy_allocator
            try:
                with self.current():
                    yield
            finally:
                self._loading = None
                self._streams.release()

    def _free(self) -> int:
        """Bytes of free device memory."""
        with on_gpu(self._number):
            return int(self.xp.cuda.runtime.memGetInfo()[0])

    def _install_pool(self) -> tuple[int, Callable[[], None]]:
        """Makes RMM allocate from the GPU's pool. Returns its limit in bytes, and a function that ends this."""
        import rmm
        from cuda.bindings.runtime import cudaMemPool_t  # RMM needs this package

        runtime, resource = self.xp.cuda.runtime, rmm.mr
        with on_gpu(self._number):
            limit = self._limit or self._free() // 2
            before = resource.get_per_device_resource(self._number)
            if self._number not in _HANDLES:
                kind = runtime.MemPoolProps(
                    runtime.cudaMemAllocationTypePinned, runtime.cudaMemHandleTypeNone,
                    runtime.cudaMemLocationTypeDevice, self._number,
                )  # fmt: skip
                _HANDLES[self._number] = runtime.memPoolCreate(kind)
            pool = _HANDLES[self._number]
            # Freed memory stays in the pool until the load is over. Without a threshold, CUDA would release it at
            # every synchronization, and the next chunk would allocate it again.
            runtime.memPoolSetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold, limit)
            view = resource.CudaAsyncViewMemoryResource(cudaMemPool_t(pool))  # of a number it is a ValueError
            resource.set_per_device_resource(self._number, resource.LimitingResourceAdaptor(view, limit))

        def remove() -> None:
            try:
                with on_gpu(self._number):
                    runtime.deviceSynchronize()  # memory is freed in the order of its stream
                    self.xp.get_default_pinned_memory_pool().free_all_blocks()  # transfers were staged in it
                    runtime.memPoolSetAttribute(pool, runtime.cudaMemPoolAttrReleaseThreshold, 0)  # of what comes later
                    runtime.memPoolTrimTo(pool, 0)
            finally:  # also where nothing works any more: other libraries use RMM, too
                resource.set_per_device_resource(self._number, before)

        return limit, remove

    def current(self) -> AbstractContextManager[Any]:
        cuda, stack = self.xp.cuda, ExitStack()
        if self._loading is None:
            stack.enter_context(super().current())
        else:  # whatever this thread's current torch stream is
            stack.enter_context(on_gpu(self._number))
            stack.enter_context(self._streams.current())
        stack.enter_context(cuda.using_allocator(self._loading or self._torchs))
        return stack

    def _by_itself(self, size: int) -> Any:
        """Memory by plain cudaMalloc. If there is too little, the pool gives back what it keeps for later."""
        cuda = self.xp.cuda
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY or self._number not in _HANDLES:
                raise
        with on_gpu(self._number):
            cuda.runtime.deviceSynchronize()  # memory is freed in the order of its stream
        cuda.runtime.memPoolTrimTo(_HANDLES[self._number], 0)
        return cuda.MemoryPointer(cuda.Memory(size), 0)

    @contextmanager
    def lasting(self) -> Iterator[None]:
        try:
            with self.xp.cuda.using_allocator(self._by_itself):
                yield
        except self.xp.cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise DeviceError(
                "out of GPU memory while storing token ids: free GPU memory, or set tokens_on='host'"
            ) from error


def _torch_memory(size: int, device: int) -> int:
    """Allocates from torch's pool on torch's current stream. When the memory is freed, torch reuses it only for work
    that is queued on that stream afterwards."""
    return int(torch.cuda.caching_allocator_alloc(size, device, torch.cuda.current_stream(device).cuda_stream))


def _give_back_to_torch(pointer: int, device: int) -> None:
    if sys.is_finalizing():
        return
    torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]
