"""Rendering by kernels, on the host, against the CPU engine: every template at hand, every layout, the shipped data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulator.host_kernels import COMPILER, HostKernels
from template_cases import EVERY, TEMPLATES, TEXTS, column, compile, conversations, small_tokenizer
from template_cases import assert_same as reference_gives
from tiers import name_of, shared_files, with_shared

from gpuload.engines.conversations import from_arrow
from gpuload.engines.device.render import DeviceText, render
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.host.render import render as on_host
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Operation, Path, Ref

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = HostKernels()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content | trim }}{% endif %}{% endfor %}"
)


def by_kernels(program: ChatProgram, prompts: pa.Array) -> DeviceText:
    return render(KERNELS, program, from_arrow(DeviceTexts(KERNELS), prompts))


def assert_same(program: ChatProgram, prompts: pa.Array) -> DeviceText:
    """Text, rejections and counts are those of the CPU engine."""
    expected, found = on_host(program, prompts), by_kernels(program, prompts)
    assert found.text.equals(expected.text)
    assert found.rejected == expected.rejected
    assert found.compiled_rows + found.reference_rows == expected.compiled_rows + expected.reference_rows
    if not any("not supported on the device" in reason for reason in found.reasons):
        assert (found.compiled_rows, found.reasons) == (expected.compiled_rows, expected.reasons)
    return found


@pytest.mark.parametrize("name", EVERY)
def test_every_template(name: str) -> None:
    tokenizer, template = TEMPLATES[name]
    assert_same(compile(tokenizer, chat_template=template), column(conversations(3, seed=4)))


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33])
def test_odd_sizes(rows: int) -> None:
    prompts = column((conversations(2, seed=rows) * 2)[:rows])
    assert_same(compile(small_tokenizer(), chat_template=TEMPLATE), prompts)


def test_one_row_of_five_megabytes() -> None:
    texts = ["", "é" * 2_500_000, "x", " " * 1000 + "y"]
    prompts = column([[{"role": "user", "content": text}] for text in texts])
    assert_same(compile(small_tokenizer(), chat_template=TEMPLATE), prompts)


STRINGS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]


@pytest.mark.parametrize("text", STRINGS)
@pytest.mark.parametrize("role", STRINGS)
@pytest.mark.parametrize("make", [pa.ListArray, pa.LargeListArray])
def test_layouts(make: Any, role: pa.DataType, text: pa.DataType) -> None:
    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    rows = conversations(3, seed=9)
    for order in (("role", "content"), ("content", "role")):
        plain = pa.array(rows, pa.list_(pa.struct([(name, pa.string()) for name in order])))
        kinds = {"role": role, "content": text}
        fields = [
            plain.values.field(name).dictionary_encode()
            if pa.types.is_dictionary(kinds[name])
            else plain.values.field(name).cast(kinds[name])
            for name in order
        ]
        offsets = plain.offsets.cast(pa.int64() if make is pa.LargeListArray else pa.int32())
        prompts = make.from_arrays(offsets, pa.StructArray.from_arrays(fields, list(order)))
        for part in (prompts, prompts[3:17], prompts[5:5], prompts[-1:]):
            assert_same(program, part)


def test_nulls_and_empty_rows_are_rejected_and_no_neighbour_is_lost() -> None:
    good = [{"role": "user", "content": " ok "}]
    rows = [
        good, None, good, [], good, [{"role": "user", "content": None}], good, [None], good,
        [*good, {"role": "assistant", "content": None}], good, [{"role": None, "content": "no role"}], [None, None],
        *([{"role": role, "content": "x"}] for role in ("\0text", "\0[]", "", "user")),
    ]  # fmt: skip
    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    found = assert_same(program, column(rows))
    assert len(found.rejected) == 6
    assert_same(program, column([None, [], [None]]))


def test_null_rows_with_hidden_messages() -> None:
    kind = pa.struct([("role", pa.string()), ("content", pa.string())])
    structs = pa.array([{"role": "user", "content": str(i)} for i in range(6)], kind)
    prompts = pa.ListArray.from_arrays(pa.array([0, 1, 4, 6], pa.int32()), structs, mask=pa.array([False, True, False]))
    assert assert_same(compile(small_tokenizer(), chat_template=TEMPLATE), prompts).rejected == {1: "prompt is null"}


@pytest.mark.parametrize("field", ["content", "role"])
@pytest.mark.parametrize("bad", [b"plain until here\xff", b"\xed\xa0\x80", b"\xe4\xb8", b"\x80"])
def test_invalid_utf8_is_named(field: str, bad: bytes) -> None:
    parts = [b"x" if field == "role" else "é".encode(), bad, "中".encode(), b"ok"]
    bounds = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    bad_column = pa.StringArray.from_buffers(4, pa.py_buffer(bounds), pa.py_buffer(b"".join(parts)))
    by_name = {"role": pa.array(["user"] * 4), "content": pa.array(["user"] * 4), field: bad_column}
    prompts = pa.ListArray.from_arrays(
        pa.array([0, 2, 3, 4], pa.int32()), pa.StructArray.from_arrays(list(by_name.values()), list(by_name))
    )
    assert len(assert_same(compile(small_tokenizer(), chat_template=TEMPLATE), prompts).rejected) == 1


CALLS = pa.list_(pa.struct([("function", pa.struct([("name", pa.string())]))]))


def test_further_fields_and_the_reference_in_between() -> None:
    template = "{{ messages[0].content | trim }}{{ messages[0].tool_calls | length }}{{ messages[0].name }}"
    call = {"function": {"name": "f"}}
    rows = [
        [{"role": "user", "content": text, "tool_calls": calls, "name": name}]
        for text in TEXTS[:8]
        for calls in ([], [call], None, [call, call])
        for name in (None, "n")
    ]
    prompts = column(rows, tool_calls=CALLS, name=pa.string(), nothing=pa.null(), number=pa.int64())
    found = assert_same(compile(small_tokenizer(), chat_template=template), prompts)
    assert (found.compiled_rows, found.reference_rows) == (len(prompts) - len(found.rejected), 0)


def test_many_fields_do_not_blur_the_roles() -> None:
    # 40 fields of 2 bits each are more than a number of 64 bits holds.
    names = [f"f{i}" for i in range(40)]
    rows = [[{"role": role, "content": "x", names[i]: "y"}] for i in range(40) for role in ("user", "system")]
    kinds = {name: pa.string() for name in names}
    template = "<{{ messages[0].role }}>{{ messages[0].content }}{{ messages[0].f0 }}{{ messages[0].f39 }}"
    prompts = column(rows, **kinds)
    found = by_kernels(compile(small_tokenizer(), chat_template=template), prompts)
    reference_gives(found, prompts, small_tokenizer(), chat_template=template, add_generation_prompt=True)


@pytest.mark.parametrize("work", ["m.content | lower", "m.content | replace('a', 'b')"])
def test_rewriting_operations_are_done_on_the_host(work: str) -> None:
    template = "{% for m in messages %}{{ " + work + " }}{% if 'x' in (" + work + ") %}!{% endif %}{% endfor %}"
    program = compile(small_tokenizer(), chat_template=template)
    found = assert_same(program, column(conversations(2, seed=1)))
    assert found.reasons == {}


def test_equal_hashes_are_not_believed() -> None:
    class Colliding(HostKernels):
        def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
            super()._launch(name, blocks, arguments)
            if name.startswith("hash_"):
                arguments[-1][:] = 7

    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    prompts = column(conversations(2, seed=3))
    found = render(Colliding(), program, from_arrow(DeviceTexts(Colliding()), prompts))
    assert found.text.equals(on_host(program, prompts).text)
    assert found.reasons == {}


def test_outputs_need_not_be_zero_before() -> None:
    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        @staticmethod
        def empty(shape: Any, dtype: Any = float) -> Any:
            made = np.empty(shape, dtype)
            made.view(np.uint8).fill(0xAB)
            return made

    class OnPoison(HostKernels):
        xp = Poisoned()  # type: ignore[assignment]

    program = compile(small_tokenizer(), chat_template=TEMPLATE)
    prompts = column(conversations(2, seed=3))
    found = render(OnPoison(), program, from_arrow(DeviceTexts(OnPoison()), prompts))
    assert found.text.equals(on_host(program, prompts).text)


def test_other_columns_are_an_error() -> None:
    with pytest.raises(TypeError, match="list<struct"):
        from_arrow(DeviceTexts(KERNELS), pa.array(["text"]))


def test_shipped_data(gsm8k: str, qwen_folder: str) -> None:
    from transformers import AutoTokenizer

    prompts = pq.read_table(gsm8k, columns=["prompt"])["prompt"].combine_chunks()
    found = assert_same(compile(AutoTokenizer.from_pretrained(qwen_folder)), prompts)
    assert found.compiled_rows == len(prompts)


def files_of_conversations() -> list[Any]:
    kinds = {file: {each.name: each.type for each in pq.read_schema(file)} for file in shared_files("*.parquet")}
    return [file for file, fields in kinds.items() if pa.types.is_list(fields.get("prompt", pa.null()))]


@pytest.mark.parametrize("file", with_shared(files_of_conversations), ids=name_of)
@pytest.mark.parametrize("name", ["shared/qwen3", "shared/llama3.1-instruct"])
def test_shared_data(file: Any, name: str) -> None:
    prompts = pq.read_table(file)["prompt"].combine_chunks()
    assert_same(compile(TEMPLATES[name][0], chat_template=TEMPLATES[name][1]), prompts)


def test_a_path_without_literals() -> None:
    program = compile(small_tokenizer(), chat_template="{{ messages[0].content }}{{ messages[0].content | trim }}")
    prompts = column([[{"role": "user", "content": text}] for text in TEXTS])
    assert assert_same(program, prompts).reference_rows == 0
    (tree,) = program.trees.values()
    assert tree.nodes == [Path((Ref(0), Ref(0, "content", (Operation("strip"),))))]
