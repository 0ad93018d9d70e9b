"""Rows in which a template prints nulls that are in the data only because Arrow's structs have all fields.

A sample of the rows with such nulls is rendered by the tokenizer twice, as they are and without the nulls, in the
thread that compares rows. JSON is not looked at: its nulls are there.
"""

import time
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import RowNumbers
from gpuload.core.options import Verify
from gpuload.engines.protocol import Prompts
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python
from gpuload.sources.nulls import without_nulls
from gpuload.sources.read import Source
from gpuload.sources.types import JSON_TYPE, is_messages

_ROWS, _CANDIDATES, _SECONDS = 32, 256, 0.1
_ROW_BYTES = 1 << 20


class NullFinder:
    """Looks for rows in which a template prints nulls. Used by one thread at a time.

    Args:
        mode: "sample": at most some rows of a load, and a tenth of a second; "full": all rows; "off": none.
        reference: the tokenizer.

    Attributes:
        found: in how many of the rows that were looked at the template prints nulls.
    """

    check: ClassVar[str] = "null printed"

    def __init__(self, mode: Verify, reference: Reference):
        self._all, self._reference = mode == "full", reference
        self._on = mode != "off" and reference.uses_template and reference.keeps_nulls
        self._left, self._seconds = _ROWS, _SECONDS
        self._looked = self.found = 0
        self._example = ""

    def look(self, source: Source, numbers: RowNumbers, prompts: Prompts, sizes: RowNumbers) -> None:
        """See `Finder`."""
        if not self._on or not self._wants_more() or not _may_have_nulls(source):
            return
        began = time.thread_time()
        rows = np.flatnonzero((sizes >= 0) & (sizes <= _ROW_BYTES))[: None if self._all else _CANDIDATES]
        column = prompts.to_arrow(rows)
        if column.type == JSON_TYPE:
            found = np.flatnonzero(pc.fill_null(pc.match_substring(column.storage, "null"), False))
            rows, column = rows[found], column.take(pa.array(found))
        given = zip(rows.tolist(), to_python(column), strict=True)
        candidates = ((row, prompt) for row, prompt in given if _has_nulls(prompt))
        for row, prompt in islice(candidates, None if self._all else self._left):
            self._left -= 1
            self._looked += 1
            if self._prints_nulls(prompt):
                self.found += 1
                self._example = self._example or f"{source.name} row {numbers[row]}"
            if not self._all and time.thread_time() - began > self._seconds:
                break
        self._seconds -= time.thread_time() - began

    def _prints_nulls(self, prompt: Any) -> bool:
        try:
            return self._reference.render(prompt) != self._reference.render(without_nulls(prompt))
        except Exception:  # the template may need a key
            return False

    def _wants_more(self) -> bool:
        return self._all or (self._left > 0 and self._seconds > 0)

    @property
    def notes(self) -> list[str]:
        """For the report: what was found."""
        if not self.found:
            return []
        rows = f"{self.found:,} of {self._looked:,} rows with nulls in nested fields that were looked at"
        return [f"the template prints these nulls in {rows}, for example {self._example}: drop_nulls=True removes them"]


def _may_have_nulls(source: Source) -> bool:
    """Whether values in messages may have nulls that are due to Arrow, which those of JSON files have not."""
    return not source.parsed and any(kind == JSON_TYPE or _is_deep(kind) for kind in source.schema.types)


def _is_deep(kind: pa.DataType) -> bool:
    """Whether messages of a type have fields with values in values."""
    return is_messages(kind) and any(pa.types.is_nested(field.type) for field in kind.value_type)


def _has_nulls(prompt: Any) -> bool:
    """Whether fields of values within messages, or of tools, are null. Keys of messages themselves that are null are
    not given to templates."""
    parts = prompt.values() if isinstance(prompt, dict) else (prompt,)
    lists = (part for part in parts if isinstance(part, list))
    inside = (value for part in lists for each in part if isinstance(each, dict) for value in each.values())
    return any(without_nulls(value) != value for value in inside)
