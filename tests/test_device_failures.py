"""What a load does when a device fails: it says so, gives memory back, and goes on only where that is possible."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from simulator import engine_on, load_chats_with, load_pairs_with, load_with
from simulator.host_kernels import COMPILER, HostKernels
from simulator.stream_checks import StreamKernels
from test_cuda_process import Memory

import gpuload
from gpuload.core.errors import ContextLostError, DataError, DeviceError
from gpuload.core.options import Options
from gpuload.engines.conversations import Conversations, from_arrow
from gpuload.engines.device import cuda
from gpuload.engines.device import parts as device_parts
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.kernels import DeviceKernels
from gpuload.engines.device.parts import chunk_sizes, is_small
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.host.engine import arrow_parts
from gpuload.pipeline.parts import joined
from gpuload.pipeline.stream import read
from gpuload.sources.open import open_sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

OPTIONS: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 40}


class Failing(HostKernels):
    """Kernels of which one raises an error.

    Args:
        kernel: its name.
        error: what it raises.
        lost: what a probe of the context says afterwards.
    """

    def __init__(self, kernel: str, error: Exception, lost: str | None = None) -> None:
        self.kernel, self.error, self.broken = kernel, error, lost

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        if name == self.kernel:
            raise self.error
        super()._launch(name, blocks, arguments)

    def lost(self) -> str | None:
        return self.broken


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), MemoryError("std::bad_alloc")])
def test_a_lost_context_ends_the_load_whatever_the_device(gsm8k: str, qwen: Any, device: Any, error: Exception) -> None:
    kernels = Failing("copy_pieces", error, "cudaErrorIllegalAddress")
    with pytest.raises(
        ContextLostError, match="context lost: cpu failed .*nothing in this process.*IllegalAddress"
    ) as found:
        load_with(engine_on(kernels), gsm8k, qwen, device=device, **OPTIONS)
    assert "GPULOAD_SYNC=1" in str(found.value)


@pytest.mark.parametrize("kernel", ["copy_pieces", "list_pretokens", "write_ids"])
def test_a_bare_memory_error_says_what_to_do(gsm8k: str, qwen: Any, kernel: str) -> None:
    kernels = Failing(kernel, MemoryError("std::bad_alloc"))
    with pytest.raises(DeviceError, match="out of GPU memory while .*: raise gpu_memory_limit"):
        load_with(engine_on(kernels), gsm8k, qwen, device="cuda", **OPTIONS)
    with pytest.warns(UserWarning, match="falling back to the CPU .DeviceError: out of GPU memory"):
        found = load_with(engine_on(kernels), gsm8k, qwen, **OPTIONS)
    assert found.tokens.to_lists() == gpuload.load(gsm8k, qwen, device="cpu", **OPTIONS).tokens.to_lists()


def test_memory_runs_out_where_a_load_reads_or_fetches(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("std::bad_alloc")

    for name in ("fetch", "read", "store", "keep"):
        with monkeypatch.context() as patch:
            patch.setattr(DeviceEngine, name, fail)
            with pytest.raises(DeviceError, match="out of GPU memory while loading"):
                load_with(engine_on(HostKernels()), gsm8k, qwen, device="cuda", verify="full", **OPTIONS)


def test_chats_and_pairs_fail_the_same_way(qwen: Any) -> None:
    chats = pa.table({"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 9})
    pairs = pa.table({"prompt": ["a"] * 9, "chosen": ["b"] * 9, "rejected": ["c"] * 9})
    broken = Failing("copy_pieces", RuntimeError("a fault"), "cudaErrorAssert")
    for load, table in ((load_chats_with, chats), (load_pairs_with, pairs)):
        try:
            load(broken, table, qwen)
        except ContextLostError as error:
            assert "cudaErrorAssert" in str(error)  # noqa: PT017
        else:  # texts are rendered and encoded on the host: nothing was launched
            assert load is load_pairs_with


def test_a_failed_load_gives_its_memory_back_before_the_cpu_takes_over(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that fails because of its data."""
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []
    error: Exception = RuntimeError("a kernel failed")

    def fail(self: DeviceEngine, text: Any) -> Any:
        array = np.zeros(1000)
        array_in_a_cycle = [array]
        array_in_a_cycle.append(array_in_a_cycle)  # type: ignore[arg-type]
        held.append(weakref.ref(array))
        raise error

    def described(engine: Any, error: BaseException) -> Exception:
        found = explained(engine, error)  # type: ignore[arg-type]
        alive.append(sum(one() is not None for one in held))
        return found

    from gpuload.pipeline import run

    explained = run.explained
    monkeypatch.setattr(run, "explained", described)
    monkeypatch.setattr(DeviceEngine, "encode", fail)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="falling back"):
            load_with(engine_on(HostKernels()), gsm8k, qwen, **OPTIONS)
        assert held
        assert alive == [0]
        error = DataError("about a row")
        with pytest.raises(DataError, match="about a row"):
            load_with(engine_on(HostKernels()), gsm8k, qwen, **OPTIONS)
        assert alive == [0, 0]
    finally:
        gc.enable()


def test_a_context_may_be_lost_behind_an_error_of_the_data(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: DeviceEngine, text: Any) -> Any:
        raise DataError("about a row")

    monkeypatch.setattr(DeviceEngine, "encode", fail)
    with pytest.raises(ContextLostError, match="DataError: about a row.*IllegalAddress"):
        load_with(engine_on(Failing("", RuntimeError(), "cudaErrorIllegalAddress")), gsm8k, qwen, **OPTIONS)


@pytest.mark.parametrize("what", ["synchronize", "device"])
def test_rmm_gets_its_resource_back_even_if_nothing_works_any_more(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    memory = Memory()
    monkeypatch.setitem(sys.modules, "rmm", memory)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(cuda, "_HANDLES", {})
    kernels: Any = object.__new__(cuda.CudaKernels)
    kernels.xp, kernels._number, kernels._limit = memory, 3, 1 << 30
    with pytest.raises(RuntimeError, match="IllegalAddress"), cuda.Pools().use(3, kernels._install_pool):  # noqa: PT012
        assert memory.resources == {3: f"pool 77 up to {1 << 30}"}
        if what == "device":
            monkeypatch.setattr(torch.cuda, "device", fail)
        else:
            memory.deviceSynchronize = fail  # type: ignore[method-assign]
    assert memory.resources == {3: "the user's"}


class Driver:
    """As much of CuPy as a launch needs, on a GPU whose kernels fail when they are waited for."""

    class CUDARuntimeError(RuntimeError): ...

    def __init__(self, fails: bool) -> None:
        runtime = SimpleNamespace(CUDARuntimeError=self.CUDARuntimeError, deviceSynchronize=self._wait)
        stream = SimpleNamespace(synchronize=self._wait)
        self.fails, self.waits, self.ndarray, self.__name__ = fails, 0, np.ndarray, "numpy"
        self.cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)

    def _wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise self.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")


def driven(fails: bool) -> Any:
    kernels: Any = object.__new__(DeviceKernels)
    kernels.xp, kernels._number = Driver(fails), 0
    kernels._function = lambda name: lambda grid, block, arguments: None
    return kernels


def test_an_error_is_that_of_the_launch_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (3, np.zeros(3, np.int64), np.zeros(4, np.int64), 0, 9, np.zeros(9, np.uint8))
    kernels = driven(fails=True)
    kernels.run("copy_pieces", 80, *arguments)
    assert kernels.xp.waits == 0, "launches are not waited for"
    monkeypatch.setenv("GPULOAD_SYNC", "1")
    with pytest.raises(
        DeviceError, match=r"kernel copy_pieces failed \(cudaErrorIllegalAddress.*1 blocks of 256 thr.*uint8\[9\]"
    ):
        kernels.run("copy_pieces", 80, *arguments)
    driven(fails=False).run("copy_pieces", 80, *arguments)


def test_a_launch_that_fails_at_once_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(grid: Any, block: Any, arguments: Any) -> None:
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

    arguments = (3, np.zeros(3, np.int64), np.zeros(4, np.int64), 0, 9, np.zeros(9, np.uint8))
    kernels = driven(fails=False)
    kernels._function = lambda name: fail
    with pytest.raises(RuntimeError, match="^CUDA_ERROR_INVALID_VALUE"):
        kernels.run("copy_pieces", 80, *arguments)
    monkeypatch.setenv("GPULOAD_SYNC", "1")
    with pytest.raises(DeviceError, match=r"kernel copy_pieces failed \(CUDA_ERROR_INVALID_VALUE.*uint8\[9\]"):
        kernels.run("copy_pieces", 80, *arguments)


def test_the_context_is_asked_whether_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert driven(fails=False).lost() is None
    assert "IllegalAddress" in driven(fails=True).lost()


def test_cupy_is_imported_where_the_home_directory_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    code = "import os; from gpuload.engines.device.kernels import load_cupy; load_cupy()"
    code += "; print(os.environ['CUPY_CACHE_DIR'])"
    blocked = tmp_path / "a file"
    blocked.touch()
    about = {name: value for name, value in os.environ.items() if name not in ("CUPY_CACHE_DIR", "XDG_CACHE_HOME")}
    for cache in (tmp_path / "cache", blocked / "cache"):
        about |= {"HOME": str(blocked / "home"), "GPULOAD_CACHE": str(cache)}
        done = subprocess.run([sys.executable, "-c", code], env=about, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (done.stdout.strip() == str(cache / "cupy")) == (cache.parent == tmp_path)


def failing_chunks(rows: int, error: Exception) -> Any:
    """As `cudf.chunks`, but fails behind some rows."""

    def chunks(kernels: Any, path: str, column: str, kind: Any, nbytes: int, first: int) -> Iterator[Conversations]:
        import pyarrow.parquet as pq

        values = pq.read_table(path, columns=[column]).column(column).combine_chunks()
        if rows:
            yield from_arrow(DeviceTexts(kernels), values.slice(0, rows))
        raise error

    return chunks


@pytest.mark.parametrize("rows", [0, 1, 5000, 7473])
def test_a_file_that_cudf_cannot_read_is_read_by_arrow(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    kernels, notes = HostKernels(), list[str]()
    total = open_sources(gsm8k, Options(max_prompt_length=512))[0].num_rows
    rows = min(rows, total)
    monkeypatch.setattr(cuda, "chunks", failing_chunks(rows, RuntimeError("CUDF failure: unsupported page")))

    def engine(options: Any, reference: Any, exact_only: bool = False) -> DeviceEngine:
        read = cuda.reader(kernels, notes)  # type: ignore[arg-type]
        import torch

        return DeviceEngine(kernels, torch.device("cpu"), reference, exact_only, read, notes=notes)

    found = load_with(engine, gsm8k, qwen, max_prompt_length=512, token_cache=False)
    expected = gpuload.load(gsm8k, qwen, max_prompt_length=512, device="cpu")
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert found.columns.equals(expected.columns)
    assert f"read by Arrow from row {rows:,} on: cuDF cannot (RuntimeError: CUDF failure: unsupported page)" in str(
        found.report
    )


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("wrong", [-1, 1, 5000])
def test_a_file_of_which_cudf_reads_other_rows_is_read_by_arrow(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch, wrong: int, device: Any, tmp_path: Path
) -> None:
    """That file only, although some of its rows may have been rendered."""
    monkeypatch.setattr(device_parts, "MISREAD", set())
    monkeypatch.setattr(cuda, "MISREAD", device_parts.MISREAD)
    table, other = pq.read_table(gsm8k).slice(0, 1000), str(tmp_path / "other.parquet")
    pq.write_table(table, tmp_path / "right.parquet")
    pq.write_table(table.slice(0, 900), other)
    read: list[str] = []

    def chunks(using: Any, path: str, column: str, kind: Any, nbytes: int, first: int) -> Iterator[Conversations]:
        read.append(Path(path).name)
        values = pq.read_table(path, columns=[column]).column(column).combine_chunks()
        if path == other:
            values = pa.concat_arrays([values.slice(0, len(values) + min(0, wrong)), values.slice(0, max(0, wrong))])
        for low in range(0, len(values), 400):
            yield from_arrow(DeviceTexts(using), values.slice(low, 400))

    monkeypatch.setattr(cuda, "chunks", chunks)
    kernels, notes = HostKernels(), list[str]()

    def engine(options: Any, reference: Any, exact_only: bool = False) -> DeviceEngine:
        notes.clear()
        made = cuda.reader(kernels, notes)  # type: ignore[arg-type]
        return DeviceEngine(kernels, torch.device("cpu"), reference, exact_only, made, notes=notes)

    files = [other, str(tmp_path / "right.parquet")]
    found = load_with(engine, files, qwen, max_prompt_length=512, device=device, token_cache=False)
    expected = gpuload.load(files, qwen, max_prompt_length=512, device="cpu", token_cache=False)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert found.columns.equals(expected.columns)
    assert read[0] == "other.parquet"
    assert set(read[1:]) == {"right.parquet"}
    assert notes == [f"{other}: read by Arrow: cuDF reads another number of rows"]


def test_many_small_files_are_read_by_arrow_and_joined(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few, or large ones, by cuDF."""
    large: Any = SimpleNamespace(parquet="x", decoded_bytes=lambda names: 8 << 20)
    assert not is_small(large, "prompt", 1 << 40)
    read: list[str] = []

    def chunks(using: Any, path: str, column: str, kind: Any, nbytes: int, first: int) -> Iterator[Conversations]:
        read.append(path)
        yield from_arrow(DeviceTexts(using), pq.read_table(path, columns=[column]).column(column).combine_chunks())

    monkeypatch.setattr(cuda, "chunks", chunks)
    files = [str(tmp_path / f"{number}.parquet") for number in range(20)]
    for number, file in enumerate(files):
        prompts = [[{"role": "user", "content": f"{number} {row}"}] for row in range(5)]
        pq.write_table(pa.table({"prompt": prompts, "n": range(5)}), file)
    for some, by_cudf in ((files, []), (files[:3], files[:3])):
        read.clear()
        build = engine_on(HostKernels(), cuda.reader(HostKernels(), []))  # type: ignore[arg-type]
        found = load_with(build, some, qwen, max_prompt_length=512, token_cache=False)
        expected = gpuload.load(some, qwen, max_prompt_length=512, device="cpu", token_cache=False)
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert found.columns.equals(expected.columns)
        assert read == by_cudf


def test_what_cudf_cannot_read_is_not_read_by_arrow_in_a_lost_context(
    gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, notes = Failing("", RuntimeError(), "cudaErrorIllegalAddress"), list[str]()
    monkeypatch.setattr(cuda, "chunks", failing_chunks(100, RuntimeError("CUDA failure")))
    build = engine_on(kernels, cuda.reader(kernels, notes))  # type: ignore[arg-type]
    with pytest.raises(ContextLostError, match="CUDA failure"):
        load_with(build, gsm8k, qwen, max_prompt_length=512, token_cache=False)
    assert not notes


def test_without_cudf_arrow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pylibcudf", None)
    assert cuda.without_cudf() is not None


def test_small_parts_are_joined_for_a_device() -> None:
    messages = [[{"role": "user", "content": "x" * 50}]]
    (source,) = open_sources(
        pa.table({"prompt": messages * 100_000, "n": range(100_000)}), Options(max_prompt_length=512)
    )

    def parts(nbytes: int) -> list[Any]:
        batches = read([source], lambda number: arrow_parts(source, "prompt"), None, {})
        return list(joined(batches, nbytes))

    assert [len(part) for part in parts(64 << 20)] == [100_000], "7 MB are less than a first part"
    found = parts(1 << 20)
    assert 2 < len(found) < 13, "8,192 rows at a time would be 13 parts"
    assert len(found[0]) == 8192 < len(found[1]), "the device does not wait for the first rows"
    assert [n for part in found for n in part.table.column("n").to_pylist()] == list(range(100_000))
    assert sum(len(part.prompts) for part in found) == 100_000


@pytest.mark.parametrize("make", [HostKernels, StreamKernels])
@pytest.mark.parametrize("tokens_on", ["device", "host"])
def test_a_loader_may_be_left_early(gsm8k: str, qwen: Any, tokens_on: Any, make: type[Any]) -> None:
    """With a batch pending. Its ids live on, and the dataset and other loaders work as before."""
    kernels = make()
    found = load_with(engine_on(kernels), gsm8k, qwen, tokens_on=tokens_on, **OPTIONS)
    expected = [batch["input_ids"].tolist() for batch in found.loader(8, shuffle=False)]
    for _ in range(3):
        for batch in found.loader(8, shuffle=False):
            assert batch["input_ids"].tolist() == expected[0]
            break
    left = iter(found.loader(8, shuffle=False))
    first = next(left)["input_ids"]
    del found
    gc.collect()
    assert first.tolist() == expected[0]
    assert next(left)["input_ids"].tolist() == expected[1]
    assert not getattr(kernels, "races", [])


@pytest.mark.parametrize(
    ("prompts", "whole", "sizes"),
    [
        (10_000, 11_000, (32, 256)),
        (200, 300, (256, 256)),
        (10_000, 80_000, (16, 128)),
        (10_000, 10_000_000, (8, 8)),
    ],
)
def test_the_first_chunk_that_cudf_reads_is_small(prompts: int, whole: int, sizes: tuple[int, int]) -> None:
    """In MiB: of prompts, and of all columns, of which the host holds as many rows."""
    source: Any = SimpleNamespace(decoded_bytes=lambda names: (whole if names is None else prompts) << 20)
    assert chunk_sizes(source, "prompt", 256 << 20) == tuple(size << 20 for size in sizes)
    assert chunk_sizes(source, "prompt", 4 << 20) == (4 << 20, 4 << 20), "there is too little memory to choose"
