"""Rendering on a device: a compiled template writes a column of conversations, without copying text to the host.

`walk.py` says which segments each row is made of. Here

    1. a kernel finds the address and length of every segment of every row
    2. a prefix sum over the lengths gives each segment its place in the result
    3. one kernel copies all segments
    4. where the answers of each row begin and end follows from the places of segments, by another kernel

No text is copied before step 3: a segment is an address, in whichever buffer the reader decoded it to. Texts that
transformers rendered on the host are copied over in one transfer and take part in step 3, so rows come out in order.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array, Ragged, offsets_of, on_host
from gpuload.core.arrow import bitmap
from gpuload.core.marks import LOSS, loss_bits
from gpuload.engines.conversations import Conversations
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import gather, texts_to_device
from gpuload.engines.protocol import RenderedRows, TextColumn, Tokenized
from gpuload.engines.walk import Walk
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Path, Ref


@dataclass(frozen=True, eq=False)
class DeviceSpans:
    """Parts of n texts, in order; in device memory."""

    first: Array  # (n + 1,) int64: those of text i are the parts first[i] to first[i + 1] - 1
    start: Array  # int64, where each part begins, in bytes of the text
    end: Array  # int64
    bits: Array  # int32, those of its tokens (`core.marks`)


@dataclass(kw_only=True, eq=False)
class DeviceText(RenderedRows):
    """n prompts as text in device memory; a `protocol.RenderedText`. A rejected row is empty."""

    kernels: Kernels  # for that device
    offsets: Array  # (n + 1,) int64
    data: Array  # (offsets[-1],) uint8, all texts one after the other
    answers: DeviceSpans | None = None  # the parts of the texts that have loss; None if nobody asks

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """(n,) int64 in device memory, bytes of each text."""
        return self.kernels.xp.diff(self.offsets)

    @property
    def column(self) -> TextColumn:
        """The texts as kernels take them."""
        return TextColumn(self.data, self.offsets[:-1], self.lengths)

    @cached_property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) int64 in host memory, bytes of each text, -1 where a row was rejected."""
        with self.kernels.current():
            sizes = on_host(self.lengths).copy()
        sizes[list(self.rejected)] = -1
        return sizes

    @property
    def sampled_sizes(self) -> np.ndarray[Any, Any]:
        return self.sizes

    @cached_property
    def text(self) -> pa.LargeStringArray:
        """The texts as Arrow, null where a row was rejected; copied to the host when first asked for."""
        valid = self.sizes >= 0
        mask = None if valid.all() else bitmap(valid)
        with self.kernels.current():
            offsets, data = pa.py_buffer(on_host(self.offsets)), pa.py_buffer(on_host(self.data))
        return pa.LargeStringArray.from_buffers(len(self), offsets, data, mask)

    def tokenized(self, ids: Ragged, fallback_rows: int = 0) -> Tokenized:
        """The same rows with their ids."""
        return Tokenized(
            ids=ids,
            text_sizes=self.lengths,
            text_nbytes=len(self.data),
            fallback_rows=fallback_rows,
            **self.counts(),
        )

    @staticmethod
    def concatenate(parts: "list[DeviceText]") -> "DeviceText":
        """The rows of all parts, one after the other."""
        kernels, xp = parts[0].kernels, parts[0].kernels.xp
        offsets = offsets_of(xp.concatenate([part.lengths for part in parts]))
        whole = DeviceText(kernels=kernels, offsets=offsets, data=xp.concatenate([part.data for part in parts]))
        answers = [part.answers for part in parts if part.answers is not None]
        if answers:
            counts = xp.concatenate([xp.diff(some.first) for some in answers])
            edges = (xp.concatenate([getattr(some, name) for some in answers]) for name in ("start", "end", "bits"))
            whole.answers = DeviceSpans(offsets_of(counts), *edges)
        whole.take_fates(parts)
        return whole


def render(kernels: Kernels, program: ChatProgram, prompts: Conversations) -> DeviceText:
    """Renders every conversation of a column in device memory; whoever reads them bounds their number.

    Besides its result it needs memory for some numbers per message, and none for text. The program grows where rows
    take a path that no earlier row has taken.
    """
    walk = Walk(program, prompts)
    offsets, data, answers = _write(kernels, walk, program.answers is not None)
    return DeviceText(kernels=kernels, offsets=offsets, data=data, answers=answers, **walk.fates())


def _write(kernels: Kernels, walk: Walk, with_answers: bool) -> tuple[Array, Array, DeviceSpans | None]:
    """(n + 1,) offsets, and the bytes: all segments of all rows, copied in one pass. And where their answers are."""
    xp, prompts = kernels.xp, walk.prompts
    rows = len(prompts)
    table = _SegmentTable(kernels, walk)
    for path, _ in walk.paths:
        table.add_path(path)
    table.add_texts()
    # Each row has a run of entries: that of its path or of its own text, or, if it was rejected, the last one, an empty
    # one.
    number = xp.full(rows, len(walk.paths) + len(walk.texts), np.int64)
    for path_number, (_, some) in enumerate(walk.paths):
        number[some] = path_number
    if walk.texts:
        by_reference = xp.asarray(np.fromiter(walk.texts, np.int64))
        number[by_reference] = xp.arange(len(walk.paths), len(walk.paths) + len(walk.texts))
    runs = table.runs()
    first_entry, count, first_span, spans = (runs[part][number] for part in range(4))

    bounds, first = offsets_of(count), offsets_of(spans)  # row i has the segments bounds[i] to bounds[i + 1]
    total, answers = xp.concatenate([bounds[-1:], first[-1:]]).tolist()
    address, size = xp.empty(total, np.int64), xp.empty(total, np.int64)
    kernels.run(
        "lay_pieces", kernels.threads(rows), rows, bounds, first_entry, prompts.first, table.to_device(), address, size
    )
    offsets, data = gather(kernels, address, size)
    if not with_answers:
        return offsets[bounds], data, None
    start, end, bits = xp.empty(answers, np.int64), xp.empty(answers, np.int64), xp.empty(answers, np.int32)
    kernels.run(
        "lay_answers", kernels.threads(rows), rows, bounds, first, first_span, table.spans_to_device(), offsets, start,
        end, bits,
    )  # fmt: skip
    return offsets[bounds], data, DeviceSpans(first, start, end, bits)


class _SegmentTable:
    """The segments of all paths and rendered texts, as the kernel `lay_pieces` reads them: four int64 each. And their
    answers, as `lay_answers` reads them: the numbers of two segments in the path, and the bits of the tokens.

    A literal is (address, length, 0, 0). A text of a message is (address of the column's bytes, number of the message
    in its row, address of the column's starts, address of its lengths). A text that transformers rendered is several
    literals, cut where its answers begin and end.
    """

    def __init__(self, kernels: Kernels, walk: Walk) -> None:
        self._kernels, self._walk = kernels, walk
        self._entries: list[tuple[int, int, int, int]] = []
        self._spans: list[tuple[int, int, int]] = []
        self._ends: list[tuple[int, int]] = [(0, 0)]  # of each run: how many entries and spans there are after it
        literals = {part: 0 for path, _ in walk.paths for part in path.segments if isinstance(part, str)}
        self._literals = {part: number for number, part in enumerate(literals)}
        # One transfer for all bytes that come from the host: literals, then texts rendered by transformers.
        self._from_host = texts_to_device(kernels, [*(part.encode() for part in literals), *walk.texts.values()])
        self._base = kernels.address(self._from_host.data)
        self._start, self._length = on_host(self._from_host.start).tolist(), on_host(self._from_host.length).tolist()

    def add_path(self, path: Path) -> None:
        """Adds the segments of a path, as a run."""
        for part in path.segments:
            if isinstance(part, Ref):
                self._entries.append(self._text(part))
            else:
                self._add_bytes(self._literals[part])
        self._add_run([(start, end, int(LOSS)) for start, end in path.generated or ()])

    def add_texts(self) -> None:
        """Adds the texts that transformers rendered, a run each."""
        for number, row in enumerate(self._walk.texts, len(self._literals)):
            spans = self._walk.answers.get(row, [])
            cuts = sorted({0, self._length[number], *(edge for span in spans for edge in span[:2])})
            for low, high in itertools.pairwise(cuts):
                self._add_bytes(number, low, high)
            at = {cut: segment for segment, cut in enumerate(cuts)}
            self._add_run([(at[start], at[end], int(loss_bits(*number or [0]))) for start, end, *number in spans])

    def runs(self) -> Array:
        """(4, runs + 1) int64: first entry, number of entries, first span and number of spans of each run, and of an
        empty one."""
        ends = np.array([*self._ends, self._ends[-1]], np.int64)
        first, counts = ends[:-1], np.diff(ends, axis=0)
        return self._kernels.xp.asarray(np.stack([first[:, 0], counts[:, 0], first[:, 1], counts[:, 1]]))

    def to_device(self) -> Array:
        """(entries, 4) int64."""
        return self._kernels.xp.asarray(np.array(self._entries, np.int64).reshape(-1, 4))

    def spans_to_device(self) -> Array:
        """(spans, 3) int64."""
        return self._kernels.xp.asarray(np.array(self._spans, np.int64).reshape(-1, 3))

    def _add_run(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Ends a run of entries. Its spans are sorted by where they begin."""
        self._spans += sorted(spans)
        self._ends.append((len(self._entries), len(self._spans)))

    def _add_bytes(self, number: int, low: int = 0, high: int | None = None) -> None:
        """Adds a part of the bytes that come from the host."""
        size = (self._length[number] if high is None else high) - low
        self._entries.append((self._base + self._start[number] + low, size, 0, 0))

    def _text(self, ref: Ref) -> tuple[int, int, int, int]:
        texts = self._walk.column(ref.field, ref.operations)
        data, start, length = (self._kernels.address(array) for array in (texts.data, texts.start, texts.length))
        return data, ref.message, start, length
