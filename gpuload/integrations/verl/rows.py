"""The rows of a data set inside verl: Arrow columns, made Python objects when they are asked for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.arrays import Ragged
from gpuload.integrations.verl.reuse import IDS
from gpuload.sources.columns import Columns


class Rows:
    """What verl's class keeps as `dataframe`: as much of a `datasets.Dataset` as verl uses, at a fraction of its cost.

    Args:
        columns: the rows.
        names: key of a row → name of its column.
        ids: the prompts' ids, for rows that are to carry them; no ids for a prompt that cannot be rendered.
    """

    def __init__(self, columns: Columns, names: Mapping[str, str], ids: Ragged | None = None):
        self._columns = columns
        self._names = dict(names)
        self._ids = ids

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def column_names(self) -> list[str]:
        return list(self._names)

    @property
    def nbytes(self) -> int:
        """Of the columns and the ids."""
        return self._columns.nbytes + (self._ids.nbytes if self._ids else 0)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.take([row])[0]

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """(m,) row numbers → m rows, each of objects of its own.

        Raises:
            IndexError: there is no such row.
        """
        numbers = np.asarray(rows, np.int64)
        columns = self._columns.take(numbers, list(self._names.values()))
        keys = list(self._names)
        values = [columns[name] for name in self._names.values()]
        if self._ids is not None:
            keys.append(IDS)
            values.append([ids or None for ids in self._ids.take(numbers).to_lists()])
        return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)]

    def select(self, rows: Iterable[int]) -> "Rows":
        """The given rows in the given order, over the same memory except for ids."""
        numbers = np.fromiter(rows, np.int64)
        ids = None if self._ids is None else self._ids.take(numbers)
        return Rows(self._columns.select(numbers), self._names, ids)
