"""The prompts of all turns of conversations: what inference would have had before each answer."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import RowNumbers, offsets_of, ranges
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.errors import OptionError
from gpuload.sources.columns import to_python
from gpuload.sources.frames import open_frame
from gpuload.sources.read import Source, with_prompts
from gpuload.sources.types import JSON_TYPE, as_json, is_messages


def prompts_of_turns(sources: Sequence[Source], key: str, chosen: RowNumbers | None = None) -> list[Source]:
    """The same conversations as prompts, in memory: the messages before each one of the assistant, and all messages if
    the last one is not the assistant's. A row without such messages stays, without any.

    Args:
        key: the column with conversations.
        chosen: conversations, in any order; None for all. Their prompts are in the order of the files.

    Returns:
        Sources with all other columns, and two more: `conversation`, its number in all sources, and `turn`, the number
        of the message that answers the prompt.

    Raises:
        OptionError: the column has texts.
    """
    made, first = [], 0
    for source in sources:
        tables = [] if not source.num_rows else [*_exploded(source, key, first, chosen)]
        if any(map(len, tables)):
            tables = pa.concat_tables(tables, promote_options="default")
            made.append(open_frame(tables, f"{source.name} (prompts of all turns)"))
        first += source.num_rows
    return made


def check_conversations(source: Source, key: str) -> None:
    """Checks that a source has conversations in a column: an `OptionError` if it has texts."""
    kind = source.schema.field(key).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if kind != JSON_TYPE and not is_messages(kind):
        raise OptionError(f"{source.name}: column {key!r} has texts: turns='served' is for conversations")


def _exploded(source: Source, key: str, first: int, chosen: RowNumbers | None) -> Iterator[pa.Table]:
    check_conversations(source, key)
    for table, column in with_prompts(source, key):
        numbers = first + np.arange(len(column))
        first += len(column)
        if chosen is not None:
            some = np.isin(numbers, chosen)
            table, column, numbers = table.filter(some), column.filter(some), numbers[some]
        if column.type == JSON_TYPE:
            row, count, prompts = _of_json(to_python(column))
        else:
            row, count, prompts = _of_lists(column)
        made = pa.table({key: prompts, "conversation": numbers[row], "turn": count})
        rest = table.select([name for name in table.schema.names if name not in made.schema.names]).take(as_arrow(row))
        for field, values in zip(rest.schema, rest.columns, strict=True):
            made = made.append_column(field, values)
        yield made


def _of_json(values: Sequence[Any]) -> tuple[RowNumbers, RowNumbers, pa.Array]:
    """Row, number of messages, and messages of each prompt."""
    lists = [value if isinstance(value, list) else [] for value in values]
    roles = [each.get("role") if isinstance(each, dict) else None for value in lists for each in value]
    ours = np.array([each == "assistant" for each in roles], bool)
    row, count = _prompts(np.array(list(map(len, lists)), np.int64), ours)
    pairs = zip(row.tolist(), count.tolist(), strict=True)
    return row, count, as_json([values[k][:n] if isinstance(values[k], list) else values[k] for k, n in pairs])


def _of_lists(column: pa.Array) -> tuple[RowNumbers, RowNumbers, pa.Array]:
    """As `_of_json`."""
    messages = column.flatten()
    lengths = as_numpy(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    names = [field.name for field in messages.type]
    ours = np.zeros(len(messages), bool)
    if "role" in names:
        ours = as_numpy(pc.fill_null(pc.equal(pc.struct_field(messages, "role").cast(pa.string()), "assistant"), False))
    row, count = _prompts(lengths, ours)
    begin = offsets_of(lengths)[:-1][row]
    found = messages.take(as_arrow(ranges(begin, count, offsets_of(count))))
    null = pc.is_null(column).take(as_arrow(row))
    made = pa.LargeListArray.from_arrays(as_arrow(offsets_of(count)), found, mask=null)
    return row, count, made.cast(column.type) if pa.types.is_list(column.type) else made


def _prompts(lengths: RowNumbers, ours: np.ndarray[Any, Any]) -> tuple[RowNumbers, RowNumbers]:
    """Row and number of messages of each prompt, by the messages of each row (n,), and whether each of all (m,) is the
    assistant's."""
    offsets = offsets_of(lengths)
    row = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(row)) - offsets[:-1][row]
    asked = ours & (at > 0)
    some = np.flatnonzero(lengths)
    open_ones = some[~ours[offsets[1:][some] - 1]]
    rows = np.concatenate([row[asked], open_ones])
    without = np.setdiff1d(np.arange(len(lengths)), rows)  # they stay as rows without messages, which a load counts
    rows = np.concatenate([rows, without])
    counts = np.concatenate([at[asked], lengths[open_ones], 0 * without])
    order = np.lexsort((counts, rows))
    return rows[order], counts[order]
