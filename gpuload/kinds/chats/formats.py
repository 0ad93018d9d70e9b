"""The forms in which people keep training data, and what is read from each.

    messages            `messages`: a list of {role, content, ...}
    prompt-completion   `prompt` and `completion`, both as text or both as messages
    text                `text`
    sharegpt            `conversations`: a list of {from, value}; `system`
    alpaca              `instruction`, `input`, `output`; `system`, `history`

A format is found by the columns that a file has. Every format becomes one column: messages as they are; for
prompt-completion a struct of both; for sharegpt and alpaca messages with these roles:

    sharegpt   human → user, gpt → assistant, system → system, observation → tool;
               function_call → assistant, whose `tool_calls` are the calls in its JSON text, and whose content is null,
               or the empty text if the template needs a text
    alpaca     instruction, a line break, input → user; output → assistant; history: pairs of both, before
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from gpuload.core.errors import DataError
from gpuload.kinds.chats.malformed import RowError, check_form, check_text, converted
from gpuload.kinds.training_reference import KWARGS, TOOLS, TrainingReference
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source
from gpuload.sources.types import JSON_TYPE, as_json, is_messages, is_text

LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is a good one, in data for KTO; the first one that there is."""

PLAIN_MESSAGES = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool", "tool": "tool"}
_ROLES |= {role: role for role in ("user", "assistant")}


Content = Callable[[], str | None]
"""Returns the content of messages that consist of calls: see `TrainingReference.content_of_calls`."""


@dataclass(frozen=True)
class Format:
    """One of the formats above.

    Attributes:
        name: as the user may give it.
        columns: those that make a file have this format; the first is the name of the column made of them.
        more: further columns that are read if they are there.
        kept: columns that are read if they are there, and passed through as well.
        convert: values of these columns for n rows, content of calls → n prompts; None if the first column is used as
            it is.
    """

    name: str
    columns: tuple[str, ...]
    more: tuple[str, ...] = ()
    convert: Callable[[Mapping[str, Any], Content], pa.Array] | None = None
    kept: tuple[str, ...] = ()


def _pairs(columns: Mapping[str, Any], content: Content) -> pa.Array:
    prompt, completion = columns["prompt"], columns["completion"]
    if isinstance(prompt, pa.ExtensionArray) or isinstance(completion, pa.ExtensionArray):  # JSON of mixed shapes
        rows = zip(to_python(prompt), to_python(completion), strict=True)
        return as_json([{"prompt": one, "completion": other} for one, other in rows])
    return pa.StructArray.from_arrays([prompt, completion], ["prompt", "completion"])


def _from_sharegpt(columns: Mapping[str, Any], content: Content) -> pa.Array:
    rows = to_python(columns["conversations"])
    system = to_python(columns["system"]) if "system" in columns else [None] * len(rows)
    return messages_column([_sharegpt_row(row, first, content) for row, first in zip(rows, system, strict=True)])


def _sharegpt_row(turns: Any, system: Any, content: Content) -> Any:
    check_text("system", system)
    if not turns:
        return turns
    if not isinstance(turns, list):
        raise RowError(f"conversations is of type {type(turns).__name__}, not a list")
    first = [{"role": "system", "content": system}] if system else []
    return first + [sharegpt_turn(turn, content) for turn in turns]


def sharegpt_turn(turn: Any, content: Content) -> Any:
    """A message of ShareGPT data with role and content."""
    if not isinstance(turn, dict) or turn.get("from") is None:
        return turn  # rendering rejects it, with a reason
    check_text("from", turn["from"])
    if turn["from"] != "function_call":
        return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
    try:
        calls = json.loads(turn["value"])
    except (KeyError, TypeError, ValueError):  # not JSON: what the assistant has written
        return {"role": "assistant", "content": turn.get("value")}
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": content(),
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


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


FORMATS = (
    Format("messages", ("messages",)),
    Format("sharegpt", ("conversations",), ("system",), _from_sharegpt),
    Format("prompt-completion", ("prompt", "completion"), convert=_pairs),
    Format("alpaca", ("instruction", "output"), ("input", "system", "history"), _from_alpaca),
    Format("text", ("text",)),
)


def find_format(schema: pa.Schema, where: str, name: str | None = None, key: str | None = None) -> Format:
    """The format of a file.

    Args:
        schema: its columns.
        where: its name, for messages.
        name: the format that it must have; None for any.
        key: the column with the messages or the text, if it has another name than above.

    Raises:
        DataError: it has not; the message shows its columns and the closest format.
    """
    names = set(schema.names)
    candidates = [each for each in FORMATS if name in (None, each.name)]
    if key is not None:
        if key not in names:
            raise DataError(f"{where}: no column {key!r}. The columns are {', '.join(schema.names)}")
        candidates = [replace(each, columns=(key,)) for each in candidates if len(each.columns) == 1]
    for each in candidates:
        if names.issuperset(each.columns) and _fits(each, schema):
            return each
    raise no_format(schema, where, candidates, name, _remedy(schema))


def no_format(schema: pa.Schema, where: str, candidates: Sequence[Format], name: str | None, remedy: str) -> DataError:
    """The error for a file that has none of some formats.

    Args:
        schema, where, name: as for `find_format`.
        candidates: the formats.
        remedy: what to do.
    """
    names = set(schema.names)
    closest = max(candidates, key=lambda each: len(names.intersection(each.columns)) / len(each.columns))
    wanted = f"format={name!r}" if name else "a known format"
    return DataError(
        f"{where}: not {wanted}. The columns are {_described(schema)}; the closest format is {closest.name}, which has "
        f"{' and '.join(closest.columns)}{_missing(closest, names)}: {remedy}"
    )


def one_format(found: Mapping[str, str]) -> str:
    """The format that all files have.

    Args:
        found: file → its format.

    Raises:
        DataError: they have several.
    """
    names = list(dict.fromkeys(found.values()))
    if len(names) > 1:
        examples = ", ".join(next(f"{file} is {one}" for file, each in found.items() if each == one) for one in names)
        raise DataError(f"files have different formats ({examples}): load them separately, or pass format=")
    return names[0]


def _fits(candidate: Format, schema: pa.Schema) -> bool:
    """Whether the first column has a type of this format. JSON of mixed shapes may be any."""
    kind = schema.field(candidate.columns[0]).type
    if kind == JSON_TYPE:
        return True
    fields = {field.name for field in kind.value_type} if is_messages(kind) else set()
    match candidate.name:
        case "messages":
            return "role" in fields
        case "sharegpt":
            return {"from", "value"} <= fields
        case "prompt-completion":
            other = schema.field("completion").type
            return other == JSON_TYPE or (is_text(kind) == is_text(other) and (is_text(kind) or "role" in fields))
        case _:
            return is_text(kind)


def _remedy(schema: pa.Schema) -> str:
    for field in schema:
        if is_messages(field.type) and {"role", "from"} & {each.name for each in field.type.value_type}:
            return f"pass messages_key={field.name!r}"
    return "rename the columns, or pass messages_key="


def is_plain(found: str, schema: pa.Schema) -> bool:
    """Whether no template renders data of a format."""
    return found == "text" or (found == "prompt-completion" and is_text(schema.field("prompt").type))


def _missing(candidate: Format, names: set[str]) -> str:
    missing = [name for name in candidate.columns if name not in names]
    return f" ({' and '.join(missing)} missing)" if missing else " of another type"


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type!s:.80})" for field in schema)


def as_prompts(source: Source, found: Format, key: str, reference: TrainingReference) -> Source:
    """The same rows with one column `key` instead of those of its format.

    Args:
        found: the format.
        reference: whose template will render them.
    """
    used = [name for name in (*found.columns, *found.more, TOOLS, KWARGS) if name in source.schema.names]
    kept = [name for name in found.kept if name in source.schema.names]
    if found.convert is None and used == [key] and source.schema.field(key).type != JSON_TYPE:
        return source

    def content() -> str | None:
        return reference.content_of_calls

    def batches() -> Iterator[pa.Table]:
        for table in source.batches():
            columns = {name: _whole(table.column(name)) for name in used + kept}
            prompts = converted(made, columns)
            rest = table.drop_columns([name for name in table.schema.names if name in used or name == key])
            yield rest.append_column(key, prompts)

    def made(columns: Mapping[str, Any]) -> pa.Array:
        if found.convert:
            return _with_own_arguments(found.convert(columns, content), columns)
        first = columns[found.columns[0]]
        check_form(found.columns[0], first, objects=found.name != "text")
        return _with_own_arguments(first, columns)

    form = repr((found.name, used, kept))

    def digest(*names: str) -> bytes:
        assert source.content is not None
        made = [form.encode(), *map(source.content, used + kept)] if key in names else []
        others = [name for name in names if name != key]
        return b"".join([*made, source.content(*others)] if others else made)

    def decoded_bytes(names: Collection[str] | None) -> int:
        if names is None:
            return source.decoded_bytes(None)
        return source.decoded_bytes([each for name in names for each in ([*used, *kept] if name == key else [name])])

    schema = pa.schema([field for field in source.schema if field.name not in used and field.name != key])
    return replace(
        source,
        schema=schema.append(pa.field(key, JSON_TYPE)),
        batches=batches,
        parquet=None,
        frame=None,
        without=None,
        content=source.content and digest,
        form=form,
        decoded_bytes=decoded_bytes,
    )


def _with_own_arguments(prompts: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
    """Prompts with the arguments of their rows: dicts, for those that have any."""
    nothing = [None] * len(prompts)
    tools, kwargs = (to_python(columns[name]) if name in columns else nothing for name in (TOOLS, KWARGS))
    tools = [_tools(each) for each in tools]
    if not any(tools) and not any(kwargs):
        return prompts
    rows = zip(to_python(prompts), tools, kwargs, strict=True)
    return as_json([_with_own(*row) for row in rows])


def _tools(value: Any) -> Any:
    """The tools of a row, which may be JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"tools is not valid JSON: {error}") from error
    if value and not isinstance(value, list):
        raise RowError(f"tools is of type {type(value).__name__}, not a list")
    return value


def _with_own(prompt: Any, tools: Any, kwargs: Any) -> Any:
    own = {name: value for name, value in ((TOOLS, tools), (KWARGS, kwargs)) if value}
    if prompt is None or not own:
        return prompt
    return (prompt if isinstance(prompt, dict) else {"messages": prompt}) | own


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


def messages_column(rows: Sequence[Any]) -> pa.Array:
    """Messages with a type of Arrow if they all have role and text only, and as JSON otherwise."""
    fields = {"role", "content"}
    if all(isinstance(row, list) and all(isinstance(m, dict) and m.keys() == fields for m in row) for row in rows):
        try:
            return pa.array(rows, PLAIN_MESSAGES)
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError):  # the last: JSON can escape lone surrogates
            pass
    return as_json(rows)
