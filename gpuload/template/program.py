"""The compiled form of a chat template: decision trees as plain data, which every engine can run.

There is one tree per *shape* of conversation: the roles, and which fields each message has. An inner node is a
predicate on the text of one message. A leaf lists the segments of the prompt: literal strings, and texts of messages
after some operations. A tree contains no code, so the same tree runs as Arrow operations on the CPU and as kernels on
the GPU, and can be printed:

    user
      if message 0 content starts with '/think'
        then '<user>' + [message 0 content | strip] + '<end>'
        else ...

`apply_operations`, `holds` and `render_path` define what the data means, for one row at a time. The probes use them
(`probe.py`), and the engines' columnwise versions are tested against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TEXT = "\0text"
"""Marks a field of a `Shape` whose value is free text."""

EMPTY_LIST = "\0[]"
"""Marks a field of a `Shape` whose value is an empty list."""

Answer = tuple[int, int] | tuple[int, int, int]
"""Start and end of a part with loss, and the number of its weight (`core.marks`) if that is not 1."""


class RenderedRow(NamedTuple):
    """A row's text, and start and end of each part with loss, in bytes; no parts if nobody asks."""

    text: str
    answers: list[Answer]


Shape = tuple[tuple[tuple[str, str | None], ...], ...]
"""One tuple per message: its fields in order, as (name, value) with the role, None, `TEXT` or `EMPTY_LIST` as value."""


@dataclass(frozen=True)
class Operation:
    """An operation that maps a text to a text.

    Its name is a method of `str`: `strip`, `lstrip`, `rstrip` (arguments: none for white space as Python defines it, or
    the characters), `removeprefix`, `removesuffix`, `replace` (old, new), `lower` or `upper`; or a cut at a separator:
    `before` and `after` its first occurrence, `before_last` and `after_last` its last one. A cut returns a text without
    the separator unchanged. Automata also have `slice` (start and stop, each empty or a number) and other methods.
    """

    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *map(repr, self.arguments)))


_IDEMPOTENT = ("strip", "lstrip", "rstrip")

_CUTS: dict[str, Callable[[str, str], str]] = {
    "before": lambda text, mark: text.split(mark, 1)[0],
    "after": lambda text, mark: text.split(mark, 1)[-1],
    "before_last": lambda text, mark: text.rsplit(mark, 1)[0],
    "after_last": lambda text, mark: text.rsplit(mark, 1)[-1],
}


def apply_operations(text: str, operations: Sequence[Operation]) -> str:
    """Apply `operations` to `text`, in order."""
    for operation in operations:
        cut = _CUTS.get(operation.name)
        if cut is not None:
            text = cut(text, operation.arguments[0])
        elif operation.name == "slice":
            start, stop = (int(end) if end else None for end in operation.arguments)
            text = text[start:stop]
        else:
            text = getattr(text, operation.name)(*operation.arguments)
    return text


@dataclass(frozen=True)
class Ref:
    """A reference to the text of one field of one message, after `operations`."""

    message: int  # the message's index in the conversation
    field: str = "content"  # the field's name
    operations: tuple[Operation, ...] = ()  # applied in order

    def then(self, name: str, *arguments: str) -> Ref:
        """Return a reference with one more operation."""
        operation = Operation(name, arguments)
        # Templates often trim inside a macro and again around it. The second strip has no effect.
        if self.operations and self.operations[-1] == operation and name in _IDEMPOTENT:
            return self
        return Ref(self.message, self.field, (*self.operations, operation))

    def __str__(self) -> str:
        return " | ".join((f"message {self.message} {self.field}", *map(str, self.operations)))


Segment = str | Ref
"""A part of a prompt: a literal string, or a text of the conversation."""


@dataclass(frozen=True)
class Predicate:
    """A yes-or-no test of a text."""

    ref: Ref  # the text
    test: str  # `contains`, `startswith`, `endswith`, `equals` or `empty`
    value: str = ""  # the string to test for; not used by `empty`

    def __str__(self) -> str:
        words = {"startswith": "starts with", "endswith": "ends with", "empty": "is empty"}
        return f"{self.ref} {words.get(self.test, self.test)}" + ("" if self.test == "empty" else f" {self.value!r}")


def holds(predicate: Predicate, text: str) -> bool:
    """Evaluate `predicate` for a row where the field it refers to is `text`."""
    text, value = apply_operations(text, predicate.ref.operations), predicate.value
    match predicate.test:
        case "contains":
            return value in text
        case "startswith":
            return text.startswith(value)
        case "endswith":
            return text.endswith(value)
        case "equals":
            return text == value
        case "empty":
            return not text
    raise ValueError(f"unknown test {predicate.test!r}")


@dataclass(frozen=True)
class Path:
    """A leaf: the prompt is the concatenation of `segments`."""

    segments: tuple[Segment, ...]  # its parts, in order
    # The segments [first, end) of each `{% generation %}` block, in order of their ends. Literals are cut where a block
    # begins or ends. None if the template prints a block elsewhere than where it stands.
    generated: tuple[tuple[int, int], ...] | None = ()

    def __str__(self) -> str:
        return " + ".join(repr(part) if isinstance(part, str) else f"[{part}]" for part in self.segments) or "''"


@dataclass(frozen=True)
class ByReference:
    """A leaf: rows are rendered by transformers, for this `reason`."""

    reason: str

    def __str__(self) -> str:
        return f"reference: {self.reason}"


@dataclass(frozen=True)
class Rejected:
    """A leaf: the template rejects these rows, with this message."""

    message: str

    def __str__(self) -> str:
        return f"rejected: {self.message}"


Leaf = Path | ByReference | Rejected


@dataclass(frozen=True)
class Branch:
    """An inner node: rows continue at node number `yes` or `no` of the tree, depending on `predicate`."""

    predicate: Predicate
    yes: int
    no: int


Node = Branch | Leaf | None
"""None is an open node, which no row has reached yet."""


def render_path(path: Path, messages: Sequence[Mapping[str, object]]) -> str:
    """Return the prompt that `path` gives for one conversation."""
    parts = []
    for segment in path.segments:
        if isinstance(segment, Ref):
            segment = apply_operations(str(messages[segment.message][segment.field]), segment.operations)
        parts.append(segment)
    return "".join(parts)


@dataclass
class Tree:
    """A decision tree as a flat list of nodes; node 0 is the root."""

    nodes: list[Node] = field(default_factory=lambda: [None])

    def graft(self, decisions: Sequence[tuple[Predicate, bool]], leaf: Leaf) -> bool:
        """Add a leaf, and the branches that lead to it: the predicates from the root, in order, with their answers.
        False if the tree already has a leaf there, or other predicates on this path: then the template is not
        deterministic, and the tree is unchanged."""
        at, grown = 0, list(self.nodes)
        for predicate, answer in decisions:
            node = grown[at]
            if node is None:
                node = grown[at] = Branch(predicate, len(grown), len(grown) + 1)
                grown += [None, None]
            if not isinstance(node, Branch) or node.predicate != predicate:
                return False
            at = node.yes if answer else node.no
        if grown[at] is not None:
            return False
        grown[at] = leaf
        self.nodes = grown
        return True

    def leaves(self) -> Iterator[tuple[tuple[tuple[Predicate, bool], ...], Leaf | None]]:
        """Yield every leaf and open node with the decisions that lead to it, depth first."""
        stack: list[tuple[int, tuple[tuple[Predicate, bool], ...]]] = [(0, ())]
        while stack:
            at, decisions = stack.pop()
            node = self.nodes[at]
            if isinstance(node, Branch):
                stack.append((node.no, (*decisions, (node.predicate, False))))
                stack.append((node.yes, (*decisions, (node.predicate, True))))
            else:
                yield decisions, node


def describe_shape(shape: Shape) -> str:
    """Describe a shape, for example as `system, user, assistant (no content, tool_calls)`."""
    words = []
    for message in shape:
        fields = dict(message)
        names = [name for name, value in message if value is not None and name not in ("role", "content")]
        if fields.get("content") is None:
            names.insert(0, "no content")
        words.append(f"{fields.get('role')}" + (f" ({', '.join(names)})" if names else ""))
    return ", ".join(words)


def describe_tree(tree: Tree) -> str:
    """Format a tree as indented text, one line per node."""
    lines: list[str] = []
    stack = [(0, 0, "")]
    while stack:
        at, depth, word = stack.pop()
        node, margin = tree.nodes[at], "  " * (depth + 1) + word
        if isinstance(node, Branch):
            lines.append(f"{margin}if {node.predicate}")
            stack += [(node.no, depth + 1, "else "), (node.yes, depth + 1, "then ")]
        elif node is not None:
            lines.append(f"{margin}{node}")
        else:
            lines.append(f"{margin}(not reached by any row yet)")
    return "\n".join(lines)
