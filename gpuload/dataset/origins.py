"""Where the rows of a dataset come from."""

import numpy as np

from gpuload.core.arrays import RowNumbers
from gpuload.core.records import dataclass


@dataclass(frozen=True)
class Origins:
    """The places of n rows in their files, at eight bytes per row.

    Attributes:
        numbers: (n,) int64, numbers of the rows over all files.
        starts: (files + 1,) int64, the first of these numbers in each file, and the number of all rows.
        first_rows: (files,) int64, the number of that row in the file: not 0 if only a part of a file was read.
    """

    numbers: RowNumbers
    starts: RowNumbers
    first_rows: RowNumbers

    def __getitem__(self, row: int) -> tuple[int, int]:
        """The file of a row, and the number of the row in it."""
        file, number = self._pairs(self.numbers[[row]])[0].tolist()
        return file, number

    def pairs(self) -> RowNumbers:
        """(n, 2) int64: the file of each row, and the number of the row in it."""
        return self._pairs(self.numbers)

    def select(self, rows: RowNumbers) -> "Origins":
        """(m,) row numbers → the origins of those rows."""
        return Origins(self.numbers[rows], self.starts, self.first_rows)

    def _pairs(self, numbers: RowNumbers) -> RowNumbers:
        # Files without rows begin where the next one does: the last of them has the row.
        file = np.searchsorted(self.starts, numbers, side="right") - 1
        return np.stack([file, numbers - self.starts[file] + self.first_rows[file]], axis=1)
