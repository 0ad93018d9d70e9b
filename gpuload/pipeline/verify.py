"""The fast path compared with the tokenizer, row by row, in production.

A sample takes rows from every batch: the longest and the shortest that are affordable, and those that are most likely
to go wrong for this tokenizer (`risk.py`). Its cost is bounded:

1. Rows and bytes that are compared: 64 rows and 64 KiB, or 1/1,024 of all rows and of all text if that is more.
   Batches share them by their size. Later batches get what a batch does not use; one that cannot afford 16 rows uses
   nothing.
2. Bytes that are searched for risks: 2 MiB, or 1/256 of all text if that is more.
3. Seconds: a tenth of a second, or 5 % of the load so far if that is more. Beyond, nothing is searched or compared. Of
   a reference that compares rows in part: after three rows, the share of a tenth of a second that it names.
4. Bytes of a row: 1 MiB, because `tokenizers` takes some hundred times as much memory as a text has bytes.

In addition, within the seconds: up to 256 rows whose form is new (`shapes.py`), those with a new form of a message
first; and one row for each combining mark in text that the tokenizer's normalizer changes, up to 64. A fast path that
is wrong for them is wrong for one row in thousands, which a sample of text would miss.

Of few rows, which the tokenizer itself has made (`engines/host/few.py`), the sample is the first few.

Whatever the first three bounds are, at least one row of a load is compared. In `load`, all of this runs in a thread of
its own, while later batches are rendered and encoded.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import Ragged, common_prefix
from gpuload.core.errors import GpuloadError
from gpuload.core.marks import CHOSEN, IDS, LOSS, REJECTED, WEIGHT
from gpuload.core.memory import room_to_encode
from gpuload.core.options import Verify
from gpuload.dataset.report import Check
from gpuload.engines.protocol import ArrowPrompts, Prompts, RenderedText
from gpuload.pipeline.kind import Finder
from gpuload.pipeline.nulls import NullFinder
from gpuload.pipeline.risk import RiskFinder, in_turn
from gpuload.pipeline.shapes import Shapes, shapes_of
from gpuload.reference.reference import Prompt, Reference
from gpuload.reference.template_call import rejection
from gpuload.sources.columns import to_python

_ROWS = 64
_BYTES = 64 << 10
_SEARCHED_BYTES = 2 << 20
_ROW_BYTES = 1 << 20
_LEAST_ROWS = 16  # per batch that is sampled: choosing rows has a fixed cost
_OWN_ROWS = 8  # of the tokenizer's own: there is nothing else to find than that two of its calls differ
_SHARE = 1 / 1024  # of the rows, and of the bytes of text, that are compared
_SEARCHED_SHARE = 1 / 256  # of the bytes of text
_SHAPE_ROWS = 256
_FORM_ROWS = 64  # of them, for new forms of messages only: where all shapes differ, the first rows would take all
_SHAPE_SHARE = 0.5  # of the seconds, beyond which no further rows of JSON are parsed for their shapes
_MARK_ROWS = 64
_MARK_SHARE = 0.25  # of the seconds, beyond which none are looked for
_MOST_SHAPES = 1 << 20  # numbers of shapes that are remembered
_SECONDS = 0.1
_FEWEST_ROWS = 2  # that may take all of these seconds, where rows are compared in part
_SECONDS_SHARE = 0.05  # of a load

Rows = np.ndarray[Any, np.dtype[np.int64]]


class Verifier:
    """Compares rows of batches with the tokenizer. Used by one thread at a time.

    Args:
        mode: "sample", "full" or "off".
        reference: the tokenizer.
        rows: how many rows there will be in all; batches share the sample by their size.
        finders: what else looks at the rows.
        by_tokenizer: whether all rows are the tokenizer's own, because they are few. Then a sample is a few of them.

    Attributes:
        check: the outcome so far.
        finders: what looks at the rows of batches, next to `compare`.
        shapes: number of a shape → whether a row of it was compared. Other processes have the same numbers.
    """

    def __init__(
        self,
        mode: Verify,
        reference: Reference,
        rows: int,
        finders: Sequence[Finder] = (),
        by_tokenizer: bool = False,
    ):
        self._mode = mode
        self._by_tokenizer = by_tokenizer
        self._reference = reference
        self._total = rows
        self._rng = np.random.default_rng(0)
        self._risks: RiskFinder | None = None
        self._started = time.perf_counter()
        self._rows = self._bytes = self._searched_bytes = 0.0  # what may still be used; it grows with every batch
        self._shape_rows, self._mark_rows = _SHAPE_ROWS, _MARK_ROWS  # what may still be used of these
        self._forms: set[int] = set()  # forms of messages in rows that were compared, or chosen for it
        self._shapes: Shapes | None = None  # of the batch at hand
        self._began = self._spent = 0.0  # CPU time of the thread when this batch was begun; seconds before
        self.check = Check()
        self.finders: list[Finder] = [NullFinder(mode, reference), *finders]
        self.shapes: dict[int, bool] = {}

    def compare(
        self,
        place: Callable[[int], str],
        prompts: Prompts,
        text: RenderedText,
        fetch: Callable[[Rows], Ragged],
    ) -> Rows:
        """Compares a sample of one batch, or all of it.

        Args:
            place: number of a row → its file, and its number there.
            prompts: the n rows' prompts.
            text: the n rows rendered.
            fetch: (k,) ascending row numbers → the ids of these rows, in host memory.

        Returns:
            The rows that were compared.
        """
        if self._mode == "off":
            return np.zeros(0, np.int64)
        # CPU time of this thread: while it waits for the interpreter lock, other stages are at work.
        compared: list[int] = []
        self._began, self._spent, self._shapes = time.thread_time(), self.check.seconds, None
        rows = np.flatnonzero(text.sizes >= 0) if self._mode == "full" else self._sample(prompts, text)
        if len(rows):
            found, order = fetch(np.sort(rows)), np.argsort(np.argsort(rows))
            for row, prompt, at in zip(rows, to_python(prompts.to_arrow(rows)), order, strict=True):
                if self._mode == "sample" and self.check.rows and self._time_is_over():
                    break
                with room_to_encode(int(text.sizes[row]), place(row)):
                    if not self._compare(place(row), prompt, found[int(at)].tolist()):
                        continue
                compared.append(int(row))
                if self._shapes is not None and row < len(self._shapes.shapes):
                    self.shapes[int(self._shapes.shapes[row])] = True
        self.check.seconds = self._spent + time.thread_time() - self._began
        self.check.count_shapes(self.shapes)
        return np.array(compared, np.int64)

    def _time_is_over(self, share: float = 1.0) -> bool:
        """Whether the seconds that may be spent by now, or a share of them, are spent."""
        self.check.seconds = self._spent + time.thread_time() - self._began
        least = _SECONDS * (self._reference.sample_share if self.check.rows >= _FEWEST_ROWS else 1)
        return self.check.seconds > share * max(least, _SECONDS_SHARE * (time.perf_counter() - self._started))

    def _sample(self, prompts: Prompts, text: RenderedText) -> Rows:
        """Rows of a batch within the bounds; at least one row of the load."""
        sizes = text.sampled_sizes
        usable = np.flatnonzero((sizes >= 0) & (sizes <= _ROW_BYTES))
        if not len(usable):
            return usable
        if self._by_tokenizer:
            count = max(0, _OWN_ROWS - self.check.rows)
            return usable[np.unique(np.linspace(0, len(usable) - 1, count).astype(np.int64))]
        share, nbytes = len(sizes) / self._total, int(sizes[usable].sum())
        self._rows += max(_ROWS * share, _SHARE * len(usable))
        self._bytes += max(_BYTES * share, _SHARE * nbytes)
        self._searched_bytes += max(_SEARCHED_BYTES * share, _SEARCHED_SHARE * nbytes)
        rare: list[int] = []
        if not self._time_is_over():
            rare = [*self._new_shapes(prompts, sizes, usable), *self._new_marks(prompts, sizes, usable)]
        affordable = self._rows >= min(_LEAST_ROWS, len(usable)) and not self._time_is_over()
        chosen = self._choose(prompts, sizes, usable) if affordable else usable[:0]
        # In turn: whichever is cut off by the time that is left, some of both have been compared.
        both = in_turn([iter(rare), iter(chosen.tolist())])
        chosen = np.array(list(dict.fromkeys(both)), np.int64)
        if not len(chosen) and not self.check.rows:
            return usable[[np.argmin(sizes[usable])]]
        return chosen

    def _new_shapes(self, prompts: Prompts, sizes: Rows, usable: Rows) -> list[int]:
        """Rows with a new form of a message, then the shortest row of each shape that was not compared so far."""
        self._shapes = found = shapes_of(prompts, lambda: self._time_is_over(_SHAPE_SHARE))
        usable = usable[usable < len(found.shapes)]
        shapes = found.shapes[usable]
        new = np.unique(shapes)
        if len(self.shapes) < _MOST_SHAPES:
            for shape in new.tolist():
                self.shapes.setdefault(shape, False)
        fits = (sizes >= 0) & (sizes <= _ROW_BYTES)
        chosen: dict[int, None] = {}
        for form, row in zip(found.forms.tolist(), found.rows.tolist(), strict=True):
            if form not in self._forms and fits[row] and len(chosen) < self._shape_rows:
                chosen[row] = None
                self._forms.add(form)
        shortest = usable[_shortest(sizes[usable], np.searchsorted(new, shapes), len(new))]
        known = {int(found.shapes[row]) for row in chosen} | {each for each in new.tolist() if self.shapes.get(each)}
        for shape, row in zip(new.tolist(), shortest.tolist(), strict=True):
            if shape not in known and fits[row] and len(chosen) < self._shape_rows - _FORM_ROWS:
                chosen[row] = None
        self._shape_rows -= len(chosen)
        return list(chosen)

    def _new_marks(self, prompts: Prompts, sizes: Rows, usable: Rows) -> list[int]:
        """Rows with combining marks that no row before had, in text that the normalizer changes. On a device they are
        looked for only where the text is in host memory."""
        if not self._mark_rows or not isinstance(prompts, ArrowPrompts):
            return []
        self._risks = self._risks or RiskFinder(self._reference)
        fits = np.zeros(len(sizes), bool)
        fits[usable] = sizes[usable] <= _ROW_BYTES
        found = self._risks.new_marks(prompts.column, fits, self._mark_rows, lambda: self._time_is_over(_MARK_SHARE))
        self._mark_rows -= len(found)
        return found

    def _choose(self, prompts: Prompts, sizes: Rows, usable: Rows) -> Rows:
        """The longest and the shortest row that are affordable, then the riskiest candidates."""
        chosen: dict[int, None] = {}

        def choose(row: int) -> None:
            if row not in chosen and self._rows >= 1 and sizes[row] <= self._bytes:
                chosen[row] = None
                self._rows -= 1
                self._bytes -= int(sizes[row])

        affordable = usable[sizes[usable] <= self._bytes / 2]
        if len(affordable):
            of_rows = sizes[affordable]
            choose(int(affordable[::-1][of_rows[::-1].argmax()]))
            choose(int(affordable[of_rows.argmin()]))
        candidates = self._candidates(sizes, usable)
        self._risks = self._risks or RiskFinder(self._reference)
        for at in self._risks.rank(prompts.to_arrow(candidates), self._rng).tolist():
            choose(int(candidates[at]))
        return np.array(list(chosen), np.int64)

    def _candidates(self, sizes: Rows, usable: Rows) -> Rows:
        """Rows to search for risks: random ones, in ascending order."""
        at_random = self._rng.permutation(usable)
        candidates = np.sort(at_random[np.cumsum(sizes[at_random]) <= self._searched_bytes])
        self._searched_bytes -= int(sizes[candidates].sum())
        return candidates

    def _compare(self, place: str, prompt: Prompt, found: list[int]) -> bool:
        """Compares one row; False if that is not possible."""
        try:
            if self._mode == "full":
                expected, found = self._reference.compared(prompt, found)
            else:
                expected, found = self._reference.compared_in_part(prompt, found, self._rng.integers)
        except GpuloadError:
            raise
        except Exception as error:  # then the load by the tokenizer itself rejects the row
            if self._reference.is_unreadable(error):
                self.check.unreadable.append(f"{place}: {error}")
                return False
            self.check.mismatches.append(f"{place}: the tokenizer rejects it: {rejection(error)}")
        else:
            if expected != found:
                self.check.mismatches.append(f"{place}: {_difference(found, expected)}")
        self.check.rows += 1
        return True


def _shortest(sizes: Rows, groups: Rows, count: int) -> Rows:
    """(count,) the first of the shortest rows of each group, by the (n,) sizes and numbers of the groups of rows. A
    sort would take several times as long."""
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, groups, sizes)
    rows = np.flatnonzero(sizes == least[groups])[::-1]
    shortest = np.zeros(count, np.int64)
    shortest[groups[rows]] = rows  # of several rows of a group, the last one stays: the first in order
    return shortest


def _difference(found: list[int], expected: list[int]) -> str:
    """A sentence about the first position at which two rows of tokens differ."""
    position = common_prefix(found, expected)
    here, there = (tokens[position] if position < len(tokens) else None for tokens in (found, expected))
    ids = ["nothing" if token is None else str(token & int(IDS)) for token in (here, there)]
    if here is None or there is None or ids[0] != ids[1]:
        return f"token {position} is {ids[0]}, the tokenizer returns {ids[1]}"
    return f"token {position}, {ids[0]}, has {_marked(here)}, but should have {_marked(there)}"


def _marked(token: int) -> str:
    """What the marks of a token say, such as "loss, chosen"."""
    names = {LOSS: "loss", CHOSEN: "chosen", REJECTED: "rejected", WEIGHT: "a weight"}
    return ", ".join(name for bit, name in names.items() if token & int(bit)) or "no loss"
