"""One entry of the token cache: the ids of all rows of one file, as one Arrow IPC file.

The batches lie in it as they were made, with rejected rows and counts in their metadata. An empty last batch says how
many rows there are, how they were verified, and a checksum of all ids. Files are written under a name of their own and
renamed when the load has proved right, so that no process sees half of one; one that is damaged all the same is no
entry. Reading maps the file: only what is kept of the ids is ever copied.
"""

import json
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Ragged
from gpuload.engines.host.rendered import Rendered
from gpuload.options import Verify
from gpuload.sources.read import BATCH_ROWS, Source
from gpuload.stream import Batch

_SCHEMA = pa.schema([("ids", pa.large_list(pa.int32())), ("text_bytes", pa.int64())])


@dataclass
class _NoText(Rendered):
    """`Rendered` for rows whose ids are known: everything that is counted, and no text."""

    text_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.text_bytes


@dataclass(frozen=True)
class Kept:
    """Rows of an entry. They stand where an engine's prompts would.

    Attributes:
        tokens: their ids, in the mapped file.
        text_bytes: (n,) int64, of their texts.
        rejected: row → why.
        compiled: how many rows had gone through the compiled template.
        reasons: why others had taken the reference, and how many each.
    """

    tokens: Ragged
    text_bytes: np.ndarray[Any, Any]
    rejected: dict[int, str]
    compiled: int
    reasons: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def all_compiled(self) -> bool:
        return self.compiled == len(self) - len(self.rejected)

    def take(self, rows: pa.Array) -> "Kept":
        """Some of the rows. Which of them were compiled is known where all of them were, and is else not counted."""
        numbers = rows.to_numpy()
        rejected = {at: self.rejected[row] for at, row in enumerate(numbers.tolist()) if row in self.rejected}
        compiled = len(numbers) - len(rejected) if self.all_compiled else 0
        return Kept(self.tokens.take(numbers), self.text_bytes[numbers], rejected, compiled, {})

    def rendered(self) -> Rendered:
        """What the stages after rendering ask for; the ids are in it."""
        return _NoText(
            pa.nulls(len(self), pa.large_string()),
            self.rejected,
            self.compiled,
            reasons=self.reasons,
            ids=self.tokens,
            text_bytes=int(self.text_bytes.sum()),
        )


@dataclass(frozen=True)
class Entry:
    """All rows of one file.

    Attributes:
        parts: the rows, in order, in the batches in which they were made.
        verified: how they were compared with the reference.
        compared: how many rows were.
    """

    parts: list[Kept]
    verified: Verify
    compared: int

    @cached_property
    def starts(self) -> np.ndarray[Any, Any]:
        """(parts + 1,) the first row of each part, and the number of rows."""
        return np.cumsum([0, *map(len, self.parts)])

    @cached_property
    def all_compiled(self) -> bool:
        return all(part.all_compiled for part in self.parts)

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, Kept]]:
        """As an engine's `read`: the other columns of the source, with what is kept of their rows as prompts."""
        tables: Iterator[pa.Table]
        if keep_prompts or source.without is None:
            tables = source.batches()
        elif len(source.schema) == 1:  # nothing to read, but a table of no columns forgets its rows
            counts = (min(BATCH_ROWS, source.num_rows - row) for row in range(0, source.num_rows, BATCH_ROWS))
            tables = (pa.table({prompt_key: pa.nulls(count)}) for count in counts)
        else:
            tables = source.without(prompt_key)
        row = 0
        for table in tables:
            yield table, self.rows(row, row + table.num_rows)
            row += table.num_rows

    def rows(self, low: int, high: int) -> Kept:
        """The rows from `low` to before `high`: a file may be read in other batches than those of its entry."""
        first, last = np.searchsorted(self.starts, [low, high - 1], side="right") - 1
        tokens: list[Ragged] = []
        sizes: list[np.ndarray[Any, Any]] = []
        rejected: dict[int, str] = {}
        counted: list[Kept] = []
        for start, part in zip(self.starts[first : last + 1].tolist(), self.parts[first : last + 1], strict=True):
            begin, end = max(low - start, 0), min(high - start, len(part))
            offsets = part.tokens.offsets[begin : end + 1]
            tokens.append(Ragged(part.tokens.values[offsets[0] : offsets[-1]], offsets - offsets[0]))
            sizes.append(part.text_bytes[begin:end])
            rejected |= {start + row - low: why for row, why in part.rejected.items() if begin <= row < end}
            # A part's counts go to the rows among which it begins, so that over the whole file they add up.
            counted += [part] * (low <= start)
        reasons = sum((Counter(part.reasons) for part in counted), Counter[str]())
        compiled = high - low - len(rejected) if self.all_compiled else sum(part.compiled for part in counted)
        ids = tokens[0] if len(tokens) == 1 else Ragged.concatenate(tokens)
        return Kept(ids, np.concatenate(sizes), rejected, compiled, dict(reasons))


def read_entry(path: Path, key: str, rows: int) -> Entry | None:
    """The entry of a file with so many rows; None where there is none, or something else, or a damaged one."""
    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            if not reader.schema.equals(_SCHEMA):
                return None
            batches = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
        parts: list[Kept] = []
        checksum = 0
        for batch, metadata in batches:
            batch.validate()
            lists, sizes = batch.columns
            text, facts = metadata[b"facts"], json.loads(metadata[b"facts"])
            tokens = Ragged(lists.values.to_numpy(), lists.offsets.to_numpy())
            checksum = _checksum(checksum, tokens, sizes.to_numpy(), text)
            if len(batch):
                rejected = {int(row): why for row, why in facts["rejected"].items()}
                parts.append(Kept(tokens, sizes.to_numpy(), rejected, facts["compiled"], facts["reasons"]))
        if (int(metadata[b"checksum"]), facts["key"], facts["rows"]) != (checksum, key, rows):
            return None
        return Entry(parts, facts["verified"], facts["compared"])
    except Exception:  # whatever lies there is not what was written; it is made anew
        return None


def _checksum(so_far: int, tokens: Ragged, sizes: np.ndarray[Any, Any], facts: bytes) -> int:
    """Of everything in a batch, and those before it: a disk may lose what it said it had written."""
    for part in (tokens.values, tokens.offsets, sizes):
        so_far = zlib.crc32(np.ascontiguousarray(part).data, so_far)
    return zlib.crc32(facts, so_far)


class EntryWriter:
    """Writes an entry, batch by batch, under a name of its own.

    Attributes:
        key: the entry's.
        path: of the unfinished file.
        rows: written so far.
        closed: whether the file is whole.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, key: str):
        self.key, self.path = key, folder / f"{key}-{uuid.uuid4().hex}.partial"
        self.rows = 0
        self.closed = False
        self._checksum = self._compared = 0
        self._sink = pa.OSFile(str(self.path), "wb")
        self._file = pa.ipc.new_file(self._sink, _SCHEMA)

    def write(self, batch: Batch, compared: int) -> None:
        """A batch with tokens, of which so many rows were compared with the reference."""
        assert batch.tokens is not None
        assert batch.rendered is not None
        rendered = batch.rendered
        tokens = batch.tokens.to_host()
        sizes = pa.array(np.maximum(rendered.sizes, 0), pa.int64())
        facts = {"rejected": rendered.rejected, "compiled": rendered.compiled_rows, "reasons": rendered.reasons}
        self._write(tokens, sizes, facts)
        self._compared += compared
        self.rows += len(tokens)

    def close(self, verified: Verify) -> None:
        """Ends the file; it has all rows."""
        facts = {"key": self.key, "rows": self.rows, "verified": verified, "compared": self._compared}
        self._write(Ragged.from_lists([]), pa.array([], pa.int64()), facts)
        self._file.close()
        self._sink.close()
        self.closed = True

    def discard(self) -> None:
        """Leaves nothing behind."""
        self._sink.close()
        self.path.unlink(missing_ok=True)

    def _write(self, tokens: Ragged, sizes: pa.Array, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts).encode()
        self._checksum = _checksum(self._checksum, tokens, sizes.to_numpy(), text)
        lists = pa.LargeListArray.from_arrays(pa.array(tokens.offsets), pa.array(tokens.values))
        batch = pa.RecordBatch.from_arrays([lists, sizes], schema=_SCHEMA)
        self._file.write_batch(batch, custom_metadata={"facts": text, "checksum": str(self._checksum)})
