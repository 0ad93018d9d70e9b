"""A compiled template applied to a column of conversations: which row is made of which segments.

    1. group rows by shape                                                            (`shapes.py`)
    2. send each group down its shape's tree; a predicate is answered for all messages at once
    3. where rows reach a place that no row has reached before, trace the template on one of them
    4. render the rows that share no tree one by one, with transformers where nothing else is possible

The result, a list of paths with their rows, is the same for every engine. Writing the texts down is not, see
`host/render.py` and `device/render.py`.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array, offsets_of, on_host
from gpuload.engines.conversations import OTHER, Conversations, row_messages
from gpuload.engines.protocol import TextColumn, add_seconds
from gpuload.engines.shapes import group
from gpuload.reference.control_tokens import ControlTokens
from gpuload.reference.reference import problem
from gpuload.reference.template_call import rejection
from gpuload.sources.columns import to_python
from gpuload.sources.types import is_plain
from gpuload.template.compiler import FEW_ROWS, FEWEST_ROWS, FREE_LEAVES, ChatProgram
from gpuload.template.program import (
    Answer,
    Branch,
    ByReference,
    Leaf,
    Operation,
    Path,
    Predicate,
    Ref,
    Rejected,
    RenderedRow,
    Shape,
)

Operations = tuple[Operation, ...]
Source = tuple[str, tuple[Operation, ...]]
"""A field of messages, and what is done to its texts."""

Together = Callable[["Walk", Array], Array]


class PrintedSegments(NamedTuple):
    """A segment that k rows print."""

    rows: Array  # (k,) their numbers
    place: Array  # (k,) how many segments each has printed before
    source: str | Source  # a literal; or a field of messages, and what is done to its texts
    messages: Array  # (k,) of which message, by its number among all; nothing for a literal
    loss: str  # "first" for the first text of a generation block, "more" for its others, empty outside

    def of(self, kept: Array) -> "PrintedSegments":
        """What some of the rows print: (k,) bool."""
        messages = self.messages if isinstance(self.source, str) else self.messages[kept]
        return self._replace(rows=self.rows[kept], place=self.place[kept], messages=messages)


class Learned(NamedTuple):
    """k parts of rows that have loss: from some bytes behind the beginning of a segment to some bytes behind that of
    another one."""

    rows: Array  # (k,) their numbers
    begin: Array  # (k,) how many segments of the row are before the first one
    begin_bytes: Array  # (k,) where in it the part begins
    end: Array  # (k,) the same for its end
    end_bytes: Array  # likewise


@dataclass(eq=False)
class Printed:
    """What rows of a column print."""

    count: Array  # (n,) int64, how many segments each row has; 0 if it is not among the rows that reached the end
    parts: list[PrintedSegments]  # the segments, in any order
    rejected: dict[int, str]  # row → why the template rejects it
    unknown: Array  # rows that took a way that is not known yet
    others: Array  # rows that only `RowRenderer` can render
    learned: Learned | None = None  # what has loss; None if nobody asks


class Walk:
    """One column, sent down the trees of a program. Several threads may do so at once: the trees grow under
    `program.lock`, and what has grown does not change.

    Columns of texts and answers are computed once, however many shapes ask for them.

    Args:
        paths_only: only find paths: render no row, and look for no text of control tokens.
        together: renders rows that share no tree, as far as that pays, and returns the others (`host/passes.py`).
    """

    def __init__(
        self, program: ChatProgram, prompts: Conversations, paths_only: bool = False, together: Together | None = None
    ) -> None:
        self.prompts = prompts
        self.program, self._ops = program, prompts.ops
        self._columns: dict[tuple[str, Operations], TextColumn] = {}
        self._answers: dict[Predicate, Array] = {}
        self.paths: list[tuple[Path, Array]] = []  # each path that rows take, with their ascending numbers
        self.printed: list[Printed] = []  # by rows that went through the automaton together
        self.texts: dict[int, bytes] = {}  # row → the text of a row that was rendered by itself, UTF-8
        self.answers: dict[int, list[Answer]] = {}  # row → the parts with loss in that text, in bytes
        found = group(prompts)
        self.rejected = found.rejected  # row → why no prompt can be made of it
        by_reference = {row: why for row, why in found.by_reference.items() if row not in found.rejected}
        # Where nearly every row has another shape, trees do not pay.
        many = len(found.groups) > FREE_LEAVES and program.takes_any_shape
        few: list[Array] = []
        for make_shape, rows in found.groups:
            if many and len(rows) < FEWEST_ROWS:
                few.append(rows)
                continue
            shape = make_shape()
            for leaf, some in self._leaves(shape, rows):
                if isinstance(leaf, Path) and program.answers is not None:
                    leaf = program.answers.of_path(shape, leaf)
                if isinstance(leaf, Path):
                    self.paths.append((leaf, some))
                elif isinstance(leaf, Rejected):
                    self.rejected.update(dict.fromkeys(on_host(some).tolist(), leaf.message))
                else:
                    by_reference.update(dict.fromkeys(on_host(some).tolist(), leaf.reason))
        if paths_only:
            return
        self._with_control = self._find_control_tokens()
        self.by_reference: dict[int, str] = {}  # row → why it was given to transformers
        self.reason_seconds: dict[str, float] = {}  # reason → the time that its rows took
        if few:
            alone = np.sort(on_host(self._ops.xp.concatenate(few)))
            if together is not None:
                alone = together(self, alone)
            by_reference.update(dict.fromkeys(alone.tolist(), FEW_ROWS))
        self.render_rows(dict(sorted(by_reference.items())))

    def fates(self) -> dict[str, Any]:
        """What became of the rows, as keyword arguments of a `RenderedRows`."""
        return {
            "rejected": dict(sorted(self.rejected.items())),
            "by_reference": dict(sorted(self.by_reference.items())),
            "reason_seconds": self.reason_seconds,
            "with_control": self._with_control,
        }

    def of_paths(self, prompts: Conversations, paths: list[tuple[Path, Array]]) -> Self:
        """Other rows over the same messages, of which is known that they take these paths."""
        made = copy.copy(self)
        made.prompts, made.paths, made.rejected = prompts, paths, {}
        return made

    def column(self, name: str, operations: Operations = ()) -> TextColumn:
        """The texts of one field of all messages, after some operations."""
        key = (name, operations)
        if key not in self._columns:
            if operations:
                self._columns[key] = self._ops.operate(self.column(name, operations[:-1]), operations[-1])
            else:
                self._columns[key] = self.prompts.text_field(name)
        return self._columns[key]

    def _leaves(self, shape: Shape, rows: Array) -> Iterator[tuple[Leaf, Array]]:
        """Each leaf that rows of this shape reach, with the rows that reach it."""
        tree = self.program.tree(shape)
        stack = [(0, rows)]
        while stack:
            at, rows = stack.pop()
            if not len(rows):
                continue
            node = tree.nodes[at]
            if isinstance(node, Branch | Path) and (why_not := self._unsupported(node)):
                yield ByReference(why_not), rows
            elif isinstance(node, Branch):
                # The predicate is about one message of each row: its number counts from the row's first message.
                yes = self.answer(node.predicate)[self.prompts.first[rows] + node.predicate.ref.message]
                stack += [(node.no, rows[~yes]), (node.yes, rows[yes])]
            elif node is not None:
                yield node, rows
            else:
                texts = self.prompts.texts(int(rows[0]), shape)
                with self.program.lock:
                    tree, why_not = self.program.tree(shape), None
                    if tree.nodes[at] is None:  # another thread may have traced it meanwhile
                        why_not = self.program.grow(tree, shape, texts, len(rows))
                if why_not is not None:
                    yield ByReference(why_not), rows
                else:
                    stack.append((at, rows))

    def _unsupported(self, node: Path | Branch) -> str | None:
        """Why the engine cannot do what a node asks for, or None."""
        refs = (node.predicate.ref,) if isinstance(node, Branch) else node.segments
        operations = [operation for ref in refs if isinstance(ref, Ref) for operation in ref.operations]
        return next((why for operation in operations if (why := self._ops.unsupported(operation))), None)

    def answer(self, predicate: Predicate) -> Array:
        """(m,) bool: the predicate's answer for every message, whichever one it is about."""
        ref = predicate.ref
        key = Predicate(Ref(0, ref.field, ref.operations), predicate.test, predicate.value)
        if key not in self._answers:
            self._answers[key] = self._ops.answer(self.column(ref.field, ref.operations), predicate)
        return self._answers[key]

    def _find_control_tokens(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(n,) bool in host memory: rows with the text of a control token in a field of text."""
        prompts, tokens = self.prompts, self.program.call.control.texts
        xp = self._ops.xp
        messages = xp.zeros(len(prompts.present), bool)
        for field in prompts.fields if tokens else ():
            if field.texts is not None:
                messages |= self._ops.contains_any(field.texts, tokens)
        counted = offsets_of(messages)
        # A message belongs to the row that it is counted from: after `take`, not every message is in a row.
        return on_host(counted[prompts.first + prompts.count] > counted[prompts.first]).copy()

    def render_rows(self, reasons: dict[int, str]) -> None:
        """Renders rows one by one: by what is known of the template's loops, or else with transformers. Their numbers
        ascend, and have reasons why they take no path."""
        if not reasons:
            return
        program, plain = self.program, True
        if self.prompts.objects is None:
            prompts = self.prompts.to_arrow(np.array(list(reasons), np.int64))
            plain, given = is_plain(prompts.type), _objects(prompts)
        else:
            given = [self.prompts.objects[row] for row in reasons]
        searched = {one.name for one in self.prompts.fields if one.texts is not None}
        whole = all(one.texts is not None and not (one.kind == OTHER).any() for one in self.prompts.fields)
        whole &= self.prompts.objects is None  # these may have further fields
        with program.call.clock_stopped():
            for (row, reason), value in zip(reasons.items(), given, strict=True):
                try:
                    if isinstance(value, Exception):
                        raise value
                    messages = row_messages(value)
                    if why_not := problem(messages) or (program.answers and program.answers.problem(messages)):
                        self.rejected[row] = why_not
                        continue
                    if not whole:
                        self._with_control[row] |= _has_control_token(messages, searched, program.call.control)
                    made = program.render_row(messages) if plain else ByReference(reason)
                    if isinstance(made, ByReference):
                        self.by_reference[row] = made.reason
                        made = self._by_reference(messages, made.reason)
                    if isinstance(made, Rejected):
                        self.rejected[row] = made.message
                        continue
                    self.texts[row] = made.text.encode()
                    if program.answers is not None:
                        self.answers[row] = made.answers
                except Exception as error:
                    self.rejected[row] = rejection(error)

    def _by_reference(self, messages: list[Any], reason: str) -> RenderedRow:
        """One conversation, rendered by transformers."""
        started = time.perf_counter()
        try:
            text = self.program.render(messages, reason)
            answers = self.program.answers
            return RenderedRow(text, [] if answers is None else answers.in_bytes(messages, text))
        finally:
            add_seconds(self.reason_seconds, {reason: time.perf_counter() - started})


def _objects(rows: pa.Array) -> list[Any]:
    """(n,) rows as Python objects; in the place of one that has none, the exception."""
    try:
        return to_python(rows)
    except Exception:  # a date after the year 9999, text that is not UTF-8, JSON that is nested too deep
        return [_object(rows.slice(row, 1)) for row in range(len(rows))]


def _object(row: pa.Array) -> Any:
    try:
        return to_python(row)[0]
    except Exception as error:
        return error


def _has_control_token(messages: Sequence[Any], searched: Collection[str], control: ControlTokens) -> bool:
    """Whether a text in some messages has the text of a control token; texts of some fields were searched before."""
    return control.found_in(
        [
            value
            for message in messages
            for name, value in message.items()
            if not (name in searched and isinstance(value, str))
        ]
    )
