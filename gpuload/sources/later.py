"""Tables that are decoded in the background: whoever passes rows on does not wait for their columns."""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa


class LaterTable:
    """A table whose number of rows, and about how many bytes it will have, are known before its columns are decoded.
    `wait` returns it as soon as it is decoded, or raises why it cannot be."""

    def __init__(self, num_rows: int, wait: Callable[[], pa.Table], nbytes: int = 0) -> None:
        self.num_rows, self._wait, self.nbytes = num_rows, wait, nbytes

    def take(self, rows: Any) -> "LaterTable":
        """Some rows, as `pa.Table.take`."""
        nbytes = self.nbytes * len(rows) // max(1, self.num_rows)
        return LaterTable(len(rows), lambda: self._wait().take(rows), nbytes)

    def table(self) -> pa.Table:
        """The table itself."""
        return self._wait()


def decoded(table: pa.Table | LaterTable) -> pa.Table:
    """The same table, as soon as it is decoded."""
    return table.table() if isinstance(table, LaterTable) else table


def one_table(tables: Sequence[pa.Table | LaterTable]) -> pa.Table | LaterTable:
    """The rows of tables with the same columns, one after the other."""
    if len(tables) == 1:
        return tables[0]
    if not any(isinstance(table, LaterTable) for table in tables):
        return pa.concat_tables(tables)
    rows, nbytes = (sum(getattr(table, name) for table in tables) for name in ("num_rows", "nbytes"))
    return LaterTable(rows, lambda: pa.concat_tables([decoded(table) for table in tables]), nbytes)
