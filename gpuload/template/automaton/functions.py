"""An automaton as Python functions: how conversations of any shape are rendered.

Each head is a function, and so is each node at which code would be nested too deep. A function reads the row, prints,
and returns the next function. When the automaton grows, only the functions that contain a changed node are written
again.

    def n7(row, r, out, blocks, trail):
        if r[0] + 1 < len(row['messages']):
            r[0] += 1
            v0 = row['messages'][r[0]]
            if type(v0) is dict:
                v1 = v0.get('role', MISSING)
                if type(v1) is str:
                    if v1 == 'user':
                        ...
                        out.append(f'<|im_start|>user\\n{v2}<|im_end|>\\n')
                        trail.append(41)
                        return n7
            return ('open', '')
        return n9
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.filters import do_dictsort

from gpuload.template.automaton.built import expression
from gpuload.template.automaton.nodes import (
    DICTSORT,
    ITEMS,
    MISSING,
    Affine,
    Atom,
    Automaton,
    Built,
    Place,
    TextSource,
    kind_of,
)
from gpuload.template.automaton.printed import Content, Unknown
from gpuload.template.program import Operation, Predicate

Function = Callable[[Mapping[str, Any], list[Any], list[str], list[int], list[int]], Any]

MOST_DEPTH = 12
"""Branches that are nested deeper are functions of their own: Python limits how deep code may be nested."""

Leaf = tuple[str, str]
"""How a walk ends: with the instruction "end", "raise" or "reference" and a reason, or with "open"."""


class Functions:
    """The functions of an automaton, which may grow: then `changed` must be called. `tojson` is the filter of
    transformers.

    With `blocks`, they tell which texts are in a `{% generation %}` block. With `contents`, contents of messages are
    printed as `Content`, and what else is no literal as `Unknown`.
    """

    def __init__(
        self, automaton: Automaton, tojson: Callable[..., Any], blocks: bool = False, contents: bool = False
    ) -> None:
        self._automaton, self._blocks, self._contents = automaton, blocks, contents
        self._registers: dict[Any, int] = {}
        self._constants: list[Any] = []
        self._inside: dict[int, int] = {}  # node → the function that it is in
        self._globals: dict[str, Any] = {
            "kind_of": kind_of, "MISSING": MISSING, "items": lambda value: list(value.items()), "dictsort": do_dictsort,
            "tojson": _fast(tojson), "C": self._constants, "Content": Content,
            "Unknown": Unknown,
        }  # fmt: skip
        self._inside[0] = 0
        self.changed([0])

    def changed(self, nodes: Sequence[int]) -> None:
        """Writes the functions that contain these nodes, and those that they need."""
        waiting = list(dict.fromkeys(self._inside[node] for node in nodes if node in self._inside))
        while waiting:
            number = waiting.pop()
            lines = _Lines(self, number)
            exec(compile("\n".join(lines.written), "<chat template>", "exec"), self._globals)
            waiting += [each for each in lines.needed if f"n{each}" not in self._globals]

    def walk(self, row: Mapping[str, Any]) -> tuple[list[str], list[int], list[int], Leaf]:
        """Renders one row. Returns what was printed, where blocks are in it as `blocks_of` takes it, the nodes at which
        passes of loops ended, and how the walk ended."""
        out: list[str] = []
        blocks: list[int] = []
        trail: list[int] = []
        values: list[Any] = [None] * len(self._registers)
        function = self._globals["n0"]
        while type(function) is not tuple:
            function = function(row, values, out, blocks, trail)
        return out, blocks, trail, function


class _Lines:
    """Writes one function."""

    def __init__(self, functions: Functions, number: int) -> None:
        self._of, self._first = functions, number
        self._nodes = functions._automaton.nodes
        self._heads = set(functions._automaton.heads.values())
        self.needed: list[int] = []
        self._variables: dict[Place, str] = {}  # those that have what is at a place, here
        self._variable_count = 0
        self.written = [f"def n{number}(row, r, out, blocks, trail):"]
        self._node(number, 1)

    def _line(self, depth: int, text: str) -> None:
        self.written.append("    " * depth + text)

    def _node(self, number: int, depth: int) -> None:
        """Writes a node and all that follow, up to the ends of the function."""
        printed: list[_Emitted] = []  # one after the other
        begun = len(self.written) == 1
        while True:
            if not begun and (number in self._heads or depth > MOST_DEPTH):
                self._print(depth, printed)
                self.needed.append(number)
                self._line(depth, f"return n{number}")
                return
            begun = False
            self._of._inside[number] = self._first
            node = self._nodes[number]
            name, *parts = node.instruction or ("open", "")
            if name == "emit":
                printed.append(_Emitted(*parts))
                number = node.next[None]
                continue
            self._print(depth, printed)
            printed = []
            if name in ("open", "end", "raise", "reference"):
                self._line(depth, f"return {(name, parts[0] if parts else '')!r}")
                return
            if name == "enter":
                self._line(depth, f"{self._register(parts[0])} = -1")
            elif name == "select":
                register, part, wanted = parts
                elements, test = self._value(Built("part", (part, None))), self._constant(wanted)
                self._line(depth, f"{self._register(register)} = [each for each in {elements} if {test}.holds(each)]")
            elif name == "build":
                self._line(depth, f"{self._register(parts[0])} = {self._value(parts[1])}")
            elif name == "save":
                targets = ", ".join(self._register(register) for register, _ in parts[0])
                if targets:
                    self._line(depth, f"{targets} = {', '.join(self._value(value) for _, value in parts[0])}")
                self._line(depth, f"trail.append({number})")
            else:
                last = self._branch(name, parts, node.next, depth)
                if last is None:
                    return
                number = last
                continue
            self._variables = {}  # places may contain the registers that were set
            number = node.next[None]

    def _branch(self, name: str, parts: Sequence[Any], following: Mapping[Any, int], depth: int) -> int | None:
        """Writes all answers of a branch but the last one; returns the node of that."""
        here = self._variables
        if name == "kind":
            variable = f"v{self._variable_count}"
            self._variable_count += 1
            self._line(depth, f"{variable} = {self._looked_up(parts[0])}")
            here = here | {parts[0]: variable}
            for answer, number in following.items():
                self._line(depth, f"if {_IS_KIND[answer].format(variable)}:")
                self._variables = here
                self._node(number, depth + 1)
        else:
            self._line(depth, f"if {self._condition(name, parts)}:")
            if name == "next":
                self._line(depth + 1, f"{self._register(parts[0])} += 1")
                self._variables = {}
            if True in following:
                self._node(following[True], depth + 1)
            else:
                self._line(depth + 1, "return ('open', '')")
            self._variables = here
            if False in following:
                return following[False]
        self._line(depth, "return ('open', '')")
        return None

    def _condition(self, name: str, parts: Sequence[Any]) -> str:
        if name == "next":
            return f"{self._register(parts[0])} + 1 < {self._number(parts[1])}"
        if name == "ask":
            return self._predicate(parts[0])
        if name == "same":
            return f"{self._value(parts[0])} == {self._value(parts[1])}"
        if name == "equal":
            return f"{self._place(parts[0])} == {self._place(parts[1])}"
        if name == "in":
            return f"{self._value(parts[0])} in {self._place(parts[1])}"
        if name == "texts":
            return f"all(type(each) is str for each in {self._place(parts[0])})"
        return f"{self._number(parts[1])} {parts[0]} 0"

    def _register(self, name: Any) -> str:
        registers = self._of._registers
        return f"r[{registers.setdefault(name, len(registers))}]"

    def _constant(self, value: Any) -> str:
        self._of._constants.append(value)
        return f"C[{len(self._of._constants) - 1}]"

    def _looked_up(self, place: Place) -> str:
        """The expression for what is at a place, or `MISSING`."""
        *before, last = place
        inside = self._place(tuple(before))
        return f"{inside}.get({last!r}, MISSING)" if isinstance(last, str) else f"{inside}[{self._step(last)}]"

    def _step(self, at: Any) -> str:
        return self._number(at) if isinstance(at, Affine) else repr(at)

    def _place(self, place: Place) -> str:
        for known in range(len(place), 0, -1):
            if (variable := self._variables.get(place[:known])) is not None:
                text, rest = variable, place[known:]
                break
        else:
            named = not place or isinstance(place[0], str)
            text, rest = ("row", place) if named else (self._register(place[0]), place[1:])
        for at in rest:
            text = f"{at[0]}({text})" if at in (ITEMS, DICTSORT) else f"{text}[{self._step(at)}]"
        return text

    def _number(self, number: Affine) -> str:
        parts = [str(number.constant)] if number.constant or not number.terms else []
        parts += [self._atom(atom) if count == 1 else f"{count} * {self._atom(atom)}" for atom, count in number.terms]
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"

    def _atom(self, atom: Atom) -> str:
        if atom[0] == "register":
            return self._register(atom[1])
        if atom[0] == "length":
            return f"len({self._place(atom[1])})"
        if atom[0] == "characters":
            return f"len({self._text(atom[1], atom[2])})"
        return f"({self._number(atom[1])} {'%' if atom[0] == 'mod' else '//'} {atom[2]})"

    def _text(self, source: str | TextSource, operations: Sequence[Operation] = ()) -> str:
        if isinstance(source, str):
            return repr(source)
        if source.kind == "register":
            text = self._register(source.value)
        elif source.kind == "number":
            text = f"str({self._number(source.value)})"
        else:
            text = self._place(source.value)
            if source.kind == "str":
                text = f"str({text})"
            elif source.kind == "join":
                text = f"{source.arguments[0]!r}.join(map(str, {text}))"
            elif source.kind == "json":
                given = [
                    self._constant(each) if name is None else f"{name}={each!r}" for name, each in source.arguments
                ]
                text = f"tojson({', '.join([text, *given])})"
        for operation in operations:
            text = _operated(text, operation)
        return text

    def _predicate(self, predicate: Predicate) -> str:
        text = self._text(predicate.ref.message, predicate.ref.operations)  # type: ignore[arg-type]
        if predicate.test == "contains":
            return f"{predicate.value!r} in {text}"
        if predicate.test in ("startswith", "endswith"):
            return f"{text}.{predicate.test}({predicate.value!r})"
        return f"not {text}" if predicate.test == "empty" else f"{text} == {predicate.value!r}"

    def _value(self, value: Any) -> str:
        """What a register is set to: a number, or a text of several segments."""
        if isinstance(value, Affine):
            return self._number(value)
        if isinstance(value, Built):
            return expression(value, self._place, self._number, self._text, self._constant)
        return self._joined([_Emitted(source, operations, "") for source, operations in value])

    def _print(self, depth: int, printed: Sequence[_Emitted]) -> None:
        """Prints texts one after the other."""
        groups: list[list[_Emitted]] = []
        for each in printed:
            if not groups or not self._may_be_one(groups[-1][-1], each):
                groups.append([])
            groups[-1].append(each)
        for group in groups:
            text = self._joined(group)
            if self._of._contents and not isinstance(group[0].source, str):
                text = _with_source(group[0].source, text, self._number)
            if self._of._blocks and group[0].loss:
                self._line(depth, f"blocks.append({'' if group[0].loss == 'first' else '~'}len(out))")
            self._line(depth, f"out.append({text})")

    def _may_be_one(self, before: _Emitted, text: _Emitted) -> bool:
        """Whether it does not matter that these are two texts."""
        if self._of._contents:
            return isinstance(before.source, str) and isinstance(text.source, str)
        return not self._of._blocks or text.loss == ("more" if before.loss else "")

    def _joined(self, group: Sequence[_Emitted]) -> str:
        """The expression for several texts, joined: an f-string if Python 3.11 allows its expressions there."""
        texts: list[tuple[str, bool]] = []  # literals, and the expressions for other texts
        for literal, some in itertools.groupby(group, lambda each: isinstance(each.source, str)):
            if literal:
                texts.append(("".join(each.source for each in some), True))
            else:
                texts += [(self._text(each.source, each.operations), False) for each in some]
        if len(texts) < 2:
            return next((repr(text) if literal else text for text, literal in texts), "''")
        if any(set(text) & set("'\"\\{}") for text, literal in texts if not literal):
            return f"''.join(({', '.join(repr(text) if literal else text for text, literal in texts)}))"
        return f"f'{''.join(_in_f_string(text) if literal else f'{{{text}}}' for text, literal in texts)}'"


class _Emitted(NamedTuple):
    """What an instruction "emit" prints."""

    source: Any
    operations: Sequence[Operation]
    loss: str


def _in_f_string(literal: str) -> str:
    """A literal as it is written in f'...'."""
    text = repr(literal + '"')[1:-2]  # with a double quote in it, Python puts it in single quotes
    return text.replace("{", "{{").replace("}", "}}")


def _with_source(source: TextSource, text: str, number: Callable[[Affine], str]) -> str:
    """The expression for a text that is printed, with where it comes from."""
    match source.kind, source.value:
        case "at", ("messages", Affine() as message, "role" | "content" as name):
            return text if name == "role" else f"Content({text}, {number(message)})"
    return f"Unknown({text})"


_IS_KIND = {
    "mapping": "type({}) is dict", "list": "type({}) is list", "text": "type({}) is str", "int": "type({}) is int",
    "float": "type({}) is float", "none": "{} is None", "true": "{} is True", "false": "{} is False",
    "missing": "{} is MISSING", "other": "kind_of({}) == 'other'",
}  # fmt: skip
"""The expression for whether a value is what `kind_of` says, mostly without a call of Python."""


def _operated(text: str, operation: Operation) -> str:
    name, arguments = operation.name, ", ".join(map(repr, operation.arguments))
    if name in ("before", "after", "before_last", "after_last"):
        which = "rsplit" if name.endswith("_last") else "split"
        return f"{text}.{which}({arguments}, 1)[{0 if name.startswith('before') else -1}]"
    return f"{text}[{':'.join(operation.arguments)}]" if name == "slice" else f"{text}.{name}({arguments})"


def _fast(tojson: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' filter, which makes an encoder for each call, with one for all calls without arguments; the same
    function if it does something else for these examples."""
    examples: list[Any] = ["\u20ac <&'\"\\\u2028\x00\ud800", [None, True, [], 10**30]]
    examples.append({"b": [1, 2.5, -0.0, 1e22, float("inf")], "a": {}})
    try:
        make, write_text = (vars(json.encoder)[name] for name in ("c_make_encoder", "encode_basestring"))
        encode = make(None, None, write_text, None, ": ", ", ", False, False, True)  # as `json.dumps` makes it
        same = all("".join(encode(each, 0)) == tojson(each) for each in examples)
    except Exception:
        same = False

    def encoded(value: Any, *args: Any, **kwargs: Any) -> Any:
        return tojson(value, *args, **kwargs) if args or kwargs else "".join(encode(value, 0))

    return encoded if same else tojson
