"""One entry of the token cache: the ids of all rows of one file, as one Arrow IPC file.

The record batches are those of the load that made the tokens, with rejected rows and counts in their metadata. An empty
last batch has the number of rows and how they were verified. Files are written in a temporary directory and renamed
once the load has been verified, so that no process sees half of one; a damaged file is ignored. Reading maps the file
into memory: only the ids that are used are ever copied.

A disk may lose what it reported as written. So there are two kinds of checksums: one of the lengths and the metadata of
each batch and all before it, which is compared when a file is opened, and one of the ids of each batch, which can be
left until they are used.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, on_host
from gpuload.core.options import Verify
from gpuload.engines.protocol import RowCounts, Tokenized
from gpuload.sources.read import Source, other_columns

_LEVELS: tuple[Verify, ...] = ("off", "sample", "full")
_SCHEMA = pa.schema([("ids", pa.large_list(pa.int32())), ("text_bytes", pa.int64())])


@dataclass(frozen=True)
class Entry:
    """All rows of one file.

    Attributes:
        path: of the entry.
        key: its key.
        memory: the mapped file.
        parts: the rows in order, in the batches in which they were made.
        checksums: of the ids of each part.
        verified: how they were compared with the tokenizer.
        compared: how many rows were compared.
    """

    path: Path
    key: str
    memory: pa.Buffer
    parts: list[Tokenized]
    checksums: list[int]
    verified: Verify
    compared: int

    def is_intact(self, part: int) -> bool:
        """Whether the ids of a part have their checksum."""
        return _checksum(0, self.parts[part].ids.values) == self.checksums[part]

    @cached_property
    def starts(self) -> np.ndarray[Any, Any]:
        """(parts + 1,) the first row of each part, and the number of rows."""
        return np.cumsum([0, *map(len, self.parts)])

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, Tokenized]]:
        """As an engine's `read`, with ids instead of prompts."""
        row = 0
        for table in other_columns(source, prompt_key, keep_prompts):
            yield table, self.rows(row, row + table.num_rows)
            row += table.num_rows

    def rows(self, low: int, high: int) -> Tokenized:
        """Rows `low` to `high` (exclusive). A file may be read in other batches than those of its entry."""
        first, last = np.searchsorted(self.starts, [low, high - 1], side="right") - 1
        ids: list[Ragged] = []
        sizes: list[np.ndarray[Any, Any]] = []
        rejected: dict[int, str] = {}
        rendering, control = RowCounts(), 0
        for start, part in zip(self.starts[first : last + 1].tolist(), self.parts[first : last + 1], strict=True):
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


def read_entry(path: Path, key: str, rows: int, check_ids: bool = True) -> Entry | None:
    """Opens the entry of a file.

    Args:
        path: of the entry.
        key: of the entry.
        rows: of the file.
        check_ids: compare the checksums of the ids; otherwise only those of everything else.

    Returns:
        The entry; None if there is none, or a damaged one, or another file.
    """
    try:
        with pa.memory_map(str(path)) as mapped:
            memory = mapped.read_buffer()
        with pa.ipc.open_file(memory) as reader:
            if not reader.schema.equals(_SCHEMA):
                return None
            batches = [reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)]
        parts: list[Tokenized] = []
        checksums: list[int] = []
        checksum = 0
        for batch, metadata in batches:
            batch.validate()
            lists, sizes = batch.columns
            text, facts = metadata[b"facts"], json.loads(metadata[b"facts"])
            tokens = Ragged(_in_place(lists.values, np.int32), _in_place(lists.offsets, np.int64))
            text_sizes = _in_place(sizes, np.int64)
            checksum = _checksum(checksum, tokens.offsets, text_sizes, text)
            if len(batch):
                checksums.append(facts["ids"])
                rejected = {int(row): why for row, why in facts["rejected"].items()}
                parts.append(
                    Tokenized(
                        ids=tokens,
                        text_sizes=text_sizes,
                        text_nbytes=int(text_sizes.sum()),
                        rejected=rejected,
                        compiled_rows=facts["compiled"],
                        reasons=facts["reasons"],
                        control_rows=facts["control"],
                    )
                )
        if (int(metadata[b"checksum"]), facts["key"], facts["rows"]) != (checksum, key, rows):
            return None
        entry = Entry(path, key, memory, parts, checksums, facts["verified"], facts["compared"])
        return None if check_ids and not all(map(entry.is_intact, range(len(parts)))) else entry
    except Exception:  # whatever the damage, the tokens are made again
        return None


def is_verified(found: str | None, wanted: Verify) -> bool:
    """Whether ids were compared with the tokenizer as is asked for, or better.

    Args:
        found: how they were compared; None if that is unknown.
        wanted: the option.
    """
    return found in _LEVELS and _LEVELS.index(found) >= _LEVELS.index(wanted)


def about_entry(path: Path) -> tuple[str, int] | None:
    """The name of the file of which an entry was made, and its rows; None if the entry cannot be read."""
    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            _, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
        facts = json.loads(metadata[b"facts"])
        return str(facts["source"]), int(facts["rows"])
    except Exception:  # whatever the damage: `read_entry` ignores such a file, too
        return None


def _in_place(array: pa.Array, kind: type) -> np.ndarray[Any, Any]:
    """The values of an array without nulls. Arrow's `to_numpy` imports pandas, which takes half a second."""
    data = array.buffers()[1]
    if data is None:
        return np.zeros(0, kind)
    return np.frombuffer(data, kind)[array.offset : array.offset + len(array)]


def _checksum(so_far: int, *parts: np.ndarray[Any, Any] | bytes) -> int:
    """The checksum of what had the checksum `so_far`, and of further parts after it."""
    for part in parts:
        so_far = zlib.crc32(part if isinstance(part, bytes) else np.ascontiguousarray(part).data, so_far)
    return so_far


class EntryWriter:
    """Writes an entry batch by batch, in a directory for unfinished files.

    Args:
        directory: where to write it.
        key: the entry's key.
        source: the name of the file whose rows it gets, for lists of entries.
        name: of the unfinished file; None for the key.

    Attributes:
        key: the same.
        path: of the unfinished file.
        rows: how many were written so far.
        closed: whether the file is complete.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path, key: str, source: str, name: str | None = None):
        self.key, self.path = key, directory / (name or key)
        self._source = source
        self.rows = 0
        self.closed = False
        self._checksum = self._compared = 0
        self._sink = pa.OSFile(str(self.path), "wb")
        self._file = pa.ipc.new_file(self._sink, _SCHEMA)

    def write(self, tokens: Tokenized, compared: int) -> None:
        """Appends rows, of which `compared` were compared with the tokenizer."""
        facts = {
            "rejected": tokens.rejected,
            "compiled": tokens.compiled_rows,
            "reasons": tokens.reasons,
            "control": tokens.control_rows,
        }
        self._write(tokens.ids.to_host(), pa.array(on_host(tokens.text_sizes), pa.int64()), facts)
        self._compared += compared
        self.rows += len(tokens)

    def close(self, verified: Verify) -> None:
        """Completes the file, once it has all rows."""
        facts = {
            "key": self.key,
            "rows": self.rows,
            "verified": verified,
            "compared": self._compared,
            "source": self._source,
        }
        self._write(Ragged.from_lists([]), pa.array([], pa.int64()), facts)
        self._file.close()
        self._sink.close()
        self.closed = True

    def discard(self) -> None:
        """Removes the file."""
        self._sink.close()
        self.path.unlink(missing_ok=True)

    def _write(self, tokens: Ragged, sizes: pa.Array, facts: Mapping[str, Any]) -> None:
        text = json.dumps({**facts, "ids": _checksum(0, tokens.values)}).encode()
        self._checksum = _checksum(self._checksum, tokens.offsets, sizes.to_numpy(), text)
        lists = pa.LargeListArray.from_arrays(pa.array(tokens.offsets), pa.array(tokens.values))
        batch = pa.RecordBatch.from_arrays([lists, sizes], schema=_SCHEMA)
        self._file.write_batch(batch, custom_metadata={"facts": text, "checksum": str(self._checksum)})
