"""What is kept of templates between loads of a process: only for loads in which nothing else decides about the text."""

import copy
from typing import Any

import pyarrow as pa
import pytest

import gpuload

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ x }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {{ x }}\n{% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def rows(count: int, calls: bool = False) -> list[list[dict[str, Any]]]:
    """Conversations of two turns."""
    call = [{"role": "assistant", "content": "", "tool_calls": CALLS}] if calls else []
    return [
        [{"role": "user", "content": f"q{k}"}, *call, {"role": "assistant", "content": f"a{k}"}] * 2
        for k in range(count)
    ]


def with_template(tokenizer: Any) -> Any:
    """A copy of a tokenizer."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("turns", ["conversation", "served"])
@pytest.mark.parametrize("calls", [False, True], ids=["plain", "calls"])
@pytest.mark.parametrize("values", [({"1": 1}, {1: 1}), ([1, 2], (1, 2)), ({"true": 2}, {True: 2}), (1, True)], ids=str)
def test_arguments_that_json_writes_alike(values: tuple[Any, Any], calls: bool, turns: Any, qwen: Any) -> None:
    tokenizer, data = with_template(qwen), rows(100, calls)
    for value in (*values, values[0]):
        found = gpuload.load_chats(
            pa.table({"messages": data}), tokenizer, apply_chat_template_kwargs={"x": value}, turns=turns,
            loss_on="assistant", token_cache=False, verify="off", progress=False,
        )  # fmt: skip
        expected = tokenizer.apply_chat_template(data[0], tokenize=False, x=value)
        text = tokenizer.decode(found[0]["input_ids"])
        assert str(value) in text
        assert expected.startswith(text.rstrip())


def test_a_tokenizer_that_is_changed_after_its_load(qwen: Any) -> None:
    """What its load has traced is not used for another tokenizer that is as it was: probes would render with it."""
    tokenizer, other = with_template(qwen), with_template(qwen)
    settings: Any = {"turns": "served", "loss_on": "assistant", "token_cache": False, "progress": False}
    gpuload.load_chats(pa.table({"messages": rows(100)}), tokenizer, **settings)
    tokenizer.chat_template = TEMPLATE.replace("im_start", "other")
    longer = [[*first, *second] for first, second in zip(rows(100), rows(100), strict=True)]
    found = gpuload.load_chats(pa.table({"messages": longer}), other, **settings)
    assert not found.report.by_reference
