"""A chat template, compiled: plain data that any engine can run.

A compiled template is a decision tree per *shape* of conversation (its roles, and which fields each message has). An
inner node asks one question about the text of one message; a leaf says what the prompt is made of: literal text and
pieces of the messages. There is no code in it, so the same tree runs as Arrow columns on a CPU and as kernels on a GPU,
and prints.

    shape: user
      if message 0 content starts with '/think'
      then "<user>" + message 0 content strip + "<end>"
      else ...

`apply_operations`, `holds` and `render_path` are the definition of what the data means, one row at a time. They are
what probes run (see `probe.py`), and what the engines' columns are tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "EMPTY_LIST",
    "TEXT",
    "Branch",
    "ByReference",
    "Leaf",
    "Node",
    "Operation",
    "Path",
    "Predicate",
    "Ref",
    "Rejected",
    "Segment",
    "Shape",
    "Tree",
    "apply_operations",
    "describe_shape",
    "describe_tree",
    "holds",
    "render_path",
]  # fmt: skip

TEXT = "\0text"
"""Marks a field of a `Shape` whose value is free text."""

EMPTY_LIST = "\0[]"
"""Marks a field of a `Shape` whose value is an empty list."""

Shape = tuple[tuple[tuple[str, str | None], ...], ...]
"""One tuple per message: its fields in their order, each with its value (a role), None, `TEXT` or `EMPTY_LIST`."""


@dataclass(frozen=True)
class Operation:
    """One step from a text to a text: a `str` method, or a cut at a literal.

    `name` is `strip`, `lstrip`, `rstrip` (arguments: none for Python's white space, or the characters), `removeprefix`,
    `removesuffix`, `replace` (old, new), `lower`, `upper`, or a cut at a separator, which leaves a text without that
    separator as it is: `before` (up to its first occurrence), `after` (from behind the first), `before_last`,
    `after_last`.
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
    """What `operations`, in order, make of `text`."""
    for operation in operations:
        cut = _CUTS.get(operation.name)
        if cut is not None:
            text = cut(text, operation.arguments[0])
        else:
            text = getattr(text, operation.name)(*operation.arguments)
    return text


@dataclass(frozen=True)
class Ref:
    """The text of one field of message number `message`, after `operations`."""

    message: int
    field: str = "content"
    operations: tuple[Operation, ...] = ()

    def then(self, name: str, *arguments: str) -> Ref:
        """This text after one more operation."""
        operation = Operation(name, arguments)
        # Stripping twice is stripping once: templates trim in a macro and again around it.
        if self.operations and self.operations[-1] == operation and name in _IDEMPOTENT:
            return self
        return Ref(self.message, self.field, (*self.operations, operation))

    def __str__(self) -> str:
        return " | ".join((f"message {self.message} {self.field}", *map(str, self.operations)))


Segment = str | Ref
"""A piece of a prompt: literal text, or a text of the conversation."""


@dataclass(frozen=True)
class Predicate:
    """A question about a text: `test` is `contains`, `startswith`, `endswith`, `equals` (with `value`) or `empty`."""

    ref: Ref
    test: str
    value: str = ""

    def __str__(self) -> str:
        words = {"startswith": "starts with", "endswith": "ends with", "empty": "is empty"}
        return f"{self.ref} {words.get(self.test, self.test)}" + ("" if self.test == "empty" else f" {self.value!r}")


def holds(predicate: Predicate, text: str) -> bool:
    """The answer to `predicate` where the field it asks about is `text`."""
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
    """Rows here are these segments, one after the other."""

    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return " + ".join(repr(part) if isinstance(part, str) else f"[{part}]" for part in self.segments) or "''"


@dataclass(frozen=True)
class ByReference:
    """Rows here are rendered by the reference, because of `reason`."""

    reason: str

    def __str__(self) -> str:
        return f"reference: {self.reason}"


@dataclass(frozen=True)
class Rejected:
    """Rows here are rejected by the template itself, with this message."""

    message: str

    def __str__(self) -> str:
        return f"rejected: {self.message}"


Leaf = Path | ByReference | Rejected


@dataclass(frozen=True)
class Branch:
    """Rows go on to node `yes` or node `no` of their tree by `predicate`."""

    predicate: Predicate
    yes: int
    no: int


Node = Branch | Leaf | None
"""None is a place that no row has reached yet."""


def render_path(path: Path, messages: Sequence[Mapping[str, object]]) -> str:
    """The prompt that `path` makes of one conversation."""
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
        """Put `leaf` where `decisions` lead.

        Returns:
            False, and nothing changes, where the tree already asks other questions on that way: the template did not do
            the same thing twice.
        """
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
        """Every leaf with the decisions that lead to it, depth first."""
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
    """A shape in words: `system, user, assistant (content, reasoning_content)`."""
    words = []
    for message in shape:
        fields = dict(message)
        names = [name for name, value in message if value is not None and name not in ("role", "content")]
        if fields.get("content") is None:
            names.insert(0, "no content")
        words.append(f"{fields.get('role')}" + (f" ({', '.join(names)})" if names else ""))
    return ", ".join(words)


def describe_tree(tree: Tree, indent: str = "  ") -> str:
    """A tree as indented text, one line a node."""
    lines: list[str] = []
    stack = [(0, 0, "")]
    while stack:
        at, depth, word = stack.pop()
        node, margin = tree.nodes[at], indent * (depth + 1) + word
        if isinstance(node, Branch):
            lines.append(f"{margin}if {node.predicate}")
            stack += [(node.no, depth + 1, "else "), (node.yes, depth + 1, "then ")]
        elif node is not None:
            lines.append(f"{margin}{node}")
        else:
            lines.append(f"{margin}(no row has come here yet)")
    return "\n".join(lines)
