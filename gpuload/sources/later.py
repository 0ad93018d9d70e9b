"""Tables that are decoded in the background: whoever passes rows on does not wait for their columns."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa


class LaterTable:
    """A table whose number of rows is known before its columns are decoded.

    Args:
        num_rows: of the table.
        wait: returns the table as soon as it is decoded, or raises why it cannot be.
    """

    def __init__(self, num_rows: int, wait: Callable[[], pa.Table]) -> None:
        self.num_rows, self._wait = num_rows, wait

    def take(self, rows: Any) -> "LaterTable":
        """Some rows, as `pa.Table.take`."""
        return LaterTable(len(rows), lambda: self._wait().take(rows))

    def table(self) -> pa.Table:
        """The table itself."""
        return self._wait()


def decoded(table: pa.Table | LaterTable) -> pa.Table:
    """The same table, as soon as it is decoded."""
    return table.table() if isinstance(table, LaterTable) else table
