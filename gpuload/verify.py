"""The fast path against the reference, row by row, in production.

A sample is a spread: of every batch the rows where fast paths go wrong (the shortest and the longest, special-token
text, non-ASCII text) and some at random. It is compared while later batches are still being encoded, so that most of
its cost is hidden; what is left is bounded by rows and bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Ragged, array_module, on_host
from gpuload.engines.protocol import Text
from gpuload.options import Verify
from gpuload.reference.reference import Prompt, Reference
from gpuload.sources.columns import to_python

Fetch = Callable[[Any], pa.Array]

_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 20
_FEWEST_ROWS = 2  # of a batch, however many batches there are
_LONGEST_BYTES = 200_000


@dataclass
class Check:
    """The outcome: how many rows were compared, at what cost, and what differed, in words; and how many had been
    compared without a difference when tokens from the cache were made."""

    rows: int = 0
    earlier: int = 0
    seconds: float = 0.0
    mismatches: list[str] = field(default_factory=list)


class Verifier:
    """Compares rows of the batches that it is shown.

    Args:
        rows: how many there will be; batches share the sample by their size.

    Attributes:
        check: the outcome so far.
    """

    def __init__(self, mode: Verify, reference: Reference, rows: int):
        self._mode = mode
        self._reference = reference
        self._total = rows
        self._rng = np.random.default_rng(0)
        special = np.array(reference.special_ids(), np.int64)
        self._is_special = np.isin(np.arange(special.max(initial=-1) + 1), special)
        self._first_special = int(special.min(initial=len(self._is_special)))
        self.check = Check()

    def see(self, file: str, numbers: Any, fetch: Fetch, text: Text, ids: Ragged) -> None:
        """Compares a sample of one batch; all of it with "full".

        Args:
            file: where the rows are from.
            numbers: (n,) their numbers there.
            fetch: gives the prompts of some of the n rows.
            text: the n rows rendered.
            ids: the n rows encoded, wherever they lie; only those that are compared come to the host.
        """
        if self._mode == "off":
            return
        # The thread's own time: while it waits for the interpreter, other stages are at work.
        started = time.thread_time()
        rows = np.flatnonzero(text.sizes >= 0) if self._mode == "full" else self._spread(text, ids)
        picked = to_python(fetch(rows)) if len(rows) else []
        for row, prompt in zip(rows, picked, strict=True):
            self._compare(f"{file} row {numbers[row]}", prompt, ids[int(row)].tolist())
        self.check.seconds += time.thread_time() - started

    def _spread(self, text: Text, ids: Ragged) -> Any:
        """Rows of a batch: the longest, the shortest, one or two of every kind that goes wrong, some at random."""
        sizes = text.sizes
        usable = np.flatnonzero((sizes >= 0) & (sizes <= _LONGEST_BYTES))
        share = len(sizes) / self._total
        most = max(_FEWEST_ROWS, round(_SAMPLE_ROWS * share))
        if not len(usable):
            return usable
        kinds = [text.wide]
        # A template writes special tokens into every row: only a row with more of them than most is special.
        count = self._specials(ids)
        kinds.append(count > np.median(count[usable]))
        rows = [usable[np.argmax(sizes[usable])], usable[np.argmin(sizes[usable])]]
        for kind in reversed(kinds):
            of_kind = np.intersect1d(np.flatnonzero(kind), usable)
            rows += self._rng.choice(of_kind, min(2, len(of_kind)), replace=False).tolist()
        rows += self._rng.permutation(usable)[:most].tolist()
        chosen = np.array(list(dict.fromkeys(int(row) for row in rows))[:most])
        affordable = np.cumsum(sizes[chosen]) <= _SAMPLE_BYTES * share
        affordable[0] = True
        return chosen[affordable]

    def _specials(self, ids: Ragged) -> Any:
        """(n,) how many special tokens each row has; counted where the ids lie."""
        xp = array_module(ids.values)
        # Most tokenizers have them all at the end of the vocabulary: one comparison leaves next to nothing to look up.
        likely = xp.flatnonzero((ids.values >= self._first_special) & (ids.values < len(self._is_special)))
        special = likely[xp.asarray(self._is_special)[ids.values[likely]]]
        return on_host(xp.bincount(xp.searchsorted(ids.offsets, special, side="right") - 1, minlength=len(ids)))

    def _compare(self, place: str, prompt: Prompt, found: list[int]) -> None:
        self.check.rows += 1
        expected = self._reference.ids(prompt)
        if expected != found:
            self.check.mismatches.append(f"{place}: {_difference(found, expected)}")


def _difference(found: list[int], expected: list[int]) -> str:
    """In words, the first place where two rows of ids part."""
    same = (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
    position = next(same, min(len(found), len(expected)))
    here, there = (str(ids[position]) if position < len(ids) else "nothing" for ids in (found, expected))
    return f"token {position} is {here}, the reference gives {there}"
