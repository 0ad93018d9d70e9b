"""The rows that a load keeps, on disk: ids and columns are written batch by batch, and mapped into memory at the end.

    find      which files have ids and columns from an earlier load? Is there enough space for the rest?
    read      what is there already is not read again
    add       ids and columns of a batch are appended to the files of its source
    finish    files with all rows of a source get their place in the cache, and all files are mapped

Files hold all rows that were read, in order. What is in memory for each row that was kept is its number and its length.
Files whose rows cannot be identified, such as those of a frame, or a part of the rows of a file, belong to the dataset:
they are removed with it.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from gpuload.cache.column_file import ColumnFile, ColumnWriter, columns_of
from gpuload.cache.directory import COLUMNS, IDS, make_room, store_directory
from gpuload.cache.entry import Entry, EntryWriter
from gpuload.cache.faults import not_written
from gpuload.cache.key import own_code
from gpuload.cache.store import TokenCache
from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.errors import GpuloadError, StoreError
from gpuload.core.files import Unfinished, partial_bytes, remove_orphans
from gpuload.core.options import Options
from gpuload.engines.protocol import Engine
from gpuload.pipeline.filter import Mask, kept_columns
from gpuload.pipeline.parts import Encoded
from gpuload.pipeline.room import share
from gpuload.pipeline.stream import Parts
from gpuload.sources.columns import Columns
from gpuload.sources.read import Source
from gpuload.sources.remote import RemoteFile
from gpuload.sources.urls import changed

_ROW_BYTES = 32  # offsets and sizes of a row


@dataclass
class _Files:
    """The files of one source.

    Attributes:
        entry, columns: those of an earlier load, with all rows of the source.
        tokens, writer: those that this load writes.
        rows: how many of its rows were read.
        transient: another load may make other rows of it.
    """

    entry: Entry | None
    columns: ColumnFile | None
    tokens: EntryWriter | None = None
    writer: ColumnWriter | None = None
    rows: int = 0
    transient: bool = False


class OnDisk:
    """As `InMemory`, on disk.

    Args:
        sources: of the load.
        engine: reads them.
        cache: see `InMemory`.
        options: of the load.
        sanitized: see `kept_columns`.
        wanted: the rows to read, numbered over all sources; None for all.

    Attributes:
        directory: where the files are.

    Raises:
        StoreError: there is too little space.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        engine: Engine,
        cache: TokenCache,
        options: Options,
        sanitized: bool,
        wanted: RowNumbers | None,
    ):
        self._sources, self._engine, self.cache, self._options = sources, engine, cache, options
        self._sanitized, self._wanted = sanitized, None if wanted is None else np.sort(wanted)
        self.directory = store_directory(options.cache_dir)
        remove_orphans(self.directory)
        # Of the rows that were kept: their numbers over all sources, and what the kind has counted of them. The arrays
        # have room for all rows; a page of them takes no memory until it is written to.
        total = sum(source.num_rows for source in sources) if wanted is None else len(wanted)
        self._numbers, self._sizes, self._count = np.empty(total, np.int64), np.empty((0, total), np.int64), 0
        self._last = 0  # the source of the last batch
        self._unfinished: Unfinished | None = None
        self._starts = offsets_of(np.array([source.num_rows for source in sources], np.int64))
        self._keys = [self._columns_key(source) for source in sources]
        self._files = [self._find(*each) for each in zip(sources, self._keys, strict=True)]
        needed = sum(self._needed(*each) for each in zip(sources, self._files, strict=True))
        make_room(self.directory, int(needed * share(sources, wanted)), self._in_use)

    def __len__(self) -> int:
        return self._count

    def open(self, number: int) -> Parts:
        source, files, options = self._sources[number], self._files[number], self._options
        if files.entry is not None and files.columns is not None:
            return _stored(files.entry, files.columns)
        return (files.entry or self._engine).read(source, options.prompt_key, options.return_raw_chat)

    def add(self, batch: Encoded, keep: Mask, numbers: RowNumbers) -> None:
        """Writes n rows, and remembers which of them to keep; see `InMemory`.

        Raises:
            StoreError: they cannot be written.
        """
        try:
            for number, one in enumerate(batch.apart()):
                part = batch.parts[number]
                if part.source != self._last:  # the source before this one has no more rows
                    self._close(self._files[self._last])
                    self._last = part.source
                self._write(one, batch, number)
        except OSError as error:
            raise self._not_written(error) from error
        new = slice(self._count, self._count + int(keep.sum()))
        if not len(self._sizes):
            self._sizes = np.empty((len(batch.sizes), len(self._numbers)), np.int64)
        self._numbers[new], self._sizes[:, new] = numbers[keep], batch.sizes[:, keep]
        self._count = new.stop

    def numbers(self) -> RowNumbers:
        return self._numbers[: self._count]

    def complete(self, trusted: bool) -> None:
        """See `InMemory`.

        Raises:
            StoreError: the rest cannot be written.
        """
        for number in range(len(self._sources)):
            try:
                self._check(number)
                self._complete(number, trusted)
            except GpuloadError:
                raise
            except OSError as error:
                raise self._not_written(error) from error
        paths = self._in_use
        if self._unfinished is not None and not any(path.parent == self._unfinished.path for path in paths):
            self._unfinished.remove()
            self._unfinished = None

    def finish(self, order: RowNumbers | None) -> tuple[DiskTokens, RowNumbers, Columns]:
        sizes = self._sizes[:, : self._count]
        ids = self._places([files.entry is not None and files.tokens is None for files in self._files])
        columns = self._places([files.columns is not None and files.writer is None for files in self._files])
        if np.array_equal(ids, columns):
            columns = ids
        if order is not None:
            sizes = sizes.take(order, axis=1)
            ids, columns = ids[order], ids[order] if columns is ids else columns[order]
        read = [files for files in self._files if files.rows]
        opened = [files.entry for files in read if files.entry is not None]
        tables = [files.columns for files in read if files.columns is not None]
        owner, self._unfinished = self._unfinished, None
        return DiskTokens(opened, ids, sizes[0], owner), sizes, columns_of(tables, columns)

    def discard(self) -> None:
        """Closes and removes what was written by a load that has failed."""
        for files in self._files:
            for writer in (files.tokens, files.writer):
                if writer is not None and not writer.closed:
                    writer.discard()
        if self._unfinished is not None:
            self._unfinished.remove()

    # -- files -----------------------------------------------------------------------------------------------------

    def _columns_key(self, source: Source) -> str | None:
        """Identifies the columns of a source; None if nothing does."""
        options = self._options
        if source.content is None or not options.token_cache or options.return_full_prompt:  # texts depend on more
            return None
        names = self._names(source)
        raw = options.prompt_key if options.return_raw_chat else ""
        about = repr([own_code(), pa.__version__, options.prompt_key, raw, source.num_rows, names]).encode()
        made, decides = self.cache.made, self.cache.decides
        if made is not None:
            if decides is None:
                return None
            names, about = sorted({*names, *self.cache.of_prompts(source)}), about + decides
        if isinstance(source.file, RemoteFile) and source.file.has_version:  # its values would be transferred twice
            return hashlib.blake2b(source.file.content(*names) + about, digest_size=16).hexdigest()
        try:
            return hashlib.blake2b(self.cache.content(source, names) + about, digest_size=16).hexdigest()
        except (OSError, pa.ArrowException, UnicodeDecodeError):  # reading the source will raise the proper error
            return None

    def _names(self, source: Source) -> list[str]:
        """The columns of a source that rows have."""
        hidden = () if self._options.return_raw_chat else (self._options.prompt_key,)
        return [name for name in source.schema.names if name not in hidden]

    def _find(self, source: Source, key: str | None) -> _Files:
        """What an earlier load has stored of a source."""
        if not source.num_rows:
            return _Files(None, None)
        columns = ColumnFile.open(self.directory / f"{key}{COLUMNS}", key) if key else None
        if columns is not None:
            with suppress(OSError):
                os.utime(columns.path)  # the time of the last use
        entry = self.cache.find(source)
        if self.cache.made is not None and columns is not None and (entry is None or columns.of != entry.mark):
            columns = None  # files that rows refer to have changed since
        return _Files(entry, columns)

    def _needed(self, source: Source, files: _Files) -> int:
        """About how many bytes are to be written for a source. Ids of English text take about as many as the text."""
        size, options = source.decoded_bytes, self._options
        made = () if self.cache.made is None else self.cache.made.reads(source)  # what is made of these is small
        others = [name for name in self._names(source) if name not in made]
        texts = int(options.return_full_prompt)
        ids = 0 if files.entry else size([options.prompt_key]) + _ROW_BYTES * source.num_rows
        return ids + (0 if files.columns else size(others) + size([options.prompt_key]) * texts)

    @property
    def _in_use(self) -> set[Path]:
        found = [(files.entry, files.columns) for files in self._files]
        return {each.path for both in found for each in both if each is not None}

    def _write(self, batch: Encoded, whole: Encoded, number: int) -> None:
        """Writes the rows of a source, which are the part of that number of a whole batch."""
        part = whole.parts[number]
        source, files = self._sources[part.source], self._files[part.source]
        files.rows += len(batch)
        if files.entry is not None and files.columns is not None:
            return
        self._unfinished = self._unfinished or Unfinished(self.directory)
        directory = self._unfinished.path
        if files.entry is None:
            if files.tokens is None:
                name = f"{part.source}{IDS}"  # a file may be given twice: its key is not enough
                files.tokens = EntryWriter(directory, self.cache.key_of(source) or name, source.name, name)
            assert batch.rendered is not None
            columns = self.cache.columns_of(part.table, batch.rendered.prompts, batch.tokens)
            files.transient |= batch.tokens.transient
            files.tokens.write(batch.tokens, len(batch.compared), columns)
        if files.columns is None:
            if files.writer is None:
                path = directory / f"{part.source}-others{COLUMNS}"
                files.writer = ColumnWriter(path, self._keys[part.source] or path.name, source.name)
            table = kept_columns(whole, number, np.ones(len(whole), bool), self._options, self._sanitized)
            files.writer.add(table, len(batch), batch.invalid or {})

    def _close(self, files: _Files) -> None:
        """Writes what waits to be written of a source: open files together would take as much memory as there are.

        Raises:
            OSError: it cannot be written.
        """
        if files.tokens is not None and not files.tokens.closed:
            files.tokens.close(self._options.verify)
        if files.writer is not None and not files.writer.closed:
            written = files.tokens if files.entry is None else files.entry
            files.writer.of = written.mark if written is not None else ""
            files.writer.close()

    def _check(self, number: int) -> None:
        """Checks that a file, if rows were read from it, still has what the keys of its ids and of its columns say.

        Raises:
            SourceError: it has other values.
        """
        source, files, key = self._sources[number], self._files[number], self._keys[number]
        if files.tokens is not None or files.writer is not None:
            self.cache.check(source)
            if key is not None and self._columns_key(source) != key:
                raise changed(source.name)

    def _complete(self, number: int, trusted: bool) -> None:
        """Completes the files of a source, gives them their place if they have all of its rows, and maps them.

        Raises:
            OSError: they cannot be written.
        """
        source, files = self._sources[number], self._files[number]
        whole = trusted and files.rows == source.num_rows and not files.transient
        self._close(files)
        if files.tokens is not None:
            path = files.tokens.path
            if whole and self.cache.key_of(source) and self.cache.unchanged:
                path = self.cache.accept(source, files.tokens)
            files.entry = Entry.again(path, files.tokens.key, files.rows)
        if files.writer is not None:
            path, key = files.writer.path, self._keys[number]
            if whole and key is not None:
                path = path.replace(self.directory / f"{key}{COLUMNS}")
            files.columns = ColumnFile.again(path, files.writer.key)

    def _places(self, found: Sequence[bool]) -> RowNumbers:
        """(n,) where the kept rows are, counted over the rows of all files of one kind, from the rows' numbers alone: a
        file that was found has all rows of its source, and one that was written has those that were read, both in
        ascending order.

        Args:
            found: of which sources the files were there before, with all of their rows.
        """
        numbers = self.numbers()
        if self._wanted is None:  # either has all rows
            return numbers
        whole, begins = np.array(found, bool), np.asarray(np.searchsorted(self._wanted, self._starts))
        read = np.diff(begins)
        sizes = np.where(whole, np.diff(self._starts), read) * (read > 0)  # without wanted rows, no file is opened
        source = np.asarray(np.searchsorted(self._starts, numbers, side="right") - 1)
        among_read = np.searchsorted(self._wanted, numbers) - begins[source]
        in_file = np.where(whole[source], numbers - self._starts[source], among_read)
        return np.asarray(offsets_of(sizes)[source] + in_file)

    def _not_written(self, error: OSError) -> StoreError:
        held = partial_bytes(self.directory)
        return not_written(self.directory, error, held)


def columns_on_disk(
    sources: Sequence[Source], options: Options, wanted: RowNumbers | None
) -> tuple[Columns, Unfinished]:
    """All columns of rows that need no tokens, in files that are removed with the second result.

    Args:
        wanted: the rows to serve, numbered over all sources; None for all.

    Raises:
        StoreError: there is too little space, or the files cannot be written.
    """
    directory = store_directory(options.cache_dir)
    remove_orphans(directory)
    make_room(directory, sum(source.decoded_bytes(None) for source in sources), set())
    try:
        owner = Unfinished(directory)
        files = [_written(source, owner.path / f"{number}{COLUMNS}") for number, source in enumerate(sources)]
    except OSError as error:
        raise not_written(directory, error, partial_bytes(directory)) from error
    rows = np.arange(sum(file.num_rows for file in files)) if wanted is None else wanted
    return columns_of(files, rows), owner


def _written(source: Source, path: Path) -> ColumnFile:
    """The columns of a source, in a new file."""
    writer = ColumnWriter(path, path.name, source.name)
    for table in source.batches():
        writer.add(table, table.num_rows, {})
    writer.close()
    return ColumnFile.again(path, writer.key)


def _stored(entry: Entry, columns: ColumnFile) -> Parts:
    """The rows of a source that is on disk as a whole."""
    for first, part in zip(entry.first_rows.tolist(), entry.parts, strict=False):
        invalid = {row - first: why for row, why in columns.invalid.items() if first <= row < first + len(part)}
        yield pa.table({"": pa.nulls(len(part))}), replace(part, invalid=invalid)
