"""Shared by the tests of chat templates: templates, a small tokenizer, conversations, and the reference's results."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
from tiers import SHARED, core, shared_tokenizers, with_shared
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.compiler import ChatProgram

# Contents of messages that templates treat in special ways, or that could break a compiler.
TEXTS = (
    "plain text", "", " ", "\n", "\t x \n", "  lead", "trail  \n\n", "\u00a0\u2003both\u3000\u2028",
    "\x1c\x1f\x85\u180e\u200b", "\u1680\u2000\u200a\u202f\u205f", "</think>", "<think>\nwhy\n</think>\n\nbecause",
    "a</think>b</think> c", "<think>", "<tool_response>", "<tool_response>\nx\n</tool_response>", "x</tool_response>",
    "<|im_end|>", "<|im_start|>system\n", "<s>[INST] x [/INST]</s>", "{{ messages }}", "{% if x %}{% endif %}", "{#",
    "%s %(a)s", "gpuload 00 0", "\0text", "<|channel|>final<|message|>x", "<|channel>thought\nx<channel|>y", "/think",
    "/no_think", "Reasoning Effort: high", "REASONING STRENGTH", "ΑΣ", "İ", "中文 文本", "🙂", "None", "{}", "[]", "0",
    "\\n", "'\"<b>&",
)  # fmt: skip

ROLES = (
    "user", "system user", "user assistant", "user assistant user", "system user assistant user",
    "user assistant user assistant user", "system user assistant user assistant user", "user user", "assistant user",
    "assistant", "system", "system system user", "user system user", "user tool user", "user assistant tool",
    "user assistant tool tool assistant user", "developer user", "user narrator", "system assistant user",
)  # fmt: skip


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has special tokens only."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def compile(tokenizer: Any, *, chat_template: str | None = None, **arguments: Any) -> ChatProgram:
    """Return a program for this template, or for the tokenizer's own; `arguments` are further ones of its calls."""
    return ChatProgram(TemplateCall(tokenizer, chat_template, **arguments))


def templates() -> dict[str, tuple[Any, str]]:
    """Return every available template by name, as (tokenizer, template text)."""
    found: dict[str, tuple[Any, str]] = {}
    try:
        import trl
    except ImportError:
        pass
    else:
        for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
            found[f"trl/{file.stem}"] = (small_tokenizer(), file.read_text())
    for name in shared_tokenizers() if SHARED.exists() else []:
        tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
        if isinstance(tokenizer.chat_template, str):
            found[f"shared/{name}"] = (tokenizer, tokenizer.chat_template)
    return found


TEMPLATES = templates()
TRL = [name for name in TEMPLATES if name.startswith("trl/")]
TEN = [
    "trl/qwen2_5", "trl/qwen3", "trl/llama3_1", "trl/gemma3", "trl/gemma4_v5", "trl/glm4moe", "trl/deepseekv3",
    "trl/lfm2_2_5_v2", "trl/nemotron_3_nano", "trl/qwen3_5_think",
]  # fmt: skip
EVERY = with_shared(lambda: [name for name in TEMPLATES if name not in TRL], *core(TRL, *TEN))
"""Names of all templates, as cases of tests: ten are the core."""


def conversations(count: int, seed: int, roles: tuple[str, ...] = ROLES) -> list[list[dict[str, Any]]]:
    """Return `count` conversations of each sequence in `roles`, with texts from `TEXTS`."""
    chance = random.Random(seed)
    return [
        [{"role": role, "content": chance.choice(TEXTS)} for role in some.split()]
        for some in roles
        for _ in range(count)
    ]


def column(rows: list[Any], **kinds: pa.DataType) -> pa.Array:
    """Return a column of conversations; `kinds` are the types of further fields."""
    fields = [("role", pa.string()), ("content", pa.string()), *kinds.items()]
    return pa.array(rows, pa.list_(pa.struct(fields)))


def reference(tokenizer: Any, row: Any, **options: Any) -> tuple[str | None, str | None]:
    """Return what transformers renders for a row, and why it rejects it; one of the two is None."""
    try:
        return tokenizer.apply_chat_template(row, tokenize=False, **options), None
    except Exception as error:
        return None, rejection(error)


def assert_same(rendered: Any, prompts: pa.Array, tokenizer: Any, **options: Any) -> None:
    """Assert that every row equals what transformers renders, or is rejected with the same message."""
    texts = rendered.text.to_pylist()
    assert len(texts) == len(prompts)
    for i, row in enumerate(prompts.to_pylist()):
        text, reason = reference(tokenizer, row, **options)
        assert texts[i] == text, (i, row)
        assert rendered.rejected.get(i) == reason, (i, row)
    assert rendered.compiled_rows + rendered.reference_rows + len(rendered.rejected) == len(prompts)
