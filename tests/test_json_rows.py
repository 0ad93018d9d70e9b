"""JSON and JSON lines as columns: every value is the one that `json.loads` returns."""

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gpuload.core.errors import SourceError
from gpuload.pipeline import nulls
from gpuload.sources import json_columns, json_rows, json_values
from gpuload.sources.columns import to_python
from gpuload.sources.fetch import SourceFile
from gpuload.sources.json_columns import JsonColumns
from gpuload.sources.read import check_unchanged, open_file
from gpuload.sources.types import JSON_TYPE, json_type

texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(['"', "\\", "\n", "\u2028", "é", "{", "]"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.lists(st.dictionaries(st.sampled_from("abc") | texts, values, max_size=4), max_size=5)


def table_of(content: bytes) -> tuple[pa.Table, int]:
    """The columns and the number of rows."""
    columns = JsonColumns("file", io.BytesIO(content))
    (table,) = columns.tables(None)  # type: ignore[arg-type]  # all rows are held
    assert table.schema.equals(columns.schema)
    assert columns.nbytes == len(content)
    return table, columns.rows


def read(content: bytes) -> list[dict[str, Any]]:
    """The rows, with the columns that they have."""
    table, rows = table_of(content)
    columns = {name: to_python(table[name].combine_chunks()) for name in table.schema.names}
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]


@given(rows=objects, ascii=st.booleans(), separators=st.sampled_from([(", ", ": "), (",", ":"), (" ,\t", " : ")]))
@examples(300)
def test_values_are_those_of_json(rows: list[Any], ascii: bool, separators: tuple[str, str]) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii, separators=separators) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    expected = [json.dumps([row.get(name) for name in names]) for row in rows]
    for content in ("\r\n".join(lines), "\n\n".join(f"  {line} " for line in lines), f"[{','.join(lines)}]"):
        found = read(content.encode())
        assert [json.dumps([row[name] for name in names]) for row in found] == expected


@pytest.mark.parametrize(
    "line",
    ['{"a": 1', '{"a": 1,}', '{"a" 1}', '{"a": 1} x', '{"a": 1 "b": 2}', "{a: 1}", '{"a": }', '{"a": "\t"}', "{,}"],
)
def test_what_is_not_json_is_an_error(line: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(line)
    with pytest.raises(SourceError) as found:
        table_of(f'{{"a": 1}}\n{line}'.encode())
    assert str(found.value) == f"file, line 2: not valid JSON: {expected.value}"


numbers = st.from_regex(r"-?[0-9]{1,25}(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
odd = st.sampled_from([b"NaN", b"-Infinity", b"-0", b"1E400", b"01", b'"\xed\xa0\x80"', b'"\xff"'])
escaped = st.sampled_from([b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\/"'])
json_bytes = st.recursive(
    values.map(lambda value: json.dumps(value, ensure_ascii=False).encode()) | numbers.map(str.encode) | odd | escaped,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: b"[" + b", ".join(items) + b"]")
        | st.lists(inner, max_size=3).map(lambda items: b'{"a":' + b',"b": '.join(items) + b"}")
    ),
    max_leaves=5,
)


@given(text=json_bytes, cut=st.tuples(st.integers(0, 40), st.integers(0, 3)), more=st.binary(max_size=2))
@examples(1_000)
def test_values_and_errors_are_those_of_json_whatever_the_bytes(text: bytes, cut: tuple[int, int], more: bytes) -> None:
    """Numbers have their types, digits and signs, and objects the order of their keys."""
    for line in (text, text[: cut[0]] + more + text[sum(cut) :]):
        expected = outcome(json.loads, line)
        assert outcome(json_values.parse_json, line) == expected
        one = line.replace(b"\n", b" ")
        if one.strip():
            expected = outcome(json.loads, one)
            found = outcome(lambda one: parsed(*json_rows.rows_of("file", one, 5, as_texts=True)), one)
            assert found == expected or found == f"file, line 5: not valid JSON: {expected}"


def outcome(parse: Callable[[bytes], Any], line: bytes) -> str:
    """A value or an error, with all digits and in the order of keys."""
    try:
        return repr(parse(line))
    except (ValueError, SourceError) as error:
        return str(error)


def parsed(row: Any) -> Any:
    """A row, some of whose values may still be texts."""
    return {key: json_rows.value_of(value) for key, value in row.items()} if type(row) is dict else row


def test_an_integer_with_too_many_digits_is_an_error_of_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "_FIRST_BYTES", 40)
    lines = ['{"a": [1]}', '{"a": "x"}', '{"a": 1.5}', f'{{"a": [{"1" * 5_000}]}}']
    with pytest.raises(SourceError, match="file, line 4: not valid JSON: Exceeds the limit"):
        table_of("\n".join(lines).encode())


@pytest.mark.parametrize("line", ["[1]", '"a"', "1", "null"])
def test_what_is_no_object_is_an_error(line: str) -> None:
    with pytest.raises(SourceError, match="file, line 2: expected an object with the row's columns, not"):
        table_of(f"{{}}\n{line}".encode())


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma", "zstd"])
def test_compressed_files_are_called_so(module: str) -> None:
    text = b'{"prompt": "a"}\n'
    packed = pa.compress(text, module, asbytes=True) if module == "zstd" else import_module(module).compress(text)
    with pytest.raises(SourceError, match="file: the file is compressed with .*: decompress it"):
        table_of(packed)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("text", ['[{"a": 1}]', '{"a": 1}\n{"a": 2}'])
def test_other_encodings_are_named_unless_an_array_shows_which_it_is(encoding: str, mark: bool, text: str) -> None:
    content = text.encode(encoding if mark else f"{encoding}-le")
    if text.startswith("[") and not mark:
        assert read(content) == [{"a": 1}]
        return
    with pytest.raises(SourceError, match=f"file: the file is {encoding} text, .* iconv -f {encoding} -t UTF-8"):
        table_of(content)


def test_special_values() -> None:
    content = b'{"a": [{"x": 1, "x": 2}, {}]}\n{"a": [{"y": "\\ud800"}]}\n{"a": [NaN, 1e999]}'
    found = [row["a"] for row in read(content)]
    assert found[:2] == [[{"x": 2}, {}], [{"y": "\ud800"}]]
    assert json.dumps(found[2]) == "[NaN, Infinity]"


@pytest.mark.parametrize(
    ("cells", "typed"),
    [
        ([[{"role": "user", "content": "a"}], [], [{"role": "x", "content": "b"}]], True),
        ([[{"role": "user", "content": "a"}], [{"content": "b", "role": "x"}]], False),
        ([[{"role": "user"}], [{"role": "user", "content": "b"}]], False),
        ([{"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 2}, {"c": 3}]}}], True),
        ([{"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 2}, {"d": 3}]}}], False),
        ([1, 2.5], False),
        ([-0.0, 0.0, None, 1.5], True),
        ([{"x": [-0.0]}], True),
        ([[1], "a"], False),
    ],
)
def test_arrow_has_what_it_does_not_change(cells: list[Any], typed: bool) -> None:
    table, _ = table_of("\n".join(json.dumps({"a": cell}) for cell in cells).encode())
    assert (table.schema.field("a").type != JSON_TYPE) == typed
    found = to_python(table["a"].combine_chunks())
    assert found == cells
    assert json.dumps(found) == json.dumps(cells)  # 0.0 equals -0.0


# -- in pieces -------------------------------------------------------------------------------------------------------

cells = st.one_of(
    st.none(),
    st.integers(-3, 3) | st.floats(width=16) | texts,
    st.lists(st.none() | st.integers(0, 2), max_size=2),
    st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts | st.none()}), max_size=2),
    st.sampled_from(
        [{}, {"x": None}, {"x": [], "y": 1}, {"y": 1, "x": []}, {"x": [{"z": 1.5}]}, [[]], [["a"]], 2**70, True]
    ),
    values,
)
columns_of_one_kind = st.one_of(
    st.lists(st.none() | st.integers(0, 5), max_size=12),
    st.lists(st.none() | st.lists(st.none() | texts, max_size=2), max_size=12),
    st.lists(st.none() | st.fixed_dictionaries({"a": st.none() | st.lists(st.floats(), max_size=2)}), max_size=12),
    st.lists(st.none() | st.just({}), max_size=12),
    st.lists(cells, max_size=12),
)


def as_one_column(values: list[Any]) -> tuple[pa.DataType, list[str | None]]:
    """The definition: a type of Arrow if it changes no value of any row, otherwise JSON; and the values as JSON."""
    written = [json.dumps(value) for value in values]
    kind = json_type(values)
    if kind is not None:
        try:
            if [json.dumps(value) for value in pa.array(values, kind).to_pylist()] == written:
                return kind, written
        except (pa.ArrowException, ValueError, OverflowError):
            pass
    return JSON_TYPE, written


@given(
    data=st.tuples(columns_of_one_kind, columns_of_one_kind),
    missing=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 1))),
    size=st.integers(1, 200),
    blanks=st.sampled_from(["\n", "\r\n", "\n\n \t\n"]),
    bom=st.booleans(),
    held=st.sampled_from([0, 300, 1 << 30]),
    ascii=st.booleans(),
)
@examples(500)
def test_pieces_are_as_the_whole(
    data: tuple[list[Any], list[Any]],
    missing: set[tuple[int, int]],
    size: int,
    blanks: str,
    bom: bool,
    held: int,
    ascii: bool,
) -> None:
    count = max(map(len, data))
    rows = [
        {
            name: column[row]
            for k, (name, column) in enumerate(zip("ab", data, strict=True))
            if row < len(column) and (row, k) not in missing
        }
        for row in range(count)
    ]
    lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
    for is_array in (False, True):
        text = "[" + f",{blanks}".join(lines) + "]" if is_array else blanks.join(lines)
        content = b"\xef\xbb\xbf" * bom + text.encode()
        whole, number = table_of(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_rows, "PIECE_BYTES", size)
            patch.setattr(json_columns, "HELD_BYTES", held)
            found = JsonColumns("file", io.BytesIO(content))
        assert (found.rows, found.digest, found.nbytes) == (number, hashlib.sha256(content).digest(), len(content))
        assert number == count
        assert found.schema.equals(whole.schema)
        table = pa.concat_tables(found.tables(Reopened(content)))  # type: ignore[arg-type]
        table.validate(full=True)
        for name in found.schema.names:
            kind, expected = as_one_column([row.get(name) for row in rows])
            assert found.schema.field(name).type == kind
            column = table[name].combine_chunks()
            assert [json.dumps(value) for value in to_python(column)] == expected
            if kind == JSON_TYPE:  # the texts are those of the file
                assert column.storage.to_pylist() == whole[name].combine_chunks().storage.to_pylist()
                assert column.storage.to_pylist() == [
                    json.dumps(row[name], ensure_ascii=ascii or is_array) if row.get(name) is not None else None
                    for row in rows
                ]


class Reopened:
    """A file that can be read again."""

    def __init__(self, content: bytes):
        self._content = content

    @contextmanager
    def open(self) -> Iterator[io.BytesIO]:
        yield io.BytesIO(self._content)


@given(
    parts=st.lists(
        st.sampled_from(
            [
                '{"a": 1}',
                '{"a": [1',
                "2]}",
                "[1]",
                '"',
                ",",
                "{}",
                "]",
                "[",
                '{"a": "x',
                'y"}',
                "nul",
                "\x0b",
                "\ufeff{}",
            ]
        ),
        max_size=6,
    ),
    between=st.sampled_from(["\n", ",", ", \n"]),
    is_array=st.booleans(),
    size=st.integers(1, 40),
)
@examples(500)
def test_errors_are_those_of_the_rows(parts: list[str], between: str, is_array: bool, size: int) -> None:
    content = between.join(parts)
    content = f"[{content}]" if is_array else content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "PIECE_BYTES", size)
        try:
            rows = read(content.encode())
            error = None
        except SourceError as raised:
            error = str(raised)
    expected, invalid = rows_one_by_one(content)
    odd = next(((place, row) for place, row in expected if not isinstance(row, dict)), None)
    if invalid or odd:
        assert error == (
            f"file{invalid}"
            if odd is None or invalid
            else f"file, {odd[0]}: expected an object with the row's columns, not {odd[1]!r:.60}"
        )
        return
    assert error is None
    assert [json.dumps(row.get("a")) for row in rows] == [json.dumps(row.get("a")) for _, row in expected]


def rows_one_by_one(content: str) -> tuple[list[tuple[str, Any]], str]:
    """The rows of a file and where they are, and what is not valid JSON."""
    rows, where = [], ""
    try:
        if content.strip().startswith("["):
            return [(f"item {k}", row) for k, row in enumerate(json.loads(content.encode()))], ""
        for k, line in enumerate(content.encode().split(b"\n"), 1):
            if line.strip():
                where = f", line {k}"
                rows.append((f"line {k}", json.loads(line)))
    except ValueError as error:
        return rows, f"{where}: not valid JSON: {error}"
    return rows, ""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-le"])
@pytest.mark.parametrize("size", [3, 1 << 22])
def test_encodings_of_arrays(encoding: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "PIECE_BYTES", size)
    content = json.dumps([{"a": "é\u2028,"}, {"a": "\U0001f600"}], ensure_ascii=False).encode(encoding)
    assert json.loads(content) == read(content)


@pytest.mark.parametrize("content", ['{{"a": 1}}\n{}{{"a": "\ud800"}}', '[{{"a": 1}}, {}{{"a": "\ud800"}}]'])
def test_lone_surrogates_are_escaped_in_all_pieces(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = content.format("").encode(errors="surrogatepass")
    expected = table_of(encoded)[0]["a"].combine_chunks().storage.to_pylist()
    assert expected == ["1", '"\\ud800"']
    monkeypatch.setattr(json_rows, "PIECE_BYTES", 9)
    assert table_of(encoded)[0]["a"].combine_chunks().storage.to_pylist() == expected


@pytest.mark.parametrize("size", [9, 1 << 20])
def test_a_column_needs_a_name_that_utf_8_can_encode(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "PIECE_BYTES", size)
    lines = b'{"a": 1}\n' * 3 + b'{"a": {"\\udfff": 1}}\n{"\\udfff": 1}\n'
    assert read(lines.rsplit(b"\n", 2)[0])[3] == {"a": {"\udfff": 1}}
    with pytest.raises(SourceError, match=r"file row 4: the key '\\udfff' has a lone surrogate"):
        table_of(lines)


def test_memory_is_that_of_the_columns(tmp_path: Path) -> None:
    """Python objects of a whole file take several times as much."""
    path = tmp_path / "data.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "a b"}] * 12, "n": 1.5})
    path.write_text(f"{row}\n" * 40_000)
    program = f"""
import resource
from gpuload.sources.fetch import SourceFile
from gpuload.sources.read import open_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = open_file(SourceFile({str(path)!r}, "data.jsonl", "json"))
assert sum(table.num_rows for table in source.batches()) == source.num_rows == 40_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    peak = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
    assert peak < 3.5 * path.stat().st_size


@pytest.mark.parametrize("change", ["other", "gone", None])
def test_a_large_file_is_read_again(change: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_columns, "HELD_BYTES", 0)
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1, "b": [1, "x"]}\n' * 3)
    source = open_file(SourceFile(str(path), "data.jsonl", "json"))
    if change:
        path.write_text('{"a": 1\n') if change == "other" else path.unlink()
        with pytest.raises(SourceError, match="the file was changed while it was loaded"):
            list(source.batches())
    else:
        (table,) = source.batches()
        assert table["a"].to_pylist() == [1] * 3
        assert not nulls._may_have_nulls(source)  # none that are due to Arrow, though a column is of JSON
        check_unchanged([source])


def test_tools_stay_the_text_that_they_are() -> None:
    tools = '[ {"type":"function", "function": {"name": "f"}} ]'
    table, _ = table_of(f'{{"tools": {tools}, "a": [{{"b": "c"}}]}}'.encode())
    assert table["tools"].combine_chunks().storage.to_pylist() == [tools]
    assert table.schema.field("a").type != JSON_TYPE
