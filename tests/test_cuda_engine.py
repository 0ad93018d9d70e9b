"""The whole way of a load to `CudaKernels`, with a driver whose device memory is the host's: only CuPy's arrays, its
compiler and RMM are simulated, and may fail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from simulator.host_kernels import COMPILER, build, launch
from test_cuda_process import Memory
from test_device_failures import failing_chunks

import gpuload
from gpuload.core.arrays import Array
from gpuload.core.errors import ContextLostError
from gpuload.core.options import Options
from gpuload.engines.device import cuda, kernels, verdict
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.shared import SharedTables
from gpuload.sources.open import open_sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

OPTIONS: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 40, "token_cache": False}


class DriverError(RuntimeError):
    """As CuPy's `CUDARuntimeError`."""

    status = 700


class Driver(Memory):
    """As much of CuPy as `CudaKernels` needs: memory, devices and streams that are the host's.

    Attributes:
        enters: how often a device was made the current one.
        fails: whether the n-th time fails; n → True.
        broken: nothing works any more.
        breaks: the kernel after which that is so.
    """

    CUDARuntimeError = DriverError

    def __init__(self) -> None:
        super().__init__()
        self.enters, self.broken, self.fails = 0, False, lambda n: False
        self.breaks = ""
        self.launched: set[str] = set()
        null = SimpleNamespace(synchronize=self.check)
        stream = type("Stream", (), {"__enter__": lambda s: s, "__exit__": lambda *_: None})
        stream.synchronize = lambda s: self.check()  # type: ignore[attr-defined]
        self.cuda = SimpleNamespace(
            Stream=lambda **_: stream(),
            PythonFunctionAllocator=lambda *_: SimpleNamespace(malloc="torch's"),
            using_allocator=lambda allocator: nullcontext(),
            get_current_stream=lambda: null,
            runtime=self,
        )
        self.cuda.Stream.null = nullcontext()  # type: ignore[attr-defined]

    def check(self) -> None:
        if self.broken:
            raise DriverError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def __enter__(self) -> Driver:
        self.enters += 1
        if self.fails(self.enters):
            raise DriverError("cudaErrorDevicesUnavailable: device busy")
        return self

    def __exit__(self, *_: object) -> None: ...

    def deviceSynchronize(self) -> None:  # noqa: N802
        self.check()
        super().deviceSynchronize()

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 4 << 30, 8 << 30

    def function(self, name: str) -> Callable[..., None]:
        def call(grid: Any, block: Any, arguments: Any) -> None:
            self.launched.add(name)
            self.broken = self.broken or name == self.breaks
            launch(build(source(), "SEGMENT=16"), name, grid[0], 0, list(arguments))

        return call


class OnHost(cuda.CudaKernels):
    """Its own methods, but for addresses and tensors."""

    resident = 1024

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(number, limit)
        MADE.append(self)
        self.device = "cpu"

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)


MADE: list[OnHost] = []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    """A process with GPU 0, CuPy and RMM, and without pylibcudf."""
    made, find = Driver(), importlib.util.find_spec

    class Cupy(ModuleType):
        cuda = made.cuda

        def __getattr__(self, name: str) -> Any:
            return getattr(np if hasattr(np, name) else made, name)

    def found(name: str, *more: Any) -> Any:
        return None if name == "pylibcudf" else object() if name in ("cupy", "rmm") else find(name, *more)

    MADE.clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda number: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", found)
    monkeypatch.setitem(sys.modules, "rmm", made)
    monkeypatch.setitem(sys.modules, "rmm.allocators.cupy", SimpleNamespace(rmm_cupy_allocator="rmm's"))
    made.resources = {0: "the user's"}
    made.mr.get_per_device_resource, made.mr.set_per_device_resource = made.resources.get, made.resources.__setitem__
    monkeypatch.setattr(kernels, "load_cupy", lambda: Cupy("numpy"))
    monkeypatch.setattr(kernels, "_functions", lambda number: made.function)
    monkeypatch.setattr(kernels, "_shared_on", cache(lambda number: SharedTables()))
    monkeypatch.setattr(cuda, "CudaKernels", OnHost)
    for name, value in (("_WORKING", set()), ("_HANDLES", {}), ("_POOLS", cuda.Pools())):
        monkeypatch.setattr(cuda, name, value)
    cuda._IDLE_STREAMS.clear()
    monkeypatch.setattr(verdict, "described", lambda number: {"gpu": "H", "compute_mode": 0})
    monkeypatch.setattr(verdict, "run_step", lambda *_: verdict.Step("", ""))
    unchecked: dict[int, str] = {}
    monkeypatch.setattr(verdict, "UNCHECKED", unchecked)
    monkeypatch.setattr(cuda, "UNCHECKED", unchecked)
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(verdict.tempfile, "tempdir", str(tmp_path))
    return made


def check_same(found: Any, file: str, tokenizer: Any) -> None:
    expected = gpuload.load(file, tokenizer, **OPTIONS | {"device": "cpu"})
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    for name, values in expected.batch([3, 1, 7]).items():
        assert np.array_equal(found.batch([3, 1, 7])[name], values), name


@pytest.mark.parametrize("tokens_on", ["device", "auto"])
def test_cupy_and_rmm_suffice(gsm8k: str, qwen: Any, driver: Driver, tokens_on: Any) -> None:
    """Without pylibcudf, Arrow reads, and the same kernels do the rest, in the same pool."""
    found = gpuload.load(gsm8k, qwen, device="cuda", tokens_on=tokens_on, **OPTIONS)
    assert "prompts are read by Arrow: pylibcudf is not installed" in found.report.notes
    assert "cuda:0: " in str(found.report)
    check_same(found, gsm8k, qwen)
    assert {type(each) for each in MADE} == {OnHost}
    assert {"copy_pieces", "list_pretokens", "write_ids", "pad"} <= driver.launched
    assert driver.happened.count("create (1, 0, 1, 0)") == 1
    assert driver.resources == {0: "the user's"}


@pytest.mark.usefixtures("driver")
def test_torch_refuses_tensors_to_per_thread_default_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch would end with its BufferError."""
    assert cuda.unavailable_reason("cuda") is None
    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    assert "PER_THREAD_DEFAULT_STREAM is set" in (cuda.unavailable_reason("cuda") or "")


def test_with_pylibcudf_these_kernels_get_what_cudf_reads(
    gsm8k: str, qwen: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    read = failing_chunks(100, RuntimeError("CUDF failure"))

    def chunks(using: Any, *more: Any) -> Any:
        given.append(using)
        return read(using, *more)

    monkeypatch.setattr(cuda, "without_cudf", lambda: None)
    monkeypatch.setattr(cuda, "chunks", chunks)
    found = gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
    assert not [note for note in found.report.notes if "pylibcudf" in note]
    assert given == MADE[-1:]
    check_same(found, gsm8k, qwen)


def test_in_exclusive_process_mode_the_report_says_that_kernels_were_not_checked(
    gsm8k: str, qwen: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"gpu": "H", "compute_mode": verdict.EXCLUSIVE}
    monkeypatch.setattr(verdict, "described", lambda number: about)
    note = "GPU 0 is in exclusive-process mode, and its kernels have not been checked: run 'gpuload doctor --gpu'"
    for _ in range(2):  # also of later loads, which do not ask again
        found = gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
        assert [each for each in found.report.notes if each.startswith(note)]
    verdict.keep(verdict.place_of(about), "")
    cuda._WORKING.clear()
    verdict.UNCHECKED.clear()
    found = gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
    assert not [each for each in found.report.notes if "exclusive" in each]


@pytest.mark.parametrize("lost", [False, True])
def test_the_device_cannot_be_entered_in_a_load(gsm8k: str, qwen: Any, driver: Driver, lost: bool) -> None:
    """Whenever that is."""
    gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)  # and it has been tested
    begins = driver.enters
    gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
    last = driver.enters - begins
    assert last > 10
    for at in (1, 2, 3, 4, 5, last // 2, last):
        first = driver.enters

        def fails(n: int, bad: int = first + at) -> bool:
            driver.broken = driver.broken or (lost and n == bad)
            return n == bad or driver.broken

        driver.fails = fails
        with pytest.raises(RuntimeError, match="DevicesUnavailable") as found:
            gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
        assert isinstance(found.value, ContextLostError) == lost
        assert driver.resources == {0: "the user's"}
        assert not cuda._POOLS._users[0]
        driver.fails, driver.broken = lambda n: False, False
    check_same(gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS), gsm8k, qwen)


@pytest.mark.parametrize("kernel", ["copy_pieces", "write_ids"])
def test_the_kernel_that_failed_is_named_although_all_that_follows_fails_too(
    gsm8k: str, qwen: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Waits for streams, the end of the pool: each gets the same error once more."""
    gpuload.load(gsm8k, qwen, device="cuda", **OPTIONS)
    monkeypatch.setenv("GPULOAD_SYNC", "1")
    driver.breaks = kernel
    with pytest.raises(ContextLostError, match=rf"context lost: cuda:0 failed \(DeviceError: kernel {kernel} failed"):
        gpuload.load(gsm8k, qwen, device="auto", **OPTIONS)


class DataFrame:
    """As a `cudf.DataFrame`, of which `slices` is given columns."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, name: Any) -> Any:
        return DataFrame(self.table.select(name)) if isinstance(name, list) else self.table.column(name)

    def head(self, rows: int) -> DataFrame:
        return DataFrame(self.table.slice(0, rows))

    def drop(self, columns: list[str]) -> DataFrame:
        return DataFrame(self.table.drop_columns(columns))

    def memory_usage(self, index: bool, deep: bool) -> Any:
        return np.array([self.table.nbytes])

    def to_arrow(self, preserve_index: bool) -> pa.Table:
        return self.table


DataFrame.__module__ = "cudf.core.dataframe"


@pytest.mark.parametrize("rows", [0, 5, 20])
@pytest.mark.parametrize("lost", [False, True])
def test_a_frame_whose_column_cannot_be_taken_apart_is_read_by_arrow(
    qwen: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch, rows: int, lost: bool
) -> None:
    from gpuload.engines.conversations import from_arrow
    from gpuload.engines.device.texts import DeviceTexts

    def failing(using: Any, column: Any, kind: Any, nbytes: int) -> Iterator[Any]:
        if rows:
            yield from_arrow(DeviceTexts(using), column.combine_chunks().slice(0, rows))
        driver.broken = lost
        raise DriverError("cudaErrorInvalidValue: a column of another kind")

    monkeypatch.setattr(cuda, "without_cudf", lambda: None)
    monkeypatch.setattr(cuda, "slices", failing)
    prompts = [[{"role": "user", "content": f"text {n}"}] for n in range(20)]
    table = pa.table({"prompt": prompts, "n": range(20)})
    assert open_sources(DataFrame(table), Options(max_prompt_length=512))[0].frame is not None
    if lost:
        with pytest.raises(ContextLostError, match="context lost.*IllegalAddress"):  # of whichever thread
            gpuload.load(DataFrame(table), qwen, device="auto", max_prompt_length=512)
        return
    found = gpuload.load(DataFrame(table), qwen, device="cuda", max_prompt_length=512)
    expected = gpuload.load(table, qwen, device="cpu", max_prompt_length=512)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert found.take(["n"]) == {"n": list(range(20))}
    assert f"read by Arrow from row {rows} on: cuDF cannot (DriverError: cudaErrorInvalidValue" in str(found.report)


@pytest.mark.parametrize("where", ["device", "wait", "unregister"])
def test_pinned_memory_is_freed_in_a_lost_context_too(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing can be done about its pages any more, and nothing is printed when the array is freed."""
    printed, asked = list[Any](), list[int]()

    def unregister(address: int) -> None:
        asked.append(address)
        raise DriverError("cudaErrorIllegalAddress")

    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    driver.hostRegister, driver.hostUnregister = lambda *_: None, unregister  # type: ignore[attr-defined]
    array = np.zeros(4096, np.int32)
    address = OnHost(0, 0).pinned(array)
    driver.fails, driver.broken = lambda n: where == "device", where == "wait"
    del array
    assert asked == ([address] if where == "unregister" else [])
    assert not printed
