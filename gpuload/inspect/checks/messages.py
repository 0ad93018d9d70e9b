"""The messages of rows as columns: one entry for each message, whatever form the rows have."""

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import mask_of, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy, as_scalar, fill_null
from gpuload.inspect.checks.findings import RowMask
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, fields_of, is_messages, is_text

PARTS = ("messages", "text", "prompt", "completion", "chosen", "rejected")
"""What a row may consist of. A row that is a text or messages has one part of that name."""

TEXT_PART, PROMPT_PART = PARTS.index("text"), PARTS.index("prompt")

NONE, TEXT, OBJECT = 0, 1, 2  # what the arguments of a message's tool calls are
_REASONING = ("reasoning_content", "reasoning", "thinking")
_IN_TEXT = r"(?s)<think>(?P<inside>.*?\S.*?)</think>"
_TEXT_TYPE = pa.large_string()

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FlatMessages:
    """k messages of n rows, those of a row one after the other."""

    count: int  # n
    row: Ints  # (k,) int64, the row of each
    part: Ints  # (k,) int64, the part of the row, as an index into `PARTS`
    role: pa.LargeStringArray  # (k,) empty for texts and for messages without a role
    text: pa.LargeStringArray  # (k,) the content, or the texts of its parts; empty where there is none
    null: RowMask  # (k,) bool, the content is null
    reasoning: pa.LargeStringArray  # (k,) null where there is none
    arguments: Ints  # (k,) int64, `NONE`, `TEXT` or `OBJECT`
    media: Ints  # (k, 3) int64, how many parts of the content are images, videos and audios
    more: pa.LargeStringArray  # (k,) what else a template could print of the message, as JSON; or empty
    own: pa.LargeStringArray  # (n,) the tools of each row and other arguments of its template, as JSON; or empty

    def __len__(self) -> int:
        return len(self.row)

    def rows_of(self, mask: RowMask) -> RowMask:
        """(n,) bool: the rows of some messages, by a mask (k,)."""
        return mask_of(self.row[mask], self.count)

    def has_role(self, *roles: str) -> RowMask:
        """(k,) bool: which messages have one of some roles."""
        return as_numpy(pc.is_in(self.role, as_arrow(list(roles), _TEXT_TYPE)))

    def is_answer(self, prompts: bool) -> RowMask:
        """(k,) bool: completions, and in a conversation its last answer and what follows it; nothing of rows that are
        `prompts`."""
        if prompts:
            return np.zeros(len(self), np.bool_)
        number = np.arange(len(self))
        last = np.full(self.count, len(self))
        ours = (self.part == PARTS.index("messages")) & self.has_role("assistant")
        last[self.row[ours]] = number[ours]  # ascending: the last one stays
        found: RowMask = (self.part > PROMPT_PART) | ((self.part == 0) & (number >= last[self.row]))
        return found

    def texts_of(self, mask: RowMask) -> pa.LargeStringArray:
        """(n,) the texts of some messages of each row, by a mask (k,)."""
        return self._by_row(self.text, mask)

    def all_of(self, mask: RowMask) -> pa.LargeStringArray:
        """(n,) everything that a template could print of some messages of each row, as for `texts_of`."""
        line = as_scalar("\n", _TEXT_TYPE)
        texts = self._by_row(pc.binary_join_element_wise(self.role, self.more, self.text, line), mask)
        return pc.binary_join_element_wise(self.own, texts, line)

    @property
    def shapes(self) -> pa.LargeStringArray:
        """(n,) the roles of the messages of each row."""
        return self._by_row(self.role, np.ones(len(self), np.bool_))

    def _by_row(self, texts: pa.LargeStringArray, mask: RowMask) -> pa.LargeStringArray:
        offsets = offsets_of(np.bincount(self.row[mask], minlength=self.count))
        some = pa.LargeListArray.from_arrays(as_arrow(offsets), texts.filter(as_arrow(mask)))
        return pc.binary_join(some, as_scalar("\n", _TEXT_TYPE))


def flat_messages(column: pa.Array) -> FlatMessages:
    """The messages of n rows: texts, messages, structs of them by the names of `PARTS`, or any of these as JSON."""
    kind = column.type
    if kind == JSON_TYPE:
        return _by_rows(_readable(column))
    parts = {TEXT_PART if is_text(kind) else 0: column}
    if pa.types.is_struct(kind):
        parts = {n: column.field(name) for n, name in enumerate(PARTS) if kind.get_field_index(name) >= 0}
    made = [each for number, part in parts.items() if (each := _by_columns(part, number)) is not None]
    if len(made) < len(parts):
        return _by_rows(_readable(column))
    return _in_order(made) if len(made) > 1 else made[0]


def matches(texts: Any, pattern: str) -> RowMask:
    """(n,) bool: texts that match a regular expression; a null does not."""
    return as_numpy(fill_null(pc.match_substring_regex(texts, pattern), False))


def _by_columns(column: pa.Array, part: int) -> FlatMessages | None:
    """The messages of one part; None if they have more than roles and texts."""
    count = len(column)
    if is_text(column.type):
        rows = np.arange(count)
        nothing = pa.nulls(count, _TEXT_TYPE)
        texts = fill_null(column.cast(_TEXT_TYPE), "")
        return _made(count, rows, part, fill_null(nothing, ""), texts, as_numpy(column.is_null()), nothing)
    if not is_messages(column.type):
        return None
    names = fields_of(column.type)
    lengths = as_numpy(fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    messages = column.flatten()
    if {"role", "content"} - names or not all(is_text(messages.type.field(name).type) for name in ("role", "content")):
        return None
    columns = {name: messages.field(name) for name in names}
    if "tool_calls" in names and columns["tool_calls"].null_count < len(messages):
        return None
    reasoning = pa.nulls(len(messages), _TEXT_TYPE)
    more = _as_json([columns[name] for name in sorted(names - {"role", "content"})], len(messages))
    for name in _REASONING:
        if name in names and is_text(columns[name].type):
            reasoning = pc.coalesce(reasoning, columns[name].cast(_TEXT_TYPE))
    content = columns["content"].cast(_TEXT_TYPE)
    inside = pc.struct_field(pc.extract_regex(content, _IN_TEXT), "inside")
    if part != PROMPT_PART and inside.null_count < len(inside):
        ours = pc.equal(columns["role"].cast(_TEXT_TYPE), as_scalar("assistant", _TEXT_TYPE))
        reasoning = pc.coalesce(reasoning, pc.if_else(ours, inside, as_scalar(None, _TEXT_TYPE)))
    role = fill_null(columns["role"].cast(_TEXT_TYPE), "")
    rows = np.repeat(np.arange(count), lengths)
    return _made(count, rows, part, role, fill_null(content, ""), as_numpy(content.is_null()), reasoning, more)


def _made(
    count: int, rows: Ints, part: int, role: Any, text: Any, null: RowMask, reasoning: Any, more: Any = None
) -> FlatMessages:
    nothing, media = np.zeros(len(rows), np.int64), np.zeros((len(rows), 3), np.int64)
    more = _empty(len(rows)) if more is None else more
    return FlatMessages(
        count, rows, nothing + part, role, text, null, reasoning, nothing, media, more, own=_empty(count)
    )


def _empty(count: int) -> pa.LargeStringArray:
    return fill_null(pa.nulls(count, _TEXT_TYPE), "")


def _as_json(columns: list[pa.Array], count: int) -> pa.LargeStringArray:
    """(count,) the values of some columns, one after the other; those of a column without values are left out."""
    given = [each for each in columns if each.null_count < count]
    texts = [
        each.cast(_TEXT_TYPE) if is_text(each.type) else _as_texts([_written(value) for value in to_python(each)])
        for each in given
    ]
    if not texts:
        return _empty(count)
    return pc.binary_join_element_wise(*(fill_null(each, "") for each in texts), as_scalar("\n", _TEXT_TYPE))


def _written(value: Any) -> str | None:
    """A value as JSON, whatever the order of its keys is; None for None."""
    return None if value is None else json.dumps(value, sort_keys=True, default=str)


def _in_order(parts: list[FlatMessages]) -> FlatMessages:
    """The messages of all parts, by row."""
    order = np.argsort(np.concatenate([each.row for each in parts]), kind="stable")
    joined: dict[str, Any] = {}
    for field in fields(FlatMessages)[1:-1]:
        values = [getattr(each, field.name) for each in parts]
        if isinstance(values[0], pa.Array):
            joined[field.name] = pa.concat_arrays(values).take(as_arrow(order))
        else:
            joined[field.name] = np.concatenate(values)[order]
    return FlatMessages(parts[0].count, **joined, own=parts[0].own)


# -- row by row ------------------------------------------------------------------------------------------------------


def _described(row: int, part: int, message: Any) -> dict[str, Any]:
    """What `FlatMessages` has of one message."""
    reasoning: str | None = None
    others: dict[str, Any] = {}
    if not isinstance(message, dict):
        content, role, arguments = message, "", NONE
    else:
        content, role = message.get("content"), _text_in(message, "role") or ""
        arguments = _arguments(message.get("tool_calls"))
        reasoning = next(filter(None, (_text_in(message, name) for name in _REASONING)), None)
        others = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    if not isinstance(content, str | None):
        others["content"] = content
    text, media = _text_of(content)
    if reasoning is None and role == "assistant" and "<think>" in text:
        inside, end, _ = text.partition("<think>")[2].partition("</think>")
        reasoning = inside if end and inside.strip() else None
    found = {"row": row, "part": part, "role": role, "text": text, "null": content is None, "reasoning": reasoning}
    return found | {"arguments": arguments, "media": media, "more": _written(others or None) or ""}


def _as_texts(values: list[str | None]) -> pa.LargeStringArray:
    try:
        return as_arrow(values, _TEXT_TYPE)
    except UnicodeEncodeError:  # lone surrogates, whose rows are dropped
        return as_arrow([v if v is None else v.encode(errors="replace").decode() for v in values], _TEXT_TYPE)


def _readable(column: pa.Array) -> list[Any]:
    """Rows as Python objects; None for those that have none, which are dropped."""
    try:
        return to_python(column)
    except MemoryError:
        raise
    except Exception:
        rows: list[Any] = []
        for row in range(len(column)):
            try:
                rows += to_python(column.slice(row, 1))
            except Exception:
                rows.append(None)
        return rows


def _by_rows(rows: list[Any]) -> FlatMessages:
    made: list[dict[str, Any]] = []
    every: list[str | None] = []
    for number, row in enumerate(rows):
        parts = row if isinstance(row, dict) else {"messages": row}
        own = {name: value for name, value in parts.items() if name not in PARTS and value is not None}
        every.append(_written(own or None) or "")
        for part, name in enumerate(PARTS):
            value = parts.get(name)
            if isinstance(value, str):
                made.append(_described(number, TEXT_PART if name == "messages" else part, value))
            made += [_described(number, part, message) for message in (value if isinstance(value, list) else ())]
    lists = {field.name: [each[field.name] for each in made] for field in fields(FlatMessages)[1:-1]}
    numbers = {name: np.array(lists[name], np.int64) for name in ("row", "part", "arguments")}
    texts = {name: _as_texts(lists[name]) for name in ("role", "text", "reasoning", "more")}
    media, null = np.array(lists["media"], np.int64).reshape(-1, 3), np.array(lists["null"], np.bool_)
    return FlatMessages(len(rows), **numbers, **texts, null=null, media=media, own=_as_texts(every))


def _text_of(content: Any) -> tuple[str, tuple[int, int, int]]:
    """The text of a content, and how many of its parts are images, videos and audios."""
    if isinstance(content, str):
        return content, (0, 0, 0)
    texts, kinds = [], []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            kinds.append(str(part.get("type")).removesuffix("_url").removeprefix("input_"))
            texts.append(str(part["text"]) if isinstance(part.get("text"), str) else "")
        elif isinstance(part, str):
            texts.append(part)
    return "".join(texts), (kinds.count("image"), kinds.count("video"), kinds.count("audio"))


def _text_in(message: dict[str, Any], name: str) -> str | None:
    value = message.get(name)
    return value if isinstance(value, str) else None


def _arguments(calls: Any) -> int:
    """What the arguments of tool calls are."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(given, str):
            return TEXT
        if isinstance(given, dict):
            return OBJECT
    return NONE
