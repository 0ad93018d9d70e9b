"""What tests of the integration with Automodel share: conversations of every kind, and a loss mask made row by row."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ANSWERS = ["", "  x\n", "<think>y</think>z", "<|im_end|>", " answer 你好\n", "<|im_start|>assistant\n"]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def chat(row: int) -> list[Row]:
    turns = [
        [user(f"hi {k} " * (row % 7)), assistant(ANSWERS[(row + k) % 6] * (row % 3 + 1))] for k in range(row % 4 + 1)
    ]
    return [*([system(f"row {row}")] if row % 3 == 0 else []), *(message for turn in turns for message in turn)]


CHATS = [chat(row) for row in range(24)]
CALL = {"function": {"name": "f", "arguments": {"n": 1}}}

ROWS: list[Row] = [
    *({"messages": messages} for messages in CHATS),
    {"messages": [*chat(3), assistant("again")]},
    {"messages": chat(5)[:-1]},
    {"messages": chat(4), "tools": [TOOL]},
    {"messages": chat(4), "tools": json.dumps([TOOL])},
    {"messages": chat(4), "tools": []},
    {
        "messages": [
            user("q"),
            assistant(None, tool_calls=[CALL]),  # type: ignore[arg-type]
            {"role": "tool", "content": "r", "tool_call_id": "call_0"},
            assistant("end"),
        ],
        "tools": [TOOL],
    },
    {"messages": [user("q"), assistant("a", reasoning_content="because"), user("q"), assistant("b")]},
    {"messages": [user([{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]), assistant("x")]},  # type: ignore[arg-type]
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]
"""Rows that Automodel can read, most of which it can prepare with most templates."""

BROKEN: list[Row] = [
    {"messages": [assistant("first")]},
    {"messages": [user("no answer")]},
    {"messages": [system("one"), system("two"), user("q"), assistant("a")]},
    {"messages": []},
    {"messages": "text"},
    {"messages": [{"role": "other", "content": "x"}]},
    {"messages": chat(2), "tools": "{"},
    {"messages": chat(2), "tools": {"a": 1}},
    {"messages": [user("q"), assistant("a", tool_calls=None)]},
    {"other": 1},
]
"""Rows for which Automodel raises an error, at least with some templates."""


def write_rows(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mask_by_lengths(tokenizer: Any, messages: list[Row], tools: Any = None) -> tuple[list[int], list[bool]] | None:
    """Ids and loss mask of a conversation, by encoding all its beginnings; None if they do not begin its ids."""

    def encoded(count: int) -> list[int]:
        made = tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=True, return_dict=True)
        return list(made["input_ids"])

    ids = encoded(len(messages))
    mask = [False] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = encoded(k), encoded(k + 1)
        for part in (start, end):
            replaced = len(part) > 1 and part[-1] == tokenizer.eos_token_id and len(part) <= len(ids)
            if part != ids[: len(part)] and not (replaced and part[:-1] == ids[: len(part) - 1]):
                return None
        mask = [bit or len(start) <= at < len(end) for at, bit in enumerate(mask)]
    return ids, mask
