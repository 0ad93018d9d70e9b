"""The fast path against the reference, row by row, in production.

A sample is a spread: the rows where fast paths go wrong (the shortest and the longest, special-token text, non-ASCII
text) and some at random, from every batch, at a bounded cost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged
from gpuload.columns import to_python
from gpuload.options import Verify
from gpuload.tokenizer.reference import Prompt, Reference

Fetch = Callable[[Any], pa.Array]

_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 20
_LONGEST_BYTES = 200_000


@dataclass(frozen=True)
class Candidate:
    """A row to compare: where it is from, the prompt, the ids of the fast path."""

    file: str
    row: int
    prompt: Prompt
    ids: list[int]
    nbytes: int


@dataclass
class Check:
    """The outcome: how many rows were compared, at what cost, and what differed, in words."""

    rows: int = 0
    seconds: float = 0.0
    mismatches: list[str] = field(default_factory=list)


class Verifier:
    """Gathers candidates while batches pass by, and compares them with the reference."""

    def __init__(self, mode: Verify, reference: Reference):
        self._mode = mode
        self._reference = reference
        self._check = Check()
        self._rng = np.random.default_rng(0)
        self._candidates: list[Candidate] = []
        self._special_ids = np.array(sorted(reference.special_ids()), np.int64)

    def see(self, file: str, numbers: Any, fetch: Fetch, text: pa.LargeStringArray, ids: Ragged) -> None:
        """Takes note of a batch; with "full", compares all of it.

        Args:
            numbers: (n,) row numbers in the file.
            fetch: gives the prompts of some of the n rows.
        """
        if self._mode == "off":
            return
        started = time.thread_time()
        rows = np.flatnonzero(~np.asarray(text.is_null())) if self._mode == "full" else self._spread(text, ids)
        picked = to_python(fetch(rows)) if len(rows) else []
        sizes = pc.binary_length(text)
        for row, prompt in zip(rows.tolist(), picked, strict=True):
            self._candidates.append(Candidate(file, int(numbers[row]), prompt, ids[row].tolist(), sizes[row].as_py()))
        if self._mode == "full":
            self._compare(self._candidates)
            self._candidates = []
        self._check.seconds += time.thread_time() - started

    def finish(self) -> Check:
        """The outcome over all batches seen."""
        started = time.thread_time()
        self._compare(self._within_budget())
        self._check.seconds += time.thread_time() - started
        return self._check

    def _spread(self, text: pa.LargeStringArray, ids: Ragged) -> Any:
        """Up to nine rows of a batch: one or two of every kind that goes wrong."""
        sizes = np.asarray(pc.fill_null(pc.binary_length(text), -1))
        usable = np.flatnonzero((sizes >= 0) & (sizes <= _LONGEST_BYTES))
        if not len(usable):
            return usable
        rows = {int(usable[np.argmin(sizes[usable])]), int(usable[np.argmax(sizes[usable])])}
        kinds = [sizes != np.asarray(pc.fill_null(pc.utf8_length(text), -1))]
        if len(self._special_ids):
            # A template writes special tokens into every row: only a row with more of them than most is special.
            seen = np.concatenate([[0], np.cumsum(np.isin(ids.values, self._special_ids))])
            count = seen[ids.offsets[1:]] - seen[ids.offsets[:-1]]
            kinds.append(count > np.median(count[usable]))
        for kind in kinds:
            of_kind = np.intersect1d(np.flatnonzero(kind), usable)
            rows.update(self._rng.choice(of_kind, min(2, len(of_kind)), replace=False).tolist())
        rows.update(self._rng.choice(usable, min(3, len(usable)), replace=False).tolist())
        return np.array(sorted(rows))

    def _within_budget(self) -> list[Candidate]:
        """The shortest, the longest, and as many others as the budget holds."""
        if not self._candidates:
            return []
        by_size = sorted(self._candidates, key=lambda c: c.nbytes)
        chosen = [by_size[0], by_size[-1]][: len(by_size)]
        nbytes = 0
        for number in self._rng.permutation(max(0, len(by_size) - 2)):
            one = by_size[1 + number]
            nbytes += one.nbytes
            if len(chosen) >= _SAMPLE_ROWS or nbytes > _SAMPLE_BYTES:
                break
            chosen.append(one)
        return chosen

    def _compare(self, candidates: list[Candidate]) -> None:
        for one in candidates:
            self._check.rows += 1
            expected = self._reference.ids(one.prompt)
            if expected != one.ids:
                self._check.mismatches.append(_difference(one, expected))


def _difference(one: Candidate, expected: list[int]) -> str:
    position = next(
        (i for i, (a, b) in enumerate(zip(one.ids, expected, strict=False)) if a != b),
        min(len(one.ids), len(expected)),
    )
    found = one.ids[position] if position < len(one.ids) else "nothing"
    wanted = expected[position] if position < len(expected) else "nothing"
    return f"{one.file} row {one.row}: token {position} is {found}, the reference gives {wanted}"
