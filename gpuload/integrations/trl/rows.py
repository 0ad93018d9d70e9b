"""Rows of a prepared dataset as flat ids, without Python lists.

torch's DataLoader asks a dataset for the rows of a batch, and passes them to the collator. A `FlatDataset` answers with
`FlatRows`, which reads nothing yet. The collators of `batches.py` take flat ids from them; anything else gets the dicts
that `datasets` makes.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from gpuload.core.arrays import Ragged, RowNumbers, offsets_of
from gpuload.integrations.trl.contract import row_numbers
from gpuload.sources.types import is_list


@dataclass(frozen=True)
class _Lists:
    """A column of lists of integers, chunk by chunk, as views."""

    starts: RowNumbers  # the number of the first row of each chunk
    chunks: list[Ragged]

    def take(self, numbers: RowNumbers) -> Ragged:
        chunk = np.searchsorted(self.starts, numbers, side="right") - 1
        places = zip(chunk.tolist(), (numbers - self.starts[chunk]).tolist(), strict=True)
        pieces = [self.chunks[k][row] for k, row in places]
        return Ragged(np.concatenate(pieces), offsets_of(np.array([len(piece) for piece in pieces])))


def _lists_of(column: pa.ChunkedArray) -> _Lists | None:
    """None if values are not lists of integers, or some are null."""
    if not is_list(column.type) or not pa.types.is_integer(column.type.value_type) or column.null_count:
        return None
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if any(chunk.values.null_count for chunk in chunks):
        return None
    starts = offsets_of(np.array([len(chunk) for chunk in chunks], np.int64))[:-1]
    return _Lists(starts, [Ragged(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in chunks])


class Views(dict[str, Any]):
    """Column → its `_Lists`. A copy of a dataset may have other columns, and makes its own."""

    def __deepcopy__(self, memo: Any) -> "Views":
        return Views()

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, ()


class FlatDataset(Dataset):  # type: ignore[misc]
    """A dataset whose batches are `FlatRows`. Everything else is as in `datasets`."""

    views: Views

    @staticmethod
    def of(dataset: Any) -> Any:
        """The same data. Datasets of other classes stay as they are."""
        if type(dataset) is not Dataset:
            return dataset
        made: Any = copy.copy(dataset)
        made.__class__ = FlatDataset
        made.views = Views()
        return made

    def __getitems__(self, keys: list[int]) -> Any:
        format = self.format
        if format["type"] is not None or format["columns"] != self.column_names:
            return self.dicts(keys)
        return FlatRows(self, keys)

    def dicts(self, keys: list[int]) -> list[dict[str, Any]]:
        """Rows as `datasets` makes them."""
        made: list[dict[str, Any]] = super().__getitems__(keys)
        return made


class FlatRows(Sequence[dict[str, Any]]):
    """Some rows of a dataset, with the numbers (B,) as torch counts them."""

    def __init__(self, dataset: FlatDataset, keys: list[int]) -> None:
        self._dataset, self._keys = dataset, keys
        self.names = frozenset(dataset.column_names)
        self._numbers = row_numbers(dataset, keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, row: Any) -> Any:
        return self._dataset.dicts(self._keys)[row]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._dataset.dicts(self._keys))

    def ids(self, *names: str) -> list[Ragged] | None:
        """Columns of lists of integers; None if one is missing or of another type, has nulls, or an empty row."""
        if not self.names.issuperset(names):
            return None
        views = self._dataset.views
        for name in names:
            if name not in views:
                views[name] = _lists_of(self._dataset.data.column(name))
        if any(views[name] is None for name in names):
            return None
        found = [views[name].take(self._numbers) for name in names]
        return found if all(rows.lengths.all() for rows in found) else None

    def numbers(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(B,) a column of numbers, of the type that torch gives a Python list."""
        return torch.tensor(self._dataset.data.column(name).take(pa.array(self._numbers)).to_pylist(), dtype=dtype)
