"""Columns of token ids: Arrow lists in chunks, whose offsets have 32 bits, and `Ragged` rows."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, RowNumbers, appended, offsets_of
from gpuload.core.options import Truncation
from gpuload.dataset.arrow import lists, parts
from gpuload.kinds.training_engine import with_eos
from gpuload.sources.types import is_text

SIDES: dict[str, Truncation] = {"keep_start": "right", "keep_end": "left"}
"""TRL's `truncation_mode` → the end that is truncated."""


def ragged_of(column: pa.ChunkedArray | pa.Array) -> Ragged:
    """Rows of a column of lists of integers without nulls."""
    parts = [
        Ragged(chunk.flatten().to_numpy(), offsets_of(pc.list_value_length(chunk).to_numpy()))
        for chunk in getattr(column, "chunks", [column])
        if len(chunk)
    ]
    return parts[0] if len(parts) == 1 else Ragged.concatenate(parts)


def column_of(rows: Ragged) -> pa.ChunkedArray:
    """The reverse: lists of int32."""
    pieces = [rows.take(numbers) for numbers in parts(rows.lengths)]
    return pa.chunked_array([lists(piece.values, piece.offsets) for piece in pieces], pa.list_(pa.int32()))


def partners(rows: int, group: int, processes: int) -> RowNumbers:
    """(rows,) whose completions other rows get in TRL's KTO: of the row before in its group, and for the first row of a
    group of its last one.

    `datasets` gives each process a run of consecutive rows, the first ones one row more, and each begins a group.
    """
    number = np.arange(rows)
    starts = offsets_of(np.array([len(part) for part in np.array_split(number, processes)]))
    share = np.searchsorted(starts, number, side="right") - 1
    first = number - (number - starts[share]) % group
    last = np.minimum(first + group, starts[share + 1]) - 1
    return np.where(number == first, last, number - 1)


def picked(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """A few rows. `Table.take` would join the chunks of the whole table first."""
    return pa.concat_tables([table.slice(row, 1) for row in rows])


def prefixed(prompts: pa.ChunkedArray, answers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Prompts, each followed by its answer. Both are texts, or messages, which then have the fields of both; a
    `pa.ArrowException` if two types of a field have no common one."""
    if is_text(answers.type):
        return pc.binary_join_element_wise(prompts.cast(answers.type), answers, pa.scalar("", answers.type))
    first, then = prompts.combine_chunks(), answers.combine_chunks()
    # A cast to the type of one part would drop the fields that only the other one has.
    kinds = [pa.schema([("message", part.type.value_type)]) for part in (first, then)]
    kind = pa.unify_schemas(kinds, promote_options="permissive").field(0).type
    messages = pa.concat_arrays([part.flatten().cast(kind) for part in (first, then)])
    # Rows of the numbers of messages; those of answers come after all prompts.
    bounds = [offsets_of(pc.list_value_length(part).to_numpy()) for part in (first, then)]
    number = np.arange(len(messages), dtype=np.int32)
    split = int(bounds[0][-1])
    both = appended(Ragged(number[:split], bounds[0]), Ragged(number[split:], bounds[1]))
    lists_of = pa.LargeListArray if pa.types.is_large_list(answers.type) else pa.ListArray
    offsets = pa.array(both.offsets, pa.int64() if lists_of is pa.LargeListArray else pa.int32())
    return pa.chunked_array([lists_of.from_arrays(offsets, messages.take(pa.array(both.values)))])


def columns_with_eos(table: pa.Table, names: Sequence[str], eos: str) -> pa.Table:
    """The same rows, with the EOS token after each text of some columns that does not end with it."""
    for name in names:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), with_eos(table[name], eos))
    return table
