"""What `ChatDataset` and `PairDataset` have in common: rows of lists, and `to_arrow`."""

from abc import abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.workers import prepare_worker
from gpuload.dataset.rows import PromptDataset, Row


class TrainingDataset(PromptDataset):
    """Tokenized rows to train on."""

    limit_name = "max_length"

    @abstractmethod
    def to_arrow(self) -> pa.RecordBatchReader:
        """All rows as Arrow record batches."""

    @abstractmethod
    def _lists(self, numbers: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
        """What is made of the tokens of B rows: B values for each name."""

    def __getitems__(self, rows: Any) -> list[Row]:
        """Return several rows.

        Args:
            rows: Row numbers, or a slice; negative numbers count from the end.

        Returns:
            One dict per row, with lists.

        Raises:
            IndexError: A row number is out of range.
        """
        prepare_worker()
        numbers = self._check(rows)
        columns = {name: self._column(name, numbers) for name in self.passed_through.names}
        columns |= self._lists(numbers)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def to_cudf(self) -> Any:
        """Return all rows as a `cudf.DataFrame`, with the columns of `to_arrow`.

        Raises:
            DeviceError: cuDF is not installed.
            DataError: As for `to_arrow`.
        """
        from gpuload.engines.device.cudf import frame_of

        return frame_of(self.to_arrow().read_all())
