"""Comparisons with a trainer's own code: both prepare some rows, and gpuload prepares the dataset if they are equal.

They are few where the trainer's code is known (`known_code.py`); elsewhere they cover every shape of the dataset.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.core.arrays import RowNumbers
from gpuload.core.errors import GpuloadError
from gpuload.engines.protocol import ArrowPrompts
from gpuload.pipeline.shapes import shapes_of
from gpuload.sources.types import is_list, is_text

ROWS = 64
_OF_KNOWN_CODE = 16  # rows


def covering_rows(tables: Callable[[], Iterable[pa.Table]]) -> tuple[RowNumbers, pa.Table]:
    """Up to 64 rows, the same on all ranks: the longest and the shortest, one of each shape, and others until there are
    enough.

    A shape is which columns have a value, and of messages, their roles and which fields they have. `tables` returns the
    dataset, which has at least one row, in parts. Returns the numbers of the rows, ascending, and the rows.
    """
    shapes, sizes, start = [], [], 0
    first: dict[int, int] = {}  # form of a message → the first row with it
    for batch in (batch for table in tables() for batch in table.to_batches()):
        column = batch.to_struct_array()
        found = shapes_of(ArrowPrompts(column))
        for form, row in zip(found.forms.tolist(), found.rows.tolist(), strict=True):
            first.setdefault(form, start + row)
        shapes.append(found.shapes)
        sizes.append(_text_bytes(column))
        start += len(column)
    length = np.concatenate(sizes)
    of_shapes = np.unique(np.concatenate(shapes), return_index=True)[1].tolist()
    # In the order of the rows: numbers of shapes differ from process to process.
    wanted = [int(length.argmax()), int(length.argmin()), *sorted(first.values()), *sorted(of_shapes)]
    chosen = list(dict.fromkeys(wanted))[:ROWS]
    others = np.setdiff1d(np.arange(start), chosen)
    more = others[spread(len(others), ROWS - len(chosen))]
    numbers = np.sort(np.concatenate([np.array(chosen, np.int64), more]))
    rows, start = [], 0
    for table in tables():
        inside = numbers[(numbers >= start) & (numbers < start + len(table))] - start
        rows += [table.slice(row, 1) for row in inside.tolist()]
        start += len(table)
    return numbers, pa.concat_tables(rows, promote_options="permissive")


def spread(rows: int, count: int) -> RowNumbers:
    """Up to `count` row numbers below `rows`, ascending: the first one, the last one, and others at equal distances."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(count, rows)).astype(np.int64))


def of_all_lengths(rows: RowNumbers, lengths: RowNumbers, count: int) -> RowNumbers:
    """Up to `count` of some rows: the shortest, the longest, and others in between. `lengths` (n,) are those of all."""
    by_length = rows[np.argsort(lengths[rows], kind="stable")]
    return by_length[spread(len(rows), count)]


def sampled(lengths: RowNumbers, change: str | None, table: Callable[[], pa.Table]) -> RowNumbers:
    """Which of n rows are compared with a trainer's, ascending: some of all lengths (n,), or of every shape if there is
    a `change` of its code (`known_code.change`). `table` makes the rows."""
    if change is None:
        return np.sort(of_all_lengths(np.arange(len(lengths)), lengths, _OF_KNOWN_CODE))
    return covering_rows(lambda: [table()])[0]


def near_and_others(lengths: RowNumbers, limit: int, count: int) -> list[int]:
    """Up to `count` rows whose lengths (n,) are known, not -1: half of them next to a limit, the others of all
    lengths."""
    known = np.flatnonzero(lengths >= 0)
    near = known[np.argsort(np.abs(lengths[known] - limit), kind="stable")][: count // 2]
    return list(dict.fromkeys([*near.tolist(), *of_all_lengths(known, lengths, count // 2).tolist()]))


def _text_bytes(column: pa.Array) -> RowNumbers:
    """(n,) bytes of text in each row."""
    if is_text(column.type):
        return np.asarray(pc.fill_null(pc.binary_length(column), 0), np.int64)
    made = np.zeros(len(column), np.int64)
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            made += _text_bytes(field)
    elif is_list(column.type):
        ends = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64))
        total = np.concatenate([[0], np.cumsum(_text_bytes(column.flatten()))])
        made = np.diff(total[np.concatenate([[0], ends])])
    return made


def compare(
    sample: Sequence[Any],  # names of rows, or sets of rows
    ours: Callable[[Any], Any],
    theirs: Callable[[Any], Any],
    changed: str | None,
    *,
    logger: logging.Logger,
    trainer: str,
    rows: int | None = None,  # how many the sample has, if it is not made of names of rows
    differs: str = "row {row} of a sample differs from {trainer}'s",
) -> str | None:
    """Why gpuload must not prepare a dataset; None if a sample of it is as the trainer makes it.

    What both make of one of the sample may have arrays and tensors, see `comparable`. Ours is None for a row that the
    trainer is to prepare itself, and a `GpuloadError` the reason not to prepare the dataset.

    `changed` is from `known_code.change`: if the trainer's code is not known, the log says that the sample is equal,
    and the reason why it is not begins with the change.
    """
    for each in sample:
        try:
            found = ours(each)
            if found is None or comparable(found) == comparable(theirs(each)):
                continue
            why = differs.format(row=each, trainer=trainer)
        except GpuloadError as error:
            why = str(error)
        except Exception as error:  # for this sample; it may be another error for all rows, or none
            where = f"row {each}: " if rows is None else ""
            why = f"{where}{trainer} raises {type(error).__name__}: {error!s:.200}"
        return f"{changed}, and {why}" if changed else why
    if changed is not None:
        log_equal(logger, changed, len(sample) if rows is None else rows)
    return None


def log_equal(logger: logging.Logger, change: str, rows: int) -> None:
    """Say that gpuload is used, although the trainer's code has changed, because so many rows are equal."""
    logger.warning("gpuload: %s; %d rows prepared by both are equal: used", change, rows)


def comparable(value: Any) -> Any:
    """A row whose arrays and tensors can be compared with `==`."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, [comparable(each) for each in value.tolist()]
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    return [comparable(each) for each in value] if isinstance(value, list) else value
