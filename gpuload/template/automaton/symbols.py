"""Symbolic conversations: what a template is given so that everything it does can be recorded (`recorder.py`).

In place of the list of messages the template gets a `SymbolicList`, in place of a message a `SymbolicMapping`, in place
of a text a `Text`, in place of a number that differs from row to row a `SymbolicNumber`. They know their *place* in the
conversation (`nodes.py`), and ask the recorder what is there, which answers for one real row and writes the question
down. Whatever is not defined here raises `NotCompilableError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from gpuload.template.automaton.nodes import DICTSORT, ITEMS, Affine, Built, ListPart, Place, TextSource, Wanted
from gpuload.template.automaton.values import (
    ZERO,
    Printable,
    Recording,
    Scalar,
    SymbolicNumber,
    Text,
    affine_of,
    source_of,
    text_of,
)
from gpuload.template.program import Ref, Segment
from gpuload.template.rope import Rope, SplitText
from gpuload.template.symbol import NotCompilableError, Symbol, reject


class SymbolicMapping(Printable):
    """A mapping, such as a message."""

    __slots__ = ("place",)

    def __init__(self, recorder: Recording, place: Place) -> None:
        super().__init__(recorder)
        self.place = place

    def text(self) -> Text:
        return text_of(self.recorder, TextSource("str", self.place))

    def __bool__(self) -> bool:
        return bool(self.length)

    @property
    def length(self) -> SymbolicNumber:
        return SymbolicNumber(self.recorder, Affine.of(("length", self.place)))

    def find(self, key: object) -> Any:
        """(whether it is there, the value, or None)."""
        if type(key) is str:
            return self.recorder.at((*self.place, key))
        # One of its own keys, from a loop over them, is at (…, ITEMS, number, 0), and its value next to it.
        own = _place_of(key) if isinstance(key, Rope) else None
        if own is None or own[:-3] != self.place or own[-3] not in (ITEMS, DICTSORT) or own[-1] != 0:
            reject("looks for something other than a plain string in a mapping")
        return self.recorder.at((*own[:-1], 1))

    def __contains__(self, key: object) -> bool:
        return bool(self.find(key)[0])

    def get(self, key: object, default: object = None) -> Any:
        there, value = self.find(key)
        return value if there else default

    def keys(self) -> SymbolicList:
        return SymbolicList(self.recorder, (*self.place, ITEMS), self.length.affine, part=0)

    def values(self) -> SymbolicList:
        return SymbolicList(self.recorder, (*self.place, ITEMS), self.length.affine, part=1)

    def items(self, how: Any = ITEMS) -> SymbolicList:
        """Its keys and values, as they are or in the order of `dictsort`."""
        return SymbolicList(self.recorder, (*self.place, how), self.length.affine, pairs=True)

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, (str, bool, int)):
            return False
        if not isinstance(other, SymbolicMapping):
            reject("compares a message or another mapping with another value")
        return self.recorder.equal(self.place, other.place)

    __hash__ = Symbol.__hash__


class SymbolicList(Printable):
    """A list, or a part of one: the elements at start, start + step, … of the list at a place: all, or `length` of
    them.

    With `pairs`, elements are the keys and values of a mapping; with a `part` of them, its keys (0) or its values (1).
    """

    __slots__ = ("length", "pairs", "part", "place", "start", "step")

    def __init__(
        self, recorder: Recording, place: Place, length: Affine | None = None, start: Affine = ZERO, step: int = 1,
        pairs: bool = False, part: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(recorder)
        self.place, self.start, self.step, self.pairs, self.part = place, start, step, pairs, part
        self.length = Affine.of(("length", place)) if length is None else length

    @property
    def whole(self) -> bool:
        of_all = ZERO, 1, Affine.of(("length", self.place))
        return self.part is None and (self.start, self.step, self.length) == of_all

    def text(self) -> Text:
        return text_of(self.recorder, TextSource("str", placed(self.recorder, self)))

    def __bool__(self) -> bool:
        return not self.recorder.compare("==", self.length)

    def selected(self, wanted: Wanted) -> SymbolicList:
        """The elements that have what is wanted."""
        if self.pairs or self.part is not None:
            reject("selects from the items of a mapping")
        part = ListPart(self.place, self.length, self.start, self.step)
        return SymbolicList(self.recorder, self.recorder.select(part, wanted))

    def element(self, index: Affine) -> Any:
        """The element with a number that is known to be below the length."""
        place = (*self.place, self.start.plus(index, self.step))
        if self.part is not None:
            return self.recorder.at((*place, self.part))[1]
        if self.pairs:
            return Text(self.recorder, (Ref(TextSource("at", (*place, 0)), ""),)), self.recorder.at((*place, 1))[1]  # type: ignore[arg-type]
        return self.recorder.at(place)[1]

    def find(self, key: int | SymbolicNumber) -> Any:
        """(whether it is there, the value) at an index, which may be negative."""
        index, compare = affine_of(key), self.recorder.compare
        if compare("<", index):
            index = index.plus(self.length)
            if compare("<", index):
                return False, None
        elif not compare("<", index.plus(self.length, -1)):
            return False, None
        return True, self.element(index)

    def sliced(self, key: slice) -> SymbolicList:
        """A part: `[a:]`, `[:-b]`, `[a:-b:2]` or `[::-1]`."""
        start, stop, step = key.start, key.stop, key.step
        if step == -1 and start is None and stop is None:
            last = self.start.plus(self.length, self.step).plus(Affine(self.step), -1)
            return SymbolicList(self.recorder, self.place, self.length, last, -self.step, self.pairs, self.part)
        if step is not None and (type(step) is not int or step < 1):
            reject("slices a list with a step that is not a positive number")
        length = self.length
        low, high = (self._end(end, default) for end, default in ((start, Affine(0)), (stop, length)))
        size = high.plus(low, -1)
        if self.recorder.compare("<", size):
            size = Affine(0)
        first, each = self.start.plus(low, self.step), step or 1
        if each > 1:
            size = Affine.of(("div", size.plus(Affine(each - 1)), each))
        return SymbolicList(self.recorder, self.place, size, first, self.step * each, self.pairs, self.part)

    def _end(self, end: Any, default: Affine) -> Affine:
        """One end of a slice, within the list."""
        if end is None:
            return default
        compare, number = self.recorder.compare, affine_of(end)
        if compare("<", number):
            number = number.plus(self.length)
            return Affine(0) if compare("<", number) else number
        return self.length if compare("<", self.length.plus(number, -1)) else number

    def __getitem__(self, key: object) -> SymbolicList:
        if not isinstance(key, slice):
            reject("indexes a list in a way that cannot be traced")
        return self.sliced(key)

    def __contains__(self, value: object) -> bool:
        return self.recorder.contains(placed(self.recorder, self), built_of(value))

    def __add__(self, other: object) -> SymbolicList:
        return self._sum(self, other)

    def __radd__(self, other: object) -> SymbolicList:
        return self._sum(other, self)

    def _sum(self, left: object, right: object) -> SymbolicList:
        # A list to which itself is added in each pass would double each time.
        if type(left) is not list and type(right) is not list:
            reject("adds two lists of a conversation")
        return SymbolicList(self.recorder, self.recorder.build(Built("sum", (built_of(left), built_of(right)))))

    def __iter__(self) -> Iterator[Any]:
        reject("passes a list of a conversation to a function or filter that loops over it")

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, (str, bool, int)):
            return False
        if not isinstance(other, (list, SymbolicList)):
            reject("compares a list of a conversation with another value")
        return (
            not self if other == [] else self.recorder.equal(*(placed(self.recorder, each) for each in (self, other)))
        )

    __hash__ = Symbol.__hash__


def segments_of(value: object) -> tuple[Segment, ...]:
    """The segments of a known or symbolic text."""
    return value._pieces if isinstance(value, Rope) else (str(value),) if value else ()


def built_of(value: object) -> Built:
    """Plain data, known and symbolic, as an instruction has it."""
    if isinstance(value, Rope) or type(value) is str:
        return Built("text", tuple(map(source_of, segments_of(value))))
    if value is None or type(value) is bool:
        return Built("constant", (repr(value),))
    if type(value) is int or isinstance(value, SymbolicNumber):
        return Built("number", (affine_of(value),))
    if isinstance(value, SymbolicList) and not value.whole:
        return Built("part", (ListPart(value.place, value.length, value.start, value.step), value.part))
    if isinstance(value, (SymbolicMapping, SymbolicList, Scalar)):
        return Built("at", (value.place,))
    if type(value) is list:
        return Built("list", tuple(map(built_of, value)))
    if type(value) is dict and all(type(key) is str for key in value):
        return Built("mapping", tuple((key, built_of(item)) for key, item in value.items()))
    reject("builds a list or mapping of something other than plain data")


def placed(recorder: Recording, value: object) -> Place:
    """The place of a symbolic value, or of a list or mapping that contains some."""
    if isinstance(value, Rope) and (place := _place_of(value)) is not None:
        return place
    built = built_of(value)
    return built.parts[0] if built.kind == "at" else recorder.build(built)


class SplitParts(SplitText):
    """A split text, of which the first and the last part are operations on the text."""

    __slots__ = ()

    def listed(self) -> SymbolicList:
        """All parts."""
        name = "split" if self._from_left else "rsplit"
        return _called(cast(Text, self._rope), name, self._separator, self._most)

    def __contains__(self, value: object) -> bool:
        return value in self.listed()

    def __getitem__(self, index: object) -> Any:
        return self.listed()[index] if isinstance(index, slice) else super().__getitem__(index)


def split(text: Text, name: str, sep: object = None, maxsplit: object = -1) -> SplitParts | SymbolicList:
    """What `split` or `rsplit` gives of a text."""
    if not (sep is None or (type(sep) is str and sep)) or type(maxsplit) is not int:
        reject("splits a text at something other than a plain string")
    try:
        return SplitParts(text, sep, maxsplit, from_left=name == "split")
    except NotCompilableError:  # at white space, or into some parts
        return _called(text, name, sep, maxsplit)


def lines_of(text: Text, keepends: object = False) -> SymbolicList:
    """What `splitlines` gives of a text."""
    return _called(text, "splitlines", bool(keepends))


def _called(text: Text, name: str, *arguments: object) -> SymbolicList:
    """The list that a method of `str` gives."""
    built = Built("method", (name, built_of(text), *map(repr, arguments)))
    return SymbolicList(text.recorder, text.recorder.build(built))


def characters_of(recorder: Recording, text: Rope) -> SymbolicList:
    """The characters of a text."""
    return SymbolicList(recorder, placed(recorder, text))


def _place_of(text: Rope) -> Place | None:
    """Where a text is that is in the data as it is; None for any other."""
    pieces: Any = text._pieces
    whole = len(pieces) == 1 and not isinstance(pieces[0], str) and not pieces[0].operations
    return pieces[0].message.value if whole and pieces[0].message.kind == "at" else None
