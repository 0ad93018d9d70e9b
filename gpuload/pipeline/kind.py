"""What a load asks of a kind of data. `gpuload/kinds/` has prompts, chats and pairs.

A kind is plain data: what the user has said of the data, and what was found of it. It says which column a row is made
of, how the row is tokenized, which limit it has, and what the result is. The pipeline calls it, and knows nothing else.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import pyarrow as pa

from gpuload.core.arrays import Array, Ragged, RowNumbers
from gpuload.core.errors import GpuloadError
from gpuload.core.options import Options, Verify
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Loaded, Rows
from gpuload.engines.protocol import Engine, Prompts
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source

Dataset = TypeVar("Dataset", bound=Rows, covariant=True)


class Finder(Protocol):
    """Looks at rows while they are verified, in the same thread, for remarks in the report."""

    def look(self, source: Source, numbers: RowNumbers, prompts: Prompts, sizes: RowNumbers) -> None:
        """Looks at some rows of a batch.

        Args:
            source: the rows' file.
            numbers: (n,) row numbers in that file.
            prompts: the n rows' prompts.
            sizes: (n,) bytes of their texts, -1 for rows without a text.
        """

    @property
    def notes(self) -> list[str]:
        """For the report: what was found."""

    found: int
    """In how many rows."""

    check: ClassVar[str]
    """The check of `gpuload check` that says so."""


class Kind(Generic[Dataset]):
    """A kind of data. It can be pickled, and sent to workers.

    Attributes:
        name: "prompts", "chats" or "pairs".
        limit_name: the option that sets the limit in tokens, in messages.
        hidden: columns of files that are not passed through. Rows or batches have tensors with these names; or a
            trainer that finds such a column in rows takes it for a mask of their tokens.
    """

    name: ClassVar[Literal["prompts", "chats", "pairs"]]
    limit_name: ClassVar[str] = "max_length"
    hidden: ClassVar[frozenset[str]]

    @classmethod
    @abstractmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple[Self, Options]:
        """The kind and the options of a load, from its keyword arguments.

        Raises:
            OptionError: an unknown name or an invalid value.
        """

    @property
    @abstractmethod
    def fields(self) -> tuple[pa.Field, ...]:
        """The columns of rows as Arrow that are made of tokens."""

    @abstractmethod
    def resolve(self, sources: Sequence[Source], options: Options) -> tuple[Self, list[Source], Options]:
        """Finds the format of opened files.

        Returns:
            The kind, with what was found; the sources whose rows count; and the options that the format needs.

        Raises:
            DataError: a file has no column, or no format, of this kind.
            OptionError: an option does not fit the format.
        """

    @abstractmethod
    def reference(self, tokenizer: Any, options: Options) -> Reference:
        """The tokenizer, as it is used for this kind.

        Raises:
            TokenizerError: it cannot be opened or used.
        """

    @abstractmethod
    def column(self, source: Source, options: Options, reference: Reference) -> Source:
        """A source whose column `options.prompt_key` has what each row is made of.

        Args:
            source: one of those that `resolve` returned, or a part of it.
        """

    @abstractmethod
    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        """The engine that the options name.

        Args:
            exact_only: the tokenizer object itself must do everything.

        Raises:
            DeviceError: a GPU is asked for and not available.
        """

    @abstractmethod
    def sizes(self, tokens: Ragged) -> Array:
        """(k, n) int64: how many tokens n rows have, and what else the result counts of them; in their memory.

        Counted once for each batch, and kept with it: stores on a device or on disk are never read for it.
        """

    def limited(self, sizes: RowNumbers) -> RowNumbers:
        """(n,) tokens to which the limit applies.

        Args:
            sizes: (k, n), from `sizes`, in host memory.
        """
        lengths: RowNumbers = sizes[0]
        return lengths

    def useless(self, sizes: RowNumbers, tokens: Ragged, options: Options) -> Mapping[int, str]:
        """The rows that are of no use although they have tokens: row → why.

        Args:
            sizes: (k, n), from `sizes`, in host memory.
            tokens: those rows, in host or device memory.
        """
        return {}

    def counts_of_dropped(self, tokens: Ragged, keep: Any) -> Mapping[str, int]:
        """What the report also says of rows that are dropped: in words → how many.

        Args:
            tokens: n rows, in host or device memory.
            keep: (n,) bool.
        """
        return {}

    def finders(self, mode: Verify, reference: Any, rows: int) -> Sequence[Finder]:
        """What looks at rows while they are verified.

        Args:
            mode: of the verification.
            rows: how many rows there will be.
        """
        return ()

    def nothing_left(self, report: Report, template: str) -> GpuloadError | None:
        """The error for data of which all rows were dropped, if this kind knows a better one than the list of reasons.
        `template` is the text of the chat template."""
        return None

    @abstractmethod
    def from_arrow(self, table: pa.Table) -> Ragged:
        """Rows with the columns `fields`, as the `to_arrow` of the result makes them → ids, as the result has them."""

    @abstractmethod
    def dataset(self, loaded: Loaded) -> Dataset:
        """The result of a load."""


def warn_of_replaced(schemas: Iterable[pa.Schema], keys: Set[str], stacklevel: int = 6) -> None:
    """Warns of columns of files with the names `keys`, which rows do not pass through; by default where `Kind.resolve`
    does so."""
    if replaced := sorted({name for schema in schemas for name in schema.names} & keys):
        warnings.warn(
            f"gpuload: columns {', '.join(replaced)} are replaced or left out: rows, batches or trainers have keys "
            "with these names. Rename these columns if you need them",
            stacklevel=stacklevel,  # the line that calls `load`
        )
