"""What a process shares among its loads on GPUs: the number of the GPU, one memory pool per GPU, and pinned memory."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpuload.core.arrays import Ragged
from gpuload.core.errors import DeviceError
from gpuload.engines.device import cuda, present
from gpuload.engines.device.cuda import CudaKernels, Pools, number_of
from gpuload.engines.device.kernels import DeviceKernels
from gpuload.engines.device.shared import SharedTables, ThreadStreams
from gpuload.engines.device.store import host_store


@pytest.mark.parametrize(
    ("device", "rank", "count", "number"),
    [("cuda", "3", 4, 3), ("auto", "3", 4, 3), ("cuda:1", "3", 4, 1), ("cuda", "3", 1, 0), ("cuda", None, 4, 0)],
)
def test_a_rank_uses_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: str | None, count: int, number: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert number_of(device) == number


def test_the_current_gpu_of_torch_counts_more_than_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert number_of("cuda") == 2


def test_a_rank_stays_on_its_gpu_after_torch_has_initialized_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    initialized, current = False, 0
    monkeypatch.setattr(present, "_BY_RANK", set())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    initialized = True
    assert number_of("cuda") == 0  # torch was there before any load
    initialized = False
    assert number_of("cuda") == 3
    initialized = True
    assert number_of("cuda") == 3  # nobody has chosen one for torch
    current = 2
    assert number_of("cuda") == 2


def installer(events: list[str], limit: int) -> Callable[[], tuple[int, Callable[[], None]]]:
    def install() -> tuple[int, Callable[[], None]]:
        events.append(f"install {limit}")
        return limit, lambda: events.append(f"remove {limit}")

    return install


def test_loads_at_the_same_time_share_a_pool() -> None:
    pools, events = Pools(), list[str]()
    first_inside, second_inside, first_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with pools.use(0, installer(events, 100)) as limit:
            assert limit == 100
            first_inside.set()
            assert second_inside.wait(60)
        first_left.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_inside.wait(60)
    with pools.use(0, installer(events, 200)) as limit:
        assert limit == 100
        second_inside.set()
        assert first_left.wait(60)
        assert events == ["install 100"]  # the first load has ended, and the second one still uses the pool
    thread.join()
    assert events == ["install 100", "remove 100"]
    with pools.use(0, installer(events, 300)) as limit, pools.use(1, installer(events, 400)) as other:
        assert (limit, other) == (300, 400)
    assert events[2:] == ["install 300", "install 400", "remove 400", "remove 300"]


def test_a_pool_that_cannot_be_made_is_not_counted() -> None:
    pools, events = Pools(), list[str]()

    def fail() -> tuple[int, Callable[[], None]]:
        raise MemoryError

    with pytest.raises(MemoryError), pools.use(0, fail):
        pass
    with pools.use(0, installer(events, 100)):
        pass
    assert events == ["install 100", "remove 100"]


def test_a_pool_is_removed_after_an_error() -> None:
    pools, events = Pools(), list[str]()
    with pytest.raises(ValueError, match="in a load"), pools.use(0, installer(events, 100)):
        raise ValueError("in a load")
    assert events == ["install 100", "remove 100"]


class Cuda:
    """As much of `cupy.cuda` as a load needs. Notes what happens, with the thread in which it does."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.runtime = SimpleNamespace(
            deviceSynchronize=lambda: self.note("waits for all"), CUDARuntimeError=RuntimeError
        )

    def note(self, what: str) -> None:
        self.happened.append(f"{threading.current_thread().name}: {what}")

    @contextmanager
    def on_gpu(self, number: int) -> Iterator[None]:
        self.note(f"on {number}")
        yield

    @contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        self.note(f"allocates by {getattr(allocator, '__name__', allocator)}")
        yield

    class Stream:
        def __init__(self, cuda: Any, name: str) -> None:
            self.cuda, self.name = cuda, name

        def __enter__(self) -> Any:
            self.cuda.note(f"enters {self.name}")
            return self

        def __exit__(self, *_: object) -> None:
            self.cuda.note(f"leaves {self.name}")

        def synchronize(self) -> None:
            self.cuda.note(f"waits for {self.name}")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CudaKernels:
    """Of GPU 3, whose driver is `Cuda`."""
    pytest.importorskip("rmm")
    made: Any = object.__new__(CudaKernels)
    made.xp, made._number, made._loading, made._torchs = SimpleNamespace(cuda=Cuda()), 3, None, "torch"
    monkeypatch.setattr(torch.cuda, "device", made.xp.cuda.on_gpu)
    names = iter(["first", "second"])
    made._streams = ThreadStreams(lambda: made.xp.cuda.Stream(made.xp.cuda, next(names)))
    monkeypatch.setattr(cuda, "_POOLS", SimpleNamespace(use=lambda *_: nullcontext(600)))
    monkeypatch.setattr(CudaKernels, "_free", lambda self: 1000)
    monkeypatch.setattr(DeviceKernels, "current", lambda self: self.xp.cuda.Stream(self.xp.cuda, "torch's"))
    return made  # type: ignore[no-any-return]


def test_each_thread_of_a_load_has_a_stream_and_waits_for_it(kernels: CudaKernels) -> None:
    happened = kernels.xp.cuda.happened

    def stage() -> None:
        for _ in range(2):
            with kernels.current():
                happened.append("works")

    with kernels.loading():
        thread = threading.Thread(target=stage, name="stage")
        thread.start()
        thread.join()
        with pytest.raises(MemoryError), kernels.current():
            raise MemoryError
    entered = ["on 3", "enters first", "allocates by rmm_cupy_allocator"]
    left = ["waits for first", "leaves first"]
    one = ["on 3", "enters second", "allocates by rmm_cupy_allocator"], ["waits for second", "leaves second"]
    stages = [*(f"stage: {what}" for what in one[0]), "works", *(f"stage: {what}" for what in one[1])]
    assert happened == [
        *(f"MainThread: {what}" for what in ["on 3", "waits for all", *entered]),
        *stages,
        *stages,
        *(f"MainThread: {what}" for what in [*entered, *left, *left]),
    ]


class Driver:
    """The current GPU of each thread, and the GPUs on which the process has a context, as CUDA 12 and 13 have them."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.contexts: set[int] = set()

    @property
    def current(self) -> int:
        return getattr(self._current, "number", 0)

    def set(self, number: int) -> None:
        self._current.number = number
        self.contexts.add(number)

    @contextmanager
    def device(self, number: int) -> Iterator[None]:
        """As `torch.cuda.device`: it returns only to a GPU with a context."""
        before = self.current
        self.set(number)
        yield
        if before in self.contexts:
            self.set(before)

    @contextmanager
    def Device(self, number: int) -> Iterator[None]:  # noqa: N802
        """As CuPy's: it returns in any case."""
        before = self.current
        self.set(number)
        yield
        self.set(before)


def test_no_thread_of_a_load_makes_a_context_on_another_gpu(
    kernels: CudaKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    kernels.xp.cuda.Device = driver.Device

    def stage() -> None:
        for _ in range(2):
            with kernels.current():
                assert driver.current == 3

    with kernels.loading():
        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()
        assert kernels.lost() is None
    assert driver.contexts == {3}


def test_after_a_load_torchs_stream_is_used_without_a_wait(kernels: CudaKernels) -> None:
    with kernels.loading():
        pass
    kernels.xp.cuda.happened.clear()
    with kernels.current():
        pass
    used = ["enters torch's", "allocates by torch", "leaves torch's"]
    assert kernels.xp.cuda.happened == [f"MainThread: {what}" for what in used]


def test_cudf_gets_the_current_stream(kernels: CudaKernels) -> None:
    cupy = pytest.importorskip("cupy")
    kernels.xp.cuda.get_current_stream = lambda: cupy.cuda.ExternalStream(1234)
    assert kernels.stream().__cuda_stream__() == (0, 1234)


def test_ids_may_use_the_memory_that_the_limit_leaves(monkeypatch: pytest.MonkeyPatch, kernels: CudaKernels) -> None:
    for limit, left in ((600, 400), (2000, 0)):
        monkeypatch.setattr(cuda, "_POOLS", SimpleNamespace(use=lambda *_, limit=limit: nullcontext(limit)))
        with kernels.loading():
            assert kernels.ids_limit == left


def test_host_memory_is_pinned_in_place_until_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> None:
        if address in pinned:
            raise RuntimeError("already registered")
        pinned[address] = nbytes

    waits: list[int] = []

    def unregister(address: int) -> None:
        assert waits, "a batch may still read this memory"
        waits.pop()
        del pinned[address]

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    runtime = SimpleNamespace(
        hostRegister=register,
        hostUnregister=unregister,
        deviceSynchronize=lambda: waits.append(0),
        CUDARuntimeError=RuntimeError,
    )
    kernels: Any = object.__new__(DeviceKernels)
    kernels.xp, kernels._number = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), 0
    rows = [host_store([Ragged.from_lists([[1, 2], [3]])], None) for _ in range(2)]
    addresses = [kernels.pinned(some.values) for some in rows]
    assert pinned == dict.fromkeys(addresses, 12)
    assert [some.values.ctypes.data for some in rows] == addresses
    assert all(address % 4096 == 0 for address in addresses), "no page has memory of anything else"
    with pytest.raises(DeviceError, match="cannot pin 12 bytes of host memory .already registered.: set tokens_on"):
        kernels.pinned(rows[0].values)
    kept = rows.pop().values[1:]
    assert len(pinned) == 2
    del kept
    assert len(pinned) == 1
    assert kernels.pinned(np.zeros(0, np.int32)) == 0


class Memory:
    """As much of CUDA, CuPy and RMM as the pool of a GPU needs. Notes what happens."""

    cudaMemAllocationTypePinned, cudaMemHandleTypeNone, cudaMemLocationTypeDevice = 1, 0, 1  # noqa: N815
    cudaMemPoolAttrReleaseThreshold = "threshold"  # noqa: N815

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.resources: dict[int, Any] = {3: "the user's"}
        self.mr = SimpleNamespace(
            get_per_device_resource=self.resources.get,
            set_per_device_resource=self.resources.__setitem__,
            CudaAsyncViewMemoryResource=self.view,
            LimitingResourceAdaptor=lambda view, limit: f"{view} up to {limit}",
        )
        self.cuda = SimpleNamespace(runtime=self)

    def view(self, pool: Any) -> str:
        self.handle = pool
        return f"pool {int(pool)}"

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.happened.append("wait")

    def get_default_pinned_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: self.happened.append("free pinned"))

    def MemPoolProps(self, *values: int) -> tuple[int, ...]:  # noqa: N802
        return values

    def memPoolCreate(self, kind: tuple[int, ...]) -> int:  # noqa: N802
        self.happened.append(f"create {kind}")
        return 77

    def memPoolSetAttribute(self, pool: int, name: str, value: int) -> None:  # noqa: N802
        self.happened.append(f"{pool}: {name} {value}")

    def memPoolTrimTo(self, pool: int, size: int) -> None:  # noqa: N802
        self.happened.append(f"{pool}: trim to {size}")


def test_a_process_has_one_pool_for_all_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pools = Memory(), Pools()
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setitem(sys.modules, "rmm", memory)
    monkeypatch.setattr(cuda, "_HANDLES", {})
    emptied = ["wait", "free pinned", "77: threshold 0", "77: trim to 0"]
    for limit in (100, 200):
        kernels: Any = object.__new__(CudaKernels)
        kernels.xp, kernels._number, kernels._limit = memory, 3, limit
        failing = suppress(ValueError) if limit == 200 else nullcontext()
        with failing, pools.use(3, kernels._install_pool):  # a load that fails gives its memory back, too
            assert memory.resources == {3: f"pool 77 up to {limit}"}
            if limit == 200:
                raise ValueError
        assert memory.resources == {3: "the user's"}
    assert memory.happened == ["create (1, 0, 1, 3)", "77: threshold 100", *emptied, "77: threshold 200", *emptied]


def test_rmm_takes_the_handle_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    rmm, memory = pytest.importorskip("rmm"), Memory()
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda, "_HANDLES", {})
    monkeypatch.setitem(sys.modules, "rmm", memory)
    kernels: Any = object.__new__(CudaKernels)
    kernels.xp, kernels._number, kernels._limit = memory, 3, 100
    kernels._install_pool()
    # Without a driver RMM comes as far as asking it; a handle of another type is a ValueError before that.
    with suppress(RuntimeError):
        rmm.mr.CudaAsyncViewMemoryResource(memory.handle)


def test_memory_of_ids_is_taken_back_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullError(RuntimeError):
        status = 2

    memory, most = Memory(), 1
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    class Alone:
        def __init__(self, size: int) -> None:
            if size > most - len([each for each in memory.happened if "trim" in each]):
                raise FullError("cudaErrorMemoryAllocation: out of memory")

    def trim(pool: int, size: int) -> None:
        nonlocal most
        memory.happened.append(f"{pool}: trim to {size}")
        most = 100

    used: list[Any] = []

    def using(allocator: Any) -> Any:
        used.append(allocator)
        return nullcontext()

    kernels: Any = object.__new__(CudaKernels)
    kernels.xp, kernels._number = memory, 3
    memory.CUDARuntimeError = FullError  # type: ignore[attr-defined]
    monkeypatch.setattr(memory, "memPoolTrimTo", trim)
    memory.cuda.using_allocator, memory.cuda.Memory = using, Alone
    memory.cuda.MemoryPointer = lambda made, offset: (made, offset)
    monkeypatch.setattr(cuda, "_HANDLES", {3: 77})
    with kernels.lasting():
        made, _ = used[0](50)
    assert isinstance(made, Alone)
    assert memory.happened == ["wait", "77: trim to 0"]
    with pytest.raises(DeviceError, match="out of GPU memory while storing token ids"), kernels.lasting():
        used[0](200)
    monkeypatch.setattr(cuda, "_HANDLES", {})
    with pytest.raises(DeviceError, match="out of GPU memory while storing token ids"), kernels.lasting():
        used[0](200)


def test_later_loads_use_the_streams_of_earlier_ones() -> None:
    idle, made = list[Any](), list[Any]()

    class Stream(nullcontext[None]):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def synchronize(self) -> None: ...

    def load() -> set[int]:
        streams, used = ThreadStreams(Stream, idle), set[int]()

        def stage() -> None:
            for _ in range(3):
                with streams.current():
                    used.add(id(streams._of.thread))

        threads = [threading.Thread(target=stage) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join()
        stage()
        streams.release()
        return used

    first = load()
    assert len(first) == 3
    assert load() == first
    assert len(made) == len(idle) == 3


@pytest.mark.parametrize(("total", "chunk"), [(80, 1024), (24, 384), (16, 256), (2, 128)])
def test_chunks_are_larger_on_large_gpus(kernels: CudaKernels, monkeypatch: Any, total: int, chunk: int) -> None:
    limit = total << 29  # half of its memory
    monkeypatch.setattr(cuda, "_POOLS", SimpleNamespace(use=lambda *_: nullcontext(limit)))
    with kernels.loading():
        assert kernels.chunk_bytes == chunk << 20


def test_tables_of_the_last_tokenizers_are_kept() -> None:
    shared, made = SharedTables(most=2), list[str]()

    class Table: ...

    def get(digest: str, what: str = "encoder") -> Any:
        def make() -> Table:
            made.append(digest + what)
            return Table()

        return shared.get(digest.encode(), what, make)

    first = weakref.ref(get("a"))
    assert get("a") is first()
    get("a", "spans")
    get("b")
    get("a")
    assert made == ["aencoder", "aspans", "bencoder"]
    get("c")  # instead of b, which was used before a
    assert first() is not None
    get("b")
    assert made[3:] == ["cencoder", "bencoder"]
    assert first() is None
    with pytest.raises(MemoryError):
        shared.get(b"d", "encoder", lambda: (_ for _ in ()).throw(MemoryError()))
    assert isinstance(shared.get(b"d", "encoder", Table), Table)
