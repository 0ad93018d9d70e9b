"""The rows that a load keeps.

In memory, their ids are where the engine keeps them, and their columns are Arrow tables. `keep_on_disk.py`
keeps them on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gpuload.cache import store
from gpuload.cache.store import TokenCache
from gpuload.core.arrays import RowNumbers
from gpuload.core.errors import StoreError
from gpuload.core.options import Options
from gpuload.dataset.report import Report
from gpuload.engines.protocol import Engine, TokenStore
from gpuload.pipeline.filter import Mask, kept_columns
from gpuload.pipeline.parts import Encoded
from gpuload.pipeline.ranks import KeptRows, Ranks
from gpuload.pipeline.room import choose_disk, row_bytes
from gpuload.pipeline.stream import Parts
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import Clock
from gpuload.sources.columns import Columns, drained
from gpuload.sources.read import Source

if TYPE_CHECKING:
    from gpuload.pipeline.keep_on_disk import OnDisk


class InMemory:
    """Collects the rows of a load in memory. `OnDisk` has the same methods.

    Args:
        sources: of the load.
        engine: keeps the ids.
        cache: has the ids of earlier loads.
        options: of the load.
        sanitized: see `kept_columns`.
    """

    def __init__(self, sources: Sequence[Source], engine: Engine, cache: TokenCache, options: Options, sanitized: bool):
        self._sources, self._engine, self.cache = sources, engine, cache
        self._options, self._sanitized = options, sanitized
        self._ids: list[TokenStore] = []
        self._tables: list[pa.Table] = []
        self._numbers: list[RowNumbers] = []
        self._sizes: list[RowNumbers] = []
        self._finding = Lock()

    def __len__(self) -> int:
        """How many rows there are so far."""
        return sum(map(len, self._ids))

    def open(self, number: int) -> Parts:
        """The rows of a source in order, with prompts, or with ids from an earlier load."""
        source = self._sources[number]
        with self._finding:  # several sources are opened at once
            entry = self.cache.find(source)
        return (entry or self._engine).read(source, self._options.prompt_key, self._options.return_raw_chat)

    def add(self, batch: Encoded, keep: Mask, numbers: RowNumbers) -> None:
        """Adds rows.

        Args:
            batch: n rows with tokens.
            keep: (n,) bool, those to keep.
            numbers: (n,) int64, their numbers over all sources.
        """
        if batch.rendered is not None and self.cache.writes(self._sources[part.source] for part in batch.parts):
            for one in batch.apart():
                (part,) = one.parts
                assert one.rendered is not None
                columns = self.cache.columns_of(part.table, one.rendered.prompts, one.tokens)
                source, compared = self._sources[part.source], len(one.compared)
                self.cache.write(part.source, source, part.rows, one.tokens, compared, columns)
        for number in range(len(batch.parts)):
            self._tables.append(kept_columns(batch, number, keep, self._options, self._sanitized))
        self._ids.append(self._engine.keep(batch.tokens.ids, None if keep.all() else np.flatnonzero(keep)))
        self._numbers.append(numbers[keep])
        self._sizes.append(batch.sizes.compress(keep, axis=1))

    def complete(self, trusted: bool) -> None:
        """Caches the ids of sources that were read as a whole.

        Args:
            trusted: no row differed from the tokenizer.

        Raises:
            SourceError: the prompts of a file have changed since the load began.
        """
        self.cache.finish(self._sources, trusted)

    def numbers(self) -> RowNumbers:
        """The numbers of all rows that were added."""
        return np.concatenate([np.zeros(0, np.int64), *self._numbers])

    def exchange(self, ranks: Ranks, report: Report, shapes: dict[int, bool]) -> Report:
        """Adds the rows of the other ranks, and returns the report of all of them.

        Args:
            ranks: the others.
            report, shapes: of this rank's rows, see `KeptRows`.
        """
        own = KeptRows(self._ids, self._tables, self.numbers(), self._sizes, report, shapes)
        everyone = ranks.exchange(own, partial(self._engine.keep, rows=None))
        self._ids, self._tables, numbers, self._sizes, report, _ = everyone
        self._numbers = [numbers]
        return report

    def finish(self, order: RowNumbers | None) -> tuple[TokenStore, RowNumbers, Columns]:
        """The ids of all rows, their sizes (k, n) and their columns, in the given order; None for the order in which
        they were added."""
        sizes = np.concatenate(self._sizes, axis=1)
        sizes = sizes if order is None else sizes.take(order, axis=1)
        return self._engine.store(self._ids, order), sizes, Columns(drained(self._tables), order)

    def discard(self) -> None:
        """Removes unfinished files, however the load ended."""
        self.cache.discard()


def choose_keeper(
    sources: Sequence[Source],
    wanted: RowNumbers | None,
    engine: Engine,
    reference: Reference,
    clock: Clock | None,
    options: Options,
    report: Report,
) -> InMemory | OnDisk:
    """What collects the rows: in memory, or on disk.

    Args:
        sources: of the load.
        wanted: the rows to read, numbered over all sources; None for all.
        engine, reference, clock, options: see `InMemory` and `TokenCache`.
        report: gets a note where the rows are on disk.

    Raises:
        StoreError: a store on disk is asked for, and there is too little space for it.
    """
    if choose_disk(options, sources, wanted):
        from gpuload.pipeline.keep_on_disk import OnDisk

        try:
            cache = TokenCache(options, reference, clock, in_place=True)
            kept = OnDisk(sources, engine, cache, options, report.sanitized, wanted)
            report.notes.append(f"ids and columns are on disk, in {kept.directory}")
            return kept
        except StoreError as error:
            if options.store != "auto":
                raise
            report.notes.append(f"ids and columns are in memory, although they may take most of it: {error}")
    # What is made of images takes longer to make than the tokenizer takes to be identified.
    known = reference.by_name or (reference.made is not None and any(source.content for source in sources))
    pays = known or row_bytes(sources, wanted, (options.prompt_key,)) >= store.LEAST_BYTES
    cache = TokenCache(options if pays else replace(options, token_cache=False), reference, clock)
    return InMemory(sources, engine, cache, options, report.sanitized)
