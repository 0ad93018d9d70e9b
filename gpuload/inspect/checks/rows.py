"""What checks get, and what they return: some rows of the data, and which of them have a problem."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpuload.core.arrays import Ragged
from gpuload.core.words import counted
from gpuload.inspect.checks.findings import Finding, Level, RowMask, finding
from gpuload.inspect.checks.messages import FlatMessages


@dataclass(frozen=True, eq=False)
class CheckedRows:
    """n rows of a file."""

    first: int  # the number of the first of them, over all files
    table: pa.Table  # their columns as they are in the file, but for those that the prompts are made of
    column: pa.Array  # (n,) what each row is made of
    texts: list[pa.LargeStringArray]  # (n,) rendered texts, one column or several; null where a row was rejected
    tokens: list[Ragged]  # n rows of tokens with their loss; two columns for pairs, chosen and rejected
    rejected: Mapping[int, str]  # row → why nothing is made of it
    useless: Mapping[int, str]  # row → why nothing is learned of it
    messages: FlatMessages  # those of the rows
    equal: RowMask | None = None  # (n,) bool, pairs of two equal answers; None if the rows are no pairs
    cut: RowMask | None = None  # (n,) bool, rows that a limit has shortened; None if no row is
    served: Any = None  # the rows are conversations, and these their rows as served (`ServedPart`); None otherwise
    as_served: bool = False  # the rows are rows as served; `texts` are what was encoded


class Hit(NamedTuple):
    """Rows that a check has found."""

    check: str  # its name
    rows: RowMask  # (n,) bool
    detail: Callable[[int], str]  # the number of a row → what was found in it
    level: Level | None = None  # instead of the one that the number of rows has; None for that one


def over_the_limit(lengths: npt.NDArray[np.int64], limit: int) -> Hit:
    """Rows of so many tokens, (n,), that have too many."""
    return Hit(
        "over the limit", lengths > limit, lambda row: f"{counted(lengths[row], 'tokens')}, and the limit is {limit:,}"
    )


class Collected:
    """The rows that checks have found so far, in a `total` of so many. `place` is from `run.places_of`."""

    def __init__(self, place: Callable[[int], str], total: int):
        self._place, self._total = place, total
        self._found: dict[tuple[str, Level | None], tuple[str, list[Any]]] = {}  # the example, and numbers of rows
        self._notes: list[Finding] = []

    def add(self, hit: Hit, first: int = 0) -> None:
        """Adds some rows: row 0 of the hit is number `first` over all files."""
        found = np.flatnonzero(hit.rows)
        if not len(found):
            return
        key = (hit.check, hit.level)
        if key not in self._found:
            detail = hit.detail(int(found[0]))
            self._found[key] = f"{self._place(int(found[0]) + first)}{f': {detail}' if detail else ''}", []
        self._found[key][1].append(found + first)

    def note(self, check: str, count: int, example: str) -> None:
        """Adds rows whose numbers are not known."""
        self._notes.append(finding(check, [], count, self._total, example))

    def findings(self) -> list[Finding]:
        """What was found."""
        made = list(self._notes)
        for (check, level), (example, parts) in self._found.items():
            rows = np.concatenate(parts).tolist()
            made.append(finding(check, rows, len(rows), self._total, example, level))
        return made
