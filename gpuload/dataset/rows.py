"""PromptDataset: the result of a load. Rows as dicts with verl's keys, batches by one gather, and the other columns."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Protocol, overload

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Array, Ragged, row_number, row_numbers
from gpuload.core.errors import OptionError, PromptTooLongError
from gpuload.core.lazy import Later, LazyDict
from gpuload.core.options import Options, Padding, nearest
from gpuload.core.workers import prepare_worker
from gpuload.dataset.fingerprint import Fingerprint, token_digest
from gpuload.dataset.loader import PromptLoader
from gpuload.dataset.origins import Origins
from gpuload.dataset.report import Report
from gpuload.engines.protocol import Engine, TokenStore
from gpuload.reference.reference import messages_of
from gpuload.sources.columns import Columns

Row = dict[str, Any]


class Make(Protocol):
    """Makes the dataset of a load, from the arguments of `PromptDataset`: this class, one below it, or a function that
    has the following too.

    Attributes:
        limit_name: name of the option that sets the limit in tokens.
    """

    @property
    def limit_name(self) -> str: ...

    def limited(self, ids: Any, /) -> Array: ...

    def __call__(self, *made: Any) -> "PromptDataset": ...


_KEYS = frozenset(("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "index"))


class PromptDataset(torch.utils.data.Dataset[Row]):
    """Tokenized prompts, with the other columns of their files. Made by `gpuload.load`.

    A map-style `torch.utils.data.Dataset`. A row is a dict with these keys, where L is `max_prompt_length`:

    - `input_ids`, `attention_mask`, `position_ids`: int64 tensors `(L,)`, left-padded.
    - `raw_prompt_ids`: the token ids as a list of int, without padding, truncated to at most L.
    - `raw_prompt`: the messages as a list of dict, with `return_raw_chat`.
    - `full_prompts`: the rendered text as a str, with `return_full_prompt`.
    - `index`: `extra_info["index"]`, or 0.
    - Every other column of the files, as Python objects; None in rows of files without the column.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> file, tokenizer = demo_files()
        >>> prompts = gpuload.load(file, tokenizer, max_prompt_length=512, max_samples=100)
        >>> prompts
        PromptDataset(100 rows, 10,636 tokens, data_source, ability, reward_model, extra_info)
        >>> prompts[0]["input_ids"].shape
        torch.Size([512])
        >>> len(prompts[0]["raw_prompt_ids"])
        83

    Attributes:
        report: What the load did, as a `gpuload.dataset.report.Report`; `print` it.
        options: The options of the load.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    limit_name: ClassVar[str] = "max_prompt_length"  # in messages

    @staticmethod
    def limited(ids: Any) -> Array:
        """(n,) lengths to which the limit applies, of n rows of ids or of a store of them."""
        return ids.lengths

    def __init__(
        self,
        store: TokenStore,
        columns: Columns,
        origins: Origins,
        engine: Engine,
        options: Options,
        pad_token_id: int,
        report: Report,
        about: Fingerprint,
    ):
        self._store = store
        self._lengths = store.lengths
        self.options = options
        self.pad_token_id = pad_token_id
        self.report = report
        self._about = about
        self.passed_through = columns
        self._origins = origins
        self._padded = engine.batches(store, options.max_prompt_length, options.truncation, pad_token_id)

    def __len__(self) -> int:
        return len(self._store)

    def __repr__(self) -> str:
        columns = ", ".join(self.passed_through.names)
        return f"PromptDataset({len(self):,} rows, {self._lengths.sum():,} tokens, {columns})"

    @property
    def token_store(self) -> TokenStore:
        """The ids of all rows where the load has put them: in memory, on the device or on disk."""
        return self._store

    @property
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding: flat `values`, int32, and `offsets`, int64 `(n + 1,)`, on the host.

        With `device="cuda"` they are copied there when they are first needed; with `store="disk"`, each time.
        """
        return self._store.to_host()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Plain data that identifies rows, tokens and options: what `PromptLoader.state_dict` saves.

        It is computed once, when it is first needed, at about a gigabyte of ids and columns per second.
        """
        return self._about | {"tokens": token_digest(self._store), "columns": self.passed_through.digests()}

    @property
    def columns(self) -> pa.Table:
        """The pass-through columns of all rows as one `pyarrow.Table`, with types promoted where files differ.

        Raises:
            DataError: The files' types of a column have no common type. Use `take` or `dataset[i]` instead.
        """
        return self.passed_through.table()

    def to_cudf(self) -> Any:
        """Return all rows as a `cudf.DataFrame`.

        Returns:
            The pass-through columns, and the column `raw_prompt_ids`, list of int32.

        Raises:
            DeviceError: cuDF is not installed, or there are more tokens than a cuDF list column can hold.
            DataError: As for `columns`.
        """
        from gpuload.engines.device.cudf import frame_of

        return frame_of(self.columns, self._store)

    @property
    def column_types(self) -> pa.Schema:
        """Names and types of the pass-through columns; the type is that in the first file with the column."""
        return self.passed_through.schema()

    def take(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return pass-through columns as Python objects, without making tensors.

        Args:
            names: Column names.
            rows: Row numbers; None for all rows.

        Returns:
            A dict from column name to a list of values.

        Raises:
            OptionError: There is no such column.
            IndexError: A row number is out of range.
        """
        if isinstance(names, str):
            raise OptionError(f"take: expected a list of column names, such as [{names!r}]")
        known = set(self.passed_through.names)
        for name in names:
            if name not in known:
                raise OptionError(f"take: {name!r} is not the name of a column{nearest(str(name), known)}")
        numbers = row_numbers(slice(None) if rows is None else rows, len(self))
        return self.passed_through.take(numbers, names)

    def origin(self, row: int) -> tuple[str, int]:
        """Return where a row comes from.

        Args:
            row: Row number in this dataset.

        Returns:
            The file's name and the number of the row in it.
        """
        file, number = self._origins[row_number(row, len(self))]
        return self.report.files[file], number

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The number of tokens of each row, int64 `(n,)`, without padding and not truncated."""
        return self._lengths

    @property
    def origins(self) -> np.ndarray[Any, Any]:
        """Where all rows come from, int64 `(n, 2)`: the index of the file in `report.files`, and the row in it."""
        return self._origins.pairs()

    @overload
    def __getitem__(self, row: int | np.integer[Any]) -> Row: ...

    @overload
    def __getitem__(self, row: slice | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor) -> list[Row]: ...

    def __getitem__(self, row: Any) -> Row | list[Row]:
        if isinstance(row, slice | list | range | np.ndarray | torch.Tensor) and getattr(row, "ndim", 1) > 0:
            return self.__getitems__(row)
        try:
            number = row_number(row, len(self))
        except TypeError:
            raise TypeError(
                f"dataset[{row!r:.80}]: pass the number of a row, a slice, or a list of numbers. Columns are read with "
                "dataset.take([name]), or as Arrow columns from dataset.columns"
            ) from None
        return self.__getitems__([number])[0]

    def __getitems__(self, rows: Any) -> list[Row]:
        """Return several rows by one gather. PyTorch's `DataLoader` calls this once per batch.

        Args:
            rows: Row numbers, or a slice; negative numbers count from the end.

        Returns:
            One dict per row.

        Raises:
            IndexError: A row number is out of range.
            PromptTooLongError: A row is longer than `max_prompt_length`, and `truncation="error"`.
        """
        prepare_worker()
        taken = self._taken(self._check(rows), "max_length")
        columns = [value.unbind(0) if isinstance(value, torch.Tensor) else value() for value in taken.values()]
        return [dict(zip(taken, values, strict=True)) for values in zip(*columns, strict=True)]

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "max_length") -> LazyDict:
        """Return a batch of B rows.

        Examples:
            >>> import gpuload
            >>> from gpuload.demo_data import demo_files
            >>> file, tokenizer = demo_files()
            >>> prompts = gpuload.load(file, tokenizer, max_samples=100)
            >>> batch = prompts.batch([0, 1, 2], padding="longest")
            >>> batch["input_ids"].dtype, batch["input_ids"].shape
            (torch.int64, torch.Size([3, 105]))
            >>> batch["data_source"].dtype, batch["data_source"].shape
            (dtype('O'), (3,))

        Args:
            rows: Row numbers `(B,)`; negative numbers count from the end.
            padding: Width L of the tensors: `"max_length"` for `max_prompt_length`, `"longest"` for the longest row of
                the batch.

        Returns:
            A mapping with the keys of a row: int64 tensors `(B, L)` on the load's device, and object arrays `(B,)` for
            everything else. The arrays are made when they are first read; `dict(batch)` reads all of them.

        Raises:
            IndexError: A row number is out of range.
            PromptTooLongError: A row is longer than `max_prompt_length`, and `truncation="error"`.
            DataError: When a column is read that has a value without a Python equivalent.
        """
        taken = self._taken(self._check(rows), padding)
        return LazyDict({name: _lazy(value) for name, value in taken.items()})

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, some of them prepared ahead where that hides latency. For `PromptLoader`."""
        return self._padded.ahead(batches)

    def loader(self, batch_size: int, **settings: Any) -> PromptLoader:
        """Return an iterable over batches, with a state that can be saved and restored.

        Args:
            batch_size: Rows per batch.
            **settings: `shuffle`, `seed`, `rank`, `world_size`, `drop_last` and `padding`; see `PromptLoader`.
                `shuffle` and `seed` default to those given to `load`.

        Returns:
            The loader.

        Raises:
            OptionError: A value is invalid, or `drop_last` leaves no batch.
        """
        settings = {"shuffle": self.options.shuffle, "seed": self.options.seed or 0} | settings
        return PromptLoader(self, batch_size, **settings)

    def _taken(
        self, numbers: np.ndarray[Any, Any], padding: Padding
    ) -> dict[str, torch.Tensor | Callable[[], list[Any]]]:
        """The values of B rows by key: tensors (B, L), and functions that make a list of B other values."""
        limit, side = self.options.max_prompt_length, self.options.truncation
        width = limit if padding == "max_length" else min(limit, int(self._lengths[numbers].max(initial=0)))
        # Closures must not refer to the batch: a cycle would keep its tensors until the next garbage collection.
        ids = cache(lambda: self._store.take(numbers).truncate(limit, side))  # one copy, for tensors and lists
        columns = {name: cache(partial(self._column, name, numbers)) for name in self.passed_through.names}
        extra_info = columns.get("extra_info", lambda: [None] * len(numbers))
        tensors = self._padded(numbers, ids, width)
        return {
            **columns,
            **tensors,
            "raw_prompt_ids": lambda: ids().to_lists(),
            "index": lambda: [index_of(extra) for extra in extra_info()],
        }

    def _column(self, name: str, numbers: np.ndarray[Any, Any]) -> list[Any]:
        """(B,) values of a pass-through column."""
        values = self.passed_through.take(numbers, [name])[name]
        if name == "raw_prompt" and self.options.return_raw_chat:
            values = [messages_of(prompt) for prompt in values]
        return values

    def _check(self, rows: Any) -> np.ndarray[Any, Any]:
        numbers = row_numbers(rows, len(self))
        limit = self.options.max_prompt_length
        if self.options.truncation == "error":
            for number in numbers[self._lengths[numbers] > limit]:
                file, place = self.origin(number)
                raise prompt_too_long(f"row {number} ({file} row {place})", int(self._lengths[number]), limit)
        return numbers


def warn_of_replaced(columns: Set[str], options: Options) -> None:
    """Warns of columns that rows do not have, because a key of `PromptDataset` has the same name."""
    more = {"raw_prompt": options.return_raw_chat, "full_prompts": options.return_full_prompt}
    keys = _KEYS | {key for key, given in more.items() if given}
    if replaced := sorted(columns & keys - {options.prompt_key}):
        warnings.warn(
            f"gpuload: columns {', '.join(replaced)} are replaced: rows and batches have keys with these names. Rename "
            "these columns if you need them",
            stacklevel=3,
        )


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows into a batch as verl does. For PyTorch's `DataLoader` and torchdata's `StatefulDataLoader`.

    Examples:
        >>> import gpuload, torch
        >>> rows = [{"ids": torch.tensor([1, 2]), "name": "a"}, {"ids": torch.tensor([3, 4]), "name": "b"}]
        >>> gpuload.collate_fn(rows)
        {'ids': tensor([[1, 2], [3, 4]]), 'name': array(['a', 'b'], dtype=object)}

    Args:
        rows: B rows, as a `PromptDataset` returns them.

    Returns:
        A dict with the keys of the rows: tensors are stacked to `(B, ...)`, all other values become object arrays
        `(B,)`.
    """
    values: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {
        key: torch.stack(items) if all(isinstance(item, torch.Tensor) for item in items) else object_array(items)
        for key, items in values.items()
    }


def prompt_too_long(row: str, tokens: int, limit: int) -> PromptTooLongError:
    """The error for a row that is longer than the limit, if `truncation="error"`."""
    return PromptTooLongError(
        f"{row} has {tokens} tokens, which exceeds max_prompt_length={limit}: raise max_prompt_length, set truncation "
        "to 'left', 'right' or 'middle', or set filter_overlong_prompts=True"
    )


def index_of(extra_info: Any) -> Any:
    """The key `index` of a row."""
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    return 0 if index is None else index


def _lazy(value: torch.Tensor | Callable[[], list[Any]]) -> torch.Tensor | Later:
    return value if isinstance(value, torch.Tensor) else Later(lambda: object_array(value()))


def object_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A 1-d array whatever the values: `np.array` would make a matrix of lists that happen to be equally long."""
    return np.fromiter(values, object, len(values))
