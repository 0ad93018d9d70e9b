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

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from gpuload._version import __version__
from gpuload.cache.entry import Entry, EntryWriter, about_entry, read_entry
from gpuload.engines.host.encode import needs_itself
from gpuload.files import PartialDirectory, cache_root, partial_bytes, remove_orphans
from gpuload.options import Options, Verify
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import Clock, dates, volatile_reason
from gpuload.sources.local import changed
from gpuload.sources.read import Source
from gpuload.stream import Batch

_PACKAGES = ("gigatoken", "jinja2", "pyarrow", "tokenizers", "transformers")
_LEVELS: tuple[Verify, ...] = ("off", "sample", "full")
_MOST_BYTES = 20 * 10**9


class TokenCache:
    """The cache from the point of view of one load.

    Args:
        options: of the load.
        reference: the tokenizer.
        clock: formats the time that the template's `strftime_now` sees during the load; None if that is unknown.

    Attributes:
        directory: where entries are.
        found: name of a source → its entry.
        missed: how many sources have tokens that must be made.
        written: those of them whose tokens are cached now.
        seconds: spent on looking up, and on writing.
        notes: why tokens are not cached.
    """

    def __init__(self, options: Options, reference: Reference, clock: Clock | None):
        self.directory = tokens_directory(options.cache_dir)
        self.found: dict[str, Entry] = {}
        self.missed = 0
        self.written: list[str] = []
        self.seconds = {"look up": 0.0, "write": 0.0}
        self.notes: list[str] = []
        self._options = options
        self._keys: dict[str, tuple[str, bytes]] = {}  # sources to be cached → key, digest of their prompts
        self._writers: dict[int, EntryWriter | None] = {}  # number of a source → its writer; None: not cached after all
        self._unfinished: PartialDirectory | None = None  # made for the first writer
        self._in_use: set[Path] = set()
        self._found_bytes = self._written_bytes = 0  # each is updated by one thread only
        self._bound: int | None = None
        self._stopped = False
        reason = uncacheable_reason(reference, clock) if options.token_cache else None
        usable = options.token_cache and reason is None
        self._decides = _decides_ids(reference, options, clock) if usable else None
        if reason:
            self._stop(reason)

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
            content = source.content(self._options.prompt_key)
        except (OSError, pa.ArrowException, UnicodeDecodeError):  # reading the source will raise the proper error
            return None
        key = hashlib.blake2b(content + self._decides, digest_size=16).hexdigest()
        path = self._path(key)
        entry = read_entry(path, key, source.num_rows)
        if entry is None or _LEVELS.index(entry.verified) < _LEVELS.index(self._options.verify):
            self._keys[source.name] = (key, content)
            return None
        with suppress(OSError):
            self._in_use.add(path)
            self._found_bytes += path.stat().st_size
            os.utime(path)  # the time of the last use, for `evict`
        return None if self._options.return_full_prompt else entry  # entries have no texts

    def write(self, source: Source, batch: Batch) -> None:
        """Writes a batch of a source, whose tokens were made by this load."""
        if self._stopped or source.name not in self._keys:
            return
        started = time.perf_counter()
        try:
            self._write(source, batch)
        except OSError as error:
            self._stop(f"{self.directory}: {error.strerror or error}")
        self.seconds["write"] += time.perf_counter() - started

    def _write(self, source: Source, batch: Batch) -> None:
        tokens = batch.tokens
        assert tokens is not None
        if self._unfinished is None:
            self._unfinished = PartialDirectory(self.directory)
        if batch.source not in self._writers:
            self._writers[batch.source] = EntryWriter(self._unfinished.path, self._keys[source.name][0], source.name)
        writer = self._writers[batch.source]
        if writer is None:
            return
        if batch.rows[0] != writer.rows or batch.rows[-1] - batch.rows[0] >= len(batch.rows):
            writer.discard()  # max_samples skips rows, and an entry must have all of them
            self._writers[batch.source] = None
            return
        if self._bound is None:
            self._bound = self._options.token_cache_bytes or default_bound(self.directory)
        if self._found_bytes + self._written_bytes + tokens.ids.nbytes > self._bound:
            self._stop(f"they would exceed token_cache_bytes={self._bound:,}")
            return
        writer.write(tokens, batch.compared)
        self._written_bytes += tokens.ids.nbytes
        if writer.rows == source.num_rows:
            writer.close(self._options.verify)

    def finish(self, sources: Sequence[Source], trusted: bool) -> None:
        """Turns the written files into entries, and removes old entries if there are too many.

        Args:
            sources: of the load.
            trusted: no row differed from the tokenizer.

        Raises:
            SourceError: the prompts of a file have changed since its digest was computed.
        """
        started = time.perf_counter()
        complete = [(n, w) for n, w in self._writers.items() if trusted and w is not None and w.closed]
        for number, _ in complete:
            self._check(sources[number])
        try:
            for number, writer in complete:
                path = self._path(writer.key)
                os.replace(writer.path, path)
                self._in_use.add(path)
                self.written.append(sources[number].name)
        except OSError as error:
            self._stop(f"{self.directory}: {error.strerror or error}")
        self.discard()
        if self.written:
            evict(self.directory, self._bound or 0, self._in_use)
        self.seconds["write"] += time.perf_counter() - started

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

    def _check(self, source: Source) -> None:
        """Checks that the file still has the prompts whose digest is in the key. Some file systems store times to the
        second only, so that `check_unchanged` may not see a change."""
        _, expected = self._keys[source.name]
        content = None
        with suppress(OSError, pa.ArrowException, UnicodeDecodeError):
            content = source.content and source.content(self._options.prompt_key)
        if content != expected:
            raise changed(source.name)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.arrow"


# -- the directory ---------------------------------------------------------------------------------------------------


def tokens_directory(cache_dir: str | None = None) -> Path:
    """Where entries are.

    Args:
        cache_dir: the option; None for the default, see `files.cache_root`.
    """
    return cache_root(cache_dir) / "tokens"


def default_bound(directory: Path) -> int:
    """A tenth of the disk space that would be free without the cache, and at most `_MOST_BYTES`."""
    held = sum(size for _, size, _ in _entries(directory)) + partial_bytes(directory)
    return min(_MOST_BYTES, (shutil.disk_usage(directory).free + held) // 10)


def evict(directory: Path, bound: int, in_use: set[Path]) -> None:
    """Removes the least recently used entries until the rest, with what other processes are writing, fits.

    Args:
        bound: bytes.
        in_use: paths of entries that are not removed.
    """
    entries = _entries(directory)
    held = sum(size for _, size, _ in entries) + partial_bytes(directory)
    for _, size, path in entries:
        if held > bound and path not in in_use:
            with suppress(OSError):
                path.unlink()
                held -= size


def clear(directory: Path) -> tuple[int, int]:
    """Removes all entries, and what killed processes left unfinished.

    Returns:
        The number of entries, and their bytes.
    """
    entries = _entries(directory)
    for _, _, path in entries:
        path.unlink(missing_ok=True)
    remove_orphans(directory)
    return len(entries), sum(size for _, size, _ in entries)


@dataclass(frozen=True)
class CachedFile:
    """An entry, for a list of them.

    Attributes:
        last_use: seconds since 1970.
        nbytes: size of the entry.
        source: the name of the file of which it was made; None if the entry is damaged.
        rows: number of its rows.
    """

    last_use: float
    nbytes: int
    source: str | None
    rows: int


def cached_files(directory: Path) -> list[CachedFile]:
    """All entries, most recently used first."""
    about = [(used, size, about_entry(path)) for used, size, path in reversed(_entries(directory))]
    return [CachedFile(used, size, *(found or (None, 0))) for used, size, found in about]


def _entries(directory: Path) -> list[tuple[float, int, Path]]:
    """Last use, bytes and path of every entry, least recently used first."""
    found = []
    for path in directory.glob("*.arrow"):
        with suppress(OSError):  # another process may have removed it
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    return sorted(found)


# -- the key ---------------------------------------------------------------------------------------------------------


def uncacheable_reason(reference: Reference, clock: Clock | None) -> str | None:
    """Why no digest can identify the ids that this tokenizer returns, or None.

    Its class must be transformers' own, whose code a version identifies, and everything else must be plain data.
    """
    tokenizer, call = reference.tokenizer, reference.call
    kind = type(tokenizer)
    if reason := needs_itself(reference):
        return reason
    for owner in (kind, *(getattr(kind, name, kind) for name in _METHODS)):
        if owner.__module__.partition(".")[0] != "transformers":
            return f"{kind.__name__} has code from outside transformers ({owner.__qualname__})"
    if own := [name for name, value in vars(tokenizer).items() if callable(value)]:
        return f"{own[0]} was replaced on this {kind.__name__}"
    if not reference.uses_template:
        return None
    if not reference.encodes_rendered_text:
        return "the template's arguments, or the tokenizer's class, change how text is encoded"
    for name, value in (("tools", call.tools), *call.kwargs.items()):
        if not _is_plain(value):
            return f"{name} is not plain data"
    return volatile_reason(call.text(), clock)


_METHODS = ("apply_chat_template", "get_chat_template", "__call__", "_encode_plus")


def _decides_ids(reference: Reference, options: Options, clock: Clock | None) -> bytes:
    """Everything except a file's content that its ids depend on."""
    template = reference.call.text() if reference.uses_template else None
    printed = dates(template, clock) if template is not None else None
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    parts: list[Any] = [_own_code(), sys.version_info[:3], versions, options.prompt_key]
    return repr([*parts, reference.fingerprint(), template, printed]).encode(errors="backslashreplace")


@cache
def _own_code() -> str:
    """Digest of this package's source: between two versions, a bug may have been fixed."""
    digest = hashlib.blake2b(__version__.encode(), digest_size=12)
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".cu", ".cuh"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether `repr` identifies a value."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
