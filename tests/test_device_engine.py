"""The GPU engine with kernels of the host, all of it but the reading by cuDF: loads give what the CPU engine gives."""

from __future__ import annotations

import gc
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import user
from simulator import engine_on, load_chats_with, load_with
from simulator.host_kernels import COMPILER, HostKernels
from simulator.stream_checks import StreamKernels
from tiers import core, name_of, shared_files, with_shared

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DataError, DeviceError, SourceError
from gpuload.core.options import Options
from gpuload.engines.conversations import Conversations, from_arrow, from_texts
from gpuload.engines.device import cuda, cudf, parts, present
from gpuload.engines.device import engine as device
from gpuload.engines.device.batches import DeviceBatches, pad, prepare_pad
from gpuload.engines.device.encode import LEAST_CHUNK, DeviceEncoder
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.parts import zip_with_tables
from gpuload.engines.device.render import render
from gpuload.engines.device.shared import SharedTables
from gpuload.engines.device.store import Segments
from gpuload.engines.device.texts import DeviceTexts, texts_to_device
from gpuload.engines.protocol import ArrowPrompts
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing.plan import whole_rows
from gpuload.reference.reference import Reference
from gpuload.sources.fetch import SourceFile
from gpuload.sources.read import Source, open_file, with_prompts

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = StreamKernels()


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Loads use arrays on several streams in order, and free none that a stream still uses."""
    KERNELS.races.clear()
    yield
    assert KERNELS.races == []


def in_odd_chunks(source: Source, prompt_key: str) -> Iterator[Conversations] | None:
    """As cuDF would: the prompt column in chunks of other sizes than the tables with the other columns."""
    if source.without is None:
        return None

    def chunks() -> Iterator[Conversations]:
        column = pa.concat_arrays([prompts for _, prompts in with_prompts(source, prompt_key)])
        at, sizes = 0, [1, 31, 32, 33, 5000]
        while at < len(column):
            size = sizes[at % len(sizes)]
            yield from_arrow(DeviceTexts(KERNELS), column.slice(at, size))
            at += size

    return cuda._on_device(KERNELS, chunks())  # type: ignore[arg-type]


@pytest.fixture(params=[None, in_odd_chunks], ids=["copied over", "read there"])
def on_device(request: Any) -> Callable[..., gpuload.PromptDataset]:
    """`gpuload.load` by the device's engine."""

    def load(*arguments: Any, **options: Any) -> gpuload.PromptDataset:
        return load_with(engine_on(KERNELS, request.param), *arguments, **options)

    return load


def assert_same(found: gpuload.PromptDataset, expected: gpuload.PromptDataset) -> None:
    assert found.report.check.mismatches == []
    assert found.tokens.values.tolist() == expected.tokens.values.tolist()
    assert found.tokens.offsets.tolist() == expected.tokens.offsets.tolist()
    assert found.fingerprint == expected.fingerprint
    assert found.report.rejected == expected.report.rejected
    assert found.report.examples == expected.report.examples
    assert found.report.overlong == expected.report.overlong
    assert found.columns.equals(expected.columns)
    rows = np.random.default_rng(0).integers(-len(found), len(found), 33)
    for padding in ("max_length", "longest"):
        one, other = found.batch(rows, padding), expected.batch(rows, padding)
        assert one.keys() == other.keys()
        for key, values in one.items():
            same = (
                torch.equal(values, other[key]) if isinstance(values, torch.Tensor) else str(values) == str(other[key])
            )
            assert same, key


def test_shipped_data(on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any) -> None:
    options: dict[str, Any] = {"max_prompt_length": 128, "return_raw_chat": True, "return_full_prompt": True}
    found = on_device(gsm8k, qwen, **options)
    assert_same(found, gpuload.load(gsm8k, qwen, **options))
    assert found.report.rows_compiled == found.report.rows_read
    assert "rendered and encoded by kernels" in str(found.report)


def test_rows_that_the_kernels_leave_come_back_in_their_places(
    on_device: Callable[..., gpuload.PromptDataset], qwen: Any
) -> None:
    texts = ["one", "cafe\u0301", "", "<|im_end|>", "l\u0304\u0323" * 50, "x" * 5000, "two", "\U0001fae9", "é"]
    table = pa.table({"prompt": [[{"role": "user", "content": text}] for text in texts * 9]})
    found = on_device(table, qwen, max_prompt_length=5000, verify="full")
    assert_same(found, gpuload.load(table, qwen, max_prompt_length=5000))
    assert found.report.rows_fallback == 9 * 3
    assert "27 rows encoded on the host: text that the device cannot normalize, or a pre-" in str(found.report)


def test_a_tokenizer_without_tables_encodes_on_the_host(
    on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "compile_tokenizer", lambda reference: "the model is Unigram, not BPE")
    monkeypatch.setattr(KERNELS, "shared", SharedTables())
    found = on_device(gsm8k, qwen, max_prompt_length=128, max_samples=300)
    assert_same(found, gpuload.load(gsm8k, qwen, max_prompt_length=128, max_samples=300))
    assert "text is copied to the host, and its ids back: the model is Unigram, not BPE" in str(found.report)
    assert "rendered by kernels; encoded by gigatoken" in found.report.engine


def test_encoding_is_retried_with_less_memory(
    on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, room = DeviceEncoder.encode, [LEAST_CHUNK]

    def little(self: DeviceEncoder, *arguments: Any) -> Any:
        if self.chunk_bytes > room[0]:
            raise MemoryError
        return encode(self, *arguments)

    monkeypatch.setattr(DeviceEncoder, "encode", little)
    options: dict[str, Any] = {"max_prompt_length": 128, "max_samples": 300}
    assert_same(on_device(gsm8k, qwen, **options), gpuload.load(gsm8k, qwen, **options))
    room[0] = 0
    with pytest.raises(DeviceError, match="while encoding: raise gpu_memory_limit"):
        on_device(gsm8k, qwen, device="cuda", **options)


OPTIONS: list[dict[str, Any]] = [
    {"max_samples": 100}, {"max_samples": 77, "shuffle": True, "seed": 3}, {"max_samples": 1},
    *({"filter_overlong_prompts": False, "truncation": keep} for keep in ("left", "right", "middle")),
    {"tokens_on": "host"}, {"tokens_on": "host", "max_samples": 77, "shuffle": True, "seed": 3},
    {"store": "disk"}, {"store": "disk", "max_samples": 77, "shuffle": True, "seed": 3},
    {"apply_chat_template_kwargs": {"tokenizer_kwargs": {"verbose": False}}, "max_samples": 20},
]  # fmt: skip


@pytest.mark.parametrize("options", core(OPTIONS, *OPTIONS[1::6], OPTIONS[-1]), ids=str)
def test_options(on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any, options: Any) -> None:
    options = {"max_prompt_length": 96} | options
    assert_same(on_device(gsm8k, qwen, **options), gpuload.load(gsm8k, qwen, **options))


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("*.parquet")), ids=name_of)
def test_shared_data(on_device: Callable[..., gpuload.PromptDataset], qwen: Any, file: Any) -> None:
    options: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 700, "verify": "off"}
    assert_same(on_device(str(file), qwen, **options), gpuload.load(str(file), qwen, **options))


ODD = [
    [{"role": "user", "content": " hi "}], None, [], [{"role": "user", "content": None}], [None],
    [{"role": "system", "content": ""}, {"role": "user", "content": "é中🙂 <|im_end|>"}],
]  # fmt: skip
FRAMES = {
    "messages": pa.array(ODD, pa.list_(pa.struct([("content", pa.large_string()), ("role", pa.string())]))),
    "texts": pa.array(["a", None, "", " é "], pa.string()),
    "dictionary": pa.array(["a", "b", None, "a"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames(on_device: Callable[..., gpuload.PromptDataset], qwen: Any, name: str) -> None:
    table = pa.table({"prompt": FRAMES[name], "extra": list(range(len(FRAMES[name])))})
    assert_same(on_device(table, qwen, max_prompt_length=64), gpuload.load(table, qwen, max_prompt_length=64))


@pytest.mark.parametrize("rows", [2, 4])
def test_two_readings_with_different_numbers_of_rows(
    rows: int, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows must neither disappear nor get the columns of others."""
    monkeypatch.setattr(parts, "MISREAD", set())
    source = open_file(SourceFile(write({"prompt": ["a", "b", "c"], "other": [1, 2, 3]}), "x", "parquet"))
    chunk = from_arrow(DeviceTexts(KERNELS), pa.array([user("a")] * rows))
    with ThreadPoolExecutor(1) as thread, pytest.raises(DeviceError, match="x: cuDF and Arrow read different numbers"):
        list(zip_with_tables(iter([chunk]), source, "prompt", False, thread))


def test_tables_with_other_numbers_of_rows(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MISREAD", set())
    source = open_file(SourceFile(write({"prompt": ["a", "b", "c"], "other": [1, 2, 3]}), "x", "parquet"))
    chunks = [from_arrow(DeviceTexts(KERNELS), pa.array([user("a")] * rows)) for rows in (1, 2)]
    for rows, right in ((2, 1), (4, 1), (3, 2)):
        monkeypatch.setattr(parts, "other_columns", lambda *_, n=rows: iter([pa.table({"other": range(n)})]))
        thread, found = ThreadPoolExecutor(1), []
        later = [table for table, _ in zip_with_tables(iter(chunks), source, "prompt", False, thread)]
        thread.shutdown(wait=False)
        with pytest.raises(DeviceError, match="different numbers of rows") if right < 2 else nullcontext():
            found += [table.table().num_rows for table in later]
        assert found == ([1, 2] if right == 2 else [])


@pytest.mark.parametrize(("reader", "chats"), [(None, False), (in_odd_chunks, False), (None, True)])
def test_the_device_does_not_wait_for_columns_that_pass_through(
    write: Callable[..., str], qwen: Any, monkeypatch: pytest.MonkeyPatch, reader: Any, chats: bool
) -> None:
    encoded, columns, encode = threading.Event(), parts.other_columns, DeviceEngine.encode
    rows = [[*user(f"{row}"), {"role": "assistant", "content": "b"}][: 1 + chats] for row in range(50)]
    tools = {"tools": [None] * 49 + ['[{"type": "function"}]']} if chats else {}  # with them, columns become one
    file = write({"messages" if chats else "prompt": rows, "n": list(range(50)), **tools})

    def slow(*arguments: Any) -> Iterator[pa.Table]:
        assert encoded.wait(60), "nothing is encoded until columns are decoded"
        yield from columns(*arguments)

    def encoding(self: DeviceEngine, text: Any) -> Any:
        encoded.set()
        return encode(self, text)

    monkeypatch.setattr(parts, "other_columns", slow)
    monkeypatch.setattr(DeviceEngine, "encode", encoding)
    if chats:
        found: Any = load_chats_with(KERNELS, file, qwen, reader)
        expected: Any = gpuload.load_chats(file, qwen, device="cpu")
        assert found.tokens.to_lists() == expected.tokens.to_lists()
        assert found.take(["n"]) == expected.take(["n"])
    else:
        found = load_with(engine_on(KERNELS, reader), file, qwen, max_prompt_length=128)
        assert_same(found, gpuload.load(file, qwen, max_prompt_length=128))
    assert not [each for each in threading.enumerate() if each.name.startswith("pass-through") and each.is_alive()]


def test_columns_that_cannot_be_decoded_are_an_error(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> Iterator[pa.Table]:
        yield pa.table({"x": range(5)})
        raise SourceError("damaged")

    monkeypatch.setattr(parts, "other_columns", damaged)
    with pytest.raises(SourceError, match="^damaged$"):
        load_with(engine_on(KERNELS, in_odd_chunks), gsm8k, qwen, max_prompt_length=128)


def test_later_parts_get_the_error_of_the_first(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be decoded is not taken for what cuDF reads otherwise: later loads may read the file by cuDF."""

    def damaged(*_: Any) -> Iterator[pa.Table]:
        yield pa.table({"other": [1]})
        raise SourceError("damaged")

    monkeypatch.setattr(parts, "other_columns", damaged)
    monkeypatch.setattr(parts, "MISREAD", set())
    source = open_file(SourceFile(write({"prompt": ["a", "b", "c"], "other": [1, 2, 3]}), "x", "parquet"))
    chunks = [from_arrow(DeviceTexts(KERNELS), pa.array([user("a")])) for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        later = [table for table, _ in zip_with_tables(iter(chunks), source, "prompt", False, thread)]
        assert later[0].table().num_rows == 1
        for table in later[1:]:
            with pytest.raises(SourceError, match="^damaged$"):
                table.table()
    assert not parts.MISREAD


def test_plain_texts_and_json(on_device: Callable[..., gpuload.PromptDataset], qwen: Any, tmp_path: Any) -> None:
    table = pa.table({"prompt": ["a", " b ", "c <|im_end|>"]})
    options: dict[str, Any] = {"max_prompt_length": 64, "chat_template": None}
    assert_same(on_device(table, qwen, **options), gpuload.load(table, qwen, **options))
    file = tmp_path / "x.jsonl"
    file.write_text(
        '{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": [{"role": "user", "content": "b", "x": 1}]}'
    )
    assert_same(on_device(str(file), qwen, max_prompt_length=64), gpuload.load(str(file), qwen, max_prompt_length=64))


def test_a_column_of_texts_on_the_device(qwen: Any) -> None:
    texts = pa.array(["a", None, "", " é "], pa.large_string())
    engine = DeviceEngine(KERNELS, torch.device("cpu"), Reference(qwen))
    valid = np.asarray(texts.is_valid())
    column = texts_to_device(KERNELS, [(text or "").encode() for text in texts.to_pylist()])
    there = from_texts(DeviceTexts(KERNELS), column, KERNELS.xp.asarray(valid), lambda rows: texts.take(pa.array(rows)))
    found, expected = engine.render(there), engine.render(ArrowPrompts(texts))
    assert found.text.equals(expected.text)
    assert found.rejected == expected.rejected == {1: "prompt is null"}
    assert there.to_arrow(np.array([3])).to_pylist() == [[{"role": "user", "content": " é "}]]


def test_rows_taken_out_of_a_column_keep_their_neighbours_away(qwen: Any) -> None:
    prompts = pa.array([*ODD, *ODD[:1], *ODD], FRAMES["messages"].type)
    engine = DeviceEngine(KERNELS, torch.device("cpu"), Reference(qwen))
    rows = np.array([0, 3, 5, 6, 9, 10])
    found = engine.render(from_arrow(DeviceTexts(KERNELS), prompts).take(rows))
    expected = engine.render(ArrowPrompts(prompts.take(pa.array(rows))))
    assert found.text.equals(expected.text)
    assert found.rejected == expected.rejected


def test_batches_are_made_where_the_process_is(
    on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = on_device(gsm8k, qwen, max_prompt_length=128, max_samples=50)
    ran: list[str] = []
    launch = HostKernels._launch
    monkeypatch.setattr(HostKernels, "_launch", lambda self, name, *rest: (ran.append(name), launch(self, name, *rest)))
    batch = prompts.batch([0, 1])
    assert ran == ["pad"]
    prompts.tokens  # noqa: B018
    ran.remove("copy_pieces")
    assert ran == ["pad"]
    travelled = pickle.loads(pickle.dumps(prompts)).batch([0, 1])
    assert ran == ["pad"]
    assert torch.equal(batch["input_ids"], travelled["input_ids"])
    prompts._batches._process = -1  # type: ignore[attr-defined]
    assert torch.equal(batch["position_ids"], prompts.batch([0, 1])["position_ids"])
    assert ran == ["pad"]


def test_batches_may_be_made_on_any_stream() -> None:
    """What the first of them has copied over, a loader's on a stream of its own, is there for the others."""
    kernels = StreamKernels()
    store = Segments(kernels).add(Ragged.from_lists([[1, 2], [3]]))
    kernels.synchronize()
    plan, nothing = whole_rows(np.array([1, 0]), np.array([1, 2])), Ragged.from_lists([])

    def make(batches: DeviceBatches) -> None:
        batches(plan, lambda: nothing, 2)
        batches.packed(plan, lambda: nothing)

    def make_twice(batches: DeviceBatches) -> None:
        with kernels.aside():
            make(batches)
        make(batches)

    make_twice(DeviceBatches(kernels, store, replace(LAYOUT, weights=(0.0, 0.5)), 0))
    gc.collect()
    assert kernels.races == []


def test_a_batch_is_the_memory_that_the_kernel_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    launch = HostKernels._launch
    monkeypatch.setattr(
        HostKernels,
        "_launch",
        lambda self, name, blocks, arguments: (
            written.append(arguments[-1].ctypes.data),
            launch(self, name, blocks, arguments),
        ),
    )
    store = Segments(KERNELS).add(Ragged.from_lists([[1, 2], [3]]))
    assert store is not None
    launch_pad = prepare_pad(KERNELS, store.index, LAYOUT, 9)
    written.clear()
    batch = pad(KERNELS, launch_pad, whole_rows(np.array([1, 0]), np.array([1, 2])), 3, LAYOUT)
    assert [tensor.data_ptr() for tensor in batch.values()] == [written[0] + 8 * 6 * plane for plane in range(3)]
    assert batch["input_ids"].tolist() == [[9, 9, 3], [9, 1, 2]]


def test_batches_of_nothing(on_device: Callable[..., gpuload.PromptDataset], gsm8k: str, qwen: Any) -> None:
    prompts = on_device(gsm8k, qwen, max_prompt_length=128, max_samples=200)
    expected = gpuload.load(gsm8k, qwen, max_prompt_length=128, max_samples=200, device="cpu")
    for padding in ("max_length", "longest"):
        assert prompts.batch([], padding)["input_ids"].shape == expected.batch([], padding)["input_ids"].shape
        assert prompts.batch([], padding)["position_ids"].dtype == torch.int64


def test_a_column_too_large_for_the_memory_is_rendered_in_halves(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ArrowPrompts(pa.array(ODD * 20, FRAMES["messages"].type))
    engine = DeviceEngine(KERNELS, torch.device("cpu"), Reference(qwen))
    expected, sizes, room = engine.render(prompts), list[int](), [30]

    def little(kernels: Any, program: Any, column: Conversations) -> Any:
        sizes.append(len(column))
        if len(column) > room[0]:
            raise MemoryError
        return render(kernels, program, column)

    monkeypatch.setattr(device, "render", little)
    found = engine.render(prompts)
    assert found.text.equals(expected.text)
    assert (found.rejected, found.compiled_rows) == (expected.rejected, expected.compiled_rows)
    assert found.rejected == expected.rejected
    assert sizes == [120, 60, 30, 30, 60, 30, 30]
    room[0] = 0
    with pytest.raises(DeviceError, match="gpu_memory_limit"):
        engine.render(prompts)


def test_auto_says_why_there_is_no_gpu_and_cuda_says_what_to_do(gsm8k: str, qwen: Any) -> None:
    why = cuda.unavailable_reason("cuda")
    if why is None:
        pytest.skip("there is a GPU")
    report = str(gpuload.load(gsm8k, qwen, max_samples=5, max_prompt_length=512).report)
    assert f"no GPU is used: {why}" in report
    assert "no GPU" not in str(gpuload.load(gsm8k, qwen, max_samples=5, max_prompt_length=512, device="cpu").report)
    with pytest.raises(DeviceError, match="device='cuda': .*; or use device='cpu' or 'auto'"):
        gpuload.load(gsm8k, qwen, device="cuda")


@pytest.mark.parametrize(("build", "fork", "count", "device", "expected"), [
    (None, False, 0, "cuda", "built without CUDA"), ("13.0", True, 1, "cuda", "forked"),
    ("13.0", False, 0, "auto", "no NVIDIA GPU"), ("13.0", False, 2, "cuda:2", "there is no GPU 2"),
    ("13.0", False, 1, "cuda", "cupy, rmm is not installed: pip install"),
])  # fmt: skip
def test_reasons_why_a_gpu_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, build: str | None, fork: bool, count: int, device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(present, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: fork)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert expected in str(cuda.unavailable_reason(device))


def test_without_a_gpu_no_build_of_torch_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(present, "_has_gpu", lambda: False)
    assert cuda.unavailable_reason("auto") == "this machine has no NVIDIA GPU"


def test_the_self_test_notices_wrong_kernels() -> None:
    class Wrong(HostKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            super()._launch(name, blocks, arguments)
            arguments[-1][-1:] = 0

    cuda.self_test(KERNELS)
    with pytest.raises(RuntimeError, match="wrong results"):
        cuda.self_test(Wrong())


def test_where_the_gpu_fails_auto_takes_the_cpu(gsm8k: str, qwen: Any) -> None:
    class Broken(HostKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            if name == "copy_pieces":
                raise RuntimeError("an illegal memory access\nwas encountered")
            super()._launch(name, blocks, arguments)

    options: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 40}
    expected = gpuload.load(gsm8k, qwen, device="cpu", **options)
    broken = engine_on(Broken())
    with pytest.warns(
        UserWarning, match="falling back to the CPU .RuntimeError: an illegal memory access was encountered"
    ):
        found = load_with(broken, gsm8k, qwen, **options)
    assert_same(found, expected)
    assert "no GPU is used: it failed (RuntimeError: an illegal" in str(found.report)
    with pytest.raises(RuntimeError, match="illegal memory"):
        load_with(broken, gsm8k, qwen, device="cuda", **options)
    with warnings.catch_warnings(action="error"), pytest.raises(DataError, match="max_prompt_length"):
        load_with(engine_on(KERNELS), gsm8k, qwen, max_prompt_length=1, max_samples=40)


def test_wrong_ids_on_the_device_are_found(gsm8k: str, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(options: Options, reference: Reference, exact_only: bool = False) -> DeviceEngine:
        made = engine_on(KERNELS)(options, reference, exact_only)
        right = made.encode

        def wrong(text: Any) -> Any:
            tokens = right(text)
            with KERNELS.current():
                if not exact_only:
                    tokens.ids.values[tokens.ids.offsets[:-1] + 3] += 1
            return tokens

        monkeypatch.setattr(made, "encode", wrong)
        return made

    with pytest.warns(UserWarning, match="token 3 is "):
        found = load_with(engine, gsm8k, qwen, max_prompt_length=512, max_samples=40)
    monkeypatch.undo()
    assert_same(found, gpuload.load(gsm8k, qwen, max_prompt_length=512, max_samples=40, device="cpu"))


@pytest.mark.parametrize("tokens_on", ["host", "device"])
def test_batches_are_made_one_batch_ahead(gsm8k: str, qwen: Any, tokens_on: str) -> None:
    happened: list[str] = []

    class Noting(HostKernels):
        @contextmanager
        def aside(self) -> Iterator[None]:
            happened.append("aside")
            yield
            happened.append("back")

        def rejoin(self) -> None:
            happened.append("rejoin")

        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            happened.append(name)
            super()._launch(name, blocks, arguments)

    options: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 10}
    expected = list(gpuload.load(gsm8k, qwen, device="cpu", **options).loader(4, shuffle=True))
    noting, options = engine_on(Noting()), options | {"tokens_on": tokens_on}
    loader = load_with(noting, gsm8k, qwen, **options).loader(4, shuffle=True)
    loader.state_dict()  # its fingerprint reads all ids once
    happened.clear()
    found = []
    for batch in loader:
        found.append(batch["input_ids"])
        happened.append(f"used {loader.state_dict()['position']}")
    made, end = ["aside", "pad", "back"], ["aside", "back"]
    assert happened == [*made, "rejoin", *made, "used 4", "rejoin", *made, "used 8", "rejoin", *end, "used 10"]
    assert all(torch.equal(one, other["input_ids"]) for one, other in zip(found, expected, strict=True))
    half = iter(loader)
    next(half)
    resumed = load_with(noting, gsm8k, qwen, **options).loader(4, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert torch.equal(next(half)["input_ids"], next(iter(resumed))["input_ids"])


class Series:
    """As much of `cudf.Series` as is needed, over host memory."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array

    def to_pylibcudf(self) -> tuple[Any, dict[str, Any]]:
        from test_cudf_columns import as_cudf

        return as_cudf(self.array), {}


class DataFrame:
    """As much of `cudf.DataFrame`."""

    def __init__(self, table: pa.Table, copied: list[list[str]]) -> None:
        self.table, self.copied = table, copied

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, name: str) -> Series:
        return Series(self.table[name].combine_chunks())

    def drop(self, columns: list[str]) -> DataFrame:
        return DataFrame(self.table.drop_columns(columns) if columns else self.table, self.copied)

    def head(self, rows: int) -> DataFrame:
        return DataFrame(self.table.slice(0, rows), [])

    def to_arrow(self, preserve_index: bool) -> pa.Table:
        assert not preserve_index
        self.copied.append(self.table.schema.names)
        return self.table

    def memory_usage(self, index: bool, deep: bool) -> Any:
        assert deep
        assert not index
        return np.array([self.table.nbytes])


DataFrame.__module__ = "cudf.core.dataframe"


@pytest.mark.parametrize("name", ["messages", "texts"])
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_cudf_frame_is_used_zero_copy(qwen: Any, monkeypatch: pytest.MonkeyPatch, name: str, nbytes: int) -> None:
    pytest.importorskip("pylibcudf")
    fields = [("content", pa.string()), ("role", pa.string())]
    prompts = FRAMES[name].cast(pa.list_(pa.struct(fields))) if name == "messages" else FRAMES[name]
    table = pa.table({"prompt": prompts, "extra": list(range(len(prompts)))})
    monkeypatch.setattr(cudf, "_to_arrow", lambda kernels, column, kind, rows: prompts_of(column, rows))

    def prompts_of(column: Any, rows: Any) -> pa.Array:
        return prompts.slice(column.offset(), column.size()).take(pa.array(rows))

    copied: list[list[str]] = []
    kernels = HostKernels()
    kernels.chunk_bytes = nbytes  # type: ignore[attr-defined]

    reader = cuda.reader(kernels, [])  # type: ignore[arg-type]
    found = load_with(engine_on(kernels, reader), DataFrame(table, copied), qwen, max_prompt_length=64)
    monkeypatch.undo()
    assert copied == [["extra"]]
    expected = gpuload.load(table, qwen, max_prompt_length=64)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert found.report.rejected == expected.report.rejected
    assert found.columns.equals(expected.columns)
    on_cpu = gpuload.load(DataFrame(table, copied), qwen, max_prompt_length=64, device="cpu")
    assert on_cpu.tokens.to_lists() == expected.tokens.to_lists()


def test_to_cudf_says_what_is_missing(gsm8k: str, qwen: Any) -> None:
    pytest.importorskip("pylibcudf")
    prompts = gpuload.load(gsm8k, qwen, max_samples=3, max_prompt_length=512, device="cpu")
    with pytest.raises(DeviceError, match="to_cudf needs cuDF"):
        prompts.to_cudf()
