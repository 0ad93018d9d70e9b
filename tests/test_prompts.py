"""Prompts in every shape they come in: field order, Arrow type, nulls, extra fields, strings, parts, JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user

import gpuload

CHATS: list[Any] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "  spaces \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "ü 你好 👩‍👩‍👧"},
    ],
]
MESSAGE = {"role": pa.string(), "content": pa.string()}


def struct(names: list[str], kind: pa.DataType, content: pa.DataType | None = None) -> pa.DataType:
    return pa.struct([(name, (content or kind) if name == "content" else kind) for name in names])


def reference(tokenizer: Any, chats: list[Any]) -> list[list[int]]:
    return [
        list(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"]) for c in chats
    ]


DICTIONARY = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(struct(["role", "content"], pa.string())),
        pa.list_(struct(["content", "role"], pa.string())),
        pa.large_list(struct(["role", "content"], pa.large_string())),
        pa.list_(struct(["role", "content"], DICTIONARY, pa.string())),
        pa.list_(struct(["content", "role"], DICTIONARY)),
        pa.list_(pa.struct([pa.field("role", pa.string(), False), pa.field("content", pa.large_string(), False)])),
    ],
    ids=str,
)
def test_arrow_types(kind: pa.DataType, tmp_path: Path, qwen: Any) -> None:
    file = tmp_path / "data.parquet"
    storage = pa.array(CHATS, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))
    column = pa.array(storage.to_pylist(), kind) if "dictionary" not in str(kind) else dictionary_encoded(storage, kind)
    pq.write_table(pa.table({"prompt": column}), file)
    assert pq.read_schema(file).field("prompt").type == kind
    prompts = gpuload.load(file, qwen, return_raw_chat=True)
    assert prompts.tokens.to_lists() == reference(qwen, CHATS)
    assert [prompts[i]["raw_prompt"] for i in range(3)] == CHATS
    in_memory = gpuload.load(pa.table({"prompt": column}).slice(1), qwen)
    assert in_memory.tokens.to_lists() == reference(qwen, CHATS[1:])


def dictionary_encoded(storage: pa.Array, kind: pa.DataType) -> pa.Array:
    messages = storage.flatten()
    fields = [
        messages.field(f.name).dictionary_encode() if pa.types.is_dictionary(f.type) else messages.field(f.name)
        for f in kind.value_type
    ]
    items = pa.StructArray.from_arrays(fields, names=[f.name for f in kind.value_type])
    return pa.ListArray.from_arrays(storage.offsets, items)


def test_a_dictionary_of_strings_is_a_column_of_strings(tmp_path: Path, qwen: Any) -> None:
    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": pa.array(["a", "b", "a"]).dictionary_encode()}), file)
    prompts = gpuload.load(file, qwen, return_raw_chat=True)
    assert prompts.tokens.to_lists() == reference(qwen, [user("a"), user("b"), user("a")])
    assert prompts[2]["raw_prompt"] == user("a")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_plain_strings(kind: pa.DataType, write: Callable[..., str], qwen: Any) -> None:
    texts = ["Hello", " <|im_start|>user ", "", "Ünïcode\n\n"]
    file = write({"prompt": pa.array(texts, kind)})
    as_user = gpuload.load(file, qwen)
    assert as_user.tokens.to_lists() == reference(qwen, [user(text) for text in texts])
    as_they_are = gpuload.load(file, qwen, chat_template=None, return_full_prompt=True)
    assert as_they_are.tokens.to_lists() == [qwen(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert as_they_are[2]["raw_prompt_ids"] == []
    assert as_they_are[2]["attention_mask"].sum() == 0
    assert as_they_are[1]["full_prompts"] == texts[1]


def test_messages_without_a_template_are_rejected(write: Callable[..., str], qwen: Any) -> None:
    with pytest.raises(gpuload.GpuloadError, match="chat_template=None expects plain strings"):
        gpuload.load(write([user("x")]), qwen, chat_template=None)


def test_extra_fields_and_nulls_reach_the_template(write: Callable[..., str], qwen: Any) -> None:
    """Fields besides role and content are the template's business, null ones too."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chats: list[Any] = [
        [
            {"role": "user", "content": "1+1?", "name": "ann", "tool_calls": None},
            {"role": "assistant", "content": None, "name": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "name": "add", "tool_calls": None},
        ],
        [{"role": "user", "content": "plain", "name": None, "tool_calls": None}],
    ]
    prompts = gpuload.load(write(chats), qwen, return_raw_chat=True, verify="full")
    assert prompts.tokens.to_lists() == reference(qwen, chats)
    assert prompts[0]["raw_prompt"] == chats[0]
    assert "add" in qwen.decode(prompts[0]["raw_prompt_ids"])


PARTS_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_content_as_a_list_of_text_parts(write: Callable[..., str], qwen: Any, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for file in (write([user(parts)]), tmp_path / "parts.jsonl"):
        Path(tmp_path / "parts.jsonl").write_text(json.dumps({"prompt": user(parts)}))
        prompts = gpuload.load(file, qwen, chat_template=PARTS_TEMPLATE, return_full_prompt=True)
        assert prompts[0]["full_prompts"] == "<user>one two"
        assert prompts[0]["raw_prompt_ids"] == qwen("<user>one two")["input_ids"]


def test_json_of_mixed_shapes(tmp_path: Path, qwen: Any) -> None:
    """Strings next to messages, contents next to parts, missing keys next to nulls: no key or type is added."""
    rows: list[Any] = [
        {"prompt": "just text", "answer": 1, "meta": {"a": 1}},
        {"prompt": user("messages"), "answer": 1.5, "meta": {"b": [1, "x"]}},
        {"prompt": user([{"type": "text", "text": "part"}]), "answer": "one", "extra_info": {"index": 9}},
        {"prompt": [{"role": "user", "content": "x", "name": "bob"}], "answer": None, "extra": True},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    prompts = gpuload.load(file, qwen, chat_template=PARTS_TEMPLATE, return_raw_chat=True, return_full_prompt=True)
    assert [prompts[i]["full_prompts"] for i in range(4)] == [
        "<user>just text",
        "<user>messages",
        "<user>part",
        "<user>x",
    ]
    batch = prompts.batch(range(4))
    assert batch["answer"].tolist() == [1, 1.5, "one", None]
    assert [type(value) for value in batch["answer"]] == [int, float, str, type(None)]
    assert batch["meta"].tolist() == [{"a": 1}, {"b": [1, "x"]}, None, None]
    assert batch["index"].tolist() == [0, 0, 9, 0]
    assert batch["raw_prompt"][3] == rows[3]["prompt"]
    assert batch["raw_prompt"][0] == user("just text")


def test_frames_in_memory(gsm8k: str, qwen: Any) -> None:
    import datasets

    table = pq.read_table(gsm8k).slice(0, 50)
    expected = gpuload.load(table, qwen)
    assert len(expected) == 50
    frame = table.to_pandas()
    hub = datasets.Dataset(table).select(range(10, 40)).filter(lambda row: row["extra_info"]["index"] % 2 == 0)
    for data, rows in ((frame, range(50)), (hub, range(10, 40, 2))):
        prompts = gpuload.load(data, qwen)
        assert prompts.tokens.to_lists() == [expected.tokens[row].tolist() for row in rows]
        assert prompts[3]["extra_info"] == expected[rows[3]]["extra_info"]


def test_a_tool_template_by_name(write: Callable[..., str], qwen_folder: str) -> None:
    """A tokenizer with several templates: the default one, one by name, one by its text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    tokenizer.chat_template = {"default": "D{{ messages[0].content }}", "other": "O{{ messages[0].content }}"}
    file = write([user("x")])
    for given, text in (("default", "Dx"), ("other", "Ox"), ("T{{ messages[0].content }}", "Tx")):
        prompts = gpuload.load(file, tokenizer, chat_template=given, return_full_prompt=True)
        assert prompts[0]["full_prompts"] == text
        assert prompts[0]["raw_prompt_ids"] == tokenizer(text)["input_ids"]


def test_many_batches_of_many_files_stay_in_order(write: Callable[..., str], qwen: Any) -> None:
    counts = [9000, 1, 8192, 17]
    files = [write([user(f"{f} {i}") for i in range(n)], f"{f}.parquet") for f, n in enumerate(counts)]
    prompts = gpuload.load(files, qwen, return_raw_chat=True)
    assert len(prompts) == sum(counts)
    expected = [user(f"{f} {i}") for f, n in enumerate(counts) for i in range(n)]
    rows = np.r_[0, 8191, 8192, 8999, 9000, 9001, 17192, 17193, 17209]
    assert prompts.batch(rows)["raw_prompt"].tolist() == [expected[row] for row in rows]
    assert [prompts.tokens[row].tolist() for row in rows] == reference(qwen, [expected[row] for row in rows])
