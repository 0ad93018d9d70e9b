"""A compiled template applied to a column of conversations by kernels, on NumPy or CuPy arrays.

The counterpart of `template/arrow.py`, step by step:

    1. rows by shape                                                     (`conversations.py`)
    2. each group down its tree; every question is one kernel            (`texts.py`)
       a place no row has reached before is traced, on one row that is copied to the host
    3. every row is a run of segments; a kernel finds where each piece lies and how long it is
    4. one prefix sum over the lengths, and one kernel that copies all pieces of all rows

What is read is never copied before step 4: a piece is an address, in whichever buffer the reader left it. Rows that
cannot go this way are rendered by the reference on the host; their texts are copied over in one go and are pieces of
step 4 as all others, so rows come out in order.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Array, offsets_of, on_host
from gpuload.engines.device.conversations import Conversations, sort
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import BOUNDS_ONLY, TextColumn, answer, copied, laid_out, not_ascii, operate
from gpuload.engines.host.render import Grower, leaves
from gpuload.reference.template_call import rejection
from gpuload.template.program import Branch, ByReference, Operation, Path, Predicate, Ref, Rejected, Shape
from gpuload.template.trace import Texts

Operations = tuple[Operation, ...]


@dataclass(eq=False)
class DeviceText:
    """A column of prompts as text, in device memory. A rejected row is empty.

    Attributes:
        kernels: for that device.
        offsets: (n + 1,) int64.
        data: uint8, all texts one after the other.
        rejected, compiled_rows, reference_rows, reasons: as in `Rendered`.
    """

    kernels: Kernels
    offsets: Array
    data: Array
    rejected: dict[int, str] = field(default_factory=dict)
    compiled_rows: int = 0
    reference_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def column(self) -> TextColumn:
        """The texts as kernels take them."""
        return TextColumn(self.data, self.offsets[:-1], self.kernels.xp.diff(self.offsets))

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @cached_property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) bytes of each text, -1 for a row that was rejected; on the host."""
        sizes = on_host(self.kernels.xp.diff(self.offsets)).copy()
        sizes[list(self.rejected)] = -1
        return sizes

    @property
    def wide(self) -> np.ndarray[Any, Any]:
        """(n,) bool, true for a text that is not all ASCII; on the host."""
        return on_host(not_ascii(self.kernels, self.column))

    @cached_property
    def text(self) -> pa.LargeStringArray:
        """The texts as Arrow, copied to the host when they are first asked for. A rejected row is null."""
        valid = self.sizes >= 0
        mask = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        offsets, data = pa.py_buffer(on_host(self.offsets)), pa.py_buffer(on_host(self.data))
        return pa.LargeStringArray.from_buffers(len(self), offsets, data, mask)

    @staticmethod
    def joined(parts: "list[DeviceText]") -> "DeviceText":
        """The rows of all parts, one after the other."""
        kernels, xp = parts[0].kernels, parts[0].kernels.xp
        offsets = offsets_of(xp.concatenate([xp.diff(part.offsets) for part in parts]))
        whole, reasons = DeviceText(kernels, offsets, xp.concatenate([part.data for part in parts])), Counter[str]()
        rows = 0
        for part in parts:
            whole.rejected |= {rows + row: reason for row, reason in part.rejected.items()}
            whole.compiled_rows += part.compiled_rows
            whole.reference_rows += part.reference_rows
            reasons.update(part.reasons)
            rows += len(part)
        whole.reasons = dict(reasons.most_common())
        return whole


def render(kernels: Kernels, program: Grower, prompts: Conversations) -> DeviceText:
    """The prompt of every conversation.

    Beside its result it needs memory for some numbers per message, and no more for text.

    Args:
        program: the compiled template; it grows where rows arrive that no earlier row prepared the way for.
        prompts: n conversations, bounded by whoever read them.
    """
    return _Walk(kernels, program, prompts).text()


class _Walk:
    """One column on its way. Columns of texts and answers are made once, however many shapes ask for them."""

    def __init__(self, kernels: Kernels, program: Grower, prompts: Conversations) -> None:
        self.kernels, self.program, self.prompts = kernels, program, prompts
        self._strings: dict[tuple[str, Operations], TextColumn] = {}
        self._answers: dict[Predicate, Array] = {}
        self.paths: list[tuple[Path, Array]] = []
        self.texts: dict[int, bytes] = {}
        found = sort(kernels, prompts)
        self.rejected = found.rejected
        by_reason = {row: why for row, why in found.other.items() if row not in found.rejected}
        for shape, rows in found.groups:
            for leaf, some in self._leaves(shape, rows):
                if isinstance(leaf, Path):
                    self.paths.append((leaf, some))
                elif isinstance(leaf, Rejected):
                    self.rejected.update(dict.fromkeys(on_host(some).tolist(), leaf.message))
                else:
                    by_reason.update(dict.fromkeys(on_host(some).tolist(), leaf.reason))
        self._reference(sorted(by_reason))
        self.reasons = Counter(by_reason.values())

    def _leaves(self, shape: Shape, rows: Array) -> Iterator[tuple[Path | Rejected | ByReference, Array]]:
        def texts(row: int) -> Texts:
            return self.prompts.texts(self.kernels, row, shape)

        return leaves(self.program, shape, rows, self.prompts.first, self._answer, texts, _beyond)

    def _answer(self, predicate: Predicate) -> Array:
        ref = predicate.ref
        key = Predicate(Ref(0, ref.field, ref.operations), predicate.test, predicate.value)
        if key not in self._answers:
            self._answers[key] = answer(self.kernels, self.strings(ref.field, ref.operations), predicate)
        return self._answers[key]

    def strings(self, name: str, operations: Operations) -> TextColumn:
        """The texts of one field after some operations."""
        key = (name, operations)
        if key not in self._strings:
            if operations:
                self._strings[key] = operate(self.kernels, self.strings(name, operations[:-1]), operations[-1])
            else:
                self._strings[key] = self.prompts.text_field(name)
        return self._strings[key]

    def _reference(self, rows: list[int]) -> None:
        if not rows:
            return
        prompts = self.prompts.fetch(rows)
        with self.program.call.clock_stopped():
            for at, row in enumerate(rows):
                try:
                    self.texts[row] = self.program.call.render(prompts[at].as_py()).encode()
                except Exception as error:
                    self.rejected[row] = rejection(error)

    def text(self) -> DeviceText:
        """Lay out the pieces of all rows, and copy them in one pass."""
        kernels, xp, rows = self.kernels, self.kernels.xp, len(self.prompts)
        literals = {part: 0 for path, _ in self.paths for part in path.segments if isinstance(part, str)}
        literals = {part: number for number, part in enumerate(literals)}
        from_host = laid_out(kernels, [*(part.encode() for part in literals), *self.texts.values()])
        base, start, length = kernels.address(from_host.data), on_host(from_host.start), on_host(from_host.length)

        # One table of segments: those of each path, then one of each text of the reference. Rows point into it.
        table: list[tuple[int, int, int, int]] = []
        segment, pieces = xp.zeros(rows, np.int64), xp.zeros(rows, np.int64)
        for path, some in self.paths:
            segment[some], pieces[some] = len(table), len(path.segments)
            for part in path.segments:
                if isinstance(part, str):
                    number = literals[part]
                    table.append((base + int(start[number]), int(length[number]), 0, 0))
                else:
                    texts = self.strings(part.field, part.operations)
                    addresses = [kernels.address(array) for array in (texts.data, texts.start, texts.length)]
                    table.append((addresses[0], part.message, addresses[1], addresses[2]))
        if self.texts:
            by_reference = xp.asarray(np.fromiter(self.texts, np.int64))
            segment[by_reference] = xp.arange(len(table), len(table) + len(self.texts))
            pieces[by_reference] = 1
            table += [(base + int(start[i]), int(length[i]), 0, 0) for i in range(len(literals), len(start))]

        bounds = offsets_of(pieces)
        total = int(bounds[-1])
        address, sizes = xp.empty(total, np.int64), xp.empty(total, np.int64)
        entries = xp.asarray(np.array(table, np.int64).reshape(-1, 4))
        kernels.run(
            "lay_pieces", kernels.threads(rows), rows, bounds, segment, self.prompts.first, entries, address, sizes
        )
        offsets, data = copied(kernels, address, sizes)
        return DeviceText(
            kernels,
            offsets[bounds],
            data,
            dict(sorted(self.rejected.items())),
            sum(len(some) for _, some in self.paths),
            len(self.texts),
            dict(self.reasons.most_common()),
        )


def _beyond(node: Path | Branch) -> str | None:
    """Why rows that come to this node are not for the device, or None."""
    for part in (node.predicate.ref,) if isinstance(node, Branch) else node.segments:
        for operation in part.operations if isinstance(part, Ref) else ():
            if operation.name not in BOUNDS_ONLY:
                return f"{operation.name} is not done on the device"
    return None
