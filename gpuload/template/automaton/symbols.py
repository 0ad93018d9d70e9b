"""Symbolic conversations: what a template is given so that everything it does can be recorded (`recorder.py`).

In place of the list of messages the template gets a `SymbolicList`, in place of a message a `SymbolicMapping`, in place
of a text a `Text`, in place of a number that differs from row to row a `Number`. They know their *place* in the
conversation (`nodes.py`), and ask the recorder what is there, which answers for one real row and writes the question
down. Whatever is not defined here raises `NotCompilableError`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from gpuload.template.automaton.nodes import ITEMS, Affine, Part, Place, Source, Wanted
from gpuload.template.program import Operation, Ref, Segment
from gpuload.template.rope import Rope
from gpuload.template.symbol import Symbol, reject

if TYPE_CHECKING:
    from gpuload.template.automaton.recorder import Recorder


class Value(Symbol):
    """A symbolic value that is not a text.

    Attributes:
        recorder: writes down what is asked.
    """

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._oracle = recorder

    def __len__(self) -> NoReturn:
        reject("takes the length of a list of a conversation in a way that cannot be traced")

    def __bool__(self) -> bool:
        reject("tests a value of a conversation in a way that cannot be traced")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        reject(f"uses the attribute {name} of a value of a conversation")


class Text(Rope):
    """A text, of which slices can be taken."""

    __slots__ = ()

    def _make(self, pieces: Any) -> Text:
        return Text(self._oracle, pieces)

    def __getitem__(self, key: object) -> Text:
        if not isinstance(key, slice) or key.step is not None or len(self._pieces) != 1:
            reject("indexes into a message's text, or slices joined texts")
        ends = (key.start, key.stop)
        if not all(end is None or type(end) is int for end in ends):
            reject("slices a message's text at a place that differs from row to row")
        piece = self._pieces[0]
        if isinstance(piece, str):
            return self._make((piece[key],))
        operation = Operation("slice", tuple("" if end is None else str(end) for end in ends))
        return self._make((Ref(piece.message, piece.field, (*piece.operations, operation)),))

    def capitalize(self) -> Text:
        if len(self._pieces) > 1:
            reject("calls capitalize on joined texts")
        return self._make(p.capitalize() if isinstance(p, str) else p.then("capitalize") for p in self._pieces)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rope) and self._pieces != other._pieces:
            return self._oracle.same(self._pieces, other._pieces)  # type: ignore[attr-defined, no-any-return]
        return super().__eq__(other)

    __hash__ = Symbol.__hash__

    def characters(self) -> Number:
        """How many characters it has."""
        affine = Affine(0)
        for piece in self._pieces:
            one = (
                Affine(len(piece))
                if isinstance(piece, str)
                else Affine.of(("characters", piece.message, piece.operations))
            )
            affine = affine.plus(one)
        return Number(self._oracle, affine)  # type: ignore[arg-type]


def text_of(recorder: Recorder, source: Source) -> Text:
    """A text by where it comes from."""
    return Text(recorder, (Ref(source, ""),))  # type: ignore[arg-type]


ZERO = Affine(0)


class Printable(Value):
    """A symbolic value that can be printed."""

    __slots__ = ()

    @abstractmethod
    def text(self) -> Rope:
        """What printing it gives."""


class Number(Printable):
    """A number that differs from row to row."""

    __slots__ = ("affine",)

    def __init__(self, recorder: Recorder, affine: Affine) -> None:
        super().__init__(recorder)
        self.affine = affine

    def text(self) -> Text:
        return text_of(self.recorder, Source("number", self.affine))

    def __add__(self, other: object) -> Number:
        return Number(self.recorder, self.affine.plus(_affine(other)))

    __radd__ = __add__

    def __sub__(self, other: object) -> Number:
        return Number(self.recorder, self.affine.plus(_affine(other), -1))

    def __rsub__(self, other: object) -> Number:
        return Number(self.recorder, _affine(other).plus(self.affine, -1))

    def __mul__(self, other: object) -> Any:
        if type(other) is not int:
            reject("multiplies two numbers that differ from row to row")
        return Number(self.recorder, Affine(0).plus(self.affine, other))

    __rmul__ = __mul__

    def __mod__(self, other: object) -> Number:
        return self._divided("mod", other)

    def __floordiv__(self, other: object) -> Number:
        return self._divided("div", other)

    def _divided(self, name: str, other: object) -> Number:
        if type(other) is not int or other <= 0:
            reject("divides by something other than a positive number")
        return Number(self.recorder, Affine.of((name, self.affine, other)))

    def __bool__(self) -> bool:
        return self != 0

    def __eq__(self, other: object) -> bool:
        if type(other) not in (int, bool) and not isinstance(other, Number):
            return False
        return self.recorder.compare("==", self.affine.plus(_affine(other), -1))

    __hash__ = Symbol.__hash__

    def __lt__(self, other: object) -> bool:
        return self.recorder.compare("<", self.affine.plus(_affine(other), -1))

    def __ge__(self, other: object) -> bool:
        return not self < other

    def __gt__(self, other: object) -> bool:
        return self.recorder.compare("<", _affine(other).plus(self.affine, -1))

    def __le__(self, other: object) -> bool:
        return not self > other


def _affine(value: object) -> Affine:
    if isinstance(value, Number):
        return value.affine
    if type(value) not in (int, bool):
        reject("calculates with a number that differs from row to row and another value")
    return Affine(int(value))  # type: ignore[call-overload]


class Scalar(Printable):
    """A number in the data, which can be printed."""

    __slots__ = ("kind", "place")

    def __init__(self, recorder: Recorder, place: Place, kind: str) -> None:
        super().__init__(recorder)
        self.place, self.kind = place, kind

    def text(self) -> Text:
        return text_of(self.recorder, Source("str", self.place))

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, str):
            return False
        reject("compares a number of a conversation")

    __hash__ = Symbol.__hash__


class Safe(Printable):
    """A text after the filter `safe`: it can only be printed."""

    __slots__ = ("_text",)

    def __init__(self, recorder: Recorder, text: Rope) -> None:
        super().__init__(recorder)
        self._text = text

    def text(self) -> Rope:
        return self._text


class Range(Value):
    """`range` with numbers that differ from row to row: start, start + step, …, as many as `length` says."""

    __slots__ = ("length", "start", "step")

    def __init__(self, recorder: Recorder, start: Affine, stop: Affine, step: int) -> None:
        super().__init__(recorder)
        if step not in (1, -1):
            reject("calls range with a step other than 1 and -1")
        size = Affine(0).plus(stop, step).plus(start, -step)
        self.length = Affine(0) if recorder.compare("<", size) else size
        self.start, self.step = start, step

    def element(self, index: Affine) -> Number:
        return Number(self.recorder, self.start.plus(index, self.step))


class SymbolicMapping(Printable):
    """A mapping, such as a message."""

    __slots__ = ("place",)

    def __init__(self, recorder: Recorder, place: Place) -> None:
        super().__init__(recorder)
        self.place = place

    def text(self) -> Text:
        return text_of(self.recorder, Source("str", self.place))

    def __bool__(self) -> bool:
        return bool(self.length)

    @property
    def length(self) -> Number:
        return Number(self.recorder, Affine.of(("length", self.place)))

    def find(self, key: str) -> Any:
        """What is there, or None twice: (whether it is there, the value)."""
        return self.recorder.at((*self.place, key))

    def __contains__(self, key: object) -> bool:
        if type(key) is not str:
            reject("looks for something other than a plain string in a mapping")
        return bool(self.find(key)[0])

    def get(self, key: object, default: object = None) -> Any:
        if type(key) is not str:
            reject("looks for something other than a plain string in a mapping")
        there, value = self.find(key)
        return value if there else default

    def keys(self) -> SymbolicList:
        return SymbolicList(self.recorder, (*self.place, ITEMS), Affine.of(("length", self.place)), part=0)

    def items(self, how: Any = ITEMS) -> SymbolicList:
        """Its keys and values, as they are or in the order of `dictsort`."""
        place = (*self.place, how)
        return SymbolicList(self.recorder, place, Affine.of(("length", self.place)), pairs=True)

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, (str, bool, int)):
            return False
        if not isinstance(other, SymbolicMapping):
            reject("compares a message or another mapping with another value")
        return self.recorder.equal(self.place, other.place)

    __hash__ = Symbol.__hash__


class SymbolicList(Printable):
    """A list, or a part of one: the elements at start, start + step, … of the list at a place.

    Args:
        place: of the list.
        length: how many elements this part has.
        start, step: where it begins in the list, and 1 or -1.
        pairs: whether elements are the keys and values of a mapping.
        part: 0 if they are only its keys.
    """

    __slots__ = ("length", "pairs", "part", "place", "start", "step")

    def __init__(
        self, recorder: Recorder, place: Place, length: Affine, start: Affine = ZERO, step: int = 1,
        pairs: bool = False, part: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(recorder)
        self.place, self.length, self.start, self.step, self.pairs, self.part = place, length, start, step, pairs, part

    @property
    def whole(self) -> bool:
        return (
            self.part is None
            and self.step == 1
            and self.start == Affine(0)
            and self.length == Affine.of(("length", self.place))
        )

    def text(self) -> Text:
        if not self.whole or self.pairs:
            reject("prints a part of a list")
        return text_of(self.recorder, Source("str", self.place))

    def __bool__(self) -> bool:
        return not self.recorder.compare("==", self.length)

    def selected(self, wanted: Wanted) -> SymbolicList:
        """The elements that have what is wanted."""
        if self.pairs or self.part is not None:
            reject("selects from the items of a mapping")
        place = self.recorder.select(Part(self.place, self.length, self.start, self.step), wanted)
        return SymbolicList(self.recorder, place, Affine.of(("length", place)))

    def element(self, index: Affine) -> Any:
        """The element with a number that is known to be below the length."""
        place = (*self.place, self.start.plus(index, self.step))
        if self.part is not None:
            return text_of(self.recorder, Source("at", (*place, self.part)))
        if self.pairs:
            return Text(self.recorder, (Ref(Source("at", (*place, 0)), ""),)), self.recorder.at((*place, 1))[1]  # type: ignore[arg-type]
        return self.recorder.at(place)[1]

    def find(self, key: int | Number) -> Any:
        """(whether it is there, the value) at an index, which may be negative."""
        index, compare = _affine(key), self.recorder.compare
        if compare("<", index):
            index = index.plus(self.length)
            if compare("<", index):
                return False, None
        elif not compare("<", index.plus(self.length, -1)):
            return False, None
        return True, self.element(index)

    def sliced(self, key: slice) -> SymbolicList:
        """A part: `[a:]`, `[:-b]`, `[a:-b]` or `[::-1]`."""
        start, stop, step = key.start, key.stop, key.step
        if step == -1 and start is None and stop is None:
            last = self.start.plus(self.length, self.step).plus(Affine(self.step), -1)
            return SymbolicList(self.recorder, self.place, self.length, last, -self.step, self.pairs, self.part)
        if step not in (None, 1):
            reject("slices a list with a step")
        length = self.length
        low, high = (self._end(end, default) for end, default in ((start, Affine(0)), (stop, length)))
        size = high.plus(low, -1)
        if self.recorder.compare("<", size):
            size = Affine(0)
        return SymbolicList(
            self.recorder, self.place, size, self.start.plus(low, self.step), self.step, self.pairs, self.part
        )  # fmt: skip

    def _end(self, end: Any, default: Affine) -> Affine:
        """One end of a slice, within the list."""
        if end is None:
            return default
        compare, number = self.recorder.compare, _affine(end)
        if compare("<", number):
            number = number.plus(self.length)
            return Affine(0) if compare("<", number) else number
        return self.length if compare("<", self.length.plus(number, -1)) else number

    def __getitem__(self, key: object) -> SymbolicList:
        if not isinstance(key, slice):
            reject("indexes a list in a way that cannot be traced")
        return self.sliced(key)

    def __contains__(self, value: object) -> bool:
        reject("searches a list of a conversation")

    def __iter__(self) -> Iterator[Any]:
        reject("passes a list of a conversation to a function or filter that loops over it")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, (str, bool, int)):
            return False
        if other == []:
            return not self
        reject("compares a list of a conversation with another one")

    __hash__ = Symbol.__hash__


def segments_of(value: object) -> tuple[Segment, ...]:
    """The segments of a known or symbolic text."""
    return value._pieces if isinstance(value, Rope) else (str(value),) if value else ()
