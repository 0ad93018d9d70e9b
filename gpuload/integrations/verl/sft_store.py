"""Conversations for SFTDataset: how they are read, where each is, and rows in the shape of verl's SFT dataset."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from gpuload.cache.store import TokenCache
from gpuload.core.arrays import offsets_of
from gpuload.core.marks import LOSS
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.engines.host.engine import arrow_parts
from gpuload.integrations.messages.cache import RowCache, Rule, StoredRows
from gpuload.pipeline.parts import Batch
from gpuload.pipeline.stream import read
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, check_unchanged

Ints = npt.NDArray[np.int64]


def read_conversations(sources: Sequence[Source], messages_key: str, wanted: Ints | None) -> Iterator[Batch]:
    """Read the rows of all files in batches, with a column of messages as prompts; or only the `wanted` ones, numbered
    over all files in any order, which are read in ascending order.

    Raises:
        SourceError: a file cannot be read, or was changed meanwhile.
    """
    for batch in read(sources, lambda number: arrow_parts(sources[number], messages_key), wanted, {}):
        assert isinstance(batch, Batch)  # none has ids
        yield batch
    check_unchanged(sources)


@dataclass(frozen=True)
class RowPlaces:
    """Which rows of the files a dataset has, in the order in which they are read."""

    names: Sequence[str]  # of the files
    starts: Ints  # (files + 1,) number of the first row of each, over all files
    numbers: Ints | None  # (n,) numbers of the rows, ascending; None for all rows

    @classmethod
    def of(cls, sources: Sequence[Source], wanted: Ints | None) -> "RowPlaces":
        """Those of the wanted rows, in any order; None for all."""
        starts = offsets_of(np.array([source.num_rows for source in sources], np.int64))
        return cls([source.name for source in sources], starts, None if wanted is None else np.sort(wanted))

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.numbers is None else len(self.numbers)

    def over_all_files(self, rows: Ints) -> Ints:
        """(m,) rows of the dataset, in the order in which they are read → their numbers over all files."""
        return rows if self.numbers is None else self.numbers[rows]

    def place(self, row: int) -> str:
        """Where a row is, for messages."""
        number = int(self.over_all_files(np.array([row]))[0])
        source = int(np.searchsorted(self.starts, number, side="right")) - 1
        return f"{self.names[source]} row {number - int(self.starts[source])}"


@dataclass
class RejectedRows:
    """Rows that verl's method has to make at each access."""

    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # row → (number in `tables`, row there)
    tables: list[pa.Table] = field(default_factory=list)  # all columns of these rows

    def add(self, rows: Sequence[int], table: pa.Table) -> None:
        """Adds rows of the dataset, with their columns."""
        if len(rows):
            self.places.update((row, (len(self.tables), number)) for number, row in enumerate(rows))
            self.tables.append(table)

    def get(self, row: int) -> pa.Table | None:
        """The columns of a row; None if it has ids."""
        if row not in self.places:
            return None
        table, number = self.places[row]
        return self.tables[table].slice(number, 1)


def row_cache(
    options: Options,
    reference: Reference,
    rule: Rule,  # of verl's class
    sources: Sequence[Source],
    keys: Sequence[str],  # the columns that decide ids, where a file has them; the first one has the messages
    places: RowPlaces,  # which rows of the files it has
) -> RowCache:
    """The cache of a dataset of files."""
    fields = [[source.schema.field(key) for key in keys if key in source.schema.names] for source in sources]
    chosen = places.numbers
    settings: dict[str, Any] = {
        "keys": list(keys),
        "columns": [[f"{field.name}: {field.type}" for field in each] for each in fields],
        "rows": "all" if chosen is None else hashlib.blake2b(chosen.tobytes(), digest_size=16).hexdigest(),
    }

    def content(cache: TokenCache) -> bytes:
        given = zip(sources, fields, strict=True)
        return b"".join(cache.content(source, [field.name for field in each]) for source, each in given)

    messages = sum(source.decoded_bytes([keys[0]]) for source in sources)
    return RowCache(
        options,
        reference,
        replace(rule, settings={**rule.settings, **settings}),
        name=sources[0].name if len(sources) == 1 else f"{sources[0].name} and {len(sources) - 1} more",
        rows=len(places),
        nbytes=messages * len(places) // max(1, int(places.starts[-1])),
        content=content,
    )


def summary(rows: StoredRows, places: RowPlaces, seconds: float, notes: Sequence[str]) -> str:
    """What was done, in one line."""
    counts = rows.rendering
    where = ", from the cache" if rows.found else ""
    parts = [
        f"{counted(len(places), 'conversations')}, {counted(int(rows.ids.lengths.sum()), 'tokens')} in "
        f"{seconds:.1f} s{where}",
        f"{counted(counts.compiled_rows, 'texts rendered')} by the compiled template, "
        f"{counts.reference_rows:,} by transformers",
    ]
    if counts.reasons:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in list(counts.reasons.items())[:3])
        parts.append(f"reasons: {reasons}")
    if fallback := rows.counts["fallback"]:
        parts.append(f"{counted(fallback, 'rows')} tokenized by verl's method")
    if rows.others:
        parts.append(f"{counted(len(rows.others), 'rows')} passed to verl's method at each access")
    if mismatches := rows.counts["mismatches"]:
        parts.append(f"{counted(mismatches, 'rows')} kept whose messages have other ids than the whole conversation")
    return "; ".join([*parts, *notes])


def planes_of(processor: Any) -> int:
    """How many rows of positions verl makes with a processor; 0 if positions are one row, without another dimension."""
    return 4 if "Qwen2VLImageProcessor" in type(getattr(processor, "image_processor", None)).__name__ else 0


def shape_row(
    ids: npt.NDArray[np.int32],
    *,
    max_length: int,
    pad_mode: str,
    truncation: str,
    pad_token_id: int | None,
    planes: int = 0,
) -> dict[str, torch.Tensor]:
    """Pad or truncate a conversation as verl's SFT dataset does: (k,) token ids, with a bit for loss.

    Args:
        max_length: limit, and with `pad_mode="right"` the length of the row.
        pad_mode: "right" or "no_padding".
        truncation: "left" removes tokens from the start, but only with `pad_mode="right"`; any other value removes them
            from the end.
        pad_token_id: None for 0.
        planes: of positions, with which models of Qwen's vision family count text and three axes of images.

    Returns:
        int64 tensors (L,): `input_ids`, `position_ids`, `loss_mask`, and `attention_mask` with `pad_mode="right"`. With
        planes, `position_ids` is (planes, L).
    """
    from_start = pad_mode == "right" and truncation == "left"
    skipped = max(0, len(ids) - max_length) if from_start else 0
    ids = ids[skipped : skipped + max_length]
    count = len(ids)
    length = max_length if pad_mode == "right" else count
    input_ids = np.full(length, 0 if pad_token_id is None else pad_token_id, np.int64)
    input_ids[:count] = ids & ~LOSS
    position_ids, loss_mask = np.zeros(length, np.int64), np.zeros(length, np.int64)
    # Positions count from the start of the whole conversation, as in verl, which truncates them like the ids.
    position_ids[:count] = np.arange(skipped, skipped + count)
    loss_mask[:count] = (ids & LOSS) != 0
    row = {"input_ids": input_ids}
    if pad_mode == "right":
        row["attention_mask"] = (np.arange(length) < count).astype(np.int64)
    row |= {"position_ids": np.tile(position_ids, (planes, 1)) if planes else position_ids, "loss_mask": loss_mask}
    return {key: torch.from_numpy(values) for key, values in row.items()}
