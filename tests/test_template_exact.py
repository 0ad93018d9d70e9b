"""Compiled templates against transformers, byte for byte."""

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from template_cases import (
    EVERY,
    TEMPLATES,
    TEN,
    TEXTS,
    assert_same,
    column,
    compile,
    conversations,
    reference,
    small_tokenizer,
)
from tiers import examples, shared, shared_files

from gpuload.engines.host.render import render
from gpuload.template.compiler import ChatProgram

SHARED_TEMPLATES = [
    "qwen2.5-instruct",
    "qwen3",
    "llama3.1-instruct",
    "deepseek-v3",
    "gemma3",
    "mistral-nemo",
    "olmo2-dolma2",
]


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_every_template_gives_what_transformers_gives(name: str, generation: bool) -> None:
    tokenizer, template = TEMPLATES[name]
    program = compile(tokenizer, chat_template=template, add_generation_prompt=generation)
    prompts = column(conversations(6, seed=int(generation)))
    rendered = render(program, prompts)
    assert_same(rendered, prompts, tokenizer, chat_template=template, add_generation_prompt=generation)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "name", ["trl/qwen3", "trl/qwen3_5_think", "trl/gemma4_v5", "trl/glm4moe", "trl/nemotron_3_super"]
)
def test_arguments_of_the_template(name: str, thinking: bool) -> None:
    tokenizer, template = TEMPLATES[name]
    kwargs = {"enable_thinking": thinking, "reasoning_effort": "low", "preserve_thinking": thinking}
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    program = compile(tokenizer, chat_template=template, tools=tools, kwargs=kwargs)
    prompts = column(conversations(4, seed=3))
    rendered = render(program, prompts)
    assert rendered.compiled_rows > 0
    assert_same(rendered, prompts, tokenizer, chat_template=template, tools=tools, add_generation_prompt=True, **kwargs)


CALLS = pa.list_(pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", pa.string())]))]))


@pytest.mark.parametrize("name", [*TEN, "trl/gptoss", "trl/qwen3_8", "trl/muse_glimmer", "trl/cohere2"])
def test_further_fields_take_part(name: str) -> None:
    tokenizer, template = TEMPLATES[name]
    call = {"function": {"name": "f", "arguments": "{}"}}
    rows = conversations(3, seed=5)
    for i, row in enumerate(rows):
        for k, message in enumerate(row):
            if (i + k) % 3 == 0:
                message["reasoning_content"] = TEXTS[(i + 7 * k) % len(TEXTS)]
            if (i + k) % 5 == 0:
                message["name"] = TEXTS[(i + 3 * k) % len(TEXTS)]
            if (i + k) % 7 == 0 and message["role"] == "assistant":
                message["tool_calls"] = [call] if i % 2 else []
    prompts = column(rows, reasoning_content=pa.string(), name=pa.string(), tool_calls=CALLS)
    rendered = render(compile(tokenizer, chat_template=template), prompts)
    assert_same(rendered, prompts, tokenizer, chat_template=template, add_generation_prompt=True)
    calling = {i for i, row in enumerate(rows) if any(message.get("tool_calls") for message in row)}
    assert calling - rendered.by_reference.keys() - rendered.rejected.keys() or calling <= rendered.rejected.keys()


message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.lists(st.sampled_from([*TEXTS, *"<>/|\n ab"]), max_size=4).map("".join) | st.text(max_size=20),
    }
)
programs: dict[str, ChatProgram] = {}


@pytest.mark.parametrize("name", TEN)
@examples(25, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(st.lists(message, min_size=1, max_size=6), min_size=1, max_size=6))
def test_any_messages(name: str, rows: list[list[dict[str, str]]]) -> None:
    tokenizer, template = TEMPLATES[name]
    program = programs.setdefault(name, compile(tokenizer, chat_template=template))
    prompts = column(rows)
    assert_same(render(program, prompts), prompts, tokenizer, chat_template=template, add_generation_prompt=True)


@shared
@pytest.mark.parametrize("name", SHARED_TEMPLATES)
def test_whole_datasets(name: str) -> None:
    import pyarrow.parquet as pq

    tokenizer, _ = TEMPLATES[f"shared/{name}"]
    program = compile(tokenizer)
    for file in shared_files("*.parquet"):
        prompts = pq.read_table(file, columns=["prompt"])["prompt"]
        rendered = render(program, prompts)
        kept = [row for row in range(len(prompts)) if row not in rendered.rejected]
        if name != "mistral-nemo":
            assert rendered.compiled_rows > 0.9 * len(kept)
        rows, texts = prompts.to_pylist(), rendered.text.to_pylist()
        expected = tokenizer.apply_chat_template([rows[i] for i in kept], tokenize=False, add_generation_prompt=True)
        assert [texts[i] for i in kept] == (expected if kept else [])
        for i in list(rendered.rejected)[:100]:
            assert reference(tokenizer, rows[i], add_generation_prompt=True) == (None, rendered.rejected[i])


def test_custom_and_named_templates() -> None:
    tokenizer = small_tokenizer()
    named = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    named.chat_template = {
        "default": "D{{ messages[0].content }}",
        "tool_use": "T{{ messages[0].content }}",
        "x": "X{{ bos_token }}",
    }
    rows = column([[{"role": "user", "content": "hi"}]])
    tool = {"type": "function", "function": {"name": "f"}}
    assert render(compile(named), rows).text.to_pylist() == ["Dhi"]
    assert render(compile(named, tools=[tool]), rows).text.to_pylist() == ["Thi"]
    assert render(compile(named, chat_template="x"), rows).text.to_pylist() == ["X<s>"]
    assert render(compile(named, chat_template="Y{{ messages[0].content | trim }}"), rows).text.to_pylist() == ["Yhi"]


def test_all_rows_see_the_same_time() -> None:
    template = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}{{ messages[0].tool_calls | length }}"
    call = {"function": {"name": "f"}}
    rows = [[{"role": "user", "content": "a", "tool_calls": calls}] for calls in ([], [call], [], [call, call])]
    rendered = render(compile(small_tokenizer(), chat_template=template), column(rows, tool_calls=CALLS))
    assert (rendered.compiled_rows, rendered.reference_rows) == (4, 0)
    texts = rendered.text.to_pylist()
    assert [text.split()[1] for text in texts] == ["a0", "a1", "a0", "a2"]
    assert len({text.split()[0] for text in texts}) == 1
    # Afterwards the template sees the current time again.
    later = small_tokenizer().apply_chat_template(rows[0], chat_template=template, tokenize=False)
    assert later.split()[0] != texts[0].split()[0]
