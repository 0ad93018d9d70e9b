"""Rows of a trainer's dataset for SFT in the token cache, so that a second start maps them instead of tokenizing.

    find      the rows that an earlier start has made of the same data, with the same tokenizer, options and code
    add       rows that were made, in order
    finish    once a sample of them is equal to the trainer's: now they are an entry of the cache

All rows of a dataset are one entry, whatever files they come from; what rows have in addition to ids are its columns.
With `store="disk"`, the entry is used in place; one that cannot be identified belongs to the dataset and is removed
with it.

The key has the digests of the trainer's functions that are replaced, because a rule that is exact for them may not be
for others; and the sample is compared at each start, whether the rows were made or found.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa

from gpuload.cache.column_file import columns_of
from gpuload.cache.directory import make_room
from gpuload.cache.entry import Entry, EntryWriter
from gpuload.cache.faults import not_written
from gpuload.cache.key import is_plain
from gpuload.cache.store import TokenCache
from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import GpuloadError, StoreError
from gpuload.core.files import Unfinished, partial_bytes, remove_orphans
from gpuload.core.options import Options
from gpuload.engines.protocol import RowCounts, Tokenized
from gpuload.integrations.known_code import digest
from gpuload.integrations.messages.rows import MessageRows
from gpuload.pipeline.room import choose_disk
from gpuload.reference.reference import Reference
from gpuload.sources.columns import Columns
from gpuload.sources.read import Source
from gpuload.sources.types import json_text

_Item = TypeVar("_Item")

_ROW_BYTES = 32  # offsets and sizes of a row


@dataclass
class StoredRows:
    """n rows of a dataset."""

    ids: Ragged | DiskTokens  # with a bit for loss (`core.marks`), in memory or in a mapped file; empty for `others`
    others: dict[int, str] = field(default_factory=dict)  # row → why the trainer's own function has to prepare it
    rendering: RowCounts = field(default_factory=RowCounts)  # how the texts were rendered, when they were made
    counts: Counter[str] = field(default_factory=Counter)  # what else the trainer's rule has counted, by name
    columns: Columns = field(default_factory=lambda: Columns([]))  # what rows have in addition, likewise
    found: bool = False  # whether an earlier start has made them

    def count(self, part: Tokenized, first: int) -> None:
        """Adds what is known of the rows from `first` on."""
        self.others.update((first + row, why) for row, why in part.rejected.items())
        self.rendering.add_counts(part)
        self.counts.update(part.counts)


def identified(
    items: Iterable[_Item], about: Callable[[_Item], tuple[int, Any]], others: dict[int, str]
) -> tuple[list[_Item], bytes, int]:
    """The rows that are JSON, which templates need; a digest of all rows; and about how many bytes they are. `about`
    says the number of an item's row, and all that its ids are made of. `others` gets rows that cannot be tokenized by
    columns, with the reason."""
    found, digest, nbytes = [], hashlib.blake2b(digest_size=16), 0
    for item in items:
        row, value = about(item)
        try:
            text = json_text([row, value]).encode()
        except TypeError as error:
            others[row] = str(error)
            continue
        found.append(item)
        digest.update(text)
        nbytes += len(text)
    digest.update(repr(sorted(others.items())).encode(errors="backslashreplace"))
    return found, digest.digest(), nbytes


@dataclass(frozen=True)
class Rule:
    """What decides the ids of rows, in addition to the data and the tokenizer."""

    trainer: str  # its name and version
    functions: Sequence[Any]  # of the trainer, which are replaced
    settings: Mapping[str, Any]  # of the trainer, and what else was computed of them: plain data

    def identity(self) -> tuple[bytes, str | None]:
        """What identifies it; or why nothing does."""
        code = {function.__qualname__: digest(function) for function in self.functions}
        unknown = next((name for name, found in code.items() if found is None), None)
        if unknown is not None:
            return b"", f"the code of {unknown} is not in a file of {self.trainer}"
        settings = dict(self.settings)
        if not is_plain(settings):
            name = next(name for name, value in settings.items() if not is_plain(value))
            return b"", f"{name} is not plain data"
        return repr([self.trainer, code, settings]).encode(errors="backslashreplace"), None


_Unequal = Callable[[StoredRows], str | None]
_Make = Callable[[], tuple[MessageRows, pa.Table | None]]


class RowCache:
    """The cache of one dataset, for one start: a context manager, which removes what is unfinished.

    `content` is a digest of everything that rows are made of. `TokenCache.content` remembers that of a file. It is
    computed again before rows become an entry, and must be the same. A `StoreError` if a store on disk is asked for,
    and there is too little space for it.
    """

    def __init__(
        self,
        options: Options,  # `token_cache`, `token_cache_bytes`, `cache_dir`, `store` and `verify` are used
        reference: Reference,  # the tokenizer with its template
        rule: Rule,
        *,
        name: str,  # of the data, for lists of what is cached
        rows: int,  # n, how many there are
        nbytes: int,  # about how many bytes their ids and columns take: ids as many as their texts
        content: Callable[[TokenCache], bytes],
    ):
        identity, unknown = rule.identity()
        self._notes: list[str] = []
        if unknown is not None and options.token_cache:
            self._notes.append(f"tokens are not cached: {unknown}")
            options = replace(options, token_cache=False)
        self._options, self._reference = options, reference
        self._source = Source(
            name,
            rows,
            nbytes,
            pa.schema([]),
            lambda: iter(()),
            b"",
            content=lambda *_: hashlib.blake2b(content(self._cache) + identity, digest_size=16).digest(),
            decoded_bytes=lambda _: nbytes,
        )
        self._made, self._num_rows = StoredRows(Ragged.from_lists([])), 0
        self._parts, self._tables = list[Ragged](), list[pa.Table]()
        self._unfinished: Unfinished | None = None
        self._writer: EntryWriter | None = None
        self._look_up(rows > 0 and choose_disk(options, [self._source], None))

    def _look_up(self, on_disk: bool) -> None:
        """Looks for the entry, and makes room for it on disk if it is to be made there."""
        self._on_disk = on_disk
        with self._reference.clock_stopped() as clock:
            self._cache = TokenCache(self._options, self._reference, clock, in_place=on_disk)
        remove_orphans(self._cache.directory)
        self._entry = self._cache.find(self._source)
        if on_disk and self._entry is None:
            try:
                make_room(self._cache.directory, self._source.nbytes + _ROW_BYTES * self._source.num_rows, set())
            except StoreError as error:
                if self._options.store != "auto":
                    raise
                self._notes.append(f"ids are in memory, although they may take most of it: {error}")
                self._look_up(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.discard()
        if self._unfinished is not None:
            assert self._writer is not None
            self._writer.discard()
            self._unfinished.remove()

    def __len__(self) -> int:
        """How many rows were added so far."""
        return self._num_rows

    @property
    def notes(self) -> list[str]:
        """Why rows are not cached, and where they are if not in memory."""
        where = [f"ids are on disk, in {self._cache.directory}"] if self._on_disk else []
        return [*where, *self._notes, *self._cache.notes]

    def find(self, unequal: _Unequal) -> StoredRows | None:
        """The rows that an earlier start has made; None if they have to be made.

        `unequal` compares a sample of them with the trainer's, and returns which row differs. An entry with such a row,
        or with a damaged one, is removed.
        """
        if self._entry is None:
            return None
        try:
            found = self._stored(self._entry)
            found.found = True
            why = unequal(found)
        except StoreError as error:
            why = str(error)
        if why is None:
            return found
        self._notes.append(f"rows from the cache are made again: {why}")
        for path in self._entry.paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._look_up(self._on_disk)
        return None

    def find_or_make(self, unequal: _Unequal, make: _Make, logger: logging.Logger) -> StoredRows | str:
        """The rows that an earlier start has made, or those that `make` returns, with their columns, all at once; or
        which row of these differs from the trainer's, see `find`."""
        rows = self.find(unequal)
        if rows is None:
            made, columns = make()
            tables = [] if columns is None else [columns]
            if why := unequal(StoredRows(made.ids, made.fallback, columns=Columns(tables))):
                return why
            self.add(made.ids, made.fallback, made.rendering, columns)
            rows = self.finish()
        for note in [*["rows are from the cache"] * rows.found, *self.notes]:
            logger.info("gpuload: %s", note)
        return rows

    def add(
        self,
        ids: Ragged,
        others: Mapping[int, str],
        rendering: RowCounts,
        columns: pa.Table | None = None,
        **counts: int,
    ) -> None:
        """Appends rows, see `StoredRows`, which have columns always or never; a `StoreError` if they cannot be written
        to a store on disk."""
        part = Tokenized(
            ids=ids,
            text_sizes=np.zeros(len(ids), np.int64),
            text_nbytes=0,
            rejected=dict(others),
            compiled_rows=rendering.compiled_rows,
            reasons=rendering.reasons,
            control_rows=rendering.control_rows,
            counts=counts,
        )
        numbers = np.arange(self._num_rows, self._num_rows + len(ids))
        if self._on_disk:
            self._write(part, columns)
        else:
            if len(ids):
                self._cache.write(0, self._source, numbers, part, 0, columns)
            self._parts.append(ids)
            self._tables += [] if columns is None else [columns]
            self._made.count(part, self._num_rows)
        self._num_rows += len(ids)

    def _write(self, part: Tokenized, columns: pa.Table | None) -> None:
        """Appends rows to the file of a store on disk."""
        try:
            if self._writer is None:
                self._unfinished = Unfinished(self._cache.directory)
                key = self._cache.key_of(self._source) or "rows"
                self._writer = EntryWriter(self._unfinished.path, key, self._source.name)
            self._writer.write(part, 0, columns)
        except OSError as error:
            raise self._not_written(error) from error

    def finish(self) -> StoredRows:
        """All rows that were added. They become an entry of the cache, if something identifies them.

        Raises:
            SourceError: the data have changed since their digest was computed.
            StoreError: they cannot be written to a store on disk.
        """
        if self._on_disk:
            return self._stored(self._closed())
        self._cache.finish([self._source], trusted=True)
        self._made.ids, self._made.columns = Ragged.concatenate(self._parts), Columns(self._tables)
        return self._made

    def _closed(self) -> Entry:
        """The complete file of a store on disk, at its place in the cache if it has one."""
        assert self._writer is not None
        writer = self._writer
        try:
            self._cache.check(self._source)
            writer.close(self._options.verify)
            known = self._cache.key_of(self._source) and self._cache.unchanged
            path = self._cache.accept(self._source, writer) if known else writer.path
            return Entry.again(path, writer.key, self._num_rows)
        except GpuloadError:
            raise
        except OSError as error:
            raise self._not_written(error) from error

    def _stored(self, entry: Entry) -> StoredRows:
        """The rows of an entry: in memory, or in place; a `StoreError` if what is copied to memory has been damaged."""
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.ids.lengths for part in entry.parts)])
        owner = None
        if self._unfinished is not None and entry.path.parent == self._unfinished.path:
            owner, self._unfinished = self._unfinished, None
        tokens = DiskTokens([entry], np.arange(len(lengths)), lengths, owner)
        rows = StoredRows(tokens if self._on_disk else tokens.to_host())
        if (file := entry.columns) is not None and self._on_disk:
            rows.columns = columns_of([file], np.arange(len(lengths)))
        elif file is not None:
            rows.columns = Columns(file.table(number) for number in range(len(file.parts)))
        for first, part in zip(entry.first_rows.tolist(), entry.parts, strict=False):
            rows.count(part, first)
        return rows

    def _not_written(self, error: OSError) -> StoreError:
        return not_written(self._cache.directory, error, partial_bytes(self._cache.directory))
