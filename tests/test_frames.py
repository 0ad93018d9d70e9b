"""Objects in memory: frames of every library are loaded, and anything else is an error that says what to pass."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
from conftest import user

import gpuload
from gpuload.core.errors import DataError, SourceError
from gpuload.sources.frames import is_frame

CONTENTS = ["one", "two", "three"]
CHATS = [[*user(text), {"role": "assistant", "content": text * 2}] for text in CONTENTS]
COLUMNS = {
    "prompt": [user(text) for text in CONTENTS],
    "messages": CHATS,
    "chosen": CHATS,
    "rejected": CHATS[::-1],
    "n": [0, 1, 2],
}
TABLE = pa.table(COLUMNS)
DATA = datasets.Dataset.from_dict(COLUMNS)


class Polars:
    """As much of `polars.DataFrame`."""

    columns = TABLE.column_names

    def __init__(self, schema: dict[str, str] | None = None) -> None:
        self.schema = schema or {}

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


class OwnData(datasets.Dataset):  # type: ignore[misc]
    """A class of a trainer."""


def own_data() -> Any:
    made = datasets.Dataset.from_dict(COLUMNS)
    made.__class__ = OwnData
    return made


def lazy(kind: str) -> Any:
    """An object of a class, by its name."""
    library, name = kind.rsplit(".", 1)
    return type(name, (), {"__module__": library, "columns": property(lambda self: ["prompt"])})()


@pytest.mark.parametrize(
    "frame",
    [TABLE, TABLE.to_batches()[0], TABLE.to_pandas(), DATA, DATA.select([0, 1, 2]), own_data(), Polars()],
    ids=lambda frame: type(frame).__name__,
)
def test_frames(qwen: Any, frame: Any) -> None:
    expected = gpuload.load(TABLE, qwen).tokens.to_lists()
    prompts = gpuload.load(frame, qwen)
    assert prompts.tokens.to_lists() == expected
    assert [prompts[row]["n"] for row in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string()], ids=str)
def test_categories(qwen: Any, kind: Any) -> None:
    """`polars.Categorical` is a dictionary of string views."""
    kinds = pa.array(["a", "b", None]).dictionary_encode()
    kinds = pa.DictionaryArray.from_arrays(kinds.indices, kinds.dictionary.cast(kind))
    prompts = gpuload.load(TABLE.append_column("kind", kinds), qwen)
    assert [prompts[row]["kind"] for row in (2, 1, 0)] == [None, "b", "a"]


CALLS = [{"x": 1}, {"y": [1, None, "a"]}, "x", [1.0]]
TEXT, JSON = datasets.Value("string"), datasets.Json()
OF_CALLS: Any = {"type": TEXT, "function": {"name": TEXT, "arguments": JSON}}
OF_MESSAGES: Any = {"role": TEXT, "content": TEXT, "tool_calls": [OF_CALLS]}


def with_call(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [*user("?"), answer], "tools": [{"name": "f"}], "extra": arguments}


@pytest.mark.parametrize("message", [OF_MESSAGES, JSON], ids=["fields", "json"])
@pytest.mark.parametrize("kind", ["dataset", "table", "parquet", "saved"])
def test_json_features(qwen: Any, tmp_path: Path, message: Any, kind: str) -> None:
    """What `datasets` reads of JSON with values of several types: JSON text in parts of rows, and objects for users."""
    features = datasets.Features({"messages": [message], "tools": [JSON], "extra": JSON})
    data: Any = datasets.Dataset.from_list([with_call(each) for each in CALLS], features=features)
    made: Any = {"dataset": data, "table": data.data.table}.get(kind)
    if kind == "parquet":
        data.to_parquet(made := str(tmp_path / "rows.parquet"))
    elif kind == "saved":
        data.save_to_disk(made := str(tmp_path / "saved"))
    for turns in ("conversation", "served"):
        chats = gpuload.load_chats(made, qwen, max_length=1024, turns=turns)  # type: ignore[arg-type]
        assert len(chats) == len(data) == 4
        for row, own in zip(chats, data, strict=True):
            rendered = qwen.apply_chat_template(own["messages"], tools=own["tools"], tokenize=False)
            assert rendered.startswith(qwen.decode(row["input_ids"]))
            assert row["extra"] == own["extra"]


def test_json_text_in_maps(qwen: Any) -> None:
    """Maps are no JSON, and stay as they are."""
    maps = pa.array([[("a", '{"x": 1}')]] * 3, pa.map_(pa.string(), pa.string())).cast(pa.map_(pa.string(), pa.json_()))
    assert gpuload.load(TABLE.append_column("map", maps), qwen)[2]["map"] == [("a", '{"x": 1}')]


def rows() -> Any:
    """A generator without end."""
    return ({"prompt": text} for text in itertools.cycle(CONTENTS))


SPLITS = datasets.DatasetDict({"train": DATA, "test": DATA})
STREAM = DATA.to_iterable_dataset()
LOADERS: list[Callable[..., Any]] = [gpuload.load, gpuload.load_chats, gpuload.load_pairs]


@pytest.mark.parametrize("load", LOADERS, ids=lambda load: load.__name__)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            SPLITS,
            r"type DatasetDict with the keys 'train', 'test': pass one of its values .*files\['train'\]",
        ),
        (datasets.IterableDatasetDict({"a": STREAM}), "type IterableDatasetDict with the keys 'a': pass one"),
        (STREAM, r"type IterableDataset, a stream: pass its files, or .*from_list\(list\(stream\)\)"),
        (COLUMNS, r"type dict with the keys 'prompt', .*files\['prompt'\], or pyarrow.table\(files\) if these are col"),
        (TABLE.to_pylist(), r"files has rows: pass pyarrow.Table.from_pylist\(rows\), or the path of a file"),
        (rows(), r"files has rows: pass pyarrow.Table.from_pylist\(rows\)"),
        ([TABLE], "expected a path or URL as a string or PathLike, not Table"),
        (TABLE.to_reader(), r"type RecordBatchReader, which can be read once only: pass its read_all\(\)"),
        (pyarrow.dataset.dataset(TABLE), r"type InMemoryDataset, a description of files: .* to_table\(\)"),
        (pd.Series(CONTENTS), r"type Series, one column: pass a DataFrame, such as its to_frame\('prompt'\)"),
        (TABLE["prompt"], r"type ChunkedArray, one column: pass .*pyarrow.table\(\{'prompt': column\}\)"),
        (TABLE["n"].chunk(0), r"type Int64Array, one column: pass .*pyarrow.table\(\{'prompt': column\}\)"),
        (lazy("polars.series.series.Series"), r"type Series, one column: pass .*to_frame\('prompt'\)"),
        (lazy("polars.lazyframe.frame.LazyFrame"), r"type LazyFrame, a query: pass its collect\(\)"),
        (lazy("dask.dataframe.DataFrame"), "type DataFrame: pass it as a pyarrow.Table or a pandas.DataFrame"),
        (SimpleNamespace(), "expected a path or URL as a string or PathLike, not SimpleNamespace"),
        (None, "expected a path or URL as a string or PathLike, not NoneType"),
        (iter(()), "no files given"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_no_frame(load: Callable[..., Any], qwen: Any, given: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load(given, qwen)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            pd.DataFrame({"prompt": CONTENTS, "n": [1, "a", None]}),
            r"column .n. cannot be converted to Arrow",
        ),
        (pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]), "Duplicate column names found"),
        (pd.DataFrame({"prompt": CONTENTS, "image": [object()] * 3}), r"converted to Arrow .*column image"),
        (pd.DataFrame({"prompt": ["a"], "n": pd.Series([2**63], dtype=object)}), "column .n. cannot be .*too large"),
        (
            pd.DataFrame(
                {
                    "prompt": [[{"role": "user", "content": "a\ud800"[: 1 + k // 5]}] for k in range(9)],
                    "mixed": pd.Series([1, "a"] * 4 + [None], dtype=object),
                }
            ),
            r"column 'prompt' has a text with a lone surrogate, '\\ud800', in row 5, which UTF-8 cannot encode",
        ),
        (Polars({"prompt": "String", "n": "Object"}), "cannot be converted to Arrow .column .n. has Python objects"),
        (pa.table([["a"], ["b"]], ["prompt", "prompt"]), "two columns have the name 'prompt'"),
        (DATA.select([]), "Dataset: no rows"),
    ],
)
def test_frames_that_cannot_be_read(qwen: Any, frame: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        gpuload.load(frame, qwen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (RuntimeError("read already"), "read already"),
        (ValueError("boom"), "boom"),
        (pa.chunked_array([[1, 2]]), ""),
        (pa.chunked_array([[1, 2]]).__arrow_c_stream__(), ""),
        (None, ""),
    ],
    ids=["once", "fails", "no capsule", "no columns", "nothing"],
)
def test_streams_without_a_table(qwen: Any, given: Any, message: str) -> None:
    class Stream:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

    expected = (
        f"files is of type Stream, and its __arrow_c_stream__ gives no table .*{message}.*: pass it as a pyarrow.Table"
    )
    with pytest.raises(SourceError, match=expected):
        gpuload.load(Stream(), qwen)


def test_rows_of_a_stream(qwen: Any) -> None:
    """What the message says."""
    found = gpuload.load(datasets.Dataset.from_list(list(STREAM)), qwen)
    assert found.tokens.to_lists() == gpuload.load(TABLE, qwen).tokens.to_lists()


def test_formats_of_datasets(qwen: Any) -> None:
    """Columns that a format hides are not there; what a function would make of rows is an error."""
    data = datasets.Dataset.from_dict({"prompt": [user("a")], "other": [1]})
    assert gpuload.load(data.with_format("numpy", columns=["prompt"]), qwen).passed_through.names == []
    assert gpuload.load(data.with_format("torch"), qwen).passed_through.names == ["other"]
    with pytest.raises(SourceError, match="has a transform .*, which is not applied here: make its rows with map"):
        gpuload.load(data.with_transform(lambda rows: rows), qwen)


def test_files_are_no_frame() -> None:
    assert not any(map(is_frame, ["a.parquet", b"a", ["a.parquet"], ("a",), iter(["a"])]))


def test_columns_of_which_arrow_takes_no_rows_are_named(qwen: Any) -> None:
    runs = pa.RunEndEncodedArray.from_arrays([2], ["x"])
    with pytest.raises(DataError, match="column .runs. cannot be converted to Arrow .*run_end_encoded.*drop it"):
        gpuload.load(pa.table({"prompt": ["a", "b"], "runs": runs}), qwen)


NULLS = [
    pa.array([{"a": None, "b": row} for row in range(40)], pa.struct([("a", pa.null()), ("b", pa.int64())])),
    pa.array([[None] * (row % 3) for row in range(40)], pa.list_(pa.null())),
    pa.array([[None] * (row % 3) for row in range(40)], pa.list_view(pa.null())),
]


@pytest.mark.parametrize("nulls", NULLS, ids=lambda each: str(each.type))
def test_slices_of_nested_nulls_next_to_views(qwen: Any, nulls: Any) -> None:
    table = pa.table({"prompt": pa.array([f"p{row}" for row in range(40)], pa.string_view()), "extra": nulls})
    for some in (table.slice(25, 10), table.slice(3)):
        found = gpuload.load(some, qwen)
        assert [found[row]["extra"] for row in range(len(found))] == some["extra"].to_pylist()


def test_slices_of_messages_with_views_and_nulls(qwen: Any) -> None:
    fields = {"role": pa.string_view(), "content": pa.string_view(), "more": pa.struct({"a": pa.null()})}
    rows = [
        [{"role": "user", "content": f"q{n}", "more": {"a": None}}, {"role": "assistant", "content": "a", "more": None}]
        for n in range(8)
    ]
    table = pa.table({"messages": pa.array(rows, pa.list_(pa.struct(fields)))})
    expected = gpuload.load_chats(table, qwen)
    found = gpuload.load_chats(table.slice(3, 3), qwen)
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in expected[3:6]]


def test_lists_of_nulls_are_stored(qwen: Any, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "nulls": pa.array([[None, None], [None]], pa.list_(pa.null()))})
    gpuload.save_to_disk({"train": gpuload.load_chats(table, qwen)}, tmp_path / "made")
    stored = datasets.load_from_disk(str(tmp_path / "made"))["train"]
    assert stored["nulls"][:] == [[None, None], [None]]


def test_types_of_users_inside_of_lists(qwen: Any) -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * 3, pa.binary(16)))
    table = pa.table({"text": ["a", "b"], "ids": pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), ids)})
    found = gpuload.load_chats(table, qwen).to_arrow().read_all()
    assert found["ids"].to_pylist() == table["ids"].to_pylist()


def test_a_shuffled_dataset_whose_cache_cannot_be_written(
    qwen: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flatten = datasets.Dataset.flatten_indices

    def full(self: Any, keep_in_memory: bool = False, **more: Any) -> Any:
        if not keep_in_memory:
            raise OSError(30, "Read-only file system")
        return flatten(self, keep_in_memory=keep_in_memory, **more)

    expected = [TABLE["n"].to_pylist()[row] for row in (2, 0)]
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(datasets.Dataset, "flatten_indices", full)
        found = gpuload.load(DATA.select([2, 0]), qwen, progress=False)
        assert [row["n"] for row in found[:]] == expected
    assert "Flattening" not in capsys.readouterr().err
    assert not datasets.are_progress_bars_disabled()
