"""Token ids kept on disk, so that a second load of the same prompts makes none.

    find      before a source is read: is there an entry for it?   (`entry.py`)
    keep      for every batch whose tokens were made: write them
    finish    where no row differed from the reference: the files become entries, old ones go

An entry holds all rows of one file before any filter: `max_prompt_length`, `max_samples`, `shuffle`, `truncation` may
change, and the next load still finds it. Its name is a digest of everything that decides the ids: the bytes of the
prompt column, the tokenizer as it is now, the template and its constants, the packages at work. Paths, times and sizes
are no part of it. What a digest cannot tell is not kept, and the report says why.

There is no lock. Processes that start together each make the tokens, the last one's file stays, and all are the same.
A lock would have to be held for a whole load, on many files in no certain order; `gpuload prepare` before the start
costs less.
"""

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from gpuload._version import __version__
from gpuload.cache.entry import Entry, EntryWriter, read_entry
from gpuload.engines.host.encode import needs_itself
from gpuload.options import Options, Verify
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source
from gpuload.stream import Batch

Clock = Callable[[str], str]

_PACKAGES = ("gigatoken", "jinja2", "pyarrow", "tokenizers", "transformers")
_LEVELS: tuple[Verify, ...] = ("off", "sample", "full")
_MOST_BYTES = 20 * 10**9
_ABANDONED = 24 * 3600  # seconds after which a file that was never finished belongs to nobody


class TokenCache:
    """The cache as one load uses it.

    Args:
        options: of the load.
        reference: the tokenizer.
        clock: what the template's `strftime_now` tells during the load, None where that cannot be said.

    Attributes:
        folder: where entries lie.
        found: sources whose tokens are from here → their entries.
        missed: how many sources have tokens that must be made.
        written: those of them whose tokens are here from now on.
        seconds: spent on looking up, and on writing.
        notes: why tokens are not kept.
    """

    def __init__(self, options: Options, reference: Reference, clock: Clock | None):
        self.folder = folder_of(options)
        self.found: dict[str, Entry] = {}
        self.missed = 0
        self.written: list[str] = []
        self.seconds = {"look up": 0.0, "keep": 0.0}
        self.notes: list[str] = []
        self._options = options
        self._keys: dict[str, tuple[str, bytes]] = {}  # sources to be kept → key, digest of their prompts
        self._writers: dict[int, EntryWriter | None] = {}  # number of a source → None: not that one after all
        self._in_use: set[Path] = set()
        self._found_bytes = self._written_bytes = 0  # each counted by one thread
        self._bound: int | None = None
        self._stopped = False
        reason = obstacle(reference, clock) if options.token_cache else None
        usable = options.token_cache and reason is None
        self._decides = _decides_ids(reference, options, clock) if usable else None
        if reason:
            self._stop(reason)

    def find(self, source: Source) -> Entry | None:
        """What is kept of a source; None where its tokens are to be made."""
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
            self.notes.append(f"tokens are not kept: {source.name} is a frame in memory")
            return None
        try:
            content = source.content(self._options.prompt_key)
        except (OSError, pa.ArrowException):  # whoever reads it next will say what is wrong
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
            os.utime(path)  # those not used for the longest time go first
        return None if self._options.return_full_prompt else entry  # no entry has texts

    def keep(self, source: Source, batch: Batch, compared: int) -> None:
        """Writes a batch whose tokens were made in this load.

        Args:
            source: where it is from.
            compared: how many of its rows were compared with the reference.
        """
        if self._stopped or source.name not in self._keys:
            return
        started = time.perf_counter()
        try:
            self._keep(source, batch, compared)
        except OSError as error:
            self._stop(f"{self.folder}: {error.strerror or error}")
        self.seconds["keep"] += time.perf_counter() - started

    def _keep(self, source: Source, batch: Batch, compared: int) -> None:
        assert batch.tokens is not None
        if batch.source not in self._writers:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writers[batch.source] = EntryWriter(self.folder, self._keys[source.name][0])
        writer = self._writers[batch.source]
        if writer is None:
            return
        if batch.rows[0] != writer.rows or batch.rows[-1] - batch.rows[0] >= len(batch.rows):
            writer.discard()  # max_samples leaves rows out: an entry has all
            self._writers[batch.source] = None
            return
        if self._bound is None:
            self._bound = self._options.token_cache_bytes or default_bound(self.folder)
        if self._found_bytes + self._written_bytes + batch.tokens.nbytes > self._bound:
            self._stop(f"all of them would take more than token_cache_bytes={self._bound:,}")
            return
        writer.write(batch, compared)
        self._written_bytes += batch.tokens.nbytes
        if writer.rows == source.num_rows:
            writer.close(self._options.verify)

    def finish(self, sources: Sequence[Source], trusted: bool) -> None:
        """Makes entries of what was written, and removes old ones where there are too many.

        Args:
            sources: those of the load.
            trusted: no row differed from the reference.
        """
        started = time.perf_counter()
        try:
            for number, writer in self._writers.items():
                if writer is None or not (trusted and writer.closed and self._is_as_it_was(sources[number])):
                    continue
                path = self._path(writer.key)
                os.replace(writer.path, path)
                self._in_use.add(path)
                self.written.append(sources[number].name)
        except OSError as error:
            self._stop(f"{self.folder}: {error.strerror or error}")
        self.discard()
        if self.written:
            evict(self.folder, self._bound or 0, self._in_use)
        self.seconds["keep"] += time.perf_counter() - started

    def discard(self) -> None:
        """Leaves no unfinished file behind, whatever has become of the load."""
        for writer in self._writers.values():
            if writer is not None:
                with suppress(OSError):
                    writer.discard()
        self._writers.clear()

    def _stop(self, reason: str) -> None:
        """No more tokens are written; files that have all their rows may still become entries."""
        self._stopped = True
        self.notes.append(f"tokens are not kept: {reason}")
        for number, writer in self._writers.items():
            if writer is not None and not writer.closed:
                with suppress(OSError):
                    writer.discard()
                self._writers[number] = None

    def _is_as_it_was(self, source: Source) -> bool:
        """Whether the prompts that were read are those whose digest is in the key."""
        _, content = self._keys[source.name]
        with suppress(OSError, pa.ArrowException):
            return source.content is not None and source.content(self._options.prompt_key) == content
        return False

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.arrow"


# -- the folder ------------------------------------------------------------------------------------------------------


def folder_of(options: Options) -> Path:
    """Where entries lie."""
    return Path(options.cache_dir).expanduser() / "tokens"


def default_bound(folder: Path) -> int:
    """A tenth of what the disk would have without the cache, and at most `_MOST_BYTES`."""
    held = sum(size for _, size, _ in _entries(folder))
    return min(_MOST_BYTES, (shutil.disk_usage(folder).free + held) // 10)


def evict(folder: Path, bound: int, in_use: set[Path]) -> None:
    """Removes the entries not used for the longest time until all take no more than `bound` bytes.

    Args:
        in_use: these stay.
    """
    entries = _entries(folder)
    held = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if held > bound and path not in in_use:
            with suppress(OSError):
                path.unlink()
                held -= size
    for path in folder.glob("*.partial"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                path.unlink()


def clear(folder: Path) -> tuple[int, int]:
    """Removes all entries; says how many and how many bytes."""
    entries = _entries(folder)
    for path in (*(path for _, _, path in entries), *folder.glob("*.partial")):
        path.unlink(missing_ok=True)
    return len(entries), sum(size for _, size, _ in entries)


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Last use, bytes and path of every entry, in order of use."""
    found = []
    for path in folder.glob("*.arrow"):
        with suppress(OSError):  # another process may have removed it
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    return sorted(found)


# -- the key ---------------------------------------------------------------------------------------------------------


def obstacle(reference: Reference, clock: Clock | None) -> str | None:
    """Why no digest can tell which ids this tokenizer gives, or None.

    Its class must be transformers' own, whose code a version tells, and all else plain data.
    """
    tokenizer, call = reference.tokenizer, reference.call
    kind = type(tokenizer)
    if reason := needs_itself(reference):
        return reason
    for owner in (kind, *(getattr(kind, name, kind) for name in _METHODS)):
        if owner.__module__.partition(".")[0] != "transformers":
            return f"{kind.__name__} has code that is not from transformers ({owner.__qualname__})"
    if own := [name for name, value in vars(tokenizer).items() if callable(value)]:
        return f"this {kind.__name__} has a {own[0]} of its own"
    if not reference.uses_template:
        return None
    if not reference.encodes_rendered_text:
        return "the template's arguments, or the tokenizer's class, encode in a way of their own"
    for name, value in (("tools", call.tools), *call.kwargs.items()):
        if not _is_plain(value):
            return f"{name} is not plain data"
    template = call.text()
    if _RANDOM.search(template):
        return "the chat template has something random in it"
    if _dates(template, clock) is None:
        return "the chat template asks for the time of day"
    return None


_METHODS = ("apply_chat_template", "get_chat_template", "__call__", "_encode_plus")
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
_TELLS_TIME = re.compile(r"\bstrftime_now\b(?!\s+is\s+(not\s+)?defined\b)")
_TELLS_DATE = re.compile(r"\bstrftime_now\s*\(\s*(?:\"([^\"\\]*)\"|'([^'\\]*)')\s*\)")


def _dates(template: str, clock: Clock | None) -> list[str] | None:
    """The dates that a template tells, as its clock says them; None where it may tell more than dates."""
    formats = [double or single for double, single in _TELLS_DATE.findall(template)]
    if len(formats) < len(_TELLS_TIME.findall(template)):
        return None
    if not formats:
        return []
    first, last = datetime(2001, 2, 3), datetime(2001, 2, 3, 23, 59, 59, 999999)
    if clock is None or any(first.strftime(form) != last.strftime(form) for form in formats):
        return None
    return [clock(form) for form in formats]


def _decides_ids(reference: Reference, options: Options, clock: Clock | None) -> bytes:
    """Everything beside a file's content that its ids depend on."""
    template = reference.call.text() if reference.uses_template else None
    dates = _dates(template, clock) if template is not None else None
    versions = [f"{package} {version(package)}" for package in _PACKAGES]
    parts: list[Any] = [_own_code(), sys.version_info[:3], versions, options.prompt_key]
    return repr([*parts, reference.fingerprint(), template, dates]).encode(errors="backslashreplace")


@cache
def _own_code() -> str:
    """This package as it is here: between two versions of it, a mistake may have been mended."""
    digest = hashlib.blake2b(__version__.encode(), digest_size=12)
    for file in sorted(Path(__file__).parent.rglob("*")):
        if file.suffix in (".py", ".cu", ".cuh"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether `repr` tells all there is to know about a value."""
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
