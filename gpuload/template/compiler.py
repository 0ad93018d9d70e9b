"""`ChatProgram`: a compiled chat template, which grows while rows are rendered.

A template cannot be compiled completely in advance: one `if` per message of a long conversation makes 2^n paths. So
a program starts with no trees. The engine sends rows down the tree of their shape, and where rows arrive at a node that
no earlier row has reached, it calls `grow`, which traces the path of one of these rows and adds it to the tree.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuload.reference.template_call import TemplateCall
from gpuload.template.known import KnownTemplates, identity
from gpuload.template.probe import FAILED
from gpuload.template.program import (
    TEXT,
    ByReference,
    Rejected,
    RenderedRow,
    Shape,
    Tree,
    describe_shape,
    describe_tree,
)
from gpuload.template.symbol import NotCompilableError
from gpuload.template.trace import Texts, Tracer

if TYPE_CHECKING:
    from gpuload.template.answers import Answers
    from gpuload.template.automaton.rows import RowRenderer

FREE_LEAVES = 32
MOST_LEAVES = 4096
FEWEST_ROWS = 16
FEW_ROWS = f"fewer than {FEWEST_ROWS} rows take this path through the template"
"""Limits of tracing. One trace with its probes costs about as much as rendering ten rows with transformers. So the
first `FREE_LEAVES` paths are traced for any number of rows, further paths only for at least `FEWEST_ROWS` rows, and no
path after `MOST_LEAVES`. Rows without a path are rendered one by one, see `automaton/`."""

MOST_KNOWN = 8
"""So many programs are kept for later loads. Rows as served need up to four of each template."""


class ChatProgram:
    """A compiled chat template. Made by `compile`."""

    def __init__(self, call: TemplateCall, answers: Answers | None = None) -> None:
        self.call = call
        self.answers = answers  # finds the parts of a conversation that have loss; None if nobody asks
        self.trees: dict[Shape, Tree] = {}  # of each shape seen so far
        self.not_compilable: str | None = None  # why nothing of this template can be compiled
        self.leaves = 0  # number of paths traced so far
        self.lock = threading.Lock()  # must be held while trees are grown. They may be walked without it
        self._tracer: Tracer | None = None
        self._checked: set[str] = set()  # reasons for which transformers has rendered a row
        self._rows: dict[bool, RowRenderer | ByReference] = {}  # by whether rows have tools of their own
        try:
            with call.clock_stopped():
                self._tracer = Tracer(call)
        except NotCompilableError as error:
            self.not_compilable = str(error)

    def tree(self, shape: Shape) -> Tree:
        """Return the tree of one shape; an empty tree if no path of this shape has been traced."""
        if self.not_compilable:
            return Tree([ByReference(self.not_compilable)])
        return self.trees.get(shape) or Tree()

    def grow(self, tree: Tree, shape: Shape, texts: Texts, rows: int) -> str | None:
        """Trace the path of one conversation and add it to the tree of its shape. The caller holds `lock`. Return None,
        or why all rows that have arrived at the same open node of the tree have to be rendered by transformers."""
        if self.leaves >= MOST_LEAVES:
            return f"more than {MOST_LEAVES} paths through the template"
        if self.leaves >= FREE_LEAVES and rows < FEWEST_ROWS:
            return FEW_ROWS
        assert self._tracer is not None  # there are no open nodes without it
        with self.call.clock_stopped():
            decisions, leaf = self._tracer.trace(shape, texts)
        if not tree.graft(decisions, leaf):
            return "the template is not deterministic"
        self.leaves += 1
        self.trees[shape] = tree
        if isinstance(leaf, ByReference) and leaf.reason.startswith(FAILED):
            # Whatever is wrong with the trace would be wrong with those of single rows.
            self._rows = dict.fromkeys((False, True), leaf)
        return None

    @property
    def takes_any_shape(self) -> bool:
        """Whether single rows are rendered without transformers, whatever their shapes."""
        rows = self.renderer(False)
        return not isinstance(rows, ByReference) and not rows.wrong

    def renderer(self, own_tools: bool) -> RowRenderer | ByReference:
        """What renders single rows, with tools of their own or without; or why nothing does."""
        if own_tools not in self._rows:
            from gpuload.template.automaton.rows import row_renderer  # few loads of prompts need it

            with self.lock, self.call.clock_stopped():
                try:
                    self._rows[own_tools] = row_renderer(self.call, self.answers, own_tools)
                except NotCompilableError as error:
                    self._rows[own_tools] = ByReference(str(error))
        return self._rows[own_tools]

    def render_row(
        self, messages: Sequence[Any], tools: list[dict[str, Any]] | None = None
    ) -> RenderedRow | Rejected | ByReference:
        """Render one conversation whatever its shape, without transformers if that is possible. Messages are plain
        data, as `json.loads` returns it, and so are tools of its own. Return its text with the parts that have loss; or
        why the template rejects it, or transformers must render it."""
        rows = self.renderer(tools is not None)
        return rows if isinstance(rows, ByReference) else rows.render(messages, tools)

    def render(self, messages: Sequence[Any], reason: str) -> str:
        """Render one conversation with transformers, which for some `reason` the compiled template does not.

        transformers executes templates without limits. A call that takes too long is ended, but not within one
        operation on strings, so for every reason the template is executed with limits first, until one row passes.
        Messages are `marked` if control tokens are sanitized. An `EndlessError` if the template exceeds a limit, or
        whatever transformers or the template raises.
        """
        if self._tracer is not None and reason not in self._checked:
            with self.lock:
                self._tracer.check(messages)
            self._checked.add(reason)
        return self.call.render(messages)

    def explore(self, shape: Shape, most: int = 32) -> Tree:
        """Trace a shape without rows, `most` paths at most: follow both answers of every predicate for which a text is
        found."""
        tree = self.tree(shape)
        if self._tracer is None:
            return tree
        plain = {(k, name): f"text {k}" for k, fields in enumerate(shape) for name, value in fields if value == TEXT}
        unreachable = set()
        for _ in range(most):
            decisions = next((path for path, leaf in tree.leaves() if leaf is None and path not in unreachable), None)
            if decisions is None:
                break
            texts = self._tracer.prober.example(plain, decisions)
            if texts is None or self.grow(tree, shape, texts, FEWEST_ROWS) is not None:
                unreachable.add(decisions)
        return tree

    def describe(self) -> str:
        """Return the program as text: every shape seen so far, with its tree."""
        if self.not_compilable:
            return f"not compiled: {self.not_compilable}"
        return "\n\n".join(f"{describe_shape(shape)}\n{describe_tree(tree)}" for shape, tree in self.trees.items())

    __str__ = describe


_known = KnownTemplates(MOST_KNOWN)


def known_program(call: TemplateCall) -> ChatProgram:
    """As `ChatProgram`, without answers; what earlier loads of this process have traced is used."""
    key = identity(call)
    if key is None or call.not_compilable_reason():
        return ChatProgram(call)
    known = _known.get(key)
    # The tokenizer with which it traces and probes may have been changed since.
    if known is None or len(known.trees) > MOST_LEAVES or identity(known.call) != key:
        known = ChatProgram(call)
        _known.keep(key, known)
    program = copy.copy(known)
    program.call, program.leaves, program._rows = call, 0, {}
    return program
