"""Malformed rows: each is dropped and counted with a reason, and no other row with it."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user

import gpuload
from gpuload.core.errors import DataError, NoRowsError
from gpuload.reference.reference import Reference
from gpuload.sources.types import JSON_TYPE

Row = dict[str, Any]
Load = Callable[..., gpuload.PromptDataset]

ANSWER = [{"role": "assistant", "content": "answer"}]
TURNS = [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer"}]
SURROGATE = "a \ud800 b"

CHAT: Row = {"messages": user("question") + ANSWER}
SHAREGPT: Row = {"conversations": TURNS}
ALPACA: Row = {"instruction": "question", "input": "more", "output": "answer"}
COMPLETION: Row = {"prompt": user("question"), "completion": ANSWER}
TEXTS: Row = {"prompt": "question", "completion": "answer"}
PROMPT: Row = {"prompt": user("question")}
PAIR: Row = {"prompt": user("question"), "chosen": ANSWER, "rejected": user("worse")}
TEXT_PAIR: Row = {"prompt": "question", "chosen": "answer", "rejected": "worse"}
IMPLICIT: Row = {"chosen": user("question") + ANSWER, "rejected": user("question") + user("worse")}
KTO: Row = {"prompt": user("question"), "completion": ANSWER, "label": True}

chats, pairs, prompts = gpuload.load_chats, gpuload.load_pairs, gpuload.load

# What loads the rows, a good one, what is otherwise in the bad one, and the reason.
JSON_ROWS: list[tuple[Load, Row, Row, str]] = [
    (chats, CHAT, {"tools": "{not json"}, "tools is not valid JSON: Expecting property name"),
    (chats, CHAT, {"tools": '{"type": "function"}'}, "tools is of type dict, not a list"),
    (chats, CHAT, {"tools": 5}, "tools is of type int, not a list"),
    (chats, CHAT, {"tools": [5]}, "Tools should either be a JSON schema"),
    (chats, CHAT, {"tools": SURROGATE}, "tools is not valid JSON"),
    (chats, CHAT, {"tools": [{"type": "function", "function": {"name": SURROGATE}}]}, "lone surrogate"),
    (chats, CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs is not valid JSON"),
    (chats, CHAT, {"messages": CHAT["messages"][0]}, "messages is one message, not a list"),
    (chats, CHAT, {"messages": {"prompt": "a", "completion": "b"}}, "messages is an object, not a list of messages"),
    (chats, CHAT, {"messages": 5}, "of type int"),
    (chats, CHAT, {"messages": [user("a")]}, "message 0 is not an object"),
    (chats, CHAT, {"messages": [*user("a"), None]}, "message 1 is null"),
    (chats, CHAT, {"messages": [*user("a"), {"role": "assistant", "content": 5}]}, "TypeError: can only concatenate"),
    (chats, CHAT, {"messages": user({"a": {"b": None}}) + ANSWER}, "TypeError: can only concatenate|'content'"),
    (chats, CHAT, {"messages": user(SURROGATE) + ANSWER}, "lone surrogate"),
    (chats, CHAT, {"messages": [*user("a"), ANSWER[0] | {"tool_calls": "f()"}]}, ""),
    (chats, CHAT, {"messages": [*user("a"), ANSWER[0] | {"tool_calls": [None]}]}, ""),
    (
        chats,
        SHAREGPT,
        {"conversations": [{"from": ["human"], "value": "q"}, TURNS[1]]},
        "from is of type list, not text",
    ),
    (chats, SHAREGPT, {"conversations": [{"from": 5, "value": "q"}, TURNS[1]]}, "from is of type int, not text"),
    (chats, SHAREGPT, {"conversations": [TURNS[0], {"value": "a"}]}, "a message has neither role nor from"),
    (chats, SHAREGPT, {"conversations": [TURNS[0], {"from": "gpt"}]}, "content of message 1 is null"),
    (chats, SHAREGPT, {"conversations": [TURNS[0], {"from": "function_call"}]}, "content of message 1 is null"),
    (chats, SHAREGPT, {"conversations": TURNS[0]}, "conversations is of type dict, not a list"),
    (chats, SHAREGPT, {"conversations": [TURNS[0], {"from": "gpt", "value": SURROGATE}]}, "lone surrogate"),
    (chats, SHAREGPT, {"system": 5}, "system is of type int, not text"),
    (chats, ALPACA, {"instruction": 5}, "instruction is of type int, not text"),
    (chats, ALPACA, {"input": ["more"]}, "input is of type list, not text"),
    (chats, ALPACA, {"output": 1.5}, "output is of type float, not text"),
    (chats, ALPACA, {"output": None}, "content of message 1 is null"),
    (chats, ALPACA, {"history": "before"}, "history is not a list of pairs of texts"),
    (chats, ALPACA, {"history": [["question"]]}, "history is not a list of pairs of texts"),
    (chats, ALPACA, {"history": [[1, 2]]}, "history is not a list of pairs of texts"),
    (chats, ALPACA, {"input": SURROGATE}, "lone surrogate"),
    (chats, COMPLETION, {"prompt": []}, "prompt is an empty list"),
    (chats, COMPLETION, {"completion": "text"}, "prompt and completion are neither both text nor both messages"),
    (chats, COMPLETION, {"prompt": 5}, "prompt and completion are neither both text nor both messages"),
    (chats, COMPLETION, {"prompt": None}, "null"),
    (chats, COMPLETION, {"prompt": user(SURROGATE)}, "lone surrogate"),
    (chats, TEXTS, {"prompt": {"a": 1}}, "prompt and completion are neither both text nor both messages"),
    (chats, TEXTS, {"completion": SURROGATE}, "lone surrogate"),
    (chats, {"text": "a text"}, {"text": 5}, "text is of type int, not text"),
    (chats, {"text": "a text"}, {"text": ["a"]}, "text is of type list, not text"),
    (chats, {"text": "a text"}, {"text": {"a": 1}}, "text is of type dict, not text"),
    (chats, {"text": "a text"}, {"text": SURROGATE}, "lone surrogate"),
    (prompts, PROMPT, {"prompt": {"role": "user"}}, "prompt is neither a string nor a list of messages"),
    (prompts, PROMPT, {"prompt": [["a"]]}, "message 0 is not an object"),
    (prompts, PROMPT, {"prompt": user(1.5)}, "TypeError: can only concatenate"),
    (prompts, PROMPT, {"prompt": [{"role": ["user"], "content": "a"}]}, "role of message 0 is of type list, not text"),
    (prompts, PROMPT, {"prompt": user(SURROGATE)}, "lone surrogate"),
    (
        prompts,
        PROMPT,
        {"prompt": user([{"type": "text", "value": "a"}])},
        "part 0 of the content of message 0 has no text",
    ),
    (pairs, PAIR, {"tools": "[5"}, "tools is not valid JSON"),
    (pairs, PAIR, {"prompt": []}, "prompt is an empty list"),
    (pairs, PAIR, {"chosen": 5}, "chosen is neither text nor messages, but of type int"),
    (pairs, PAIR, {"rejected": [5]}, "message 1 is not an object|message 0 is not an object"),
    (pairs, PAIR, {"rejected": [{"from": ["gpt"], "value": "a"}]}, "from is of type list, not text"),
    (pairs, PAIR, {"chosen": [{"role": "assistant", "content": SURROGATE}]}, "lone surrogate"),
    (pairs, PAIR, {"chat_template_kwargs": [1]}, "chat_template_kwargs is list, not an object"),
    (pairs, TEXT_PAIR, {"prompt": 5}, "prompt is neither text nor messages, but of type int"),
    (pairs, TEXT_PAIR, {"chosen": SURROGATE}, "lone surrogate"),
    (pairs, TEXT_PAIR, {"chosen": None}, "chosen is null"),
    (pairs, IMPLICIT, {"chosen": []}, "chosen is an empty list"),
    (pairs, IMPLICIT, {"chosen": [None, None]}, "no common first message"),
    (pairs, KTO, {"label": "yes"}, "label is 'yes', not true or false"),
    (pairs, KTO, {"label": None}, "label is None, not true or false"),
    (pairs, KTO, {"completion": {"a": 1}}, "message|content"),
]


def names_of(case: tuple[Load, Row, Row, str]) -> str:
    load, good, bad, _ = case
    return f"{load.__name__}-{'-'.join(good)}-{json.dumps(bad)}"


@pytest.fixture(scope="module")
def tokens_of(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """tokens_of(load, row) → the tokens of a good row, loaded alone."""
    file = tmp_path_factory.mktemp("good") / "good.jsonl"

    @cache
    def loaded(load: Load, row: str) -> list[list[int]]:
        file.write_text(row)
        return load(str(file), qwen, token_cache=False).tokens.to_lists()

    return lambda load, row: loaded(load, json.dumps(row))


def check(loaded: gpuload.PromptDataset, file: str, reason: str, tokens: list[list[int]]) -> None:
    """Row 1 of three was dropped for a reason, and the others have the tokens of the good row alone."""
    report = loaded.report
    assert list(report.rejected.values()) == [1]
    (found,) = report.rejected
    assert re.search(reason, found), found
    assert report.examples[found] == [f"{file} row 1"]
    assert [loaded[row]["n"] for row in range(len(loaded))] == [0, 2]
    assert loaded.tokens.to_lists() == tokens * 2
    assert report.check.mismatches == []


@pytest.mark.parametrize("case", JSON_ROWS, ids=names_of)
def test_bad_rows_in_json(case: tuple[Load, Row, Row, str], qwen: Any, tokens_of: Any, tmp_path: Path) -> None:
    load, good, bad, reason = case
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"n": n}) + "\n" for n, row in enumerate((good, good | bad, good))))
    check(load(str(file), qwen, verify="full"), str(file), reason, tokens_of(load, good))


# -- columns with types ------------------------------------------------------------------------------------------------

TEXT = pa.array([b"good", b"\xff bad", b"good"], pa.binary()).view(pa.string())
GOOD = pa.array(["good"] * 3)


def chat_of(*contents: pa.Array, names: tuple[str, str] = ("role", "content")) -> pa.Array:
    """(3,) conversations of some messages each, of users and assistants in turn."""
    roles = ("user", "assistant") if names[0] == "role" else ("human", "gpt")
    messages = [
        pa.StructArray.from_arrays([pa.array([roles[k % 2]] * 3), each], names=list(names))
        for k, each in enumerate(contents)
    ]
    order = [row + 3 * k for row in range(3) for k in range(len(contents))]
    values = pa.concat_arrays(messages).take(pa.array(order))
    return pa.ListArray.from_arrays(pa.array(range(0, 3 * len(contents) + 1, len(contents)), pa.int32()), values)


TOOLS = pa.array(['[{"type": "function", "function": {"name": "f", "parameters": {}}}]'] * 3)

# What loads the columns, and those of three rows of which the second one has bytes that are not text.
NOT_TEXT: list[tuple[Load, dict[str, pa.Array]]] = [
    (chats, {"messages": chat_of(GOOD, TEXT)}),
    (chats, {"messages": chat_of(GOOD, TEXT), "tools": TOOLS}),
    (
        chats,
        {"messages": chat_of(GOOD, GOOD), "tools": pa.array([None, b"[\xff]", None], pa.binary()).view(pa.string())},
    ),
    (chats, {"messages": chat_of(GOOD, GOOD), "other": TEXT}),
    (chats, {"conversations": chat_of(GOOD, TEXT, names=("from", "value"))}),
    (chats, {"conversations": chat_of(GOOD, GOOD, names=("from", "value")), "system": TEXT}),
    (chats, {"instruction": TEXT, "output": GOOD}),
    (chats, {"instruction": GOOD, "output": TEXT.dictionary_encode()}),
    (chats, {"prompt": chat_of(TEXT), "completion": chat_of(GOOD)}),
    (chats, {"prompt": chat_of(GOOD), "completion": chat_of(TEXT), "tools": TOOLS}),
    (chats, {"prompt": TEXT, "completion": GOOD}),
    (chats, {"prompt": GOOD, "completion": TEXT}),
    (chats, {"text": TEXT}),
    (prompts, {"prompt": TEXT}),
    (prompts, {"prompt": chat_of(TEXT)}),
    (pairs, {"prompt": TEXT, "chosen": GOOD, "rejected": GOOD}),
    (pairs, {"prompt": GOOD, "chosen": GOOD, "rejected": TEXT}),
    (pairs, {"prompt": chat_of(GOOD), "chosen": chat_of(TEXT), "rejected": chat_of(GOOD)}),
    (pairs, {"prompt": GOOD, "chosen": chat_of(GOOD, TEXT), "rejected": chat_of(GOOD, pa.array(["no"] * 3))}),
    (pairs, {"chosen": chat_of(GOOD, TEXT), "rejected": chat_of(GOOD, GOOD)}),
    (pairs, {"prompt": chat_of(GOOD), "completion": chat_of(TEXT), "label": pa.array([True] * 3)}),
]


@pytest.mark.parametrize("case", NOT_TEXT, ids=lambda case: f"{case[0].__name__}-{'-'.join(case[1])}")
def test_bad_rows_that_are_not_text(case: tuple[Load, dict[str, pa.Array]], qwen: Any, tmp_path: Path) -> None:
    load, columns = case
    file = str(tmp_path / "rows.parquet")
    table = pa.table(columns | {"n": pa.array([0, 1, 2])})
    pq.write_table(table, file)
    alone = load(table.take([0, 2]), qwen)
    check(load(file, qwen, verify="full"), file, "is not valid UTF-8", alone.tokens.to_lists()[:1])


def test_bad_rows_of_other_types(qwen: Any) -> None:
    """Columns of which no row is right."""
    noon = datetime(2026, 1, 1)
    one = {"role": "assistant", "content": "a"}
    cases: list[tuple[Load, dict[str, Any], str]] = [
        (chats, {"messages": [[{"role": 1, "content": "a"}]]}, "role of message 0 is of type int, not text"),
        (chats, {"messages": [[{"role": ["user"], "content": "a"}]]}, "role of message 0 is of type list, not text"),
        (chats, {"messages": [user(b"a")]}, "content of message 0 is of type bytes, not text"),
        (
            chats,
            {"messages": [[one | {"at": noon}]], "tools": TOOLS[:1]},
            "a value has the type datetime, which JSON has",
        ),
        (chats, {"conversations": [[{"from": ["gpt"], "value": "a"}]]}, "from is of type list, not text"),
        (chats, {"instruction": ["a"], "input": [1], "output": ["b"]}, "input is of type int, not text"),
        (chats, {"messages": [one]}, "closest format is messages, which has messages of another type"),
        (prompts, {"prompt": [user(noon)]}, "content of message 0 is of type datetime, not text"),
        (prompts, {"prompt": [[{"role": 1, "content": "a"}]]}, "role of message 0 is of type int"),
        (pairs, {"prompt": ["a"], "chosen": [one | {"content": noon}], "rejected": [one | {"content": noon}]}, "JSON"),
        (pairs, {"prompt": ["a"], "completion": ["b"], "label": [0.5]}, "label is 0.5, not true or false"),
    ]
    for load, columns, reason in cases:
        with pytest.raises(DataError, match=rf"(?s){reason}.*Table row 0|Table: .*{reason}"):
            load(pa.table(columns), qwen)


def test_rows_that_only_the_tokenizer_rejects(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Reference.ids

    def picky(self: Reference, prompt: Any) -> list[int]:
        if prompt == user("bad"):
            raise ValueError("not this one")
        return ids(self, prompt)

    monkeypatch.setattr(Reference, "ids", picky)
    table = pa.table({"prompt": [user("good"), user("bad"), user("good")]})
    with pytest.warns(UserWarning, match="Table row 1: the tokenizer rejects it: ValueError: not this one"):
        loaded = prompts(table, qwen, verify="full")
    assert loaded.report.rejected == {"ValueError: not this one": 1}
    assert len(loaded) == 2


def test_bad_rows_with_strict(qwen: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for load, good, bad, reason in (JSON_ROWS[0], JSON_ROWS[16], JSON_ROWS[-1]):
        file.write_text("".join(json.dumps(row) + "\n" for row in (good, good | bad, good)))
        with pytest.raises(DataError, match=f"rows.jsonl row 1: .*(?:{reason})"):
            load(str(file), qwen, strict=True)


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("form", ["value only", "text and value"])
@pytest.mark.parametrize("load", [gpuload.load, gpuload.load_chats])
def test_content_parts_with_value_in_parquet(qwen: Any, tmp_path: Path, load: Any, form: str) -> None:
    """A part of the type text has its text in `text`; of another field, templates print nothing."""
    fields = ["type", "value"] if form == "value only" else ["type", "text", "value"]
    kind = pa.list_(pa.struct([(name, pa.string()) for name in fields]))
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", kind)]))
    wrong = [{"type": "text", "value": "a"}]
    right = [{"type": "text", "text": "b"}]
    contents = [wrong] if form == "value only" else [right, wrong]
    rows = [[{"role": role, "content": each} for role in ("user", "assistant")] for each in contents]
    name = "prompt" if load is gpuload.load else "messages"
    pq.write_table(pa.table({name: pa.array(rows, messages)}), tmp_path / "a.parquet")
    reason = "part 0 of the content of message 0 has no text, but the fields type, value"
    if form == "value only":
        with pytest.raises(NoRowsError, match=reason):
            load(str(tmp_path / "a.parquet"), qwen, chat_template=PARTS)
        return
    found = load(str(tmp_path / "a.parquet"), qwen, chat_template=PARTS, verify="full")
    assert len(found) == 1
    assert found.report.rejected == {reason: 1}
    assert "b" in qwen.decode(found[0]["input_ids" if load is gpuload.load_chats else "raw_prompt_ids"])


@pytest.mark.parametrize("tools", [False, True])
def test_json_columns_of_a_table_may_have_anything(qwen: Any, tools: bool) -> None:
    """A row that is no JSON is rejected, and takes no other with it."""
    good = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    texts = pa.ExtensionArray.from_storage(
        JSON_TYPE, pa.array([good, '[{"role"]', f" {good}\n", None], pa.large_string())
    )
    table = pa.table({"messages": texts, "prompt": texts})
    if tools:
        table = table.append_column("tools", pa.array(['[{"type": "function", "function": {"name": "f"}}]'] * 4))
    with pytest.warns(UserWarning, match="rows were dropped"):
        chats = gpuload.load_chats(table.drop_columns(["prompt"]), qwen, verify="full")
    assert (len(chats), sorted(chats.report.rejected.values())) == (2, [1, 1])
    assert any("column 'messages' cannot be read: JSONDecodeError: " in why for why in chats.report.rejected)
    with pytest.warns(UserWarning, match="rows were dropped"):
        prompts = gpuload.load(table.select(["prompt"]), qwen, verify="full")
    assert (len(prompts), sorted(prompts.report.rejected.values())) == (2, [1, 1])
