"""The forms in which people keep training data, and what is read from each.

    messages            `messages`: a list of {role, content, ...}
    prompt-completion   `prompt` and `completion`, both as text or both as messages
    text                `text`
    sharegpt            `conversations`: a list of {from, value}; `system`, for those that begin with none
    alpaca              `instruction`, `input`, `output`; `system`, `history`

A format is found by the columns that a file has. Every format becomes one column: messages as they are; for
prompt-completion a struct of both; for sharegpt and alpaca messages with these roles:

    sharegpt   human → user, gpt → assistant, system → system, observation → tool;
               function_call → assistant, whose `tool_calls` are the calls in its JSON text, and whose content is null,
               or the empty text if the template needs a text; `_FURTHER` as it is
    alpaca     instruction, a line break, input → user; output → assistant; history: pairs of both, before
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.kinds.chats.malformed import RowError, check_text
from gpuload.kinds.formats import Content, Format, check_column, find_among
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, as_json, fields_of, is_text
from gpuload.template.loss_marks import marks_of

PLAIN_MESSAGES = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool", "tool": "tool"}
_ROLES |= {role: role for role in ("user", "assistant")}
_FURTHER = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "token_ids", "prompt_token_ids")
"""Fields that turns may have besides, as messages do."""


def _pairs(columns: Mapping[str, Any], content: Content) -> pa.Array:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, pa.ExtensionArray) or isinstance(completion, pa.ExtensionArray):  # JSON of mixed shapes
        rows = zip(to_python(prompt), to_python(completion), strict=True)
        return as_json([{"prompt": one, "completion": other} for one, other in rows])
    return pa.StructArray.from_arrays([prompt, completion], ["prompt", "completion"])


def _from_sharegpt(columns: Mapping[str, Any], content: Content, marks: bool = False) -> pa.Array:
    key = next(iter(columns))  # `conversations`, or as the user says
    rows = to_python(columns[key])
    system = to_python(columns["system"]) if "system" in columns else [None] * len(rows)
    return messages_column(
        [_sharegpt_row(row, first, content, key, marks) for row, first in zip(rows, system, strict=True)]
    )


def _sharegpt_row(turns: Any, system: Any, content: Content, key: str, marks: bool) -> Any:
    check_text("system", system)
    if not turns:
        return turns
    if not isinstance(turns, list):
        raise RowError(f"{key} is of type {type(turns).__name__}, not a list")
    return with_system([sharegpt_turn(turn, content, marks) for turn in turns], system)


def with_system(turns: list[Any], text: Any) -> list[Any]:
    """Messages of ShareGPT data with the text of the column `system` before them, unless the first one is a system
    message itself, as in LLaMA-Factory."""
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    own = "system" in (first.get("role"), first.get("from"))
    return [{"role": "system", "content": text}, *turns] if text and not own else turns


def sharegpt_turn(turn: Any, content: Content, marks: bool = False) -> Any:
    """A message of ShareGPT data with role and content; with `marks`, also those of loss (`template/loss_marks.py`).
    A `RowError` if it has no sender."""
    if not isinstance(turn, dict):
        return turn  # rendering rejects it, with a reason
    if turn.get("from") is None:
        if turn.get("role") is None:
            raise RowError("a message has neither role nor from")
        return turn
    check_text("from", turn["from"])
    kept = {name: turn[name] for name in _FURTHER if turn.get(name) is not None} | (marks_of(turn) if marks else {})
    if turn["from"] != "function_call":
        return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value"), **kept}
    try:
        calls = json.loads(turn["value"])
    except (KeyError, TypeError, ValueError):  # not JSON: what the assistant has written
        return {"role": "assistant", "content": turn.get("value"), **kept}
    calls = calls if isinstance(calls, list) else [calls]
    kept["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content(), **kept}


def _from_alpaca(columns: Mapping[str, Any], content: Content) -> pa.Array:
    names = list(columns)
    rows = zip(*(to_python(column) for column in columns.values()), strict=True)
    return messages_column([_alpaca_row(dict(zip(names, row, strict=True))) for row in rows])


def _alpaca_row(row: dict[str, Any]) -> list[dict[str, Any]]:
    for name in ("instruction", "input", "output", "system"):
        check_text(name, row.get(name))
    history = row.get("history") or []
    pairs = isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history)
    if not pairs or not all(isinstance(text, str) for turn in history for text in turn):
        raise RowError("history is not a list of pairs of texts")
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    question = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    for asked, answered in [*history, (question, row["output"])]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return messages


def messages_column(rows: Sequence[Any]) -> pa.Array:
    """Messages with a type of Arrow if they all have role and text only, and as JSON otherwise."""
    fields = {"role", "content"}
    if all(isinstance(row, list) and all(isinstance(m, dict) and m.keys() == fields for m in row) for row in rows):
        try:
            return as_arrow(rows, PLAIN_MESSAGES)
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError):  # the last: JSON can escape lone surrogates
            pass
    return as_json(rows)


def _messages_with(*fields: str) -> Callable[[Sequence[pa.DataType]], bool]:
    return lambda kinds: kinds[0] == JSON_TYPE or fields_of(kinds[0]).issuperset(fields)


def _is_text(kinds: Sequence[pa.DataType]) -> bool:
    return kinds[0] == JSON_TYPE or is_text(kinds[0])


def _same_form(kinds: Sequence[pa.DataType]) -> bool:
    """Whether both columns are text, or the first has messages. JSON of mixed shapes may be any."""
    prompt, completion = kinds
    if JSON_TYPE in kinds:
        return True
    return is_text(completion) if is_text(prompt) else not is_text(completion) and "role" in fields_of(prompt)


FORMATS = (
    Format("messages", ("messages",), _messages_with("role")),
    Format("sharegpt", ("conversations",), _messages_with("from", "value"), ("system",), _from_sharegpt),
    Format("prompt-completion", ("prompt", "completion"), _same_form, convert=_pairs),
    Format("alpaca", ("instruction", "output"), _is_text, ("input", "system", "history"), _from_alpaca),
    Format("text", ("text",), _is_text),
)


def find_format(schema: pa.Schema, where: str, name: str | None = None, key: str | None = None) -> Format:
    """The format of a file: see `find_among`. The column `key` has the messages or the text, if its name is another one
    than above.

    Raises:
        DataError: it has none; the message shows its columns and the closest format.
    """
    candidates: tuple[Format, ...] = FORMATS
    if key is not None:
        check_column(schema, key, where)
        candidates = tuple(replace(each, columns=(key,)) for each in candidates if len(each.columns) == 1)
    messages = next((field for field in schema if {"role", "from"} & fields_of(field.type)), None)
    remedy = f"pass messages_key={messages.name!r}" if messages else "rename the columns, or pass messages_key="
    halves = {"prompt", "completion"}
    if key is None and messages and messages.name in halves <= set(schema.names):
        remedy = "make both text, or both messages of role and content"  # one of them alone is other data than is meant
    if messages and name not in (None, fits := "messages" if "role" in fields_of(messages.type) else "sharegpt"):
        remedy = f"pass format={fits!r}"
    return find_among(candidates, schema, where, name, remedy)


def with_marks(found: Format) -> Format:
    """The same format, whose messages keep their marks of answers that have loss (`template/loss_marks.py`)."""
    return replace(found, convert=partial(_from_sharegpt, marks=True)) if found.name == "sharegpt" else found


def is_plain(found: str, schema: pa.Schema) -> bool:
    """Whether no template renders data of a format."""
    return found == "text" or (found == "prompt-completion" and is_text(schema.field("prompt").type))
