"""Rows for SFT as Arrow record batches, with the columns that a trainer reads."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, RowNumbers, offsets_of, ranges
from gpuload.core.marks import split
from gpuload.core.options import Trainer
from gpuload.dataset.arrow import lists, row_reader
from gpuload.dataset.trainer_columns import CHATS, arrays, fields
from gpuload.kinds.chats.batches import at_hand
from gpuload.packing import Plan
from gpuload.sources.columns import Columns


def sft_reader(
    ids: Ragged | DiskTokens, plan: Plan, others: Columns, names: Sequence[str] | None, trainer: Trainer
) -> pa.RecordBatchReader:
    """Rows with labels, or with another form of loss mask.

    Args:
        ids: n rows, with bits (`gpuload.core.marks`).
        plan: n packs, each of what truncation keeps of one row.
        others, names: as for `row_reader`.
        trainer: whose columns the rows have.
    """
    own = CHATS[trainer]
    return row_reader(plan.tokens, fields(own), lambda rows: _tokens(own, *at_hand(ids, plan, rows)), others, names)


def pack_reader(ids: Ragged | DiskTokens, plan: Plan) -> pa.RecordBatchReader:
    """Packs with labels and the lengths of their pieces.

    Labels are those of the rows, also for the first token of a piece: TRL's collator ignores it.

    Args:
        ids: as for `sft_reader`.
        plan: of these rows.
    """

    def make(packs: RowNumbers) -> list[pa.Array]:
        rows, pieces = at_hand(ids, plan, packs)
        return [*_tokens(own, rows, pieces), lists(pieces.lengths.astype(np.int32), pieces.offsets)]

    own = CHATS["trl"]
    columns = [*fields(own), pa.field("seq_lengths", pa.list_(pa.int32()))]
    return row_reader(plan.tokens, columns, make, Columns([]), [])


def _tokens(names: Sequence[str], ids: Ragged, plan: Plan) -> list[pa.Array]:
    """The tokens of a plan, in some columns: one list for each of its packs."""
    bounds = offsets_of(plan.lengths)
    first = ids.offsets[plan.rows] + plan.first
    if np.array_equal(first[1:], first[:-1] + plan.lengths[:-1]):  # they are one after the other in the store
        values = ids.values[int(first[:1].sum()) :][: int(bounds[-1])]
    else:
        values = ids.values[ranges(first, plan.lengths, bounds)]
    tokens, loss = split(Ragged(values, bounds))
    return arrays(names, tokens, loss, bounds[plan.offsets])
