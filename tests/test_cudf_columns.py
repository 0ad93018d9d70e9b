"""cuDF's columns taken apart, without a GPU: real pylibcudf columns over host memory, which say that it is a GPU's."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from simulator.host_kernels import COMPILER, HostKernels
from template_cases import column, compile, conversations, small_tokenizer

from gpuload.core.errors import DeviceError, GpuloadError
from gpuload.engines.device import cudf
from gpuload.engines.device.cudf import can_read, chunks, of_cudf
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.render import render
from gpuload.engines.host.render import render as on_host
from gpuload.engines.protocol import ArrowPrompts
from gpuload.reference.reference import Reference

plc = pytest.importorskip("pylibcudf")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = HostKernels()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ m.calls | length }}{{ m.name }}{% endfor %}"
NUMBERS = {pa.int32(): "INT32", pa.int64(): "INT64"}


class OnHost:
    """A buffer with the interface of a GPU's."""

    def __init__(self, array: Any) -> None:
        self.array = np.ascontiguousarray(array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        where = (self.array.ctypes.data, False)
        return {"shape": (self.array.nbytes,), "typestr": "|u1", "data": where, "version": 3, "strides": None}


def buffer(array: Any) -> Any:
    return plc.gpumemoryview(OnHost(array))


def numbers(array: Any) -> Any:
    kind = plc.TypeId.INT64 if array.dtype == np.int64 else plc.TypeId.INT32
    return plc.Column(plc.DataType(kind), len(array), buffer(array), None, 0, 0, [])


def as_cudf(array: pa.Array, offset: int = 0, wide: bool = False) -> Any:
    """The same column as cuDF would keep it; rows before `offset` are there and not meant."""
    size, valid = len(array), np.asarray(array.is_valid())
    mask = None if valid.all() else buffer(np.packbits(np.concatenate([valid, np.zeros(64, bool)]), bitorder="little"))
    rest = size - offset
    nulls = int((~valid[offset:]).sum())

    def made(kind: Any, data: Any, children: list[Any]) -> Any:
        return plc.Column(plc.DataType(kind), rest, data, mask, nulls, offset, children)

    kind = array.type
    if pa.types.is_list(kind):
        return made(plc.TypeId.LIST, None, [numbers(array.offsets.to_numpy()), as_cudf(array.values, wide=wide)])
    if pa.types.is_struct(kind):
        fields = [as_cudf(array.field(i), wide=wide) for i in range(kind.num_fields)]
        return made(plc.TypeId.STRUCT, None, fields)
    if pa.types.is_string(kind):
        texts = [(text or "").encode() for text in array.to_pylist()]
        ends = np.cumsum([0, *map(len, texts)]).astype(np.int64 if wide else np.int32)
        data = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
        return made(plc.TypeId.STRING, buffer(data), [numbers(ends)])
    assert pa.types.is_int64(kind)
    return made(plc.TypeId.INT64, buffer(np.zeros(size, np.int64)), [])


def names_of(kind: pa.DataType) -> dict[str, Any]:
    return {"offsets": {}, "element": {field.name: {} for field in kind.value_type}}


@pytest.fixture(autouse=True)
def rows_come_from_arrow(monkeypatch: pytest.MonkeyPatch) -> dict[str, pa.Array]:
    """Copying rows to the host is the GPU's: give those of the Arrow array that the column was made of."""
    source: dict[str, pa.Array] = {}
    monkeypatch.setattr(cudf, "_to_arrow", lambda kernels, column, kind, rows: source["is"].take(pa.array(rows)))
    return source


CALLS = pa.list_(pa.struct([("f", pa.string())]))
ROWS: list[Any] = [
    *conversations(1, seed=5), None, [], [None], [{"role": "user", "content": None}], [{"role": None, "content": "x"}],
    [{"role": "user", "content": " é", "name": "n", "calls": []}, {"role": "u", "content": "🙂", "calls": [{"f": ""}]}],
    [{"role": "user", "content": "y", "calls": [], "number": 3}],
]  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 7, 13])
@pytest.mark.parametrize("order", ["role content calls name number", "content number role name calls"])
def test_conversations(rows_come_from_arrow: dict[str, pa.Array], order: str, offset: int, wide: bool) -> None:
    kinds = {"calls": CALLS, "number": pa.int64()}
    kind = pa.list_(pa.struct([(name, kinds.get(name, pa.string())) for name in order.split()]))
    prompts = pa.array(ROWS, kind)
    rows_come_from_arrow["is"] = prompts[offset:]
    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    made = of_cudf(KERNELS, as_cudf(prompts, offset, wide), kind, names_of(kind))
    found, expected = render(KERNELS, program, made), on_host(program, prompts[offset:])
    assert found.text.equals(expected.text)
    assert (found.rejected, found.reasons) == (expected.rejected, expected.reasons)


def test_a_struct_with_an_offset_of_its_own() -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    rows = [*([("no", "no")] * 3), *((f"r{i}", f"c{i}") for i in range(4))]
    structs = pa.array([{"role": role, "content": text} for role, text in rows], kind.value_type)
    bounds = numbers(np.array([0, 1, 4], np.int32))
    made = plc.Column(plc.DataType(plc.TypeId.LIST), 2, None, None, 0, 0, [bounds, as_cudf(structs, 3)])
    program = compile(small_tokenizer(), chat_template="{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    found = render(KERNELS, program, of_cudf(KERNELS, made, kind, names_of(kind)))
    assert found.text.to_pylist() == ["r0c0", "r1c1r2c2r3c3"]


def test_no_character_is_copied() -> None:
    prompts = column([[{"role": "user", "content": "abc"}]])
    made = as_cudf(prompts)
    content = of_cudf(KERNELS, made, prompts.type, names_of(prompts.type)).text_field("content")
    assert content.data.ctypes.data == made.list_view().child().child(1).data().ptr


@pytest.mark.parametrize("offset", [0, 2, 9])
def test_texts(rows_come_from_arrow: dict[str, pa.Array], offset: int) -> None:
    texts = pa.array(["a", None, "", " é ", "</s>", "x", None, "y", "z", "w"])
    rows_come_from_arrow["is"] = texts[offset:]
    engine = DeviceEngine(KERNELS, torch.device("cpu"), Reference(_templated()))
    found = engine.render(of_cudf(KERNELS, as_cudf(texts, offset), texts.type, {}))
    expected = engine.render(ArrowPrompts(texts[offset:]))
    assert found.text.equals(expected.text)
    assert found.rejected == expected.rejected


def _templated() -> Any:
    tokenizer = type(small_tokenizer())(tokenizer_object=small_tokenizer().backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = "<{{ messages[0].content | trim }}>"
    return tokenizer


def test_fields_that_arrow_does_not_see() -> None:
    prompts = column([[{"role": "user", "content": "abc"}]])
    with pytest.raises(RuntimeError, match="disagree on the fields") as found:
        of_cudf(KERNELS, as_cudf(prompts), prompts.type, {"offsets": {}, "element": {"role": {}}})
    assert not isinstance(found.value, GpuloadError), "Arrow reads such a file"


def test_a_chunk_that_is_read_again_is_freed_before(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out when cuDF looks for what is behind a chunk."""
    from pylibcudf.io import parquet

    prompts = column([[{"role": "user", "content": str(i)}] for i in range(20)])
    parts: list[weakref.ref[Any]] = []

    class Options:
        builder = staticmethod(lambda source: Options())
        build = lambda self: self  # noqa: E731
        set_column_names = lambda self, names: None  # noqa: E731
        use_pandas_metadata = lambda self, use: self  # noqa: E731

    class Part:
        def __init__(self) -> None:
            self.tbl = plc.Table([as_cudf(prompts)])
            self.columns, self.child_names = self.tbl.columns(), {"prompt": names_of(prompts.type)}

    class Reader:
        def __init__(self, options: Any, **settings: Any) -> None:
            assert all(part() is None for part in parts)
            self.read = False

        def has_next(self) -> bool:
            if self.read and len(parts) == 1:
                raise MemoryError
            return not self.read

        def read_chunk(self) -> Part:
            self.read, part = True, Part()
            parts.append(weakref.ref(part))
            return part

    monkeypatch.setattr(parquet, "ParquetReaderOptions", Options)
    monkeypatch.setattr(parquet, "ChunkedParquetReader", Reader)
    (tmp_path / "x.parquet").touch()
    read = chunks(KERNELS, str(tmp_path / "x.parquet"), "prompt", prompts.type, 64 << 20)
    assert [len(part) for part in read] == [20]
    assert len(parts) == 2


def test_buffers_of_a_frame_have_the_types_that_their_makers_gave_them() -> None:
    """Memory of a CuPy array is a buffer of its items, not of bytes."""
    words, kernels = np.array([0x01020304, -1], np.int32), Kernels()
    kernels.xp = type("module", (), {"asarray": lambda buffer: buffer.obj.array})  # type: ignore[assignment]
    assert kernels.view(buffer(words)).tolist() == [4, 3, 2, 1, 255, 255, 255, 255]


def test_which_columns_are_for_cudf() -> None:
    assert can_read(column([]).type)
    assert can_read(pa.large_string())
    assert not can_read(pa.list_(pa.string()))
    assert not can_read(pa.null())


@pytest.mark.parametrize(
    ("kind", "readable"),
    [
        *[(kind, True) for kind in (pa.bool_(), pa.uint16(), pa.float32(), pa.list_(pa.struct([("f", pa.string())])))],
        *[(kind, False) for kind in (pa.time32("ms"), pa.decimal128(9, 2), pa.binary(), pa.timestamp("us", "UTC"))],
        (pa.map_(pa.string(), pa.string()), False),
        (pa.list_(pa.struct([("at", pa.date32())])), False),
    ],
    ids=str,
)
def test_messages_with_values_that_cudf_changes_are_for_arrow(kind: pa.DataType, readable: bool) -> None:
    """Times become durations there, bytes texts, time zones and precisions are lost; maps need other names."""
    assert can_read(pa.list_(pa.struct([("role", pa.string()), ("value", kind)]))) == readable


def test_chunks_are_halved_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from pylibcudf.io import parquet

    prompts = column([[{"role": "user", "content": f"{i}"}] for i in range(100)])
    pq.write_table(pa.table({"prompt": prompts, "other": list(range(100))}), tmp_path / "x.parquet")
    skipped, limits, asked, pandas = [0], [], [], []

    class Options:
        builder = staticmethod(lambda source: Options())
        build = lambda self: self  # noqa: E731
        set_column_names = lambda self, names: asked.append(names)  # noqa: E731
        set_skip_rows = lambda self, rows: skipped.append(rows)  # noqa: E731

        def use_pandas_metadata(self, use: bool) -> Any:
            pandas.append(use)
            return self

    class Reader:
        def __init__(self, options: Any, stream: Any, chunk_read_limit: int, pass_read_limit: int) -> None:
            assert stream == "the current stream"
            self.at, self.limit = skipped[-1], chunk_read_limit
            limits.append(chunk_read_limit)

        def has_next(self) -> bool:
            return self.at < 100

        def read_chunk(self) -> Any:
            if self.at >= 40 and self.limit > 16 << 20:
                raise MemoryError
            part = prompts[self.at : self.at + 20]
            self.at += 20
            table = plc.Table([as_cudf(pa.array(part.to_pylist(), part.type))])
            names = {"prompt": names_of(prompts.type)}
            return type("Part", (), {"tbl": table, "columns": table.columns(), "child_names": names})

    monkeypatch.setattr(parquet, "ParquetReaderOptions", Options)
    monkeypatch.setattr(parquet, "ChunkedParquetReader", Reader)
    monkeypatch.setattr(KERNELS, "stream", lambda: "the current stream")
    program = compile(small_tokenizer(), chat_template="{{ messages[0].content }}")
    parts = list(chunks(KERNELS, str(tmp_path / "x.parquet"), "prompt", prompts.type, 64 << 20))
    read = [render(KERNELS, program, part).text for part in parts]
    assert pa.concat_arrays(read).to_pylist() == [str(i) for i in range(100)]
    assert (skipped, limits) == ([0, 40, 40], [64 << 20, 32 << 20, 16 << 20])
    assert asked == [["prompt"]] * 3
    assert pandas == [False] * 3, "no index column of pandas is decoded"
    skipped[:], limits[:], file = [0], [], str(tmp_path / "x.parquet")
    sizes = [len(part) for part in chunks(KERNELS, file, "prompt", prompts.type, 64 << 20, 16 << 20)]
    assert (sum(sizes), skipped[1:]) == (100, [20, 40, 40])
    assert limits == [16 << 20, 64 << 20, 32 << 20, 16 << 20], "small, large, then smaller without memory"
    skipped[:], limits[:] = [80], []
    assert [len(part) for part in chunks(KERNELS, file, "prompt", prompts.type, 16 << 20, 8 << 20)] == [20]
    assert limits == [8 << 20], "nothing is behind the first chunk"
    skipped[:], limits[:], alive, held = [0], [], list[bool](), list[weakref.ref[Any]]()
    read_chunk, made = Reader.read_chunk, Reader.__init__

    def begin(self: Any, *arguments: Any, **more: Any) -> None:
        alive.extend(one() is not None for one in held)
        made(self, *arguments, **more)

    def full(self: Any) -> bool:
        if self.at == 20 and self.limit > 16 << 20:
            raise MemoryError
        return self.at < 100

    def held_chunk(self: Any) -> Any:
        part = read_chunk(self)()  # an object: classes are in cycles
        held.append(weakref.ref(part))
        return part

    for name, work in (("__init__", begin), ("has_next", full), ("read_chunk", held_chunk)):
        monkeypatch.setattr(Reader, name, work)
    sizes = [len(part) for part in chunks(KERNELS, file, "prompt", prompts.type, 32 << 20)]
    assert (sum(sizes), limits, alive) == (100, [32 << 20, 16 << 20], [False]), "what is read again is freed before"
    monkeypatch.setattr(Reader, "has_next", lambda self: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(DeviceError, match="gpu_memory_limit"):
        list(chunks(KERNELS, str(tmp_path / "x.parquet"), "prompt", prompts.type, 64 << 20))
