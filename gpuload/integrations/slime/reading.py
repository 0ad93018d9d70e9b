"""Files as slime reads them: a path with a slice of rows, and the columns that samples are made of."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.errors import DataError, SourceError
from gpuload.core.files import open_regular
from gpuload.integrations.slime.samples import tools_of
from gpuload.sources.columns import to_python
from gpuload.sources.fetch import SourceFile
from gpuload.sources.read import Source, check_prompt_column, open_file
from gpuload.sources.types import JSON_TYPE, is_list

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_rows(path: str, rows: slice | None, prompt_key: str, others: Sequence[str]) -> Source:
    """Opens some rows of a .parquet or .jsonl file, with the column of prompts, and those others that it has; a
    `DataError` if slime reads the file in another way, or rejects it, and a `SourceError` if it cannot be read."""
    if not path.endswith((".parquet", ".jsonl")):
        raise DataError(f"{path}: slime reads .parquet and .jsonl files")
    if is_json := path.endswith(".jsonl"):
        _check_json_lines(path)
    source = open_file(SourceFile(path, path, "json" if is_json else "parquet"), index_columns=True)
    check_prompt_column(source, prompt_key)
    names = [name for name in dict.fromkeys((prompt_key, *others)) if name in source.schema.names]
    for name in names:
        if not is_json and source.schema.field(name).type == JSON_TYPE:
            raise DataError(f"{path}: column {name!r} has the type JSON, which slime reads as text")
    return _narrowed(source, names, rows or slice(None))


def _check_json_lines(path: str) -> None:
    """slime skips lines that are not JSON, where gpuload raises an error or reads them."""
    try:
        with open_regular(path) as file:
            start = file.read(1024).lstrip()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if start.startswith((_BYTE_ORDER_MARK, b"[")):
        raise DataError(f"{path}: the file begins with {'a byte order mark' if start[:1] != b'[' else 'a JSON array'}")


def _narrowed(source: Source, names: list[str], rows: slice) -> Source:
    """Some rows and columns of a source."""
    start, stop, _ = rows.indices(source.num_rows)

    def batches() -> Iterator[pa.Table]:
        first = 0  # number of the batch's first row
        for table in source.batches():
            if first >= stop:
                return
            low, high = max(start - first, 0), min(stop - first, table.num_rows)
            if low < high:
                yield table.select(names).slice(low, high - low)
            first += table.num_rows

    if start >= stop:
        raise DataError(f"{source.name}: no rows")
    return replace(
        source,
        num_rows=stop - start,
        schema=pa.schema([source.schema.field(name) for name in names]),
        batches=batches,
        identity=source.identity + f"{start} {stop} {names}".encode(errors="backslashreplace"),
        parquet=None,
        without=None,
        content=None,
    )


def check_labels(source: Source, name: str) -> None:
    """Raises a `DataError` where slime does: for rows without a label. JSON lines without the key are null here, as are
    those with null."""
    if name not in source.schema.names:
        raise DataError(f"{source.name}: no column {name!r}")
    if source.name.endswith(".jsonl") and any(table[name].null_count for table in source.batches()):
        raise DataError(f"{source.name}: column {name!r} has nulls, or lines without it")


def check_tools(source: Source, name: str) -> Any:
    """The tools of all rows, if all rows have the same; else None. A `DataError` if slime raises an error for a row."""
    column = pa.concat_tables(table.select([name]) for table in source.batches())[name]
    if column.null_count:
        raise DataError(f"{source.name}: column {name!r} has nulls, or lines without it")
    if not is_list(column.type):
        distinct = column.combine_chunks()
        if column.type == JSON_TYPE:
            distinct = pa.ExtensionArray.from_storage(JSON_TYPE, pc.unique(distinct.storage))
        elif not pa.types.is_struct(column.type):
            distinct = pc.unique(distinct)
        for value in to_python(distinct):
            try:
                valid = isinstance(tools_of(value), list)
            except json.JSONDecodeError:
                valid = False
            if not valid:
                raise DataError(f"{source.name}: column {name!r} has values that are not lists of tools")
    if not column.slice(1).equals(column.slice(0, len(column) - 1)):
        return None
    return tools_of(to_python(column.chunk(0).slice(0, 1))[0])
