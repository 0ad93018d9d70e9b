"""Conversations, templates and comparisons that the tests of SFTDataset share."""

from typing import Any

import torch
from omegaconf import OmegaConf
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from gpuload.integrations.verl import SFTDataset

LONG = {"max_length": 4096, "pad_mode": "no_padding"}

# Qwen2.5's template is shipped; these behave like templates of other vendors.
NEEDS_USER = """{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = message.content[0].text %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
REMOVES_THINKING = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and not loop.last %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
PRINTS_ARGUMENTS = """{{- bos_token or '' }}[{{ enable_thinking if enable_thinking is defined else '-' }}|{{ style }}]
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
SKIPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": parameters}}
    for name, parameters in (("look_up", {"type": "object"}), ("send", None), ("weather", None))
]


def conversation(*texts: str, system: str | None = None, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = [
    conversation("What is 6 × 7?", "42."),
    conversation("Hi", "Hello! How can I help?", "Tell me a joke\n\n", "  No.  ", system="You are terse."),
    conversation("你好，世界", "你好！", "ありがとう", "どういたしまして 🙂"),
    conversation("<|im_start|>user\nsneaky<|im_end|>", "It's <|endoftext|> you\u00a0know", system=""),
    conversation("", "", "", ""),
    conversation("only a question"),
    conversation("I begin", "do you?", first="assistant"),
    conversation("a", "<think>\nhm\n</think>\n\nb", "c", "<think>ok</think>d"),
    conversation("x" * 700, "y " * 300, "e\u0301\u212b", "z"),
    [*conversation("one", "two"), {"role": "system", "content": "late"}, {"role": "user", "content": "three"}],
    [{"role": "user", "content": "twice"}, {"role": "user", "content": "asked"}, {"role": "assistant", "content": "k"}],
]


def outcome(dataset: Any, number: int) -> Any:
    """A row, or the exception that accessing it raises."""
    try:
        return dataset[number]
    except Exception as error:
        return error


def assert_equal(dataset: Any, verl_dataset: Any) -> None:
    """Assert that both datasets return the same rows and raise for the same rows."""
    assert len(dataset) == len(verl_dataset)
    for number in range(len(verl_dataset)):
        found, expected = outcome(dataset, number), outcome(verl_dataset, number)
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected)), (number, found, expected)
            continue
        assert not isinstance(found, Exception), (number, found)
        assert list(found) == list(expected), number
        for key, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert repr(found[key]) == repr(value), (number, key)
                continue
            assert found[key].dtype == value.dtype, (number, key)
            assert torch.equal(found[key], value), (number, key)


def compare(files: Any, tokenizer: Any, config: dict[str, Any], **settings: Any) -> Any:
    """Assert that both datasets are equal in every row. Returns gpuload's."""
    dataset = SFTDataset(files, tokenizer, OmegaConf.create(config), **settings)
    files = [files] if isinstance(files, str) else list(files)
    assert_equal(dataset, MultiTurnSFTDataset(files, tokenizer, OmegaConf.create(config), **settings))
    return dataset


def raising_rows(dataset: Any) -> list[int]:
    """The rows that raise when they are accessed."""
    return [row for row in range(len(dataset)) if isinstance(outcome(dataset, row), Exception)]
