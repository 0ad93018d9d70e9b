"""The automaton of a chat template: what it does to a conversation of any shape, as plain data, and as a function.

A decision tree (`program.py`) is for one shape of conversation. Conversations with tools have nearly as many shapes as
rows. But templates handle one message after the other, so the pass of a loop for the tenth message is usually a pass
that was seen before. The automaton has one node for each thing that the template asks or prints, and the passes of a
loop share nodes: at the head of each pass, all that the template can remember of the past is in *registers* and in a
few constants, and passes that begin with the same constants begin at the same node.

A node has one instruction, a tuple that begins with its name:

    ("kind", place)                    what is at a place, one of `kind_of`; the answer decides where the walk goes on
    ("ask", predicate)                 a predicate of a text (`program.Predicate`)
    ("compare", operator, number)      whether a number is < 0, or == 0
    ("equal", place, place)            whether two values are equal
    ("same", segments, segments)       whether two texts are equal
    ("in", built, place)               whether a list has an element
    ("texts", place)                   whether all elements of a list are texts
    ("emit", source, operations, loss) prints a literal, or a text after some operations; `loss` is "first" for the
                                       first text of a generation block, and "more" for the others
    ("enter", loop)                    sets the counter of a loop to -1
    ("next", loop, number)             the counter plus one, if that is below the number: otherwise the loop ends
    ("select", register, part, wanted) puts the elements of a part of a list that have what is wanted into a register
    ("build", register, built)         puts what the template has built of values of the row into a register
    ("save", ((register, value), …))   sets registers, all at once, and goes to the head of a pass
    ("end",)                           the text is complete
    ("raise", reason)                  the template rejects the row
    ("reference", reason)              transformers must render the row

A *place* is where a value is: ("messages", index, "content"), with numbers as indexes; it may begin with a register. A
*number* is an `Affine`, a sum of multiples of registers and lengths. A *source* of text is a str, or a `TextSource`.

`functions.py` writes the automaton as Python functions, which is how rows are rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Atom = tuple[Any, ...]
"""What a number is made of: ("register", name), ("length", place), ("characters", source, operations) for the length of
a text, ("mod", Affine, n) or ("div", Affine, n)."""

ITEMS = ("items",)
"""A step of a place: the keys and values of a mapping, as a list of pairs."""

DICTSORT = ("dictsort",)
"""The same in the order of the filter `dictsort`."""

Place = tuple[Any, ...]
Instruction = tuple[Any, ...]


@dataclass(frozen=True)
class Affine:
    """A number that is known up to registers and lengths: `constant` plus the sum of coefficient × atom."""

    constant: int
    terms: tuple[tuple[Atom, int], ...] = ()

    @classmethod
    def of(cls, atom: Atom) -> Affine:
        return cls(0, ((atom, 1),))

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """This number plus a multiple of another."""
        terms = dict(self.terms)
        for atom, count in other.terms:
            terms[atom] = terms.get(atom, 0) + times * count
        kept = sorted(((atom, count) for atom, count in terms.items() if count), key=repr)
        return Affine(self.constant + times * other.constant, tuple(kept))


@dataclass(frozen=True)
class TextSource:
    """Where a text comes from: "at", a place; "register"; "json", `tojson` of what is at a place; "str", what printing
    it gives; "number", an `Affine`; "join", the elements of what is at a place, printed one after the other."""

    kind: str
    value: Any  # the place, the register's name or the number
    # Of "join", what is between two elements. Of `tojson`, pairs of name and value; positional ones have no name: None.
    arguments: tuple[Any, ...] = ()


@dataclass
class Node:
    """One instruction, and where the walk goes on by its answer. `instruction` is None where no row has been."""

    instruction: Instruction | None = None
    next: dict[Any, int] = field(default_factory=dict)


class Automaton:
    """Nodes, of which number 0 is the start; `heads` are those at which passes of loops begin."""

    def __init__(self) -> None:
        self.nodes = [Node()]
        self.heads: dict[Any, int] = {}

    def new(self) -> int:
        self.nodes.append(Node())
        return len(self.nodes) - 1

    def head(self, key: Any) -> int:
        """The node at which passes begin that know `key` of the past."""
        if key not in self.heads:
            self.heads[key] = self.new()
        return self.heads[key]


MISSING = object()
"""What is where nothing is."""

KINDS = {dict: "mapping", list: "list", str: "text", int: "int", float: "float", type(None): "none"}


def kind_of(value: Any) -> str:
    """What a value of a conversation is, in one word; "other" if it is not plain data."""
    if (kind := KINDS.get(type(value))) is not None:
        return kind
    if value is True or value is False:
        return "true" if value else "false"
    return "missing" if value is MISSING else "other"


@dataclass(frozen=True)
class ListPart:
    """Some elements of the list at a place: those at start, start + step, …, as many as `length` says."""

    place: Place
    length: Affine
    start: Affine = Affine(0)
    step: int = 1

    def of(self, values: Sequence[Any], start: int, length: int) -> list[Any]:
        """These elements of a list."""
        return [values[start + self.step * k] for k in range(length)]


@dataclass(frozen=True)
class Built:
    """Plain data that a template builds, which a register can have. Its kinds, with their parts:

    "at", a place; "text", segments, joined; "number", an `Affine`; "constant", the `repr` of None, False or True;
    "part", a `ListPart`, and an index if only what its elements have there is wanted; "list"; "mapping", pairs of a str
    and a value; "sum", two lists one after the other; "slice", of a text, and its start, stop and step; "method", the
    name of a method of str, the text, and the `repr` of each argument. What they consist of is `Built`, too.
    """

    kind: str
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Wanted:
    """What `selectattr` and `rejectattr` ask of each element."""

    key: str  # of the element
    test: str  # "equal" to `value`, "in" `value`, "defined", "undefined", or "true" as Python understands it
    value: Any = None
    negated: bool = False  # whether those are wanted of which it is not so

    def holds(self, element: Any) -> bool:
        found = element.get(self.key, MISSING) if type(element) is dict else MISSING
        match self.test:
            case "equal":
                answer = found is not MISSING and found == self.value
            case "in":
                answer = found is not MISSING and found in self.value
            case "defined":
                answer = found is not MISSING
            case "undefined":
                answer = found is MISSING
            case _:
                answer = found is not MISSING and bool(found)
        return answer is not self.negated
