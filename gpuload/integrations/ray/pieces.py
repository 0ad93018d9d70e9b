"""Pieces of cache entries: what a worker of `prepare` makes.

    piece    the ids of some row groups, tokenized and written into the store
    entry    all pieces of a file, joined by the worker that has made the last one

Each is written once and as a whole, under a name that is a digest of all that determines the ids. So a worker that dies
leaves nothing that has to be undone, and a task that is run again finds what is there. Nobody waits for anybody: two
workers that find that something is missing at the same time both make it, with the same ids, and one file replaces the
other. Runs make pieces in random orders, so that few are made twice.
"""

import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from gpuload.cache.directory import tokens_directory
from gpuload.cache.entry import EntryWriter, is_verified, read_entry
from gpuload.cache.key import key_maker
from gpuload.cache.shared_store import SharedStore
from gpuload.core.errors import GpuloadError, StoreError
from gpuload.core.options import NO_LIMIT, Verify
from gpuload.integrations.ray.parts import FilePart, open_part
from gpuload.integrations.ray.worker import Tokenizing, Work
from gpuload.sources.remote import RemoteFile
from gpuload.sources.urls import changed

_NO_BOUND = 1 << 62


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, and the name of their ids."""

    part: FilePart  # the rows
    content: bytes  # digest of their prompts
    key: str  # digest of all that determines their ids

    @property
    def name(self) -> str:
        """Of its file in the folder of the entry."""
        return f"{self.part.rows.start}-{self.part.rows.stop}.arrow"


@dataclass(frozen=True)
class EntryPlan:
    """An entry that is to be made."""

    name: str  # of the file whose ids it has, for messages
    key: str  # of the entry
    verify: Verify  # how its rows are compared with the tokenizer
    pieces: tuple[Piece, ...]  # all of them, in order

    @property
    def entry(self) -> str:
        return f"tokens/{self.key}.arrow"

    @property
    def about(self) -> str:
        """A small file that is written after the entry: how its rows were compared."""
        return f"verified/{self.key}"

    @property
    def folder(self) -> str:
        return f"pieces/{self.key}-{self.verify}"


def is_complete(store: SharedStore, plan: EntryPlan) -> bool:
    """Whether the store has an entry, compared with the tokenizer as is asked for, or better."""
    about = store.read(plan.about)
    level = None if about is None else about.decode(errors="replace")
    return is_verified(level, plan.verify) and store.exists(plan.entry)


@dataclass(frozen=True)
class PieceTask:
    """What a worker is asked for."""

    plan: EntryPlan  # of the entry
    number: int | None  # of the piece; None if all pieces are there, and only have to be joined


class PieceActor:
    """The function of Ray Data's `map_batches`: tasks → what became of them. `probe` is the key that the driver gives
    to no content."""

    def __init__(self, work: Work, store: SharedStore, name: str, probe: str):
        self._tokenizing, self._store, self._name = Tokenizing(work), store, name
        self._tokenizing.reference.by_name = True  # otherwise a load does not cache the ids of little text
        with self._tokenizing.reference.call.clock_stopped() as clock:
            make = key_maker(self._tokenizing.reference, work.options, clock)
        if isinstance(make, str) or make(b"") != probe:
            raise GpuloadError(
                "the cache keys of a Ray worker differ from the driver's: install the same versions of Python, "
                "gpuload, transformers, tokenizers, gigatoken, pyarrow and jinja2 on all nodes, as for trainers"
            )

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for pickled in batch["part"].to_pylist():
            yield pa.table({name: [value] for name, value in self._run_task(pickle.loads(pickled)).items()})

    def _run_task(self, task: PieceTask) -> dict[str, Any]:
        """What became of a task: a file, a state ("made", "found", "joined" or "failed"), and how it went."""
        started, cpu = time.perf_counter(), time.process_time()
        state, error = "failed", ""
        try:
            state = self._make(task)
        except (GpuloadError, OSError) as problem:
            error = str(problem) or type(problem).__name__
        rows = len(task.plan.pieces[task.number].part.rows) if state == "made" and task.number is not None else 0
        seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
        return {"name": task.plan.name, "state": state, "error": error, "rows": rows} | seconds

    def _make(self, task: PieceTask) -> str:
        store, plan = self._store, task.plan
        store.check(self._name)
        if is_complete(store, plan):
            return "found"
        if task.number is None:
            join(store, plan)
            return "joined"
        piece = plan.pieces[task.number]
        if piece.name in store.names(plan.folder):
            return "found"
        self._write(piece, plan)
        join(store, plan)
        return "made"

    def _write(self, piece: Piece, plan: EntryPlan) -> None:
        """Tokenizes a piece, and writes it into the store."""
        with _temporary_directory() as directory:
            own = self._tokenizing.work.options
            options = replace(
                own,
                max_prompt_length=NO_LIMIT,
                filter_overlong_prompts=False,
                verify=plan.verify,
                cache_dir=directory,
                token_cache=True,
                token_cache_bytes=_NO_BOUND,
                store="memory",
            )
            part = piece.part
            source = open_part(part, own.cache_dir, only=options.prompt_key)
            if isinstance(source.file, RemoteFile) and source.file.has_version:  # its pages would be transferred twice
                source = replace(source, content=lambda *_: piece.content)
            source = self._tokenizing.work.kind.column(source, options, self._tokenizing.reference)
            _, report = self._tokenizing.load(source, options)
            made = tokens_directory(directory) / f"{piece.key}.arrow"
            if not made.is_file():
                reasons = "; ".join(note for note in report.notes if "cached" in note or "differs" in note)
                if not reasons:
                    raise changed(part.place.name)
                raise GpuloadError(f"{part.place.name} rows {part.rows.start:,} to {part.rows.stop:,}: {reasons}")
            self._store.put(made, f"{plan.folder}/{piece.name}")


_temporary_directory = partial(tempfile.TemporaryDirectory, prefix="gpuload-", ignore_cleanup_errors=True)


def join(store: SharedStore, plan: EntryPlan) -> None:
    """Makes an entry of its pieces, if all of them are there, and removes them. Another worker may do so meanwhile. A
    `StoreError` if the store cannot be read or written, or a piece is damaged, which is removed then."""
    names = {piece.name for piece in plan.pieces}
    if is_complete(store, plan) or (names <= store.names(plan.folder) and _joined(store, plan)):
        store.remove(plan.folder)


def _joined(store: SharedStore, plan: EntryPlan) -> bool:
    """Writes an entry; False if its pieces disappear, and there is no entry that was made of them."""
    with _temporary_directory() as directory:
        try:
            writer = EntryWriter(Path(directory), plan.key, plan.name)
            for piece in plan.pieces:
                name, local = f"{plan.folder}/{piece.name}", Path(directory, "piece.arrow")
                if not store.get(name, local):
                    return is_complete(store, plan)
                entry = read_entry(local, piece.key, len(piece.part.rows))
                if entry is None:
                    store.remove(name)
                    raise StoreError(f"{store.shown}/{name}: a damaged piece was removed: run the command again")
                for number, part in enumerate(entry.parts):
                    writer.write(part, 0 if number else entry.compared)
                del entry
            writer.close(plan.verify)
            store.put(writer.path, plan.entry)
            store.write(plan.about, plan.verify.encode())
            return True
        except OSError as error:
            if isinstance(error, GpuloadError):
                raise
            raise StoreError(
                f"{plan.name}: cannot join its pieces in the temporary directory {directory}: "
                f"{error.strerror or error}: free space there, or set TMPDIR to another directory, and run the command "
                "again"
            ) from error
