"""PromptDataset: what a load gives. Rows as verl's dicts, whole batches in one gather, and the columns behind them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gpuload.arrays import Ragged
from gpuload.engines.protocol import Engine
from gpuload.errors import PromptTooLongError
from gpuload.fingerprint import Fingerprint, token_digest
from gpuload.loader import PromptLoader
from gpuload.options import Options, Padding
from gpuload.report import Report
from gpuload.sources.columns import Columns

Row = dict[str, Any]


class PromptDataset(torch.utils.data.Dataset[Row]):
    """Tokenized prompts with the columns of their files.

    A row is a dict of verl's keys; L is `max_prompt_length`, or the row's own length with `padding="longest"`:

        input_ids, attention_mask, position_ids   int64 tensors (L,), left-padded
        raw_prompt_ids                            list[int], unpadded, truncated by the same rule
        raw_prompt                                list[dict], with `return_raw_chat`
        full_prompts                              str, with `return_full_prompt`
        index                                     extra_info["index"], else 0
        every other column of the files           Python objects

    Made by `gpuload.load`.

    Attributes:
        tokens: all ids, ragged; int32.
        report: what the load did.
        passed_through: the other columns, file by file as they were read.
    """

    def __init__(
        self,
        tokens: Ragged,
        columns: Columns,
        origin: np.ndarray[Any, Any],
        engine: Engine,
        options: Options,
        pad_token_id: int,
        report: Report,
        about: Fingerprint,
    ):
        self.tokens = tokens.to_host()
        self.options = options
        self.pad_token_id = pad_token_id
        self.report = report
        self._about = about
        self.passed_through = columns
        self._origin = origin
        self._padded = engine.batches(tokens, options.max_prompt_length, options.truncation, pad_token_id)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        columns = ", ".join(self.passed_through.names)
        return f"PromptDataset({len(self):,} rows, {len(self.tokens.values):,} tokens, {columns})"

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Tells this data from other data: plain data, made when it is first asked for."""
        return self._about | {"tokens": token_digest(self.tokens)}

    @property
    def columns(self) -> pa.Table:
        """The passed-through columns of all rows as one Arrow table."""
        return self.passed_through.table()

    def to_cudf(self) -> Any:
        """The kept rows as a `cudf.DataFrame`: the passed-through columns, and `raw_prompt_ids`, a list of int32 a row.

        Raises:
            DeviceError: cuDF is not installed.
            DataError: as for `columns`.
        """
        from gpuload.engines.device.cudf import frame_of

        on_device = self.options.tokens_on == "device"
        return frame_of(self.columns, getattr(self._padded, "store", self.tokens) if on_device else self.tokens)

    @property
    def column_types(self) -> pa.Schema:
        """The passed-through columns with the types of the first file that has them."""
        return self.passed_through.schema()

    def take(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Passed-through columns as Python objects, all rows or some, without making tensors."""
        numbers = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        return self.passed_through.take(numbers, names)

    def origin(self, row: int) -> tuple[str, int]:
        """The file a row is from, and its number there."""
        source, number = self._origin[row]
        return self.report.files[source], int(number)

    def __getitem__(self, row: int) -> Row:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Several rows at the cost of one gather: torch's loaders call this once per batch.

        Raises:
            IndexError: no such row.
            PromptTooLongError: a row over `max_prompt_length`, with `truncation="error"`.
        """
        taken = self._take(rows, "max_length")
        columns = [values.unbind(0) if isinstance(values, torch.Tensor) else values for values in taken.values()]
        return [dict(zip(taken, values, strict=True)) for values in zip(*columns, strict=True)]

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "max_length") -> dict[str, Any]:
        """B rows with B in front of every key's shape: tensors (B, L), and 1-d object arrays for everything else.

        Args:
            rows: row numbers; negative ones count from the end.
            padding: to `max_prompt_length`, or to the longest row of the batch.
        """
        return {
            key: values if isinstance(values, torch.Tensor) else _object_array(values)
            for key, values in self._take(rows, padding).items()
        }

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Batches of this data set one after the other, made early where that saves waiting: for `PromptLoader`."""
        return self._padded.ahead(batches)

    def loader(self, batch_size: int, **settings: Any) -> PromptLoader:
        """An iterator over device batches with a state that can be saved; see `PromptLoader` for the settings.

        `shuffle` and `seed` are those given to `load`, where not given here.
        """
        settings = {"shuffle": self.options.shuffle, "seed": self.options.seed or 0} | settings
        return PromptLoader(self, batch_size, **settings)

    def _take(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding) -> dict[str, Any]:
        """B rows of every key: tensors (B, L), and lists of B objects."""
        numbers = self._check(rows)
        length = self.options.max_prompt_length
        tokens = self.tokens.take(numbers).truncate(length, self.options.truncation)
        width = length if padding == "max_length" else int(tokens.lengths.max(initial=0))
        taken: dict[str, Any] = self.passed_through.take(numbers)
        taken |= self._padded(numbers, tokens, width)
        taken["raw_prompt_ids"] = tokens.to_lists()
        taken["index"] = [_index(extra) for extra in taken.get("extra_info", [None] * len(numbers))]
        if self.options.return_raw_chat:
            taken["raw_prompt"] = [
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                for prompt in taken["raw_prompt"]
            ]
        return taken

    def _check(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        numbers = np.asarray(rows, np.int64).reshape(-1)
        outside = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of a data set of {len(self)} rows")
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        limit = self.options.max_prompt_length
        if self.options.truncation == "error":
            lengths = self.tokens.lengths[numbers]
            for number in numbers[lengths > limit]:
                file, place = self.origin(number)
                raise PromptTooLongError(
                    f"row {number} ({file} row {place}) has {self.tokens.lengths[number]} tokens, more than "
                    f"max_prompt_length={limit}: raise it, set truncation to 'left', 'right' or 'middle', or set "
                    "filter_overlong_prompts=True"
                )
        return numbers


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows → a batch, as verl collates: tensors are stacked, everything else becomes a 1-d array of objects.

    For stock torch loaders: `DataLoader(prompts, batch_size=256, collate_fn=gpuload.collate_fn)`.
    """
    values: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {
        key: torch.stack(items) if all(isinstance(item, torch.Tensor) for item in items) else _object_array(items)
        for key, items in values.items()
    }


def _index(extra_info: Any) -> Any:
    index = extra_info.get("index") if isinstance(extra_info, Mapping) else None
    return 0 if index is None else index


def _object_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """One-dimensional whatever the values: `np.array` makes a matrix of lists that happen to be equally long."""
    return np.fromiter(values, object, len(values))
