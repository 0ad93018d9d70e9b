"""Formats of files with training data: how one is found, and how its columns become one.

`chats/formats.py` and `pairs/formats.py` have the formats themselves.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_scalar
from gpuload.core.errors import DataError
from gpuload.kinds.chats.malformed import RowError, check_form, converted
from gpuload.kinds.normalize import normalized_column
from gpuload.kinds.training_reference import KWARGS, TOOLS, TrainingReference
from gpuload.sources.columns import to_python
from gpuload.sources.nulls import column_without_nulls
from gpuload.sources.read import Source, one_array
from gpuload.sources.types import JSON_TYPE, as_json, is_list, json_text

LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is a good one, in data for KTO; the first one that there is."""

Content = Callable[[], str | None]
"""Returns the content of messages that consist of calls: see `TrainingReference.content_of_calls`."""


@dataclass(frozen=True)
class Format:
    """A form in which people keep training data."""

    name: str  # as the user may give it
    columns: tuple[str, ...]  # those that make a file have this format; the first names the column made of them
    fits: Callable[[Sequence[pa.DataType]], bool]  # the types of these columns → whether they are of this format
    more: tuple[str, ...] = ()  # further columns that are read if they are there
    # Values of these columns for n rows, in this order, content of calls → n prompts; None if the first column is used
    # as it is.
    convert: Callable[[Mapping[str, Any], Content], pa.Array] | None = None
    kept: tuple[str, ...] = ()  # columns that are read if they are there, and passed through as well


def check_column(schema: pa.Schema, name: str, where: str) -> None:
    """A `DataError` if a file, `where` for messages, has no column with the name that the user gave."""
    if name not in schema.names:
        raise DataError(f"{where}: no column {name!r}. The columns are {', '.join(schema.names)}")


def find_among(candidates: Sequence[Format], schema: pa.Schema, where: str, name: str | None, remedy: str) -> Format:
    """The format of a file, of some candidates.

    Args:
        schema: its columns.
        where: its name, for messages.
        name: the format that it must have; None for any.
        remedy: what to do if it has none of them.

    Raises:
        DataError: it has not; the message shows its columns and the closest format.
    """
    names = set(schema.names)
    candidates = [each for each in candidates if name in (None, each.name)]
    for each in candidates:
        if names.issuperset(each.columns) and each.fits([schema.field(column).type for column in each.columns]):
            return each
    closest = max(candidates, key=lambda each: len(names.intersection(each.columns)) / len(each.columns))
    wanted = f"format={name!r}" if name else "a known format"
    described = ", ".join(f"{field.name} ({field.type!s:.80})" for field in schema)
    missing = [column for column in closest.columns if column not in names]
    if empty := [column for column in closest.columns if column in names and _is_empty(schema.field(column).type)]:
        raise DataError(f"{where}: column {empty[0]!r} is null or empty in all rows: there is nothing to load")
    why = f" ({' and '.join(missing)} missing)" if missing else " of another type"
    raise DataError(
        f"{where}: not {wanted}. The columns are {described}; the closest format is {closest.name}, which has "
        f"{' and '.join(closest.columns)}{why}: {remedy}"
    )


def _is_empty(kind: pa.DataType) -> bool:
    """Whether a type says that no row has a value, as of JSON with nothing but nulls and empty lists."""
    return pa.types.is_null(kind) or (is_list(kind) and _is_empty(kind.value_type))


def one_format(found: Mapping[str, str]) -> str:
    """The format that all files have: file → its format.

    Raises:
        DataError: they have several.
    """
    names = list(dict.fromkeys(found.values()))
    if len(names) > 1:
        examples = ", ".join(next(f"{file} is {one}" for file, each in found.items() if each == one) for one in names)
        raise DataError(f"files have different formats ({examples}): load them separately, or pass format=")
    return names[0]


def label_in(schema: pa.Schema) -> str | None:
    """The column that says whether an answer is a good one, in data for KTO; None if there is none."""
    return next((each for each in LABELS if each in schema.names), None)


def as_prompts(source: Source, found: Format, key: str, reference: TrainingReference) -> Source:
    """The same rows with one column `key` instead of those of their format, for the template of a reference."""
    expected = (*found.columns, *found.more, TOOLS, KWARGS)
    used, kept = ([name for name in names if name in source.schema.names] for names in (expected, found.kept))
    as_it_is = found.convert is None and not reference.changes_messages
    if as_it_is and used == [key] and source.schema.field(key).type != JSON_TYPE:
        return source
    made = _MadeColumn(source, found, key, used, kept, reference)
    schema = pa.schema([field for field in source.schema if field.name not in (*used, key)])
    return replace(
        source,
        schema=schema.append(pa.field(key, JSON_TYPE)),
        batches=made.batches,
        parquet=None,
        frame=None,
        without=made.without,
        only=source.without and made.only,
        content=source.content and made.digest,
        form=made.form,
        decoded_bytes=made.decoded_bytes,
    )


def replaced_columns(source: Source) -> Sequence[str]:
    """The columns of a file that `as_prompts` has replaced by one; none if it has returned the file as it is."""
    made = getattr(source.batches, "__self__", None)
    return made.used if isinstance(made, _MadeColumn) else ()


@dataclass(frozen=True)
class _MadeColumn:
    """What `as_prompts` makes of a source; for the fields see there."""

    source: Source
    format: Format
    key: str
    used: list[str]  # the columns that are replaced
    kept: list[str]  # further columns that are read
    reference: TrainingReference

    def batches(self) -> Iterator[pa.Table]:
        return (self._rest(table).append_column(self.key, self._prompts(table)) for table in self.source.batches())

    def only(self, name: str) -> Iterator[pa.Table]:
        """One column, without reading those that it is not made of."""
        source = self.source
        assert source.without is not None
        used = [*self.used, *self.kept] if name == self.key else [name]
        tables = source.without(*(each for each in source.schema.names if each not in used))
        return (pa.table({name: self._prompts(table) if name == self.key else table.column(name)}) for table in tables)

    def _prompts(self, table: pa.Table) -> pa.Array:
        return converted(self._made, {name: one_array(table.column(name)) for name in self.used + self.kept})

    def without(self, *names: str) -> Iterator[pa.Table]:
        """The other columns, for a caller that has the ids: nothing is converted, which may need the tokenizer."""
        if self.key not in names:
            return self.batches()
        source, hidden = self.source, {*self.used, *names} & {*self.source.schema.names}
        return map(self._rest, source.batches() if source.without is None else source.without(*hidden))

    def _rest(self, table: pa.Table) -> pa.Table:
        return table.drop_columns([name for name in table.schema.names if name in (*self.used, self.key)])

    def _made(self, columns: Mapping[str, Any]) -> pa.Array:
        for column in columns.values():
            if column.type == JSON_TYPE and not self.source.parsed:  # a table may have anything in such a column
                to_python(column)
        if self.reference.drop_nulls:
            columns = {n: column_without_nulls(each) if n in self.used else each for n, each in columns.items()}
        if self.format.convert:
            made = self.format.convert(columns, lambda: self.reference.content_of_calls)
        else:
            name = self.format.columns[0]
            made = columns[name]
            check_form(name, made, objects=self.format.name != "text")
        if self.reference.normalize_messages:
            made = normalized_column(made, self.reference.takes_objects)
        return _with_own_arguments(made, columns)

    @property
    def form(self) -> str:
        return repr((self.format.name, self.used, self.kept))

    def digest(self, *names: str) -> bytes:
        content = self.source.content
        assert content is not None
        made = [self.form.encode(), *map(content, self.used + self.kept)] if self.key in names else []
        others = [name for name in names if name != self.key]
        return b"".join([*made, content(*others)] if others else made)

    def decoded_bytes(self, names: Collection[str] | None) -> int:
        if names is not None:
            names = [each for name in names for each in (self.used + self.kept if name == self.key else [name])]
        return self.source.decoded_bytes(names)


def _with_own_arguments(prompts: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
    """Prompts with the arguments of their rows: dicts, for those that have any."""
    nothing = [None] * len(prompts)
    kwargs = to_python(columns[KWARGS]) if KWARGS in columns else nothing
    kwargs = [_from_text(KWARGS, each) or None for each in kwargs]
    given = columns.get(TOOLS)
    if given is not None and given.type == prompts.type == JSON_TYPE:
        joined = _with_tools(prompts.storage, given.storage)
        if joined is not None:
            prompts, given = joined, None
    tools = nothing if given is None else to_python(given)
    known: dict[str, Any] = {}  # tools as JSON text, which is often the same in many rows
    tools = [known.setdefault(each, _tools(each)) if isinstance(each, str) else _tools(each) for each in tools]
    if all(each is None for each in (*tools, *kwargs)):
        return prompts
    if prompts.type == JSON_TYPE and (joined := _joined_texts(prompts, tools, kwargs)) is not None:
        return joined
    rows = zip(to_python(prompts), tools, kwargs, strict=True)
    return as_json([_with_own(*row) for row in rows])


def _with_tools(prompts: pa.Array, tools: pa.Array) -> pa.Array | None:
    """As `_joined_texts` of tools as JSON texts, for a whole column at once; None if those of a row are no list, or
    its prompt is no list of messages."""
    if not all(pc.all(pc.starts_with(each, "[")).as_py() is not False for each in (prompts, tools)):
        return None
    start, between, end, nothing = (
        as_scalar(each, pa.large_string()) for each in ('{"messages": ', ', "tools": ', "}", "")
    )
    made = pc.binary_join_element_wise(start, prompts, between, tools, end, nothing)
    return pa.ExtensionArray.from_storage(JSON_TYPE, pc.coalesce(made, prompts))


def _joined_texts(prompts: pa.Array, tools: Sequence[Any], kwargs: Sequence[Any]) -> pa.Array | None:
    """As `_with_own` of each row, by joining JSON texts, so that messages need not be read and written again; None if a
    row is neither a list of messages nor an object."""
    made: list[str | None] = []
    known: dict[int, str] = {}

    def written(value: Any) -> str:  # once for each object
        if id(value) not in known:
            known[id(value)] = json_text(value)
        return known[id(value)]

    for text, *own in zip(prompts.storage.to_pylist(), tools, kwargs, strict=True):
        given = [(name, value) for name, value in zip((TOOLS, KWARGS), own, strict=True) if value is not None]
        if text is not None and given:
            texts = [f'"{name}": {written(value)}' for name, value in given]
            if text[:1] == "[" and text[-1:] == "]":
                text = f'{{"messages": {text}, {", ".join(texts)}}}'
            elif text[:1] == "{" and text[-1:] == "}" and text[1:-1].strip():
                text = f"{text[:-1]}, {', '.join(texts)}}}"
            else:
                return None
        made.append(text)
    return pa.ExtensionArray.from_storage(JSON_TYPE, as_arrow(made, pa.large_string()))


def _tools(value: Any) -> Any:
    """The tools of a row, which may be JSON text. An empty list is not the same as none: a template may print it."""
    value = _from_text(TOOLS, value)
    if value is not None and not isinstance(value, list):
        raise RowError(f"tools is of type {type(value).__name__}, not a list")
    return value


def _from_text(name: str, value: Any) -> Any:
    """A value that may be JSON text; None for a text without anything."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise RowError(f"{name} is not valid JSON: {error}") from error


def _with_own(prompt: Any, tools: Any, kwargs: Any) -> Any:
    own = {name: value for name, value in ((TOOLS, tools), (KWARGS, kwargs)) if value is not None}
    if prompt is None or not own:
        return prompt
    return (prompt if isinstance(prompt, dict) else {"messages": prompt}) | own
