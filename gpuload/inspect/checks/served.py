"""Checks of rows as served: what is found in a row is found in its conversation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, mask_of
from gpuload.core.options import Truncation
from gpuload.inspect.checks.findings import RowMask
from gpuload.inspect.checks.messages import flat_messages
from gpuload.inspect.checks.rows import CheckedRows, Hit, over_the_limit
from gpuload.inspect.checks.tokens import TokenChecks
from gpuload.inspect.served import joined_texts, messages_until, rows_in, texts_of
from gpuload.kinds.served.rows import within
from gpuload.kinds.served.stored import EMPTY_THINKING, Headers
from gpuload.kinds.served.turns import REASONS
from gpuload.reference.reference import Reference


@dataclass(frozen=True, eq=False)
class ServedPart:
    """The rows as served of n conversations."""

    rows: CheckedRows  # r rows as served; those of a conversation one after the other
    headers: Headers  # what the conversations say of them
    text: pa.LargeStringArray  # (n,) the texts of the rows of each conversation; null for those without rows

    def hits(self, checks: TokenChecks, limit: int | None, side: Truncation | None) -> Iterator[Hit]:
        """What checks of tokens find in these rows, by conversation. Of rows over the limit, if any, one `side` is cut;
        None: they are dropped."""
        rows, lengths, headers = self.rows, self.rows.tokens[0].lengths, self.headers
        if limit is not None:
            yield self._by_conversation(over_the_limit(lengths, limit), show_turn=True)
            fits, _ = within(headers, limit)
            kept = np.where(lengths > limit, fits if side else 0, lengths)
            left = np.zeros(len(headers.size), np.int64)
            np.maximum.at(left, headers.conversation, kept)
            lost = (left == 0) & (np.diff(headers.row_offsets) > 0)
            if side:
                yield Hit("no loss", lost, lambda row: f"no answer ends within the limit of {limit:,}")
                tokens = rows.tokens[0]
                values = tokens.values[tokens.positions < np.repeat(kept, lengths)]
                rows = replace(rows, tokens=[Ragged(values, np.append(0, np.cumsum(kept)))], cut=lengths > limit)
        for hit in checks.of(rows):
            yield self._by_conversation(hit)
        yield self._not_learned()
        empty = headers.counts[:, EMPTY_THINKING]
        yield Hit("empty thinking learned", empty > 0, lambda row: f"in {empty[row]} of its answers")

    def _not_learned(self) -> Hit:
        headers = self.headers

        def why(row: int) -> str:
            reasons = headers.reasons[headers.reason_offsets[row] : headers.reason_offsets[row + 1]].tolist()
            return "; ".join(f"{count} of its answers: {REASONS[number]}" for number, count in reasons)

        some = (np.diff(headers.reason_offsets) > 0) & (np.diff(headers.row_offsets) > 0)
        return Hit("turns not learned", some, why)  # of conversations without rows, nothing is learned: "no loss"

    def _by_conversation(self, hit: Hit, show_turn: bool = False) -> Hit:
        of, turns = self.headers.conversation, self.headers.rows[:, 1]
        found = mask_of(of[hit.rows], len(self.headers.size))

        def detail(row: int) -> str:
            at = int(np.flatnonzero(hit.rows & (of == row))[0])
            return f"{hit.detail(at)} in the row that ends with message {turns[at]}" if show_turn else hit.detail(at)

        return hit._replace(rows=found, detail=detail)


def served_part(
    reference: Reference,
    first: int,
    table: pa.Table,
    column: pa.Array,
    rendered: pa.LargeStringArray,
    stored: Ragged,
) -> ServedPart:
    """The rows as served of n conversations, of which `rendered` (n,) was encoded, where that is known, and which are
    `stored`. For the others see `CheckedRows`."""
    tokens, headers = rows_in(stored)
    of = headers.conversation
    until = messages_until(column, of, headers.rows[:, 1])
    # Of a conversation with a single row, the text of the row is known.
    made = rendered.take(pa.array(of)).to_pylist()
    several: RowMask = np.array([not text for text in made], np.bool_) | (np.diff(headers.row_offsets)[of] > 1)
    some = texts_of(reference, tokens.filter(several)).to_pylist()
    for row, text in zip(np.flatnonzero(several).tolist(), some, strict=True):
        made[row] = text
    texts = pa.array(made, pa.large_string())
    part = CheckedRows(first, table, until, [texts], [tokens], {}, {}, flat_messages(until), as_served=True)
    return ServedPart(part, headers, joined_texts(texts, of, len(column)))
