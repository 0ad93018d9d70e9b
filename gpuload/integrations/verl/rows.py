"""Rows of a dataset inside verl: Arrow columns, converted to Python objects on access."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import RowNumbers, row_number, row_numbers
from gpuload.engines.protocol import TokenStore
from gpuload.integrations.verl.reuse import IDS_KEY
from gpuload.sources.columns import Columns


class ArrowRows:
    """The `dataframe` of verl's dataset class: the part of `datasets.Dataset` that verl uses, with faster access."""

    def __init__(
        self,
        columns: Columns,  # n rows
        names: Mapping[str, str],  # key of a row → name of its column
        ids: TokenStore | None = None,  # of prompts, if rows carry them; empty where one cannot be rendered
        stored: RowNumbers | None = None,  # (n,) the number of each row in `ids`; None: they have the same numbers
        owner: Any = None,  # of the files that the columns are in
    ):
        self._columns = columns
        self._names = dict(names)
        self._ids, self._stored, self._owner = ids, stored, owner

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def column_names(self) -> list[str]:
        """Keys of a row, without the prompt ids."""
        return list(self._names)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.take([row_number(row, len(self))])[0]

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Convert rows with these numbers (m,) to m dicts. No object is shared between two rows, or with a later call.

        Raises:
            IndexError: a row number is out of range.
        """
        numbers = row_numbers(rows, len(self))
        columns = self._columns.take(numbers, list(self._names.values()))
        keys = list(self._names)
        values = [columns[name] for name in self._names.values()]
        if self._ids is not None:
            keys.append(IDS_KEY)
            stored = numbers if self._stored is None else self._stored[numbers]
            values.append([ids or None for ids in self._ids.take(stored).to_lists()])
        return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)]

    def select(self, rows: Iterable[int]) -> "ArrowRows":
        """Return the rows with these numbers (m,) in the given order. Columns and ids are shared."""
        numbers = np.fromiter(rows, np.int64)
        stored = numbers if self._stored is None else self._stored[numbers]
        return ArrowRows(self._columns.select(numbers), self._names, self._ids, stored, self._owner)
