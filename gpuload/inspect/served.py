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
    """The tokens of the rows of n conversations, with their loss, and what the headers of the conversations say.

    Args:
        stored: n conversations, see `kinds/served/stored.py`.
    """
    headers = Headers.of(stored)
    plan = whole_rows(headers.conversation, headers.rows[:, 0], headers.begin)
    return Sequences(stored, plan, IDS | LOSS).to_host(), headers


def messages_until(column: pa.Array, rows: RowNumbers, turns: RowNumbers) -> pa.Array:
    """(r,) the messages of conversations up to some of them, as JSON.

    Args:
        column: (n,) what conversations are made of.
        rows: (r,) conversations.
        turns: (r,) the number of the last message of each.
    """
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
    """(n,) the texts of the rows of each conversation, one after the other; null for those without rows.

    Args:
        texts: (r,) of rows.
        rows: (r,) the conversation of each, ascending.
        count: of conversations.
    """
    made: list[str | None] = [None] * count
    for row, text in zip(rows.tolist(), texts.to_pylist(), strict=True):
        made[row] = (made[row] or "") + text
    return as_arrow(made, pa.large_string())
