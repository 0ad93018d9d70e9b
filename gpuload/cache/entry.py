"""One entry of the token cache: the ids of all rows of one file.

A `BlockFile` with four blocks for each batch of the load that made the tokens: its rejected rows and counts, as JSON;
where the ids of each row begin; how long the texts of its rows were; the ids. The index says how the rows were
verified.

Checksums of everything but the ids are compared when a file is opened. Those of the ids, which are nearly all of it,
can be left until they are used.

An entry may have columns: a `ColumnFile` next to it with the same rows and key. Without that file it is not used, nor
with one that another load has written: both have the same random mark.
"""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.cache.block_file import BlockFile, BlockWriter
from gpuload.cache.column_file import ColumnFile, ColumnWriter
from gpuload.cache.directory import COLUMNS
from gpuload.cache.faults import missing
from gpuload.core.arrays import Ragged, RowNumbers, offsets_of, on_host
from gpuload.core.errors import StoreError
from gpuload.core.options import Verify
from gpuload.engines.protocol import RowCounts, Tokenized
from gpuload.sources.read import Source, other_columns

_LEVELS: tuple[Verify, ...] = ("off", "sample", "full")
_FACTS, _OFFSETS, _SIZES, _IDS, _BLOCKS = range(5)  # the blocks of a part, and how many there are
HIDDEN = ""  # a column of an entry that rows do not have: what tells whether the entry still holds


class Entry(BlockFile):
    """All rows of one file. The file is two arrays over the same bytes: as int64 it has the offsets of every part, as
    int32 the ids (`values`)."""

    def __init__(self, path: Path, memory: pa.Buffer, facts: Mapping[str, Any]):
        super().__init__(path, memory, facts)
        # The mark is that of what was written together with it; empty without columns.
        columns, self.mark = path.with_suffix(COLUMNS), str(facts["columns"])
        self.columns = ColumnFile.again(columns, self.key, self.num_rows) if self.mark else None
        if self.columns is not None and self.columns.of != self.mark:
            raise missing(columns)
        # The rows in order, in the batches in which they were made; where each begins (parts + 1,).
        self.parts = [self._part(first) for first in range(0, len(self.starts), _BLOCKS)]
        self.first_rows: RowNumbers = offsets_of(np.array([len(part) for part in self.parts], np.int64))
        self.values = np.frombuffer(memory, np.int32, memory.size // 4)
        self._offsets = np.frombuffer(memory, np.int64, memory.size // 8)
        # Where the ids and the offsets of each part begin in these arrays.
        self._ids_at, self._offsets_at = self.starts[_IDS::_BLOCKS] // 4, self.starts[_OFFSETS::_BLOCKS] // 8
        self.verified: Verify = facts["verified"]  # how rows were compared with the tokenizer
        self.compared: int = facts["compared"]  # and how many

    def _part(self, first: int) -> Tokenized:
        """The rows of a batch, in place, of which `first` is the first block. Ids are not compared with their checksum.

        Raises:
            StoreError: it has been damaged.
        """
        facts, offsets, sizes = (self.block(first + number) for number in (_FACTS, _OFFSETS, _SIZES))
        known, text_sizes = json.loads(facts.to_pybytes()), np.frombuffer(sizes, np.int64)
        return Tokenized(
            ids=Ragged(np.frombuffer(self.unchecked(first + _IDS), np.int32), np.frombuffer(offsets, np.int64)),
            text_sizes=text_sizes,
            text_nbytes=int(text_sizes.sum()),
            rejected={int(row): why for row, why in known["rejected"].items()},
            compiled_rows=known["compiled"],
            reasons=known["reasons"],
            control_rows=known["control"],
            counts=known["counts"],
        )

    @property
    def paths(self) -> list[Path]:
        """Its files."""
        return [self.path] if self.columns is None else [self.path, self.columns.path]

    def check_ids(self) -> None:
        """Compares all ids, and columns, with their checksums; a `StoreError` if some have been damaged."""
        for number in range(_IDS, len(self.starts), _BLOCKS):
            self.block(number)
        if self.columns is not None:
            for number in range(len(self.columns.starts)):
                self.columns.block(number)

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, Tokenized]]:
        """As an engine's `read`, with ids instead of prompts. Columns of the entry are in the places of those of the
        source with the same names."""
        row, own = 0, [] if self.columns is None else self.columns.parts[0][1].names
        own = [name for name in own if name != HIDDEN]
        for table in other_columns(source, prompt_key, keep_prompts, *own):
            tokens = self.rows(row, row + table.num_rows)
            if self.columns is not None:
                more = self.columns.rows(row, row + table.num_rows)
                found = dict(zip(table.schema.names, table.columns, strict=True)) | {n: more.column(n) for n in own}
                table = pa.table({n: found[n] for n in dict.fromkeys([*source.schema.names, *own]) if n in found})
            yield table, tokens
            row += len(tokens)

    def rows(self, low: int, high: int) -> Tokenized:
        """Rows `low` to `high` (exclusive). A file may be read in other batches than those of its entry."""
        first, last = np.searchsorted(self.first_rows, [low, high - 1], side="right") - 1
        ids: list[Ragged] = []
        sizes: list[np.ndarray[Any, Any]] = []
        rejected: dict[int, str] = {}
        rendering, control = RowCounts(), 0
        for start, part in zip(self.first_rows[first : last + 1].tolist(), self.parts[first : last + 1], strict=True):
            begin, end = max(low - start, 0), min(high - start, len(part))
            offsets = part.ids.offsets[begin : end + 1]
            ids.append(Ragged(part.ids.values[offsets[0] : offsets[-1]], offsets - offsets[0]))
            sizes.append(part.text_sizes[begin:end])
            inside = {start + row - low: why for row, why in part.rejected.items() if begin <= row < end}
            rejected |= inside
            known = part.rendering_of(end - begin - len(inside))
            # Counts of a part that are not known of single rows go to the rows among which it begins, so that they add
            # up over the whole file.
            if known is not None or low <= start:
                rendering.add_counts(part if known is None else RowCounts(**known))
            control += part.control_rows * (low <= start)
        text_sizes = np.concatenate(sizes)
        return Tokenized(
            ids=ids[0] if len(ids) == 1 else Ragged.concatenate(ids),
            text_sizes=text_sizes,
            text_nbytes=int(text_sizes.sum()),
            rejected=rejected,
            compiled_rows=rendering.compiled_rows,
            reasons=rendering.reasons,
            control_rows=control,
        )

    def places(self, rows: RowNumbers, lengths: RowNumbers) -> RowNumbers:
        """Where the ids of some rows (m,) begin, in `values`; the caller knows how many ids they have, (m,). A part is
        compared with its checksum when first used.

        Raises:
            StoreError: the ids have been damaged, or this is not the file that the caller knows.
        """
        part = np.searchsorted(self.first_rows, rows, side="right") - 1
        blocks = _BLOCKS * part + _IDS
        for number in np.unique(blocks[~self._intact[blocks]]).tolist():
            self.block(number)
        at = self._offsets_at[part] + rows - self.first_rows[part]
        if not np.array_equal(self._offsets[at + 1] - self._offsets[at], lengths):
            raise missing(self.path)
        places: RowNumbers = self._ids_at[part] + self._offsets[at]
        return places


def read_entry(path: Path, key: str, rows: int, check_ids: bool = True) -> Entry | None:
    """Opens the entry of a file with so many rows; None if there is none, or a damaged one, or another file. Without
    `check_ids`, only the checksums of everything else are compared."""
    entry = Entry.open(path, key, rows)
    try:
        if entry is not None and check_ids:
            entry.check_ids()
    except StoreError:  # the tokens are made again
        return None
    return entry


def is_verified(found: str | None, wanted: Verify) -> bool:
    """Whether ids were compared with the tokenizer as the option wants it, or better; None if it is unknown how."""
    return found in _LEVELS and _LEVELS.index(found) >= _LEVELS.index(wanted)


class EntryWriter(BlockWriter):
    """Writes an entry batch by batch, in a directory for unfinished files, under a name; None for the key. For the
    other arguments see `BlockWriter`."""

    def __init__(self, directory: Path, key: str, source: str, name: str | None = None):
        super().__init__(directory / (name or key), key, source)
        self.mark = uuid.uuid4().hex  # see `Entry`
        self._compared = 0
        self._columns: ColumnWriter | None = None

    def write(self, tokens: Tokenized, compared: int, columns: pa.Table | None = None) -> None:
        """Appends rows, of which some were compared with the tokenizer, and the columns of what else they have: always
        or never."""
        if not len(tokens):
            return
        if columns is not None:
            self._columns = self._columns or ColumnWriter(self.path.with_suffix(COLUMNS), self.key, self._source)
            self._columns.add(columns, len(tokens), {})
        facts = {
            "rejected": tokens.rejected,
            "compiled": tokens.compiled_rows,
            "reasons": tokens.reasons,
            "control": tokens.control_rows,
            "counts": tokens.counts,
        }
        ids = tokens.ids.to_host()
        arrays = ((ids.offsets, np.int64), (on_host(tokens.text_sizes), np.int64), (ids.values, np.int32))
        for data in (json.dumps(facts).encode(), *(np.ascontiguousarray(array, kind) for array, kind in arrays)):
            self._begin()
            self._write(data)
        self._compared += compared
        self.rows += len(tokens)

    def close(self, verified: Verify) -> None:
        """Completes the file, once it has all rows."""
        if self._columns is not None:
            self._columns.of = self.mark
            self._columns.close()
        self._finish(verified=verified, compared=self._compared, columns="" if self._columns is None else self.mark)

    def discard(self) -> None:
        if self._columns is not None:
            self._columns.discard()
        super().discard()

    def move(self, path: Path) -> None:
        """Renames the complete file, after that of its columns: no entry is without them.

        Raises:
            OSError: they cannot be renamed.
        """
        if self._columns is not None:
            os.replace(self._columns.path, path.with_suffix(COLUMNS))
        os.replace(self.path, path)
