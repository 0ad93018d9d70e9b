"""Rendering on a device: a compiled template writes a column of conversations, without copying text to the host.

`walk.py` says which segments each row is made of. Here

    1. a kernel finds the address and length of every segment of every row
    2. a prefix sum over the lengths gives each segment its place in the result
    3. one kernel copies all segments

No text is copied before step 3: a segment is an address, in whichever buffer the reader decoded it to. Texts that
transformers rendered on the host are copied over in one transfer and take part in step 3, so rows come out in order.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Array, Ragged, offsets_of, on_host
from gpuload.engines.conversations import Conversations
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import gather, texts_to_device
from gpuload.engines.protocol import RowCounts, TextColumn, Tokenized
from gpuload.engines.walk import Walk
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Path, Ref


@dataclass(kw_only=True, eq=False)
class DeviceText(RowCounts):
    """n prompts as text in device memory; a `protocol.RenderedText`. A rejected row is empty.

    Attributes:
        kernels: for that device.
        offsets: (n + 1,) int64.
        data: (offsets[-1],) uint8, all texts one after the other.
    """

    kernels: Kernels
    offsets: Array
    data: Array

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

    @cached_property
    def text(self) -> pa.LargeStringArray:
        """The texts as Arrow, null where a row was rejected; copied to the host when first asked for."""
        valid = self.sizes >= 0
        mask = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
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
        rows = 0
        for part in parts:
            whole.add(part, rows)
            rows += len(part)
        return whole


def render(kernels: Kernels, program: ChatProgram, prompts: Conversations) -> DeviceText:
    """Renders every conversation of a column.

    Besides its result it needs memory for some numbers per message, and none for text.

    Args:
        program: the compiled template; it grows where rows take a path that no earlier row has taken.
        prompts: n conversations in device memory; whoever reads them bounds their number.
    """
    with program.lock:
        walk = Walk(program, prompts)
    offsets, data = _write(kernels, walk)
    return DeviceText(kernels=kernels, offsets=offsets, data=data, **walk.counts())


def _write(kernels: Kernels, walk: Walk) -> tuple[Array, Array]:
    """(n + 1,) offsets, and the bytes: all segments of all rows, copied in one pass."""
    xp, prompts = kernels.xp, walk.prompts
    rows = len(prompts)
    table = _SegmentTable(kernels, walk)

    # Where each row's run of entries begins in the table, and how many there are; none for a rejected row.
    first_entry, count = xp.zeros(rows, np.int64), xp.zeros(rows, np.int64)
    for path, some in walk.paths:
        first_entry[some], count[some] = table.add_path(path), len(path.segments)
    if walk.texts:
        by_reference = xp.asarray(np.fromiter(walk.texts, np.int64))
        first = table.add_texts()
        first_entry[by_reference] = xp.arange(first, first + len(walk.texts))
        count[by_reference] = 1

    bounds = offsets_of(count)  # row i has the segments bounds[i] to bounds[i + 1]
    total = int(bounds[-1])
    address, size = xp.empty(total, np.int64), xp.empty(total, np.int64)
    kernels.run(
        "lay_pieces", kernels.threads(rows), rows, bounds, first_entry, prompts.first, table.to_device(), address, size
    )
    offsets, data = gather(kernels, address, size)
    return offsets[bounds], data


class _SegmentTable:
    """The segments of all paths, as the kernel `lay_pieces` reads them: four int64 each.

    A literal is (address, length, 0, 0). A text of a message is (address of the column's bytes, number of the message
    in its row, address of the column's starts, address of its lengths).
    """

    def __init__(self, kernels: Kernels, walk: Walk) -> None:
        self._kernels, self._walk = kernels, walk
        self._entries: list[tuple[int, int, int, int]] = []
        literals = {part: 0 for path, _ in walk.paths for part in path.segments if isinstance(part, str)}
        self._literals = {part: number for number, part in enumerate(literals)}
        # One transfer for all bytes that come from the host: literals, then texts rendered by transformers.
        self._from_host = texts_to_device(kernels, [*(part.encode() for part in literals), *walk.texts.values()])
        self._base = kernels.address(self._from_host.data)
        self._start, self._length = on_host(self._from_host.start).tolist(), on_host(self._from_host.length).tolist()

    def add_path(self, path: Path) -> int:
        """Adds the segments of a path; returns the number of the first."""
        first = len(self._entries)
        for part in path.segments:
            self._entries.append(self._text(part) if isinstance(part, Ref) else self._bytes(self._literals[part]))
        return first

    def add_texts(self) -> int:
        """Adds the texts that transformers rendered, one entry each; returns the number of the first."""
        first = len(self._entries)
        self._entries += [self._bytes(number) for number in range(len(self._literals), len(self._start))]
        return first

    def to_device(self) -> Array:
        """(entries, 4) int64."""
        return self._kernels.xp.asarray(np.array(self._entries, np.int64).reshape(-1, 4))

    def _bytes(self, number: int) -> tuple[int, int, int, int]:
        return self._base + self._start[number], self._length[number], 0, 0

    def _text(self, ref: Ref) -> tuple[int, int, int, int]:
        texts = self._walk.column(ref.field, ref.operations)
        data, start, length = (self._kernels.address(array) for array in (texts.data, texts.start, texts.length))
        return data, ref.message, start, length
