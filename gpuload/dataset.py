"""`PromptDataset`, the result of a load: rows as verl's dicts, whole batches in one gather, and the columns."""

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
    """Tokenized prompts with the other columns of their files. Made by `gpuload.load`.

    A row is a dict with verl's keys; L is `max_prompt_length`:

        input_ids, attention_mask, position_ids   int64 tensors (L,), left-padded
        raw_prompt_ids                            list[int], not padded, truncated by the same rule
        raw_prompt                                list[dict], with `return_raw_chat`
        full_prompts                              str, with `return_full_prompt`
        index                                     extra_info["index"], else 0
        every other column of the files           Python objects

    Attributes:
        tokens: all ids, n ragged rows of int32 in host memory.
        report: what the load did.
        options: of the load.
        pad_token_id: fills up padded rows.
        passed_through: the other columns, file by file as they were read.

    Example:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> prompts = gpuload.load(*demo_files(), max_prompt_length=512, max_samples=8)
        >>> len(prompts), prompts[0]["input_ids"].shape
        (8, torch.Size([512]))
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
        """Identifies this data, as plain data; see `gpuload.fingerprint`. Computed when first asked for."""
        return self._about | {"tokens": token_digest(self.tokens)}

    @property
    def columns(self) -> pa.Table:
        """The pass-through columns of all rows as one Arrow table.

        Raises:
            DataError: the files' columns have no common type.
        """
        return self.passed_through.table()

    def to_cudf(self) -> Any:
        """Converts the rows to a `cudf.DataFrame`: the pass-through columns, and `raw_prompt_ids`, lists of int32.

        Raises:
            DeviceError: cuDF is not installed.
            DataError: as for `columns`.
        """
        from gpuload.engines.device.cudf import frame_of

        on_device = self.options.tokens_on == "device"
        return frame_of(self.columns, getattr(self._padded, "store", self.tokens) if on_device else self.tokens)

    @property
    def column_types(self) -> pa.Schema:
        """The pass-through columns, each with its type in the first file that has it."""
        return self.passed_through.schema()

    def take(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Converts some pass-through columns to Python objects, without making tensors.

        Args:
            names: of the columns.
            rows: which rows; None for all.
        """
        numbers = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        return self.passed_through.take(numbers, names)

    def origin(self, row: int) -> tuple[str, int]:
        """The file that a row comes from, and its row number in that file."""
        source, number = self._origin[row]
        return self.report.files[source], int(number)

    def __getitem__(self, row: int) -> Row:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Returns several rows with one gather; torch's data loaders call this once per batch.

        Raises:
            IndexError: a row number is out of range.
            PromptTooLongError: a row is over `max_prompt_length`, with `truncation="error"`.
        """
        taken = self._take(rows, "max_length")
        columns = [values.unbind(0) if isinstance(values, torch.Tensor) else values for values in taken.values()]
        return [dict(zip(taken, values, strict=True)) for values in zip(*columns, strict=True)]

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "max_length") -> dict[str, Any]:
        """Returns B rows as one batch: tensors (B, L), and 1-d object arrays for everything else.

        Args:
            rows: B row numbers; negative ones count from the end.
            padding: "max_length", or "longest" for L = the longest row of the batch.

        Raises:
            IndexError: a row number is out of range.
            PromptTooLongError: a row is over `max_prompt_length`, with `truncation="error"`.
        """
        return {
            key: values if isinstance(values, torch.Tensor) else _object_array(values)
            for key, values in self._take(rows, padding).items()
        }

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same batches, each made early where that hides a transfer. For `PromptLoader`."""
        return self._padded.ahead(batches)

    def loader(self, batch_size: int, **settings: Any) -> PromptLoader:
        """Returns an iterator over device batches, with a state that can be saved.

        Args:
            batch_size: rows per batch and rank.
            **settings: see `PromptLoader`; `shuffle` and `seed` default to those given to `load`.
        """
        settings = {"shuffle": self.options.shuffle, "seed": self.options.seed or 0} | settings
        return PromptLoader(self, batch_size, **settings)

    def _take(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding) -> dict[str, Any]:
        """B rows by key: tensors (B, L), and lists of B objects."""
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
            raise IndexError(f"index {outside[0]} is out of range for a dataset with {len(self)} rows")
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        limit = self.options.max_prompt_length
        if self.options.truncation == "error":
            lengths = self.tokens.lengths[numbers]
            for number in numbers[lengths > limit]:
                file, place = self.origin(number)
                raise PromptTooLongError(
                    f"row {number} ({file} row {place}) has {self.tokens.lengths[number]} tokens, which exceeds "
                    f"max_prompt_length={limit}: raise max_prompt_length, set truncation to 'left', 'right' or "
                    "'middle', or set filter_overlong_prompts=True"
                )
        return numbers


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collates rows into a batch as verl does: tensors are stacked, everything else becomes a 1-d object array.

    For torch's own loaders: `DataLoader(prompts, batch_size=256, collate_fn=gpuload.collate_fn)`.

    Args:
        rows: B rows.

    Returns:
        Key → tensor (B, ...) or object array (B,).

    Example:
        >>> batch = collate_fn([{"input_ids": torch.zeros(4), "index": 7}, {"input_ids": torch.ones(4), "index": 8}])
        >>> batch["input_ids"].shape, batch["index"].tolist()
        (torch.Size([2, 4]), [7, 8])
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
    """A 1-d array whatever the values: `np.array` would make a matrix of lists that happen to be equally long."""
    return np.fromiter(values, object, len(values))
