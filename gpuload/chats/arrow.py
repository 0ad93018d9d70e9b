"""Rows for SFT as Arrow record batches, with the columns of data that TRL's `SFTTrainer` has prepared."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gpuload.arrays import Ragged, RowNumbers, offsets_of
from gpuload.engines.host.packs import IGNORED
from gpuload.loss import split
from gpuload.packing import Plan
from gpuload.row_reader import lists, row_reader
from gpuload.sources.columns import Columns

_INTS = pa.list_(pa.int32())
_FIELDS = [pa.field("input_ids", _INTS), pa.field("labels", _INTS)]


def sft_reader(ids: Ragged, plan: Plan, others: Columns, names: Sequence[str] | None) -> pa.RecordBatchReader:
    """Rows with labels.

    Args:
        ids: n rows, with bits (`gpuload.loss`).
        plan: n packs, each of what truncation keeps of one row.
        others, names: as for `row_reader`.
    """
    return row_reader(plan.tokens, _FIELDS, lambda rows: _ids_and_labels(ids, plan.take(rows)), others, names)


def pack_reader(ids: Ragged, plan: Plan) -> pa.RecordBatchReader:
    """Packs with labels and the lengths of their pieces.

    Labels are those of the rows, also for the first token of a piece: TRL's collator ignores it.

    Args:
        ids: as for `sft_reader`.
        plan: of these rows.
    """

    def make(packs: RowNumbers) -> list[pa.Array]:
        pieces = plan.take(packs)
        return [*_ids_and_labels(ids, pieces), lists(pieces.lengths, pieces.offsets)]

    fields = [*_FIELDS, pa.field("seq_lengths", _INTS)]
    return row_reader(plan.tokens, fields, make, Columns([]), [])


def _ids_and_labels(ids: Ragged, plan: Plan) -> list[pa.Array]:
    """The tokens of a plan: one list for each of its packs."""
    bounds = offsets_of(plan.lengths)
    # Token j of the result is in its piece i at j - bounds[i], and comes from the place of the piece plus that.
    shift = np.repeat(ids.offsets[plan.rows] + plan.first - bounds[:-1], plan.lengths)
    tokens, loss = split(Ragged(ids.values[np.arange(bounds[-1]) + shift], bounds))
    labels = np.where(loss.values, tokens.values, np.int32(IGNORED))
    return [lists(values, bounds[plan.offsets]) for values in (tokens.values, labels)]
