"""What people read of a dataset: rows as text and token by token, as a table of pandas, as a table in a notebook."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, row_number
from gpuload.core.errors import DataError, GpuloadError
from gpuload.core.marks import split
from gpuload.core.words import counted
from gpuload.reference.reference import Reference
from gpuload.sources.columns import Columns

_ROWS, _COLUMNS = 5, 6  # of a table in a notebook


class Readable(ABC):
    """The part of `Rows` that is for people."""

    _reference: Reference | None
    _lengths: RowNumbers
    passed_through: Columns

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def origin(self, row: int) -> tuple[str, int]: ...

    @abstractmethod
    def take(self, names: Any, rows: Any = None) -> dict[str, list[Any]]: ...

    @abstractmethod
    def to_arrow(self) -> pa.RecordBatchReader: ...

    @property
    @abstractmethod
    def column_names(self) -> list[str]:
        """The names of the columns of `to_arrow` and `to_pandas`: those made of tokens, then those of the files."""

    @abstractmethod
    def _parts(self, numbers: RowNumbers) -> dict[str, Ragged]:
        """The whole sequences of B rows by their names, with the bit of loss."""

    def to_pandas(self) -> Any:
        """Return all rows as a `pandas.DataFrame`, with the columns of `to_arrow`.

        Examples:
            >>> prompts.to_pandas().shape
            (100, 5)

        Raises:
            GpuloadError: pandas is not installed.
            DataError: As for `to_arrow`, or pandas has no such values.
        """
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise GpuloadError("to_pandas needs pandas: pip install pandas") from error
        table = self.to_arrow().read_all()
        try:
            return table.to_pandas()
        except pa.ArrowException:
            for name in table.column_names:
                _check_pandas(name, table.column(name))
            raise

    def decode(self, row: int) -> Any:
        """Return the text of a row's tokens, special tokens included: what the model reads.

        Examples:
            >>> prompts.decode(0)[-33:]
            '<|im_end|>\\n<|im_start|>assistant\\n'

        Args:
            row: Row number.

        Returns:
            A str; for a pair, a dict with the text of each of its sequences.

        Raises:
            IndexError: There is no such row.
            GpuloadError: The dataset was sent to another process, where it has no tokenizer.
        """
        texts = self._texts(row_number(row, len(self)), self._tokenizer("decode"))
        return next(iter(texts.values())) if len(texts) == 1 else texts

    def _texts(self, row: int, reference: Reference) -> dict[str, str]:
        parts = self._parts(np.array([row]))
        return {name: reference.tokenizer.decode(split(ids)[0][0].tolist()) for name, ids in parts.items()}

    def show(self, row: int) -> None:
        """Print a row token by token, and which of them have loss. `gpuload show` shows roles and colors, too.

        Examples:
            >>> chats.show(0)
            Table row 0
            conversation: 3 tokens
            loss
              [two][·words][<|im_end|>]

        Args:
            row: Row number.

        Raises:
            IndexError: There is no such row.
            GpuloadError: As for `decode`.
        """
        reference, number = self._tokenizer("show"), row_number(row, len(self))
        from gpuload.tokenizer.visible import Pieces, shown

        pieces = Pieces(reference.tokenizer, reference.model_json if reference.backend is not None else None)
        file, place = self.origin(number)
        print(shown(f"{file} row {place}"))
        for name, tokens in self._parts(np.array([number])).items():
            ids, loss = (part[0] for part in split(tokens))
            print(f"{name}: {counted(len(ids), 'tokens')}")
            from gpuload.dataset.notebook import token_lines

            print("\n".join(token_lines(list(map(pieces, ids.tolist())), loss if loss.any() else None)))

    def _tokenizer(self, caller: str) -> Reference:
        if self._reference is None:
            raise GpuloadError(
                f"{caller}: a copy, or a dataset in another process, has no tokenizer: call it where it was loaded"
            )
        return self._reference

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reference": None}

    def _repr_html_(self) -> str:
        first = np.arange(min(_ROWS, len(self)))
        reference = self._reference
        texts = (
            [" ⏐ ".join(self._texts(int(row), reference).values()) for row in first] if reference is not None else []
        )
        others = self.passed_through.names[:_COLUMNS]
        values = self.take(others, first)
        rows = zip(first, self._lengths[first].tolist(), *[texts] * bool(texts), *values.values(), strict=True)
        from gpuload.dataset.notebook import table_html

        return table_html(repr(self), ("row", "tokens", *["text"] * bool(texts), *others), rows)


def _check_pandas(name: str, column: pa.ChunkedArray) -> None:
    """Checks that pandas has the values of a column; a `DataError` if not."""
    try:
        column.to_pandas()
    except pa.ArrowException as error:
        raise DataError(
            f"column {name!r} of type {column.type!s:.60} cannot be converted to pandas ({error!s:.200}): convert it, "
            "or use to_arrow"
        ) from error
