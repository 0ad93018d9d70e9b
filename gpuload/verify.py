"""The fast path compared with the tokenizer, row by row, in production.

A sample takes from every batch the rows on which fast paths fail (the shortest and the longest, special-token text,
non-ASCII text) and some at random. It is compared while later batches are still being encoded, so that most of its cost
is hidden; the rest is bounded in rows and bytes.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.arrays import Ragged, array_module, on_host
from gpuload.engines.protocol import Prompts, RenderedText
from gpuload.options import Verify
from gpuload.reference.reference import Prompt, Reference
from gpuload.sources.columns import to_python

_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 20
_FEWEST_ROWS = 2  # per batch, however many batches there are
_LONGEST_BYTES = 200_000


@dataclass
class Check:
    """The outcome of a verification.

    Attributes:
        rows: how many rows were compared.
        earlier: how many rows were compared, without a difference, when tokens that are now from the cache were made.
        seconds: CPU time spent.
        mismatches: one sentence for each row that differs.
    """

    rows: int = 0
    earlier: int = 0
    seconds: float = 0.0
    mismatches: list[str] = field(default_factory=list)


class Verifier:
    """Compares rows of batches with the tokenizer.

    Args:
        mode: "sample", "full" or "off".
        reference: the tokenizer.
        rows: how many rows there will be in all; batches share the sample by their size.

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

    def compare(
        self, source: str, numbers: np.ndarray[Any, Any], prompts: Prompts, text: RenderedText, ids: Ragged
    ) -> None:
        """Compares a sample of one batch, or all of it.

        Args:
            source: the name of the rows' file.
            numbers: (n,) row numbers in that file.
            prompts: the n rows' prompts.
            text: the n rows rendered.
            ids: the n rows encoded; only those that are compared are copied to the host.
        """
        if self._mode == "off":
            return
        # CPU time of this thread: while it waits for the interpreter lock, other stages are at work.
        started = time.thread_time()
        rows = np.flatnonzero(text.sizes >= 0) if self._mode == "full" else self._sample(text, ids)
        picked = to_python(prompts.to_arrow(rows)) if len(rows) else []
        for row, prompt in zip(rows, picked, strict=True):
            self._compare(f"{source} row {numbers[row]}", prompt, ids[int(row)].tolist())
        self.check.seconds += time.thread_time() - started

    def _sample(self, text: RenderedText, ids: Ragged) -> Any:
        """Rows of a batch: the longest, the shortest, up to two of every risky kind, some at random."""
        sizes = text.sizes
        usable = np.flatnonzero((sizes >= 0) & (sizes <= _LONGEST_BYTES))
        share = len(sizes) / self._total
        most = max(_FEWEST_ROWS, round(_SAMPLE_ROWS * share))
        if not len(usable):
            return usable
        kinds = [text.wide]
        # A template writes special tokens into every row: only rows with more of them than most are risky.
        count = self._special_counts(ids)
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

    def _special_counts(self, ids: Ragged) -> Any:
        """(n,) how many special tokens each row has; counted in the memory of the ids."""
        xp = array_module(ids.values)
        # Most tokenizers have them at the end of the vocabulary: one comparison leaves almost nothing to look up.
        likely = xp.flatnonzero((ids.values >= self._first_special) & (ids.values < len(self._is_special)))
        special = likely[xp.asarray(self._is_special)[ids.values[likely]]]
        return on_host(xp.bincount(xp.searchsorted(ids.offsets, special, side="right") - 1, minlength=len(ids)))

    def _compare(self, place: str, prompt: Prompt, found: list[int]) -> None:
        self.check.rows += 1
        expected = self._reference.ids(prompt)
        if expected != found:
            self.check.mismatches.append(f"{place}: {_difference(found, expected)}")


def _difference(found: list[int], expected: list[int]) -> str:
    """A sentence about the first position at which two rows of ids differ."""
    same = (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
    position = next(same, min(len(found), len(expected)))
    here, there = (str(ids[position]) if position < len(ids) else "nothing" for ids in (found, expected))
    return f"token {position} is {here}, the tokenizer returns {there}"
