"""A compiled template applied to a column of conversations, on a CPU.

    1. take the column apart and group rows by shape                 (`messages.py`)
    2. send each group down its tree; every question is one column   (`strings.py`)
       a place no row has reached before is traced now, on one row   (`trace.py`)
    3. write down, for every row, the list of pieces its path is made of: literals and texts, each a start and a length
    4. gather all pieces of all rows in one pass

Rows that cannot go this way are rendered by the reference, one by one; their text joins step 4 as one piece each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from gpuload.engines.host.conversations import Messages
from gpuload.engines.host.rendered import Rendered
from gpuload.engines.host.texts import Bools, Buffer, Bytes, Ints, Strings, answer, gather, operate
from gpuload.reference.template_call import TemplateCall, rejection
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Branch, ByReference, Operation, Path, Predicate, Rejected, Shape, Tree
from gpuload.template.trace import Texts

__all__ = ["Grower", "leaves", "render"]

MOST_BYTES = 1 << 28
"""A column is rendered in slices of about so much text, which bounds the memory beside the result."""


class Grower(Protocol):
    """Where trees come from; see `compiler.py`."""

    call: TemplateCall

    def tree(self, shape: Shape) -> Tree: ...

    def grow(self, tree: Tree, shape: Shape, texts: Texts, rows: int) -> str | None: ...


def render(program: ChatProgram, prompts: pa.Array | pa.ChunkedArray) -> Rendered:
    """The prompt of every conversation in a column.

    Args:
        program: the compiled template.
        prompts: list<struct<role, content, ...>>.

    Raises:
        TypeError: `prompts` is a column of something else.
    """
    with program.lock:
        return _render(program, prompts)


def _render(program: ChatProgram, prompts: pa.Array | pa.ChunkedArray) -> Rendered:
    total, texts = Rendered(pa.array([], pa.large_string())), []
    reasons, rows = Counter[str](), 0
    for batch in _batches(prompts):
        columns = [_Column(program, part) for part in batch]
        texts.append(_written(columns))
        for column in columns:
            total.rejected.update((rows + row, reason) for row, reason in sorted(column.rejected.items()))
            total.compiled_rows += sum(len(some) for _, some in column.paths)
            total.reference_rows += len(column.texts)
            reasons.update(column.reasons)
            rows += len(column.prompts)
    total.text = texts[0] if len(texts) == 1 else pa.concat_arrays(texts)
    total.reasons = dict(reasons.most_common())
    return total


def _batches(prompts: pa.Array | pa.ChunkedArray) -> Iterator[list[pa.Array]]:
    """`prompts` in slices, as many together as stay below `MOST_BYTES`; at least one."""
    chunks = prompts.chunks or [pa.array([], prompts.type)] if isinstance(prompts, pa.ChunkedArray) else [prompts]
    batch: list[pa.Array] = []
    room = MOST_BYTES
    for chunk in chunks:
        parts = max(1, -(-chunk.nbytes // MOST_BYTES))
        size = max(1, -(-len(chunk) // parts))
        for low in range(0, max(1, len(chunk)), size):
            part = chunk.slice(low, size)
            if batch and part.nbytes > room:
                yield batch
                batch, room = [], MOST_BYTES
            batch.append(part)
            room -= part.nbytes
    yield batch


def leaves(
    program: Grower,
    shape: Shape,
    rows: Any,
    first: Any,
    answer: Callable[[Predicate], Any],
    texts: Callable[[int], Texts],
    beyond: Callable[[Path | Branch], str | None] = lambda node: None,
) -> Iterator[tuple[Path | Rejected | ByReference, Any]]:
    """Sends the rows of one shape down its tree, which grows where no row has been before; on NumPy or CuPy.

    Args:
        rows: their numbers, ascending.
        first: each row's first message, among all messages.
        answer: a predicate's answer for every message.
        texts: the texts of one row, on the host.
        beyond: why an engine cannot do what a node asks for, or None.

    Returns:
        Each leaf that is reached, with the rows that reach it.
    """
    tree = program.tree(shape)
    stack = [(0, rows)]
    while stack:
        at, rows = stack.pop()
        if not len(rows):
            continue
        node = tree.nodes[at]
        if isinstance(node, Branch | Path) and (why_not := beyond(node)):
            yield ByReference(why_not), rows
        elif isinstance(node, Branch):
            yes = answer(node.predicate)[first[rows] + node.predicate.ref.message]
            stack += [(node.no, rows[~yes]), (node.yes, rows[yes])]
        elif node is not None:
            yield node, rows
        elif (why_not := program.grow(tree, shape, texts(int(rows[0])), len(rows))) is not None:
            yield ByReference(why_not), rows
        else:
            stack.append((at, rows))


class _Column:
    """One slice on its way through. Columns of texts and answers are made once, however many shapes ask for them.

    Attributes:
        paths: which rows took which path.
        texts: the rows that the reference rendered.
        rejected: the rows that were rejected, with reasons.
        reasons: why rows took the reference.
    """

    def __init__(self, program: Grower, prompts: pa.Array) -> None:
        self.program, self.prompts, self.messages = program, prompts, Messages.of(prompts)
        self._strings: dict[tuple[str, tuple[Operation, ...]], Strings] = {}
        self._answers: dict[tuple[str, tuple[Operation, ...], str, str], Bools] = {}
        self.paths: list[tuple[Path, Ints]] = []
        self.texts: dict[int, bytes] = {}
        self.rejected = dict(self.messages.rejected)
        by_reason = {row: why for row, why in self.messages.other.items() if row not in self.rejected}
        for group in self.messages.groups():
            for leaf, rows in self._leaves(group.shape, group.rows):
                if isinstance(leaf, Path):
                    self.paths.append((leaf, rows))
                elif isinstance(leaf, Rejected):
                    self.rejected.update(dict.fromkeys(rows.tolist(), leaf.message))
                else:
                    by_reason.update(dict.fromkeys(rows.tolist(), leaf.reason))
        self._reference(sorted(by_reason))
        self.reasons = Counter(by_reason.values())

    # Down the trees.

    def _leaves(self, shape: Shape, rows: Ints) -> Iterator[tuple[Path | Rejected | ByReference, Ints]]:
        def texts(row: int) -> Texts:
            return self.messages.texts(row, shape)

        return leaves(self.program, shape, rows, self.messages.first, self._answer, texts)

    def _answer(self, predicate: Predicate) -> Bools:
        ref = predicate.ref
        key = (ref.field, ref.operations, predicate.test, predicate.value)
        if key not in self._answers:
            self._answers[key] = answer(self.strings(ref.field, ref.operations), predicate)
        return self._answers[key]

    def strings(self, name: str, operations: tuple[Operation, ...]) -> Strings:
        """The texts of one field after some operations."""
        key = (name, operations)
        if key not in self._strings:
            if operations:
                self._strings[key] = operate(self.strings(name, operations[:-1]), operations[-1])
            else:
                self._strings[key] = self.messages.strings(name)
        return self._strings[key]

    # Row by row.

    def _reference(self, rows: list[int]) -> None:
        if not rows:
            return
        with self.program.call.clock_stopped():
            for row in rows:
                try:
                    self.texts[row] = self.program.call.render(self.prompts[row].as_py()).encode()
                except Exception as error:
                    self.rejected[row] = rejection(error)


def _written(columns: list[_Column]) -> pa.LargeStringArray:
    """Lay out the pieces of all rows of all columns, and gather them in one pass.

    Every text that can be a piece gets a number: the literals first, then, slice by slice, the reference's texts and
    the columns that paths refer to. A row is then a list of such numbers, and a path turns the number of a row's first
    message into all of them at once: `first * (1 for texts, 0 for literals) + a constant`.
    """
    literals = {s: 0 for column in columns for path, _ in column.paths for s in path.segments if isinstance(s, str)}
    tables = _Tables()
    tables.add(_laid_out([literal.encode() for literal in literals]))
    literals = {literal: i for i, literal in enumerate(literals)}
    row_pieces = np.zeros(sum(len(column.prompts) for column in columns), np.int64)
    above, valid = 0, np.ones(len(row_pieces), bool)
    for column in columns:
        for path, rows in column.paths:
            row_pieces[above + rows] = len(path.segments)
        row_pieces[above + _array(column.texts)] = 1
        valid[above + _array(column.rejected)] = False
        above += len(column.prompts)
    bounds = np.zeros(len(row_pieces) + 1, np.int64)
    np.cumsum(row_pieces, out=bounds[1:])

    above, pieces = 0, np.empty(bounds[-1], np.int64)
    for column in columns:
        pieces[bounds[above + _array(column.texts)]] = tables.add(_laid_out(list(column.texts.values()))) + np.arange(
            len(column.texts)
        )
        numbers: dict[tuple[str, tuple[Operation, ...]], int] = {}
        for path, rows in column.paths:
            constant, factor = np.empty(len(path.segments), np.int64), np.zeros(len(path.segments), np.int64)
            for j, segment in enumerate(path.segments):
                if isinstance(segment, str):
                    constant[j] = literals[segment]
                    continue
                key = (segment.field, segment.operations)
                if key not in numbers:
                    numbers[key] = tables.add(column.strings(*key))
                constant[j], factor[j] = numbers[key] + segment.message, 1
            filled = column.messages.first[rows][:, None] * factor + constant
            if len(rows) == rows[-1] - rows[0] + 1:
                pieces[bounds[above + rows[0]] : bounds[above + rows[-1] + 1]] = filled.ravel()
            else:
                pieces[bounds[above + rows][:, None] + np.arange(len(path.segments))] = filled
        above += len(column.prompts)

    offsets, data = tables.gather(pieces)
    mask = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.LargeStringArray.from_buffers(above, pa.py_buffer(offsets[bounds]), pa.py_buffer(data), mask)


class _Tables:
    """Columns of texts, numbered through, their buffers laid end to end."""

    def __init__(self) -> None:
        self._base: dict[Buffer, int] = {}
        self._bytes = self._texts = 0
        self._start: list[Ints] = []
        self._end: list[Ints] = []

    def add(self, strings: Strings) -> int:
        """Append a column; the number of its first text."""
        if strings.buffer not in self._base:
            self._base[strings.buffer] = self._bytes
            self._bytes += len(strings.buffer.data)
        start = strings.start + self._base[strings.buffer]
        self._start.append(start)
        self._end.append(start + strings.length)
        self._texts += len(start)
        return self._texts - len(start)

    def gather(self, which: Ints) -> tuple[Ints, Bytes]:
        """Offsets and bytes of the texts of those numbers, one after the other."""
        # Arrow's allocator keeps its pages from one batch to the next; fresh ones cost as much as the copy.
        arena = np.frombuffer(pa.allocate_buffer(self._bytes), np.uint8)
        np.concatenate([buffer.data for buffer in self._base], out=arena)
        return gather(arena, np.concatenate(self._start), np.concatenate(self._end), which)


def _array(rows: Iterable[int]) -> Ints:
    return np.fromiter(rows, np.int64)


def _laid_out(texts: list[bytes]) -> Strings:
    """Texts one after the other in a buffer of their own."""
    length = np.array([len(text) for text in texts], np.int64)
    return Strings(Buffer(np.frombuffer(b"".join(texts), np.uint8)), np.cumsum(length) - length, length)
