"""What tests of stores share: rows, a small model in a directory, and a template that marks answers as trainers do."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

Row = dict[str, Any]

WORDS = ["one", " two ", "é 你好", "👋🏽", "three\n\nfour", "  ", "x = {'a': 1}\n"]

# Text as Qwen2.5's own template writes it without tools. An answer is what follows its header, as in LLaMA-Factory's
# template "qwen"; with the template of the tokenizer, the line break at the end of the header is a part of it.
TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def words(row: int, count: int) -> str:
    """A text that does not begin with white space."""
    return "".join(["so", *(WORDS[(row * 5 + k * k) % len(WORDS)] for k in range(count))])


def chat(row: int) -> list[Row]:
    """A conversation of one to three turns; one of four has a system message."""
    system = [{"role": "system", "content": words(row, 3)}] if row % 4 == 0 else []
    turns = (
        [
            {"role": "user", "content": words(row + k, (row + k) % 4)},
            {"role": "assistant", "content": words(row + 2 * k, (row * 3 + k) % 5)},
        ]
        for k in range(row % 3 + 1)
    )
    return [*system, *(message for turn in turns for message in turn)]


CHATS = [{"messages": chat(row)} for row in range(24)]
PAIRS = [
    {
        "prompt": chat(row)[:-1],
        "chosen": chat(row)[-1:],
        "rejected": [{"role": "assistant", "content": words(row + 1, row % 3)}],
    }
    for row in range(12)
]


def write_rows(file: Path, rows: Iterable[Row]) -> str:
    """Write rows as JSON lines, and return the path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def write_model(tokenizer: Any, directory: Path) -> str:
    """Write a model with two layers and its tokenizer, and return the path."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
