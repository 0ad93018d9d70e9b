"""The token cache: ids on disk, so that a second load of the same prompts tokenizes nothing.

    find      before a source is read: is there an entry for it?   (`entry.py`)
    write     every batch whose tokens were made
    finish    if no row differed from the tokenizer, the written files become entries, and old entries are removed

An entry holds all rows of one file before any filter, so `max_prompt_length`, `max_samples`, `shuffle` and `truncation`
may change and the next load still finds it. Its name is a digest of everything that determines the ids: the bytes of
the prompt column, the tokenizer's current state, the template and its constants, and package versions. Paths, times and
sizes are not part of it. Where a digest cannot identify the ids, nothing is cached, and the report says why.

There is no lock. Processes that start together all make the tokens; the last one's file remains, and all are equal. A
lock would be held for a whole load, on many files in no fixed order. `gpuload prepare` before the start is cheaper.
"""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa

from gpuload.cache.block_file import about
from gpuload.cache.directory import (
    COLUMNS,
    IDS,
    default_bound,
    digests_directory,
    evict,
    store_directory,
    tokens_directory,
)
from gpuload.cache.entry import Entry, EntryWriter, is_verified, read_entry
from gpuload.cache.key import changeable, decides_later, entry_key, uncacheable_reason
from gpuload.cache.known_files import known_digest
from gpuload.cache.known_tokenizer import KnownReference
from gpuload.core.arrays import RowNumbers
from gpuload.core.errors import StoreError
from gpuload.core.files import PartialDirectory, files_in
from gpuload.core.options import Options
from gpuload.engines.protocol import Prompts, Tokenized
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import Clock
from gpuload.sources.read import Source
from gpuload.sources.urls import changed, is_url

LEAST_BYTES = 4 << 20
"""Bytes of prompts from which a load caches ids if the tokenizer is an object, which takes a tenth of a second to
identify: more than encoding this much text. One that is given by name is not even opened where all ids are found."""


_MOST_ENTRIES = 256  # that are looked at to see how many rows they have


class TokenCache:
    """The cache from the point of view of one load.

    Args:
        clock: formats the time that the template's `strftime_now` sees during the load; None if that is unknown.
        in_place: entries are used in place, as parts of a store on disk.
    """

    def __init__(self, options: Options, reference: Reference, clock: Clock | None, in_place: bool = False):
        self._stores, self._in_place = store_directory(options.cache_dir), in_place
        self.directory = self._stores if in_place else tokens_directory(options.cache_dir)  # of new entries
        self.found: dict[str, Entry] = {}  # by the name of their source
        self.missed = 0  # sources whose tokens must be made
        self.written: list[str] = []  # those of them whose tokens are cached now
        self.seconds = {"look up": 0.0, "write": 0.0}
        self.notes: list[str] = []  # why tokens are not cached
        self._options = options
        self._missing: set[str] = set()  # sources to be cached
        self._contents: dict[str, bytes] = {}  # sources that are cached, or to be cached → digest of their prompts
        self._writers: dict[int, EntryWriter | None] = {}  # number of a source → its writer; None: not cached after all
        self._unfinished: PartialDirectory | None = None  # made for the first writer
        self._in_use: set[Path] = set()
        self._found_bytes = self._written_bytes = 0  # each is updated by one thread only
        self._bound: int | None = None
        self._stopped = False
        known = isinstance(reference, KnownReference)  # such a tokenizer was found to be cacheable
        reason = uncacheable_reason(reference, clock) if options.token_cache and not known else None
        usable = options.token_cache and reason is None
        self.made = reference.made  # columns that are made together with ids
        self._decides = decides_later(reference, options, clock) if usable else None
        # Of a tokenizer that is remembered, nobody has the object; opening it would take seconds.
        self._now = (lambda: None) if known or not usable else partial(changeable, reference)
        self._began = self._now()
        if reason:
            self._stop(reason)

    @cached_property
    def decides(self) -> bytes | None:
        """What identifies ids, apart from the content of their file; None if they are not cached. For a tokenizer that
        nobody has asked for its fingerprint, this takes a tenth of a second, in which no other thread has the
        interpreter lock."""
        return None if self._decides is None else self._decides()

    def find(self, source: Source) -> Entry | None:
        """The entry of a source; None if its tokens must be made."""
        started = time.perf_counter()
        entry = self._find(source)
        if entry is None:
            self.missed += 1
        else:
            self.found[source.name] = entry
        self.seconds["look up"] += time.perf_counter() - started
        return entry

    def _find(self, source: Source) -> Entry | None:
        if self._decides is None:
            return None
        if source.content is None:
            self.notes.append(f"tokens are not cached: {source.name} is a frame in memory")
            return None
        try:
            content = self.content(source, self.of_prompts(source))
        except (OSError, pa.ArrowException, UnicodeDecodeError):  # reading the source will raise the proper error
            return None
        self._contents[source.name] = content
        if not self._may_have(source):  # so the tokenizer is identified later, while others encode
            self._missing.add(source.name)
            return None
        key = self._key(source)
        path = self._path(key)
        entry = read_entry(path, key, source.num_rows, check_ids=not self._in_place)
        if entry is None and is_url(str(self._options.cache_dir)):
            from gpuload.cache.shared_store import SharedStore

            if SharedStore(str(self._options.cache_dir)).get(f"tokens/{key}.arrow", path):
                entry = read_entry(path, key, source.num_rows, check_ids=not self._in_place)
        if entry is None or not is_verified(entry.verified, self._options.verify) or not self._holds(source, entry):
            self._missing.add(source.name)
            return None
        for file in entry.paths:
            with suppress(OSError):
                self._in_use.add(file)
                self._found_bytes += file.stat().st_size
                os.utime(file)  # the time of the last use, for `evict`
        return None if self._options.return_full_prompt else entry  # entries have no texts

    def _may_have(self, source: Source) -> bool:
        """Whether there may be an entry of a source: one with as many rows."""
        if is_url(str(self._options.cache_dir)):
            return True
        folders = (tokens_directory(self._options.cache_dir), self._stores)
        entries = [path for folder in folders for path in files_in(folder, IDS)]
        if len(entries) > _MOST_ENTRIES:
            return True
        return any(found is not None and found[1] == source.num_rows for found in map(about, entries))

    def _key(self, source: Source) -> str:
        """The key of the entry of a source, after its content is known."""
        assert self.decides is not None
        return entry_key(self._contents[source.name], self.decides)

    def _holds(self, source: Source, entry: Entry) -> bool:
        """Whether what the ids of an entry were made of, apart from the source, is as it was."""
        try:
            return self.made is None or (entry.columns is not None and self.made.holds(source, entry.columns))
        except StoreError:  # damaged
            return False

    def of_prompts(self, source: Source) -> list[str]:
        """The columns of a source that decide its ids."""
        return [self._options.prompt_key, *(self.made.reads(source) if self.made is not None else ())]

    def content(self, source: Source, names: Sequence[str]) -> bytes:
        """The digest of some columns of a source. It is not computed again for a file that has not changed."""
        assert source.content is not None
        directory = digests_directory(self._options.cache_dir)
        rows = f"rows {source.first_row} to {source.first_row + source.num_rows}"
        about = [*sorted(names), source.form, rows]
        return known_digest(directory, source.file, about, partial(source.content, *names))

    def key_of(self, source: Source) -> str | None:
        """The key of the entry that a source can get, after `find`; None if its ids are not cached."""
        return self._key(source) if source.name in self._missing else None

    def columns_of(self, table: pa.Table, prompts: Prompts, tokens: Tokenized) -> pa.Table | None:
        """What an entry has of n rows, of which nothing is from an entry, in addition to their ids. Marks the ids if no
        entry may have them."""
        if self.made is None or self._decides is None:
            return None
        columns: pa.Table
        columns, why = self.made.of(table, prompts)
        tokens.transient |= why is not None
        if why is not None and (note := f"tokens are not cached: {why}") not in self.notes:
            self.notes.append(note)
        return columns

    def writes(self, sources: Iterable[Source]) -> bool:
        """Whether ids of any of these are cached, as far as that is known."""
        return not self._stopped and any(source.name in self._missing for source in sources)

    def write(
        self,
        number: int,
        source: Source,
        rows: RowNumbers,
        tokens: Tokenized,
        compared: int,
        columns: pa.Table | None = None,
    ) -> None:
        """Writes rows (n,) of the source with this number, whose tokens were made by this load: see `EntryWriter`."""
        if self._stopped or source.name not in self._missing:
            return
        started = time.perf_counter()
        try:
            self._write(number, source, rows, tokens, compared, columns)
        except OSError as error:
            self._stop(f"{self.directory}: {error.strerror or error}")
        self.seconds["write"] += time.perf_counter() - started

    def _write(
        self, number: int, source: Source, rows: RowNumbers, tokens: Tokenized, compared: int, columns: pa.Table | None
    ) -> None:
        if self._unfinished is None:
            self._unfinished = PartialDirectory(self.directory)
        if number not in self._writers:
            key = self._key(source)
            known = any(each is not None and each.key == key for each in self._writers.values())  # given twice
            self._writers[number] = None if known else EntryWriter(self._unfinished.path, key, source.name)
        writer = self._writers[number]
        if writer is None:
            return
        if tokens.transient or rows[0] - source.first_row != writer.rows or rows[-1] - rows[0] >= len(rows):
            writer.discard()  # max_samples skips rows, and an entry must have all of them
            self._writers[number] = None
            return
        if self._bound is None:
            self._bound = self._options.token_cache_bytes or default_bound(self.directory)
        nbytes = tokens.ids.nbytes + (0 if columns is None else columns.nbytes)
        if self._found_bytes + self._written_bytes + nbytes > self._bound:
            default = "" if self._options.token_cache_bytes else ", by default a tenth of the free disk space"
            self._stop(f"they would exceed token_cache_bytes={self._bound:,}{default}")
            return
        writer.write(tokens, compared, columns)
        self._written_bytes += nbytes
        if writer.rows == source.num_rows:
            writer.close(self._options.verify)

    def finish(self, sources: Sequence[Source], trusted: bool) -> None:
        """Turns the written files into entries, if no row differed from the tokenizer (`trusted`), and removes old
        entries if there are too many; a `SourceError` if the prompts of a file have changed since its digest was
        computed."""
        started = time.perf_counter()
        complete = [(n, w) for n, w in self._writers.items() if trusted and w is not None and w.closed]
        if complete and not self.unchanged:
            complete = []
        cached = self.found.keys() | {sources[number].name for number, _ in complete}
        for source in {source.name: source for source in sources if source.name in cached}.values():
            self.check(source)
        try:
            for number, writer in complete:
                path = self.accept(sources[number], writer)
                self._in_use |= {path, path.with_suffix(COLUMNS)}
        except OSError as error:
            self._stop(f"{self.directory}: {error.strerror or error}")
        self.discard()
        if self.written:
            evict(self.directory, self._bound or 0, self._in_use)
        self.seconds["write"] += time.perf_counter() - started

    @cached_property
    def unchanged(self) -> bool:
        """Whether the tokenizer is as it was when the load began, once all rows have their ids. If not, nobody knows
        whether these are those of before, and they become no entries."""
        if self._now() == self._began:
            return True
        self._stop("the tokenizer was changed while the load used it")
        return False

    def check(self, source: Source) -> None:
        """Checks that a file still has the prompts that its ids were made of, in this load or an earlier one. Some file
        systems store times to the second only, so that `check_unchanged` may not see a change.

        Raises:
            SourceError: it has others.
        """
        expected = self._contents.get(source.name)
        content = None
        with suppress(OSError, pa.ArrowException, UnicodeDecodeError):
            content = expected and self.content(source, self.of_prompts(source))
        if content != expected:
            raise changed(source.name)

    def accept(self, source: Source, writer: EntryWriter) -> Path:
        """Turns a file that has all rows of a source into an entry. Returns its path.

        Raises:
            OSError: it cannot be moved.
        """
        path = self.directory / f"{writer.key}{IDS}"
        writer.move(path)
        self.written.append(source.name)
        return path

    def discard(self) -> None:
        """Removes unfinished files, however the load ended."""
        for writer in self._writers.values():
            if writer is not None:
                with suppress(OSError):
                    writer.discard()
        self._writers.clear()
        if self._unfinished is not None:
            self._unfinished.remove()
            self._unfinished = None

    def _stop(self, reason: str) -> None:
        """Stops writing. Files that have all their rows may still become entries."""
        self._stopped = True
        self.notes.append(f"tokens are not cached: {reason}")
        for number, writer in self._writers.items():
            if writer is not None and not writer.closed:
                with suppress(OSError):
                    writer.discard()
                self._writers[number] = None

    def _path(self, key: str) -> Path:
        """Where the entry with this key is, or would be. One that is used in place is not to be evicted."""
        name = f"{key}{IDS}"
        cached, stored = (root / name for root in (tokens_directory(self._options.cache_dir), self._stores))
        if self._in_place and os.path.exists(cached):
            with suppress(OSError):
                self._stores.mkdir(parents=True, exist_ok=True)
                for file, place in ((cached.with_suffix(COLUMNS), stored.with_suffix(COLUMNS)), (cached, stored)):
                    if file.exists():
                        os.replace(file, place)
        return stored if os.path.exists(stored) else cached
