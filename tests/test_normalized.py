"""Messages that are changed before they are rendered: `drop_nulls` and `normalize_messages`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import core, examples

import gpuload
from gpuload.core.errors import DataError, OptionError
from gpuload.kinds.normalize import normalized, takes_objects
from gpuload.reference.template_call import TemplateCall
from gpuload.sources.columns import to_python
from gpuload.sources.nulls import column_without_nulls, has_null_fields, without_nulls
from gpuload.sources.types import as_json

trl = pytest.importorskip("trl", reason="TRL has the templates of these tests")
from trl.trainer.utils import remove_none_values  # noqa: E402

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
HERMES, QWEN3 = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen2_5", "qwen3"))
NEEDS_TEXT = (
    "{% for m in messages if m.content is not string %}{{ raise_exception('a content is no text') }}{% endfor %}"
    + HERMES
)

Chat = list[dict[str, Any]]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*calls: Any, content: str | None = "") -> Chat:
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def ids_of(tokenizer: Any, messages: Any, template: str, tools: Any = None) -> list[int]:
    made = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, return_dict=True)
    return list(made["input_ids"])


def rows_of(dataset: gpuload.ChatDataset) -> list[list[int]]:
    return [dataset[k]["input_ids"] for k in range(len(dataset))]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


# -- nulls -----------------------------------------------------------------------------------------------------------

ROWS = [
    {"messages": chat(call({"x": 1})), "tools": [tool("f", x={"type": "integer"})]},
    {"messages": chat(call({"y": "two"})), "tools": [tool("f", y={"type": "string", "enum": ["two"]})]},
]
"""In parquet, each has the fields of both."""


def in_parquet(path: Path, rows: list[Any] = ROWS) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_nulls_of_parquet_are_dropped_as_trl_drops_them(qwen: Any, tmp_path: Path) -> None:
    file = in_parquet(tmp_path / "a.parquet")
    cleaned = [remove_none_values(row) for row in pq.read_table(file).to_pylist()]
    assert cleaned == ROWS
    expected = [ids_of(qwen, row["messages"], HERMES, row["tools"]) for row in cleaned]
    options: dict[str, Any] = {"chat_template": HERMES, "verify": "full", "strict": True}
    found = gpuload.load_chats(file, qwen, drop_nulls=True, **options)
    assert rows_of(found) == expected
    assert found.report.rows_by_reference == 0
    assert found.report.notes[1] == "keys that are null are removed from messages (drop_nulls=True)"
    plain = gpuload.load_chats(jsonl(tmp_path / "a.jsonl", ROWS), qwen, **options)
    assert rows_of(plain) == expected
    assert rows_of(gpuload.load_chats(file, qwen, **options)) != expected


def test_the_report_warns_of_nulls_that_are_printed(qwen: Any, tmp_path: Path) -> None:
    def notes(file: Any, **options: Any) -> list[str]:
        report = gpuload.load_chats(file, qwen, chat_template=HERMES, token_cache=False, **options).report
        return [note for note in report.notes if "these nulls" in note]

    file = in_parquet(tmp_path / "a.parquet")
    (note,) = notes(file)
    assert note == (
        "the template prints these nulls in 2 of 2 rows with nulls in nested fields that were looked at, for example "
        f"{file} row 0: drop_nulls=True removes them"
    )
    table = pa.Table.from_pylist([{"messages": row["messages"]} for row in ROWS])
    assert len(notes(table)) == 1
    assert notes(file, drop_nulls=True) == []
    assert notes(file, verify="off") == []
    # JSON that has nulls, and structs without any.
    explicit = [{"messages": chat(call({"x": None}))}, {"messages": chat(call({"x": 1}))}]
    assert notes(jsonl(tmp_path / "a.jsonl", explicit)) == []
    assert notes(pa.Table.from_pylist(explicit[1:])) == []


def test_nulls_in_pairs_are_dropped(qwen: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": row["messages"][3:]} for row in ROWS
    ]
    file = in_parquet(tmp_path / "a.parquet", rows)
    options: dict[str, Any] = {"chat_template": HERMES, "verify": "full", "strict": True}
    found = gpuload.load_pairs(file, qwen, drop_nulls=True, **options)
    expected = gpuload.load_pairs(jsonl(tmp_path / "a.jsonl", rows), qwen, **options)
    assert found[:] == expected[:]
    assert gpuload.load_pairs(file, qwen, **options)[:] != expected[:]


value = st.recursive(
    st.none() | st.integers(-9, 9) | st.text("an\n", max_size=3),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from("abc"), some, max_size=3),
    max_leaves=8,
)


@examples(100)
@given(st.lists(st.lists(value, max_size=2) | st.dictionaries(st.sampled_from("abc"), value), max_size=4))
def test_nulls_are_what_trl_removes(values: list[Any]) -> None:
    assert [without_nulls(each) for each in values] == [remove_none_values(each) for each in values]
    assert to_python(column_without_nulls(as_json(values))) == [remove_none_values(each) for each in values]
    try:
        column = pa.array(values)
    except pa.ArrowException:
        return
    cleaned = column_without_nulls(column)
    assert to_python(cleaned) == [None if row is None else without_nulls(row) for row in to_python(column)]
    assert (cleaned is column) != has_null_fields(column)


def test_the_token_cache_keeps_changed_messages_apart(qwen: Any, tmp_path: Path, warm_cache: Path) -> None:
    rows = [row | {"messages": chat(call('{"x": 1}'))} for row in ROWS]
    file = in_parquet(tmp_path / "a.parquet", rows)
    every: list[dict[str, Any]] = [{}, {"drop_nulls": True}, {"normalize_messages": "auto"}]
    every.append(every[1] | every[2])
    cold = [rows_of(gpuload.load_chats(file, qwen, chat_template=HERMES, **options)) for options in every]
    assert len(set(map(str, cold))) == len(every)
    for options, expected in zip(every, cold, strict=True):
        warm = gpuload.load_chats(file, qwen, chat_template=HERMES, **options)
        assert warm.report.from_cache == [file]
        assert rows_of(warm) == expected


# -- forms of messages -----------------------------------------------------------------------------------------------


def test_what_normalizing_does() -> None:
    messages = [
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": [call('{"x": [null, 1.0]}'), call(""), call("no json"), call("[1]")]},
        {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": '{"b": 1}'}]},
        {"role": "assistant", "text": "no content"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": None},
    ]
    given = copy.deepcopy(messages)
    found = normalized(given, True)
    assert given == messages
    assert found == [
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "tool_calls": [call({"x": [None, 1.0]}), call({}), call("no json"), call("[1]")],
            "content": "",
        },
        {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {"b": 1}}]},
        *messages[3:],
    ]
    assert normalized(found, True) == found
    assert normalized(given, False)[1]["tool_calls"] == messages[1]["tool_calls"]
    assert normalized({"prompt": given, "tools": given}, True) == {"prompt": found, "tools": given}


NAMES = ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "nemotron_3_nano", "gptoss", "deepseekv3"]


@pytest.mark.parametrize("name", core(NAMES, "qwen2_5", "glm4moe", "deepseekv3"))
@pytest.mark.parametrize("form", ["json", "parquet"])
def test_normalized_messages_are_those_that_transformers_renders(
    qwen: Any, tmp_path: Path, name: str, form: str
) -> None:
    chats = [chat(call('{"x": "é", "y": [1, null]}'), content=None), chat(call('{"x": "b"}')), chat(call("{}"))[:2]]
    objects = name != "deepseekv3"  # which takes arguments as text
    assert takes_objects(TemplateCall(qwen, template(name))) == objects
    rows = [{"messages": each} for each in chats]
    file = jsonl(tmp_path / "a.jsonl", rows) if form == "json" else in_parquet(tmp_path / "a.parquet", rows)
    options: dict[str, Any] = {"chat_template": template(name), "token_cache": False}
    if form == "parquet" and not objects and not TemplateCall(qwen, template(name)).changes.drops_none:
        with pytest.raises(
            DataError, match="'NoneType' object is not iterable"
        ):  # of the template, for null tool_calls
            gpuload.load_chats(file, qwen, normalize_messages="auto", verify="full", strict=True, **options)
        return
    found = gpuload.load_chats(file, qwen, normalize_messages="auto", verify="full", strict=True, **options)
    expected = [ids_of(qwen, normalized(each, objects), template(name)) for each in chats]
    assert rows_of(found) == expected
    note = "null contents and arguments as text are normalized (normalize_messages='auto')"
    assert found.report.notes[1] == note


def test_the_reason_for_a_rejected_row_names_the_option(qwen: Any, tmp_path: Path) -> None:
    chats = [chat(call({"x": 1}), content=None), chat(call({"x": 1})), chat(call({"x": 2}), content=None)]
    remedy = ": normalize_messages='auto' makes contents and arguments that this template takes"
    for more in ({}, {"tools": [tool("f")]}):
        file = jsonl(tmp_path / "a.jsonl", [{"messages": each, **more} for each in chats])
        with pytest.warns(UserWarning, match="normalize_messages='auto'"):
            found = gpuload.load_chats(file, qwen, chat_template=NEEDS_TEXT)
        ((reason, count),) = found.report.rejected.items()
        assert reason == f"a content is no text{remedy}"
        assert count == 2
    assert len(gpuload.load_chats(file, qwen, chat_template=NEEDS_TEXT, normalize_messages="auto")) == 3
    glm = jsonl(tmp_path / "b.jsonl", [{"messages": chat(call('{"x": 1}'))}, {"messages": chat(call({"x": 1}))}])
    with pytest.warns(UserWarning, match="normalize_messages='auto'"):
        found = gpuload.load_chats(glm, qwen, chat_template=template("glm4moe"))
    assert [reason.endswith(remedy) for reason in found.report.rejected] == [True]


def test_reasons_that_normalizing_does_not_change(qwen: Any) -> None:
    strict = QWEN3 + "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}"
    chats = [chat(call({"x": 1})), [{"role": "user", "content": "no"}, *chat(call({"x": 1}), content=None)[1:]]]
    with pytest.warns(UserWarning, match="rows were dropped"):
        found = gpuload.load_chats(pa.table({"messages": chats}), qwen, chat_template=strict)
    assert found.report.rejected == {"never": 1}


def test_pairs_are_normalized(qwen: Any, tmp_path: Path) -> None:
    def rows(content: Any, arguments: Any) -> list[Any]:
        messages = chat(call(arguments), content=content)
        return [{"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[3:]}]

    given, expected = (
        jsonl(tmp_path / f"{k}.jsonl", rows(*each)) for k, each in enumerate([(None, '{"x": 1}'), ("", {"x": 1})])
    )
    options: dict[str, Any] = {"chat_template": NEEDS_TEXT, "verify": "full", "strict": True}
    found = gpuload.load_pairs(given, qwen, normalize_messages="auto", **options)
    assert found[:] == gpuload.load_pairs(expected, qwen, **options)[:]
    table = pa.Table.from_pylist(rows(None, '{"x": 1}'))
    assert gpuload.load_pairs(table, qwen, normalize_messages="auto", **options)[:] == found[:]


def test_formats_that_are_converted_are_normalized(qwen: Any) -> None:
    """Nulls in arguments that were JSON text stay: they are in the data."""
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'}]
    table = pa.Table.from_pylist([{"conversations": turns}])
    options: dict[str, Any] = {"chat_template": NEEDS_TEXT, "verify": "full", "strict": True}
    found = gpuload.load_chats(table, qwen, normalize_messages="auto", drop_nulls=True, **options)
    assert rows_of(found) == [ids_of(qwen, chat(call({}))[:2], NEEDS_TEXT)]
    table = pa.Table.from_pylist([{"messages": chat(call('{"x": null}'), content=None)}])
    found = gpuload.load_chats(table, qwen, normalize_messages="auto", drop_nulls=True, **options)
    assert rows_of(found) == [ids_of(qwen, chat(call({"x": None})), NEEDS_TEXT)]


@pytest.mark.parametrize("options", [{"drop_nulls": 1}, {"normalize_messages": "all"}, {"normalize_messages": True}])
@pytest.mark.parametrize("load", [gpuload.load_chats, gpuload.load_pairs])
def test_invalid_values(qwen: Any, load: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        load(pa.table({"messages": [chat(call({}))]}), qwen, **options)


def test_the_command_line(qwen_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuload.cli.main import main

    file = in_parquet(tmp_path / "a.parquet", [{"messages": row["messages"]} for row in ROWS])
    options = ["--tokenizer", qwen_folder, "--drop-nulls", "--normalize-messages", "auto"]
    assert main(["prepare", file, *options, "--cache-dir", str(tmp_path / "cache")]) == 0
    assert "drop_nulls=True" in capsys.readouterr().out
    assert main(["prepare", file, *options, "--export", "sft", str(tmp_path / "out")]) == 0
    found = pq.read_table(next((tmp_path / "out").rglob("*.parquet")))["input_ids"].to_pylist()
    expected = gpuload.load_chats(file, qwen_folder, drop_nulls=True, normalize_messages="auto")
    assert found == rows_of(expected)


@pytest.mark.parametrize("parquet", [False, True])
def test_an_empty_list_of_calls_is_none(parquet: bool, qwen: Any, tmp_path: Path) -> None:
    """That template takes it for calls, and leaves the answer out."""
    without = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]
    rows = [{"messages": [without[0], {**without[1], "tool_calls": []}]}] * 20 + [{"messages": chat(call("{}"))}]
    file = in_parquet(tmp_path / "a.parquet", rows) if parquet else jsonl(tmp_path / "a.jsonl", rows)
    options: dict[str, Any] = {"chat_template": template("deepseekv3"), "verify": "full", "token_cache": False}
    found = gpuload.load_chats(file, qwen, normalize_messages="auto", **options)
    assert rows_of(found)[:20] == [ids_of(qwen, without, template("deepseekv3"))] * 20
    assert rows_of(gpuload.load_chats(file, qwen, **options))[0] != rows_of(found)[0]
    hits = gpuload.check(file, qwen, chat_template=template("deepseekv3"), progress=False)
    assert [(hit.count, hit.example) for hit in hits if hit.check == "text dropped"] == [
        (20, "row 0: the template does not print 'an answer'")
    ]
