"""Frames in memory → Arrow tables of some thousand rows."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.errors import DataError, SourceError
from gpuload.sources.read import Source, bytes_of, first_rows, slices
from gpuload.sources.types import as_readable

_FRAMES = ("pyarrow.Table", "pyarrow.RecordBatch", "pandas.DataFrame", "datasets.Dataset", "cudf.DataFrame")

_INSTEAD = {
    "datasets.IterableDataset": "a stream: pass its files, or its rows as datasets.Dataset.from_list(list(stream))",
    "pyarrow.RecordBatchReader": "which can be read once only: pass its read_all()",
    "pyarrow.Dataset": "a description of files: pass these, or its to_table()",
    "polars.LazyFrame": "a query: pass its collect()",
    "pandas.Series": "one column: pass a DataFrame, such as its to_frame('prompt')",
    "cudf.Series": "one column: pass a DataFrame, such as its to_frame('prompt')",
    "polars.Series": "one column: pass a DataFrame, such as its to_frame('prompt')",
    "pyarrow.Array": "one column: pass a table, such as pyarrow.table({'prompt': column})",
    "pyarrow.ChunkedArray": "one column: pass a table, such as pyarrow.table({'prompt': column})",
}
"""Class → what is wrong with its objects, and what to do."""


def is_frame(data: object) -> bool:
    """Whether `data` is a frame in memory that `open_frame` opens, rather than files; a `SourceError` if it is
    neither."""
    return _kind_of(data) is not None


def _kind_of(data: object) -> str | None:
    """The class in `_FRAMES` of a frame in memory, or "arrow" for another one that shares its columns by Arrow's C
    stream, such as a `polars.DataFrame`; None for files. A `SourceError` if it is something in memory that cannot be
    read as it is, or splits."""
    names = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(data).__mro__]
    found = next((name for name in names if name in _FRAMES), None)
    if found is not None:
        return found
    name = type(data).__name__
    if why := next((_INSTEAD[each] for each in names if each in _INSTEAD), None):
        raise SourceError(f"files is of type {name}, {why}")
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:8]))
        raise SourceError(
            f"files is of type {name} with the keys {keys}: pass one of its values if these are splits, such as "
            f"files[{next(iter(data), 'train')!r}], or pyarrow.table(files) if these are columns"
        )
    if hasattr(data, "__arrow_c_stream__"):
        return "arrow"
    if hasattr(type(data), "columns"):
        raise SourceError(f"files is of type {name}: pass it as a pyarrow.Table or a pandas.DataFrame")
    return None


def open_frame(frame: Any, name: str) -> Source:
    """Opens a frame in memory, with a name for messages; a `DataError` if a column has values of several types, and a
    `SourceError` if it gives no columns."""
    kind = _kind_of(frame)
    if kind == "cudf.DataFrame":
        return _open_cudf(frame, name)
    try:
        table = _converted(_table_of(frame, kind))
    except _WRONG as error:
        said, (column, alone) = ": ".join(map(str, error.args)), _wrong_column(frame, kind)
        if isinstance(error, UnicodeEncodeError):
            raise DataError(
                f"{name}: {column} has a text with a lone surrogate, {error.object[error.start]!r}, in row "
                f"{_wrong_row(alone)}, which UTF-8 cannot encode: replace it, or drop the row"
            ) from None
        raise DataError(
            f"{name}: {column} cannot be converted to Arrow ({said:.300}): drop it, or give it one type"
        ) from error
    return Source(
        name,
        table.num_rows,
        table.nbytes,
        table.schema,
        lambda: slices([table], name),
        f"{table.num_rows} {table.nbytes} ".encode() + first_rows(table),
        decoded_bytes=partial(bytes_of, table),
    )


_WRONG = (pa.ArrowException, OverflowError, TypeError, ValueError)


def _converted(table: pa.Table) -> pa.Table:
    table = as_readable(table)
    table.slice(0, 0).take(as_arrow([], pa.int64()))  # which Arrow cannot with all types
    return table


def _wrong_column(frame: Any, kind: str | None) -> tuple[str, Any]:
    """Which column is the first one that cannot be converted, and a frame of that column alone."""
    pandas = kind == "pandas.DataFrame"
    try:
        whole = frame if pandas else _table_of(frame, kind)
        names = list(whole.columns) if pandas else whole.schema.names
        for at, name in enumerate(names):
            alone = frame.iloc[:, [at]] if pandas else whole.select([at])
            try:
                _converted(_table_of(alone, kind) if pandas else alone)
            except _WRONG:
                return f"column {name!r}", alone
    except _WRONG:  # no column at all
        pass
    return "a column", frame


def _wrong_row(frame: Any) -> int:
    """The first row of a pandas frame that cannot be converted; one of them can not."""
    low, high = 0, len(frame)
    while high - low > 1:  # it is one of low to high - 1
        middle = (low + high) // 2
        try:
            _table_of(frame.iloc[low:middle], "pandas.DataFrame")
            low = middle
        except _WRONG:
            high = middle
    return low


def _table_of(frame: Any, kind: str | None) -> pa.Table:
    if kind == "pandas.DataFrame":
        return pa.Table.from_pandas(frame, preserve_index=False)
    if kind == "pyarrow.RecordBatch":
        return pa.Table.from_batches([frame])
    if kind == "arrow":
        return _streamed(frame)
    if kind == "pyarrow.Table":
        return frame
    form = getattr(frame, "format", {})
    if form.get("type") == "custom":  # a function that makes rows when they are read
        raise SourceError(
            "the datasets.Dataset has a transform (set_transform, with_transform), which is not applied here: make its "
            "rows with map, or remove it with reset_format"
        )
    # One that was filtered or shuffled is its table and a list of row numbers.
    frame = frame.with_format(None).select_columns(form.get("columns", frame.column_names))
    return (frame if getattr(frame, "_indices", None) is None else _flattened(frame)).data.table


def _streamed(frame: Any) -> pa.Table:
    """The columns that an object shares by Arrow's C stream; a `SourceError` if it does not."""
    if own := next((name for name, each in _types_of(frame) if str(each) == "Object"), None):
        raise TypeError(f"column {own!r} has Python objects")
    try:
        return pa.table(frame)
    except Exception as error:  # whatever the object's own code raises
        raise SourceError(
            f"files is of type {type(frame).__name__}, and its __arrow_c_stream__ gives no table ({error!s:.300}): "
            "pass it as a pyarrow.Table"
        ) from error


def _types_of(frame: Any) -> Iterable[tuple[str, Any]]:
    """The columns of a `polars.DataFrame` and their types; it exports Python objects as their addresses."""
    schema = getattr(frame, "schema", None)
    return schema.items() if isinstance(schema, Mapping) else ()


def _flattened(frame: Any) -> Any:
    """A `datasets.Dataset` whose rows are in its table. `datasets` keeps them in its cache, or, where that cannot be
    written, in memory."""
    with no_bars_of_datasets():
        try:
            return frame.flatten_indices()
        except OSError:
            return frame.flatten_indices(keep_in_memory=True)


@contextmanager
def no_bars_of_datasets() -> Iterator[None]:
    """`datasets` shows no progress."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _open_cudf(frame: Any, name: str) -> Source:
    def tables(*hidden: str) -> Iterator[pa.Table]:
        return parts(frame.drop(columns=list(hidden)) if hidden else frame)

    def parts(shown: Any) -> Iterator[pa.Table]:
        return slices([shown.to_arrow(preserve_index=False)], name)

    sample = frame.head(64).to_arrow(preserve_index=False)
    nbytes = int(frame.memory_usage(index=False, deep=True).sum())
    identity = f"{len(frame)} {nbytes} {sample.to_pydict()}".encode(errors="backslashreplace")
    return Source(
        name,
        len(frame),
        nbytes,
        sample.schema,
        tables,
        identity,
        frame=frame,
        without=tables,
        only=lambda column: parts(frame[[column]]),
        decoded_bytes=lambda names: nbytes if names is None else nbytes * len(names) // max(1, len(sample.schema)),
    )
