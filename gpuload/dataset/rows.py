"""Rows: what the datasets of all kinds have in common. Rows as dicts, batches by one gather, and the other columns."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Self, get_args, overload

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Ragged, row_number, row_numbers
from gpuload.core.errors import OptionError, PromptTooLongError
from gpuload.core.lazy import Later, LazyDict
from gpuload.core.options import Options, Padding, check_choice, nearest
from gpuload.core.workers import prepare_worker
from gpuload.dataset.batch import RowBatch
from gpuload.dataset.fingerprint import Fingerprint, token_digest
from gpuload.dataset.origins import Origins
from gpuload.dataset.pieces import in_store, some_of, stored, tokens_of
from gpuload.dataset.readable import Readable
from gpuload.dataset.report import Report
from gpuload.engines.batches import BatchLayout
from gpuload.engines.protocol import Engine, TokenStore
from gpuload.packing.plan import Plan, whole_rows
from gpuload.reference.reference import Reference
from gpuload.sources.columns import Columns

if TYPE_CHECKING:
    from gpuload.dataset.loader import PromptLoader

Row = dict[str, Any]

Numbers = np.ndarray[Any, np.dtype[np.int64]]

Values = torch.Tensor | Callable[[], list[Any]]
"""The values of B rows: a tensor `(B, ...)`, or what makes a list of B objects."""

Made = Mapping[str, Callable[[], list[Any]]]


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a load has made of its files: n rows."""

    tokens: TokenStore  # of the rows, where the engine or the store on disk has them
    sizes: Numbers  # (k, n) what the kind has counted of each row, see `Kind.sizes`; its tokens come first
    columns: Columns  # the other columns
    origins: Origins  # where the rows come from
    engine: Engine  # makes batches
    options: Options  # of the load
    pad_token_id: int  # fills rows of batches up
    report: Report  # what the load did
    about: Fingerprint | LazyDict  # identifies files, tokenizer and options
    reference: Reference | None = None  # the tokenizer; None where nobody needs it any more


class Rows(Readable, torch.utils.data.Dataset[Row]):
    """Tokenized rows, and the other columns of their files: what prompts, chats and pairs have in common.

    Attributes:
        report: What the load did, as a `gpuload.dataset.report.Report`; `print` it.
        options: The options of the load.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    _truncates = True  # whether longer rows can be truncated

    def __init__(self, loaded: Loaded, layout: BatchLayout):
        self._store = loaded.tokens
        self._sizes = loaded.sizes
        self._lengths: Numbers = loaded.sizes[0]
        self.options = loaded.options
        self.pad_token_id = loaded.pad_token_id
        self.report = loaded.report
        self._about = loaded.about
        self.passed_through = loaded.columns
        self._origins = loaded.origins
        self._reference = loaded.reference
        self._batches = loaded.engine.batches(stored(loaded.tokens), layout, loaded.pad_token_id)

    def __len__(self) -> int:
        return len(self._store)

    @property
    @abstractmethod
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding: flat `values`, int32, and `offsets`, int64 `(n + 1,)`, on the host."""

    @abstractmethod
    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = ...) -> RowBatch:
        """A batch of B rows: tensors, and object arrays of the other columns."""

    @abstractmethod
    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        """What is made of the tokens of B rows: B values for each key. `columns` makes the values of other columns."""

    @abstractmethod
    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        """The same for a batch."""

    @property
    def token_store(self) -> TokenStore:
        """The ids of all rows where the load has put them: in memory, on the device or on disk."""
        return self._store

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Plain data that identifies rows, tokens and options: what `PromptLoader.state_dict` saves.

        It is computed once, when it is first needed, at about a gigabyte of ids and columns per second.
        """
        return dict(self._about) | {"tokens": token_digest(self._store), "columns": self.passed_through.digests()}

    @property
    def columns(self) -> pa.Table:
        """The pass-through columns of all rows as one `pyarrow.Table`, with types promoted where files differ.

        Raises:
            DataError: The files' types of a column have no common type. Use `take` or `dataset[i]` instead.
        """
        return self.passed_through.table()

    def to_cudf(self) -> Any:
        """Return all rows as a `cudf.DataFrame`, with the columns of `to_arrow`.

        Examples:
            >>> prompts.to_cudf()  # doctest: +SKIP

        Raises:
            DeviceError: cuDF is not installed, or there are more tokens than a cuDF list column can hold.
            DataError: As for `to_arrow`.
        """
        from gpuload.engines.device.cudf import frame_of

        return frame_of(self.to_arrow().read_all())

    @property
    def column_types(self) -> pa.Schema:
        """Names and types of the pass-through columns; the type is that in the first file with the column."""
        return self.passed_through.schema()

    def select(self, rows: Any) -> Self:
        """Return a dataset of some rows. No tokens are copied; the report stays that of the whole load.

        Examples:
            >>> some = prompts.select([7, 3])
            >>> len(some), some.origin(0)[1]
            (2, 7)

        Args:
            rows: Row numbers in their new order, or a slice; negative numbers count from the end.

        Raises:
            IndexError: A row number is out of range.
        """
        numbers = row_numbers(rows, len(self))
        chosen = object.__new__(type(self))
        cached = [name for name, kind in inspect.getmembers_static(type(self)) if isinstance(kind, cached_property)]
        chosen.__dict__ = {name: value for name, value in self.__dict__.items() if name not in cached}
        chosen._store, chosen._sizes = some_of(self._store, numbers), self._sizes[:, numbers]
        chosen._lengths = self._lengths[numbers]
        chosen.passed_through, chosen._origins = self.passed_through.select(numbers), self._origins.select(numbers)
        return chosen

    def take(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, list[Any]]:
        """Return pass-through columns as Python objects, without making tensors.

        Examples:
            >>> prompts.take(["data_source"], rows=[0, 1])
            {'data_source': ['openai/gsm8k', 'openai/gsm8k']}

        Args:
            names: Column names.
            rows: Row numbers; None for all rows.

        Returns:
            A dict from column name to a list of values.

        Raises:
            OptionError: There is no such column.
            IndexError: A row number is out of range.
        """
        known = set(self.passed_through.names)
        if isinstance(names, str) or not isinstance(names, Iterable):
            one = names if isinstance(names, str) else next(iter(sorted(known)), "name")
            raise OptionError(f"take: expected a list of column names, such as [{one!r}]")
        for name in names:
            if name not in known:
                raise OptionError(f"take: {name!r} is not the name of a column{nearest(str(name), known)}")
        numbers = row_numbers(slice(None) if rows is None else rows, len(self))
        return self.passed_through.take(numbers, names)

    def origin(self, row: int) -> tuple[str, int]:
        """Return where a row comes from.

        Examples:
            >>> file, row = prompts.origin(5)
            >>> Path(file).name, row
            ('gsm8k.parquet', 5)

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
            PromptTooLongError: A row is longer than the limit, and `truncation="error"`.
        """
        prepare_worker()
        numbers = self._check(rows)
        columns = self._columns(numbers)
        made = {**columns, **self._lists(numbers, columns)}
        values = [value() if callable(value) else value for value in made.values()]
        return [dict(zip(made, row, strict=True)) for row in zip(*values, strict=True)]

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, some of them prepared ahead where that hides latency. For `PromptLoader`."""
        return self._batches.ahead(batches)

    def _batch(self, rows: Any, padding: Padding) -> RowBatch:
        """A batch of rows: tensors, and object arrays that are made when they are first read."""
        check_choice("padding", padding, get_args(Padding))
        numbers = self._check(rows)
        columns = self._columns(numbers)
        taken = {**columns, **self._tensors(numbers, padding, columns)}
        return RowBatch({name: _lazy(value) for name, value in taken.items()})

    def _loader(self, batch_size: int, settings: dict[str, Any]) -> "PromptLoader":
        """A loader of batches of rows; shuffled as the load was told to, if nothing else is said."""
        from gpuload.dataset.loader import PromptLoader

        known = set(inspect.signature(PromptLoader).parameters) - {"dataset", "batch_size"}
        for name in settings.keys() - known:
            raise OptionError(f"loader: unknown option {name}{nearest(name, known)}")
        order = {"shuffle": self.options.shuffle, "seed": self.options.seed or 0}
        return PromptLoader(self, batch_size, **order | settings)

    def _columns(self, numbers: Numbers) -> Made:
        """What makes the values of the pass-through columns of B rows, once."""
        # These functions must not refer to the batch: a cycle would keep its tensors until the next garbage collection.
        return {name: cache(partial(self._column, name, numbers)) for name in self.passed_through.names}

    def _plan(self, numbers: Numbers) -> Plan:
        """Which tokens of B rows a batch has: of each row as many as the limit allows."""
        side = self.options.truncation
        plan = whole_rows(numbers, self._lengths[numbers])
        return plan if side == "error" else plan.truncated(self.options.max_prompt_length, side)

    def _tokens(self, plan: Plan) -> Ragged:
        """The tokens of a plan of rows in host memory: one row for each pack."""
        return tokens_of(self._store, plan)

    def _padded(self, plan: Plan, padding: Padding) -> dict[str, torch.Tensor]:
        """The tensors of a batch of sequences."""
        width = self._width(int(plan.tokens.max(initial=0)), padding)
        return self._batches(in_store(self._store, plan), partial(self._tokens, plan), width)

    def _width(self, longest: int, padding: Padding) -> int:
        """Columns of a batch whose longest row has so many ids before it is truncated."""
        limit = self.options.max_prompt_length
        return limit if padding == "max_length" else min(limit, longest)

    def _column(self, name: str, numbers: np.ndarray[Any, Any]) -> list[Any]:
        """(B,) values of a pass-through column."""
        return self.passed_through.take(numbers, [name])[name]

    def _check(self, rows: Any) -> np.ndarray[Any, Any]:
        numbers = row_numbers(rows, len(self))
        limit = self.options.max_prompt_length
        if self.options.truncation == "error":
            for number in numbers[self._lengths[numbers] > limit]:
                file, place = self.origin(number)
                row = f"row {number} ({file} row {place})"
                raise prompt_too_long(row, int(self._lengths[number]), limit, self._truncates)
        return numbers


def prompt_too_long(row: str, tokens: int, limit: int, truncates: bool = True) -> PromptTooLongError:
    """The error for a row that is longer than the limit, if `truncation="error"`.

    Args:
        truncates: whether rows of this kind can be truncated.
    """
    long = f"{row} has {tokens} tokens, which exceeds max_prompt_length={limit}"
    if not truncates:
        return PromptTooLongError(f"{long}: raise max_prompt_length, or set filter_overlong_prompts=True")
    return PromptTooLongError(
        f"{long}: raise max_prompt_length, set truncation to 'left', 'right' or 'middle', or set "
        "filter_overlong_prompts=True"
    )


def _lazy(value: torch.Tensor | Callable[[], list[Any]]) -> torch.Tensor | Later:
    return value if isinstance(value, torch.Tensor) else Later(lambda: object_array(value()))


def object_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A 1-d array whatever the values: `np.array` would make a matrix of lists that happen to be equally long."""
    return np.fromiter(values, object, len(values))
