"""The recorder: runs a chat template once for a real conversation, and adds what it did to an automaton.

The whole conversation is traced, in transformers' own Jinja environment as `sandbox.py` instruments it, with symbolic
lists, mappings, texts and numbers (`symbols.py`) in place of its messages. Every question is an instruction. At each
pass of a loop the trace is cut: what Python remembers of the past must be in the key of the head or in registers.

What can it remember? Jinja forgets what the body of a loop has set when the pass ends. What was set before the loop is
a function of the path to it, which is in the key through the loop's node, and of places and numbers in registers that
the loop does not set. Only namespaces outlive a pass, and what macros and `{% set %}` blocks have printed so far. So at
each cut the attributes of namespaces that are strings or truth values are part of the key; numbers, texts and places
go to registers, which are named by the loop's node, so that a value taken from a register of an outer loop is never
overwritten. Lists and mappings that the template builds go to registers as a whole.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.filters
from jinja2.compiler import CodeGenerator
from jinja2.utils import Namespace

from gpuload.template.automaton.built import evaluate
from gpuload.template.automaton.nodes import (
    DICTSORT,
    ITEMS,
    MISSING,
    Affine,
    Automaton,
    Built,
    Instruction,
    ListPart,
    Place,
    TextSource,
    Wanted,
    kind_of,
)
from gpuload.template.automaton.symbols import SymbolicList, SymbolicMapping, built_of, segments_of
from gpuload.template.automaton.values import Range, Scalar, SymbolicNumber, source_of, text_of
from gpuload.template.program import Operation, Predicate, Ref, Segment, apply_operations, holds
from gpuload.template.rope import Rope
from gpuload.template.symbol import reject


class Recorder:
    """The oracle of one trace, by which an automaton grows.

    The variables of `row` differ from row to row, and are as the template sees them; `tojson` is the filter of
    transformers.
    """

    def __init__(self, automaton: Automaton, row: Mapping[str, Any], tojson: Callable[..., Any]) -> None:
        self.automaton, self.row, self._tojson = automaton, row, tojson
        self.at_node = 0
        self.registers: dict[Any, Any] = {}
        self.namespaces: list[tuple[int, Namespace]] = []
        self.buffers: list[Buffer] = []
        self.changed: list[int] = []  # nodes that were added to
        self._known: dict[Instruction, Any] = {}  # answers since the last cut

    # -- instructions ----------------------------------------------------------------------------------------------

    def record(self, instruction: Instruction, answer: Any = None, following: int | None = None) -> None:
        """One instruction, with the row's answer; `following` if the node after it is known."""
        node = self.automaton.nodes[self.at_node]
        if node.instruction is None:
            node.instruction = instruction
            self.changed.append(self.at_node)
        elif node.instruction != instruction:
            raise NotDeterministicError(f"{node.instruction} and {instruction}")
        if answer not in node.next:
            node.next[answer] = self.automaton.new() if following is None else following
            self.changed.append(self.at_node)
        elif following is not None and node.next[answer] != following:
            raise NotDeterministicError("two heads after one node")
        self.at_node = node.next[answer]

    def _ask(self, instruction: Instruction, answer: Any) -> Any:
        if instruction not in self._known:
            self.record(instruction, answer)
            self._known[instruction] = answer
        return self._known[instruction]

    def ask(self, predicate: Predicate) -> bool:
        return bool(self._ask(("ask", predicate), holds_at(predicate, self)))

    def compare(self, operator: str, number: Affine) -> bool:
        """Whether a number is < 0, or == 0."""
        value = self.number(number)
        answer = value < 0 if operator == "<" else value == 0
        if not number.terms:
            return answer
        return bool(self._ask(("compare", operator, number), answer))

    def equal(self, one: Place, other: Place) -> bool:
        return bool(self._ask(("equal", one, other), self.value(one) == self.value(other)))

    def same(self, one: tuple[Segment, ...], other: tuple[Segment, ...]) -> bool:
        """Whether two texts are equal."""
        texts = [tuple(map(source_of, pieces)) for pieces in (one, other)]
        return bool(self._ask(("same", *texts), self._evaluated(texts[0]) == self._evaluated(texts[1])))

    def select(self, part: ListPart, wanted: Wanted) -> Place:
        """Puts elements of a list into a register, which is the place of their list."""
        register = ("select", self.at_node)
        self.record(("select", register, part, wanted))
        values = part.of(self.value(part.place), self.number(part.start), self.number(part.length))
        self.registers[register] = [each for each in values if wanted.holds(each)]
        return (register,)

    def build(self, built: Built) -> Place:
        """Puts what the template has built into a register, which is its place."""
        register = ("built", self.at_node)
        self.record(("build", register, built))
        self.registers[register] = self._evaluated(built)
        return (register,)

    def contains(self, place: Place, built: Built) -> bool:
        """Whether the list at a place has this element."""
        return bool(self._ask(("in", built, place), self._evaluated(built) in self.value(place)))

    def only_texts(self, place: Place) -> bool:
        """Whether all elements of the list at a place are texts."""
        return bool(self._ask(("texts", place), all(type(each) is str for each in self.value(place))))

    def at(self, place: Place) -> tuple[bool, Any]:
        """Whether something is at a place, and what, as a constant or a symbol."""
        kind = self._ask(("kind", place), kind_of(self.value(place)))
        match kind:
            case "missing":
                return False, None
            case "none":
                return True, None
            case "true" | "false":
                return True, kind == "true"
            case "text":
                return True, text_of(self, TextSource("at", place))
            case "int" | "float":
                return True, Scalar(self, place, kind)
            case "mapping":
                return True, SymbolicMapping(self, place)
            case "list":
                return True, SymbolicList(self, place)
        reject("reads a value that is not plain data")

    # -- values of the row -----------------------------------------------------------------------------------------

    def value(self, place: Place) -> Any:
        inside = not place or isinstance(place[0], str)
        found: Any = self.row if inside else self.registers[place[0]]
        for at in place if inside else place[1:]:
            if at in (ITEMS, DICTSORT):
                found = list(found.items()) if at == ITEMS else jinja2.filters.do_dictsort(found)
            elif isinstance(at, Affine):
                found = found[self.number(at)]
            else:
                found = found.get(at, MISSING) if isinstance(found, Mapping) else found[at]
        return found

    def number(self, number: Affine) -> int:
        return sum((count * self._atom(atom) for atom, count in number.terms), start=number.constant)

    def _atom(self, atom: Any) -> int:
        if atom[0] == "register":
            return int(self.registers[atom[1]])
        if atom[0] == "length":
            return len(self.value(atom[1]))
        if atom[0] == "characters":
            return len(self.text(atom[1], atom[2]))
        value = self.number(atom[1])
        return int(value % atom[2] if atom[0] == "mod" else value // atom[2])

    def text(self, source: str | TextSource, operations: tuple[Operation, ...] = ()) -> str:
        """A text of the row."""
        if isinstance(source, str):
            return source
        match source.kind:
            case "at":
                text = self.value(source.value)
            case "register":
                text = self.registers[source.value]
            case "number":
                text = str(self.number(source.value))
            case "str":
                text = str(self.value(source.value))
            case "join":
                text = source.arguments[0].join(map(str, self.value(source.value)))
            case _:
                positional = [each for name, each in source.arguments if name is None]
                named = {name: each for name, each in source.arguments if name is not None}
                text = str(self._tojson(self.value(source.value), *positional, **named))
        return str(apply_operations(text, operations))

    # -- loops -----------------------------------------------------------------------------------------------------

    def enter(self) -> Any:
        """Begins a loop; returns the register that counts its passes."""
        name = ("loop", self.at_node)
        self.record(("enter", name))
        self.registers[name] = -1
        return name

    def passes(self, name: Any, over: SymbolicList | Range) -> Iterator[Any]:
        """The elements of a list; each pass begins at a head."""
        counter, inside = Affine.of(("register", name)), len(self.namespaces)
        while True:
            self._cut(name, inside)
            more = self.number(counter) + 1 < self.number(over.length)
            self.record(("next", name, over.length), more)
            if not more:
                return
            self.registers[name] += 1
            yield over.element(counter)

    def _cut(self, loop: Any, inside: int) -> None:
        """Puts what is remembered into registers, and goes to the head of a pass.

        When the loop began, there were `inside` namespaces; those that a pass has made are forgotten.
        """
        del self.namespaces[inside:]
        saved: list[tuple[Any, Any]] = []
        key: list[Any] = [loop]
        for number, (made, namespace) in enumerate(self.namespaces):
            constants: list[Any] = [made]
            for name, value in attributes(namespace).items():
                register: Any = (loop, number, name)
                kept, known = self._kept(register, value, saved)
                namespace[name] = kept
                constants.append((name, known))
            key.append(tuple(constants))
        for number, buffer in enumerate(self.buffers):
            register = (loop, "buffer", number)
            if pieces := [segment for value in buffer for segment in segments_of(value)]:
                saved.append((register, tuple(map(source_of, pieces))))
                buffer[:] = [text_of(self, TextSource("register", register))]
            key.append(bool(pieces))
        values = [self._evaluated(value) for _, value in saved]
        self.registers.update(zip((register for register, _ in saved), values, strict=True))
        head = self.automaton.head(tuple(key))
        self.record(("save", tuple(saved)), None, head)
        self._known = {}

    def _kept(self, register: Any, value: Any, saved: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """What an attribute of a namespace is after a cut, and what the key knows of it."""
        if value is None or type(value) in (bool, str):
            return value, (type(value).__name__, value)
        if isinstance(value, jinja2.Undefined):
            return value, ("undefined", value._undefined_name)
        if type(value) is int:
            value = SymbolicNumber(self, Affine(value))
        if isinstance(value, SymbolicNumber):
            saved.append((register, value.affine))
            return SymbolicNumber(self, Affine.of(("register", register))), "number"
        if isinstance(value, Rope):
            saved.append((register, tuple(map(source_of, value._pieces))))
            return text_of(self, TextSource("register", register)), "text"
        in_row = isinstance(value, (SymbolicMapping, SymbolicList)) and isinstance(value.place[0], str)
        if in_row and isinstance(value, SymbolicMapping):
            return SymbolicMapping(self, self._moved(register, value.place, saved)), ("mapping", _form(value.place))
        if in_row and isinstance(value, SymbolicList) and value.whole and not value.pairs:
            return SymbolicList(self, self._moved(register, value.place, saved)), ("list", _form(value.place))
        if type(value) is list and not value:
            return value, "no list"
        if not isinstance(value, (list, dict, SymbolicMapping, SymbolicList, Scalar)):
            reject("keeps something other than plain data in a namespace")
        saved.append((register, built_of(value)))
        if isinstance(value, Scalar):
            return Scalar(self, (register,), value.kind), ("number", value.kind)
        if isinstance(value, (dict, SymbolicMapping)):
            return SymbolicMapping(self, (register,)), "built mapping"
        return SymbolicList(self, (register,)), "built list"

    def _moved(self, register: Any, place: Place, saved: list[tuple[Any, Any]]) -> Place:
        """The same place with registers of their own for its indexes."""
        moved: list[Any] = []
        for number, at in enumerate(place):
            if isinstance(at, Affine):
                saved.append(((*register, number), at))
                at = Affine.of(("register", (*register, number)))
            moved.append(at)
        return tuple(moved)

    def _evaluated(self, value: Any) -> Any:
        if isinstance(value, Affine):
            return self.number(value)
        if isinstance(value, Built):
            return evaluate(value, self.value, self.number, self.text)
        return "".join(self.text(source, operations) for source, operations in value)

    def emit(self, value: Any, loss: bool) -> None:
        """Prints a known or symbolic text; with `loss`, that of a generation block, which may be empty."""
        for number, segment in enumerate(segments_of(value) or ([""] if loss else [])):
            source, operations = source_of(segment)
            self.record(("emit", source, operations, ("more" if number else "first") if loss else ""))


class NotDeterministicError(Exception):
    """A node was reached again, and the template did something else there."""


def holds_at(predicate: Predicate, recorder: Recorder) -> bool:
    ref = predicate.ref
    text = recorder.text(ref.message, ref.operations)  # type: ignore[arg-type]
    return holds(Predicate(Ref(0, ""), predicate.test, predicate.value), text)


def _form(place: Place) -> tuple[Any, ...]:
    return tuple("number" if isinstance(at, Affine) else at for at in place)


# -- what the template is given ------------------------------------------------------------------------------------


def attributes(namespace: Namespace) -> dict[str, Any]:
    """What a namespace has. (Its own attributes are those of the template.)"""
    return dict(object.__getattribute__(namespace, "_Namespace__attrs"))


class Buffer(list[Any]):
    """What a macro or block has printed so far."""


class BufferedCode(CodeGenerator):
    """Generates code whose buffers are known to the recorder."""

    def buffer(self, frame: Any) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = gpuload_buffer()")
