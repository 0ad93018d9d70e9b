"""Operations and predicates on columns, compared with their definition; every Arrow layout of a conversation column."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_cases import TEXTS, assert_same, column, compile, conversations, small_tokenizer
from tiers import examples

from gpuload.engines.conversations import text_column
from gpuload.engines.host import render as rendering
from gpuload.engines.host.render import render
from gpuload.engines.host.texts import HostTexts, gather
from gpuload.engines.protocol import TextColumn
from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate, Ref, apply_operations, holds

MARKS = ["</think>", "a", "aba", "\n", "é", "<think>", "中", "🙂x"]
STRIPS = [(), ("\n",), ("ab\n é中🙂",), ("",)]
OPERATIONS = [
    *(Operation(name, arguments) for name in ("strip", "lstrip", "rstrip") for arguments in STRIPS),
    *(Operation(name, (mark,)) for name in ("removeprefix", "removesuffix", "before", "after") for mark in MARKS),
    *(Operation(name, (mark,)) for name in ("before_last", "after_last") for mark in MARKS),
    Operation("replace", ("a", "bb")), Operation("replace", ("aba", "")), Operation("lower"), Operation("upper"),
]  # fmt: skip

texts = st.lists(
    st.lists(st.sampled_from([*TEXTS, *MARKS, *WHITE_SPACE, "b", "ab", "aa"]), max_size=5).map("".join)
    | st.text(max_size=12),
    max_size=12,
)


def read(texts: TextColumn) -> list[str]:
    return [raw.decode() for raw in HostTexts.bytes_at(texts, list(range(len(texts))))]


@examples(150)
@given(texts, st.lists(st.sampled_from(OPERATIONS), max_size=3), st.sampled_from([*MARKS, "", "abab"]))
def test_columns_agree_with_the_definition(values: list[str], operations: list[Operation], mark: str) -> None:
    ops, strings = HostTexts(), text_column(pa.array(["no", *values, "no"], pa.large_string())[1:-1])
    for operation in operations:
        strings = ops.operate(strings, operation)
    expected = [apply_operations(value, operations) for value in values]
    assert read(strings) == expected
    for test in ("contains", "startswith", "endswith", "equals", "empty"):
        predicate = Predicate(Ref(0), test, mark)
        assert ops.answer(strings, predicate).tolist() == [holds(predicate, value) for value in expected]


def test_every_white_space_of_unicode_and_nothing_else_is_stripped() -> None:
    every = [f"{chr(c)}x{chr(c)}" for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    strings = HostTexts().operate(text_column(pa.array(every, pa.large_string())), Operation("strip"))
    assert read(strings) == [text.strip() for text in every]


def test_long_runs_of_white_space_are_stripped_at_once() -> None:
    text = " \u3000\n" * 100_000
    strings = text_column(pa.array([text + "x" + text, text, "x"], pa.large_string()))
    assert read(HostTexts().operate(strings, Operation("strip"))) == ["x", "", "x"]


def test_gather_takes_pieces_in_any_order() -> None:
    data = np.frombuffer(b"abcdefghij", np.uint8)
    start, end = np.array([7, 0, 3, 3, 9]), np.array([9, 4, 3, 10, 10])
    offsets, taken = gather(data, start, end, np.array([0, 3, 1, 2, 0, 4]))
    assert taken.tobytes() == b"hi" + b"defghij" + b"abcd" + b"" + b"hi" + b"j"
    assert offsets.tolist() == [0, 2, 9, 13, 13, 15, 16]
    assert gather(data, start, end, np.array([], np.int64))[0].tolist() == [0]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content | trim }}{% endif %}{% endfor %}"
)
STRING_TYPES = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]


@pytest.mark.parametrize("text", STRING_TYPES)
@pytest.mark.parametrize("role", STRING_TYPES)
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
def test_layouts(make_list: Any, role: pa.DataType, text: pa.DataType) -> None:
    rows = conversations(4, seed=9)
    tokenizer = small_tokenizer()
    program = compile(tokenizer, chat_template=TEMPLATE)
    for order in (("role", "content"), ("content", "role")):
        plain = pa.array(rows, pa.list_(pa.struct([(name, pa.string()) for name in order])))
        kinds = {"role": role, "content": text}
        structs = pa.StructArray.from_arrays(
            [_as(plain.values.field(name), kinds[name]) for name in order], list(order)
        )
        lists = make_list(structs.type)
        kind = pa.LargeListArray if pa.types.is_large_list(lists) else pa.ListArray
        prompts = kind.from_arrays(plain.offsets.cast(pa.int64() if kind is pa.LargeListArray else pa.int32()), structs)
        for part in (prompts, prompts[3:17], prompts[5:5], prompts[-1:]):
            assert_same(render(program, part), part, tokenizer, chat_template=TEMPLATE, add_generation_prompt=True)
        chunks = pa.chunked_array([prompts[:3], prompts[3:3], prompts[3:]])
        assert render(program, chunks).text.equals(render(program, prompts).text)


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)


def test_incomplete_rows_are_rejected_and_their_neighbours_are_not() -> None:
    good = [{"role": "user", "content": " ok "}]
    rows = [
        good, None, good, [], good, [{"role": "user", "content": None}], good, [None], good,
        [*good, {"role": "assistant", "content": None}], good, [{"role": None, "content": "no role"}],
    ]  # fmt: skip
    tokenizer = small_tokenizer()
    program = compile(tokenizer, chat_template=TEMPLATE)
    rendered = render(program, column(rows))
    assert rendered.rejected == {
        1: "prompt is null", 3: "prompt is an empty list", 5: "content of message 0 is null", 7: "message 0 is null",
        9: "content of message 1 is null",
    }  # fmt: skip
    assert [text for i, text in enumerate(rendered.text.to_pylist()) if rows[i] == good] == ["<user>ok"] * 6
    # transformers 5 removes fields that are None, transformers 4 does not.
    expected = tokenizer.apply_chat_template(
        rows[11], chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    assert rendered.text.to_pylist()[11] == expected
    assert rendered.text.null_count == 5
    assert rendered.compiled_rows == 7


def test_null_rows_with_hidden_messages() -> None:
    structs = pa.array(
        [{"role": "user", "content": str(i)} for i in range(6)],
        pa.struct([("role", pa.string()), ("content", pa.string())]),
    )
    prompts = pa.ListArray.from_arrays(pa.array([0, 1, 4, 6], pa.int32()), structs, mask=pa.array([False, True, False]))
    rendered = render(compile(small_tokenizer(), chat_template=TEMPLATE), prompts)
    assert rendered.text.to_pylist() == ["<user>0", None, "<user>4<user>5"]
    assert rendered.rejected == {1: "prompt is null"}


@pytest.mark.parametrize("field", ["content", "role"])
@pytest.mark.parametrize(
    ("bad", "at"), [(b"plain until here\xff", 16), (b"\xed\xa0\x80", 0), (b"\xe4\xb8", 0), (b"\x80", 0)]
)
def test_invalid_utf8_is_named(field: str, bad: bytes, at: int) -> None:
    parts = [b"x" if field == "role" else "é".encode(), bad, "中".encode(), b"ok"]
    bad_column = pa.StringArray.from_buffers(
        4, pa.py_buffer(np.cumsum([0, *map(len, parts)]).astype(np.int32)), pa.py_buffer(b"".join(parts))
    )
    good_column = pa.array(["user"] * 4)
    by_name = {"role": good_column, "content": good_column, field: bad_column}
    prompts = pa.ListArray.from_arrays(
        pa.array([0, 2, 3, 4], pa.int32()), pa.StructArray.from_arrays(list(by_name.values()), list(by_name))
    )
    rendered = render(compile(small_tokenizer(), chat_template=TEMPLATE), prompts)
    assert rendered.rejected == {0: f"{field} of message 1 is not valid UTF-8 (byte {at})"}
    assert rendered.text.null_count == 1
    assert rendered.text.to_pylist()[2] == ("<user>ok" if field == "content" else "<ok>user")


def test_characters_split_between_two_texts_are_rejected() -> None:
    contents = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer("é".encode()))
    structs = pa.StructArray.from_arrays([pa.array(["user"] * 2), contents], ["role", "content"])
    rendered = render(
        compile(small_tokenizer(), chat_template=TEMPLATE),
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), structs),
    )
    assert len(rendered.rejected) == 2


def test_small_batches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = column(conversations(20, seed=2))
    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    whole = render(program, prompts)
    monkeypatch.setattr(rendering, "MOST_BYTES", 2000)
    parts = render(program, prompts)
    assert parts.text.equals(whole.text)
    assert (parts.rejected, parts.compiled_rows) == (whole.rejected, whole.compiled_rows)


def test_roles_that_look_like_the_marks_of_a_shape() -> None:
    prompts = column([[{"role": role, "content": "x"}] for role in ("\0text", "\0[]", "", "user")])
    rendered = render(compile(small_tokenizer(), chat_template=TEMPLATE), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=TEMPLATE, add_generation_prompt=True)
    assert rendered.reference_rows == 0


def test_many_fields_do_not_blur_the_roles() -> None:
    names = [f"f{i}" for i in range(40)]  # at 2 bits each, more than a number of 64 bits holds
    rows = [[{"role": role, "content": "x", names[i]: "y"}] for i in range(40) for role in ("user", "system")]
    rows += [[{"role": role, "content": "x"}] for role in ("user", "system")]
    prompts = column(rows, **{name: pa.string() for name in names})
    template = "<{{ messages[0].role }}>{{ messages[0].f0 }}{{ messages[0].f39 }}"
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert_same(rendered, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)


def test_other_columns_are_an_error() -> None:
    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    with pytest.raises(TypeError, match="list<struct"):
        render(program, pa.array(["text"]))


def test_content_in_parts_is_compiled() -> None:
    rows = [[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]]
    template = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    prompts = pa.array(rows)
    rendered = render(compile(small_tokenizer(), chat_template=template), prompts)
    assert rendered.text.to_pylist() == ["hi"]
    assert (rendered.compiled_rows, rendered.reasons) == (1, {})
