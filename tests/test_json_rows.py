"""JSON and JSON lines as columns: every value is the one that `json.loads` returns."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gpuload.core.errors import SourceError
from gpuload.sources.columns import to_python
from gpuload.sources.json_rows import json_table
from gpuload.sources.types import JSON_TYPE

texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(['"', "\\", "\n", "\u2028", "é", "{", "]"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.lists(st.dictionaries(st.sampled_from("abc") | texts, values, max_size=4), max_size=5)


def read(content: bytes) -> list[dict[str, Any]]:
    """The rows, with the columns that they have."""
    table, rows = json_table("file", content)
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
        json_table("file", f'{{"a": 1}}\n{line}'.encode())
    assert str(found.value) == f"file, line 2: not valid JSON: {expected.value}"


@pytest.mark.parametrize("line", ["[1]", '"a"', "1", "null"])
def test_what_is_no_object_is_an_error(line: str) -> None:
    with pytest.raises(SourceError, match="file, line 2: expected an object with the row's columns, not"):
        json_table("file", f"{{}}\n{line}".encode())


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("text", ['[{"a": 1}]', '{"a": 1}\n{"a": 2}'])
def test_other_encodings_are_named(encoding: str, mark: bool, text: str) -> None:
    content = text.encode(encoding if mark else f"{encoding}-le")
    with pytest.raises(SourceError, match=f"x: the file is {encoding} text, .* iconv -f {encoding} -t UTF-8"):
        json_table("x", content)


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
        ([[1], "a"], False),
    ],
)
def test_arrow_has_what_it_does_not_change(cells: list[Any], typed: bool) -> None:
    table, _ = json_table("file", "\n".join(json.dumps({"a": cell}) for cell in cells).encode())
    assert (table.schema.field("a").type != JSON_TYPE) == typed
    assert to_python(table["a"].combine_chunks()) == cells
