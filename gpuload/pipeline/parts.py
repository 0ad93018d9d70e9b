"""The batches that pass the stages of a load: rows of one source, or of several.

What a batch costs hardly depends on its size, on a device up to some megabytes and on the host up to some hundred rows,
so the rows of small files are joined before they are rendered. What is stored per file, columns and cache entries, is
taken apart again.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array, Ragged, RowNumbers, offsets_of, on_host
from gpuload.engines.protocol import ArrowPrompts, Prompts, RenderedRows, RenderedText, Tokenized
from gpuload.sources.batches import FIRST_PART, SHARE_OF_PROMPTS, decoded_bytes
from gpuload.sources.later import one_table
from gpuload.sources.read import Source

# Of batches on the host, each of which costs some milliseconds. Of more rows at once, more words are the same, and the
# encoder encodes those once.
_SMALL_ROWS, _SMALL_BYTES = 2048, 1 << 21


@dataclass(frozen=True, eq=False)
class SourceRows:
    """Some rows of one source.

    Attributes:
        source: number of the source.
        rows: (n,) row numbers in that source's file.
        table: the rows' columns, in host memory; until the ids are compared, on a device, maybe a `LaterTable`.
    """

    source: int
    rows: RowNumbers
    table: pa.Table


@dataclass(frozen=True, eq=False)
class SomeRows:
    """Some rows, in the order of their sources."""

    parts: tuple[SourceRows, ...]  # none of them empty, each of another source

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @cached_property
    def _firsts(self) -> Array:
        """(parts + 1,) int64, the first row of each part, and the number of rows."""
        return offsets_of(np.array([len(part.rows) for part in self.parts], np.int64))

    @cached_property
    def ranges(self) -> list[tuple[SourceRows, int, int]]:
        """Each part, with its first row, and that of the next one."""
        return [(part, *low_high) for part, low_high in zip(self.parts, pairwise(self._firsts.tolist()), strict=True)]

    @property
    def table(self) -> pa.Table:
        """The columns of rows of one source."""
        (part,) = self.parts
        return part.table

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(int(part.table.nbytes) for part in self.parts)

    def place(self, sources: Sequence[Source], row: int) -> str:
        """Where a row is, for messages: its file, and its number there."""
        at = int(np.searchsorted(self._firsts, row, side="right")) - 1
        part = self.parts[at]
        return f"{sources[part.source].name} row {part.rows[row - self._firsts[at]]}"


@dataclass(frozen=True, eq=False)
class Batch(SomeRows):
    """Rows that were read, with their prompts as the engine reads them. If they are of several sources, as Arrow."""

    prompts: Prompts

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(getattr(self.prompts, "held_bytes", 0))

    def prompts_of(self, low: int, high: int) -> Prompts:
        """The prompts of a part."""
        if len(self.parts) == 1:
            return self.prompts
        assert isinstance(self.prompts, ArrowPrompts)
        return ArrowPrompts(self.prompts.column.slice(low, high - low))


@dataclass(frozen=True, eq=False)
class Rendered(Batch):
    """Rows with the rendered prompts."""

    text: RenderedText


@dataclass(frozen=True, eq=False)
class Encoded(SomeRows):
    """Rows with their token ids. From the token cache, rows are so from the start: they pass the stages unchanged.

    Attributes:
        tokens: the token ids.
        rendered: what they were made of; None if they are from the cache.
        sizes: (k, n) what the kind has counted of each row, in host memory; nothing until it has.
        compared: the rows that were compared with the tokenizer.
        invalid: row → which of its columns is not valid; None where that was not looked for yet.
    """

    tokens: Tokenized
    rendered: Rendered | None = None
    sizes: RowNumbers = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    compared: RowNumbers = field(default_factory=lambda: np.zeros(0, np.int64))
    invalid: dict[int, str] | None = None

    def apart(self) -> Iterator["Encoded"]:
        """The rows of each source on their own, for what is stored per file; those of several have their ids in host
        memory, and no text."""
        if len(self.parts) == 1:
            yield self
            return
        rendered = self.rendered
        assert rendered is not None
        assert isinstance(rendered.text, RenderedRows)
        ids, sizes, control = self.tokens.ids.to_host(), on_host(self.tokens.text_sizes), rendered.text.with_control
        for part, low, high in self.ranges:
            offsets, rows = ids.offsets[low : high + 1], range(low, high)
            found = self.tokens.rejected
            rejected = {row - low: found[row] for row in rows if row in found}
            given = rendered.text.by_reference
            reasons = dict(Counter(given[row] for row in rows if row in given and row not in found))
            tokens = Tokenized(
                ids=Ragged(ids.values[offsets[0] : offsets[-1]], offsets - offsets[0]),
                text_sizes=sizes[low:high],
                text_nbytes=int(sizes[low:high].sum()),
                rejected=rejected,
                compiled_rows=high - low - len(rejected) - sum(reasons.values()),
                reasons=reasons,
                control_rows=0 if control is None else int(control[low:high].sum()),
                transient=self.tokens.transient,
            )
            compared = self.compared[(self.compared >= low) & (self.compared < high)] - low
            invalid = {row - low: self.invalid[row] for row in rows if row in self.invalid} if self.invalid else {}
            some = replace(rendered, parts=(part,), prompts=rendered.prompts_of(low, high))
            yield Encoded((part,), tokens, some, self.sizes[:, low:high], compared, invalid)


def joined(
    batches: Iterator[Batch | Encoded], nbytes: int, most_rows: float = math.inf, first: int = FIRST_PART
) -> Iterator[Batch | Encoded]:
    """The same rows in larger batches, also of several sources: each costs a device the same launches and waits. The
    first one is smaller, so that the device has work while the next rows are read.

    Args:
        batches: whose prompts are joined if they are in host memory.
        nbytes: of prompts, how large a batch is at least.
        most_rows: so many rows are enough, however small they are, and a batch that has them is not joined.
        first: of the parts of `nbytes`, how many times smaller the first one is.
    """
    enough = nbytes // first
    waiting: list[Batch] = []
    of_prompts = of_tables = rows = 0
    for batch in batches:
        prompts = batch.prompts if isinstance(batch, Batch) else None
        if waiting and (len(batch) >= most_rows or not _alike(waiting[0].prompts, prompts)):
            yield _as_one(waiting)
            waiting, of_prompts, of_tables, rows = [], 0, 0, 0
        if type(prompts) is not ArrowPrompts:
            yield batch
            continue
        assert isinstance(batch, Batch)
        waiting.append(batch)
        of_prompts, of_tables = of_prompts + decoded_bytes(prompts.column), of_tables + batch.nbytes
        rows += len(batch)
        if rows >= most_rows or of_prompts >= enough or of_tables >= SHARE_OF_PROMPTS * enough:
            yield _as_one(waiting)
            waiting, of_prompts, of_tables, rows, enough = [], 0, 0, 0, nbytes
    if waiting:
        yield _as_one(waiting)


def small_ones_joined(batches: Iterator[Batch | Encoded]) -> Iterator[Batch | Encoded]:
    """`joined` for the host: batches that have fewer than `_SMALL_ROWS` and `_SMALL_BYTES`."""
    return joined(batches, _SMALL_BYTES, _SMALL_ROWS, first=1)


def _alike(first: Prompts, second: Prompts | None) -> bool:
    """Whether prompts in host memory can be joined; those with images are not."""
    if type(first) is not ArrowPrompts or type(second) is not ArrowPrompts:
        return False
    return bool(first.column.type == second.column.type)


def _as_one(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    parts = []
    for source, some in groupby((part for batch in batches for part in batch.parts), lambda part: part.source):
        rows, tables = zip(*((part.rows, part.table) for part in some), strict=True)
        parts.append(SourceRows(source, np.concatenate(rows), one_table(tables)))
    columns = [batch.prompts.column for batch in batches if isinstance(batch.prompts, ArrowPrompts)]
    return Batch(tuple(parts), ArrowPrompts(pa.concat_arrays(columns)))
