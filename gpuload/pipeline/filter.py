"""Which rows of a batch are kept, and which of their columns."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers
from gpuload.core.arrow import as_arrow
from gpuload.core.errors import DataError
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.dataset.report import OF_REASON, Report
from gpuload.engines.host.sanitize import without_marks
from gpuload.engines.protocol import add_seconds
from gpuload.pipeline.parts import Encoded

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def filter_rows(
    batch: Encoded,
    lengths: RowNumbers,
    place: Callable[[int], str],
    report: Report,
    options: Options,
    keep_rejected: bool = False,
    useless: Mapping[int, str] = MappingProxyType({}),
) -> Mask:
    """Drops rows without tokens, and rows with too many of them, as verl does; counts both in the report.

    Args:
        batch: n rows, of which it is known which are invalid.
        lengths: (n,) those to which the limit applies.
        place: number of one of them → its file, and its number there.
        report: also says what the limit is and whether overlong rows are dropped.
        options: `strict` raises an error for the first row that was rejected.
        keep_rejected: keep rows that could not be rendered, without tokens.
        useless: row → why it is of no use although it has tokens.

    Returns:
        (n,) bool, the rows to keep.

    Raises:
        DataError: with `strict`, a row was rejected.
    """
    tokens = batch.tokens
    rejected = {**useless, **tokens.rejected, **(batch.invalid or {})}
    keep = np.ones(len(batch), bool)
    for row, reason in sorted(rejected.items()):
        where = place(row)
        if options.strict:
            raise DataError(
                f"{where}: {reason}. With strict=False, such rows are counted, and dropped if they are of no use"
            )
        report.reject(where, reason)
        keep[row] = False
    overlong = keep & (lengths > report.max_prompt_length)
    report.rows_read += len(keep)
    report.rows_compiled += tokens.compiled_rows
    report.reference_seconds += sum(tokens.reason_seconds.values())
    add_seconds(report.seconds, {OF_REASON + why: seconds for why, seconds in tokens.reason_seconds.items()})
    report.rows_fallback += tokens.fallback_rows
    report.control_rows += tokens.control_rows
    for why, count in tokens.reasons.items():
        report.by_reference[why] = report.by_reference.get(why, 0) + count
    report.text_bytes += tokens.text_nbytes
    report.overlong += int(overlong.sum())
    if keep.any():
        shortest = int(lengths[keep].min())
        report.shortest = min(report.shortest, shortest) if report.shortest else shortest
    if report.overlong_dropped:
        keep &= ~overlong
    if keep_rejected:
        keep[list(tokens.rejected)] = True
    return keep


def kept_columns(batch: Encoded, number: int, keep: Mask, options: Options, sanitized: bool) -> pa.Table:
    """The pass-through columns of the kept rows of a source.

    Args:
        number: of the part of the batch that is of this source.
        keep: (n,) bool, which rows of the batch.
        options: `prompt_key` is the column with the prompts, which is not passed through; `return_raw_chat` adds it as
            `raw_prompt`, and `return_full_prompt` the rendered text as `full_prompts`.
        sanitized: control tokens in the rendered text are marked, which is for the encoder only.
    """
    part, low, high = batch.ranges[number]
    table = without(part.table, options.prompt_key)
    if options.return_raw_chat:
        table = _with_column(table, "raw_prompt", part.table.column(options.prompt_key))
    if options.return_full_prompt:
        assert batch.rendered is not None  # the token cache has no texts, so it is not used with this option
        text = batch.rendered.text.text.slice(low, high - low)
        table = _with_column(table, "full_prompts", without_marks(text) if sanitized else text)
    some = keep[low:high]
    return table if some.all() else table.filter(as_arrow(some))


def all_dropped(report: Report) -> str:
    """The message for a load that kept no row, with the reasons."""
    lines = [f"all {report.rows_read:,} rows were dropped" if report.rows_read != 1 else "the only row was dropped"]
    if report.overlong:
        lines.append(
            f"  overlong   {counted(report.overlong, 'rows exceed')} {report.limit_name}={report.max_prompt_length}; "
            f"the shortest has {report.shortest} tokens: raise {report.limit_name}"
        )
    return "\n".join(lines + ([report.reasons()] if report.rejected else []))


def _with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    return without(table, name).append_column(name, column)


def without(table: pa.Table, name: str) -> pa.Table:
    """The columns of a table but one, which it need not have."""
    return table.drop_columns([name]) if name in table.schema.names else table
