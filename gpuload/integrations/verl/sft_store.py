"""Reading and storage of conversations for SFTDataset, and rows in the shape of verl's SFT dataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from gpuload.core.arrays import Ragged
from gpuload.core.marks import LOSS
from gpuload.engines.host.engine import arrow_parts
from gpuload.integrations.verl.turns import TokenizedConversations
from gpuload.pipeline.stream import Batch, read
from gpuload.sources.read import Source, check_unchanged

Ints = npt.NDArray[np.int64]


def read_conversations(sources: Sequence[Source], messages_key: str, wanted: Ints | None) -> Iterator[Batch]:
    """Read the rows of all files in batches, with the column of messages as prompts.

    Args:
        messages_key: name of the column of messages.
        wanted: rows to read, numbered over all files, in any order; None for all. They are read in ascending order.

    Raises:
        SourceError: a file cannot be read, or was changed meanwhile.
    """
    for batch in read(sources, lambda number: arrow_parts(sources[number], messages_key), wanted, {}):
        assert isinstance(batch, Batch)  # none has ids
        yield batch
    check_unchanged(sources)


@dataclass(frozen=True)
class SFTStore:
    """Tokenized conversations, in the order in which they were read.

    Attributes:
        ids: n rows of token ids, with a bit for loss (`gpuload.core.marks`); empty for rejected rows.
        places: (n, 2) int64, number of the file and row number in it.
        rejected: row → (number in `tables`, row there).
        tables: all columns of the rejected rows.
    """

    ids: Ragged
    places: Ints
    rejected: dict[int, tuple[int, int]]
    tables: list[pa.Table]

    def row(self, number: int) -> npt.NDArray[np.int32]:
        """Return the ids of a row, with bits, as a view."""
        ids: npt.NDArray[np.int32] = self.ids[number]
        return ids

    def rejected_row(self, number: int) -> pa.Table | None:
        """Return the columns of a rejected row, or None if the row has ids."""
        if number not in self.rejected:
            return None
        table, row = self.rejected[number]
        return self.tables[table].slice(row, 1)


class SFTStoreBuilder:
    """Collects batches for an `SFTStore`."""

    def __init__(self) -> None:
        self._ids: list[Ragged] = []
        self._places: list[Ints] = []
        self._rejected: dict[int, tuple[int, int]] = {}
        self._tables: list[pa.Table] = []
        self._count = 0

    def add(self, tokenized: TokenizedConversations, batch: Batch) -> None:
        """Append the rows of a batch."""
        rejected = sorted(tokenized.rejected)
        if rejected:
            numbers = {self._count + row: (len(self._tables), number) for number, row in enumerate(rejected)}
            self._rejected |= numbers
            self._tables.append(batch.table.take(pa.array(rejected)))
        self._ids.append(tokenized.ids)
        self._places.append(np.stack([np.full(len(batch.rows), batch.source), batch.rows], axis=1))
        self._count += len(batch.rows)

    def build(self) -> SFTStore:
        """Concatenate the batches. The builder is empty afterwards."""
        places = np.concatenate([np.zeros((0, 2), np.int64), *self._places])
        return SFTStore(Ragged.concatenate(self._ids), places, self._rejected, self._tables)


def shape_row(
    ids: npt.NDArray[np.int32],
    *,
    max_length: int,
    pad_mode: str,
    truncation: str,
    pad_token_id: int | None,
) -> dict[str, torch.Tensor]:
    """Pad or truncate a conversation as verl's SFT dataset does.

    Args:
        ids: (k,) token ids, with a bit for loss.
        max_length: limit, and with `pad_mode="right"` the length of the row.
        pad_mode: "right" or "no_padding".
        truncation: "left" removes tokens from the start, but only with `pad_mode="right"`; any other value removes
            them from the end.
        pad_token_id: None for 0.

    Returns:
        int64 tensors (L,): `input_ids`, `position_ids`, `loss_mask`, and `attention_mask` with `pad_mode="right"`.
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
    row |= {"position_ids": position_ids, "loss_mask": loss_mask}
    return {key: torch.from_numpy(values) for key, values in row.items()}
