"""Rows as served, as `gpuload inspect` and `gpuload check` look at them: the messages and the text of each."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.arrow import as_arrow
from gpuload.core.marks import IDS, LOSS
from gpuload.dataset.pieces import Sequences
from gpuload.kinds.served.stored import Headers
from gpuload.kinds.training_reference import messages_in
from gpuload.packing.plan import whole_rows
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python
from gpuload.sources.types import as_json


def rows_in(stored: Ragged) -> tuple[Ragged, Headers]:
    """The tokens of the rows of n conversations (`kinds/served/stored.py`), with their loss, and what the headers of
    the conversations say."""
    headers = Headers.of(stored)
    plan = whole_rows(headers.conversation, headers.rows[:, 0], headers.begin)
    return Sequences(stored, plan, IDS | LOSS).to_host(), headers


def messages_until(column: pa.Array, rows: RowNumbers, turns: RowNumbers) -> pa.Array:
    """(r,) messages, as JSON: those of conversation `rows[k]` of a column, up to message number `turns[k]`."""
    values = to_python(column)
    return as_json([messages_in(values[k])[: turn + 1] for k, turn in zip(rows.tolist(), turns.tolist(), strict=True)])


def texts_of(reference: Reference, tokens: Ragged) -> pa.LargeStringArray:
    """(r,) the texts of rows of tokens, special tokens included."""
    ids: Sequence[Any] = Ragged(tokens.values & IDS, tokens.offsets).to_lists()
    made = [
        reference.tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False) for row in ids
    ]
    return as_arrow([text.encode(errors="replace").decode() for text in made], pa.large_string())


def joined_texts(texts: pa.LargeStringArray, rows: RowNumbers, count: int) -> pa.LargeStringArray:
    """(count,) the texts of the rows of each conversation, one after the other; null for those without rows. `rows`
    says of each text, ascending, which conversation it is of."""
    made: list[str | None] = [None] * count
    for row, text in zip(rows.tolist(), texts.to_pylist(), strict=True):
        made[row] = (made[row] or "") + text
    return as_arrow(made, pa.large_string())
