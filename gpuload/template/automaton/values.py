"""Symbolic texts and numbers of a conversation; lists and mappings of them are in `symbols.py`."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, cast

from gpuload.template.automaton.nodes import Affine, Built, ListPart, Place, TextSource, Wanted
from gpuload.template.program import Operation, Ref, Segment
from gpuload.template.rope import Rope
from gpuload.template.symbol import NotCompilableError, Oracle, Symbol, reject


class Recording(Oracle, Protocol):
    """What symbols ask, see `recorder.py`. It answers for one real row."""

    def compare(self, operator: str, number: Affine) -> bool: ...

    def at(self, place: Place) -> tuple[bool, Any]: ...

    def equal(self, one: Place, other: Place) -> bool: ...

    def same(self, one: tuple[Segment, ...], other: tuple[Segment, ...]) -> bool: ...

    def select(self, part: ListPart, wanted: Wanted) -> Place: ...

    def build(self, built: Built) -> Place: ...

    def contains(self, place: Place, built: Built) -> bool: ...

    def only_texts(self, place: Place) -> bool: ...


class Value(Symbol):
    """A symbolic value that is not a text. A recorder writes down what is asked of it."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recording) -> None:
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
        if not isinstance(key, slice):
            reject("indexes into a message's text in a way that cannot be traced")
        ends = (key.start, key.stop, key.step)
        if len(self._pieces) != 1 or key.step is not None or any(isinstance(end, SymbolicNumber) for end in ends):
            built = Built("slice", (self._built(), *(_end(end) for end in ends)))
            return text_of(self.recorder, TextSource("at", self.recorder.build(built)))
        if not all(end is None or type(end) is int for end in ends):
            reject("slices a text by something other than numbers")
        piece = self._pieces[0]
        if isinstance(piece, str):
            return self._make((piece[key],))
        operation = Operation("slice", tuple("" if end is None else str(end) for end in ends[:2]))
        return self._make((Ref(piece.message, piece.field, (*piece.operations, operation)),))

    @property
    def recorder(self) -> Recording:
        return cast(Recording, self._oracle)

    capitalize = functools.partialmethod(Rope._changed_case, "capitalize")
    title = functools.partialmethod(Rope._changed_case, "title")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rope) and self._pieces != other._pieces:
            return self.recorder.same(self._pieces, other._pieces)
        return super().__eq__(other)

    __hash__ = Symbol.__hash__

    def _equals(self, other: str) -> bool:
        try:
            return super()._equals(other)
        except NotCompilableError:  # a joined text
            return self.recorder.same(self._pieces, (other,))

    def __contains__(self, needle: object) -> bool:
        if isinstance(needle, Text):
            return self.recorder.contains(self.recorder.build(self._built()), needle._built())
        return super().__contains__(needle)

    def whole(self) -> Text:
        """The same as one segment, from a register."""
        return text_of(self.recorder, TextSource("at", self.recorder.build(self._built())))

    def _built(self) -> Built:
        return Built("text", tuple(map(source_of, self._pieces)))

    def characters(self) -> SymbolicNumber:
        """How many characters it has."""
        affine = Affine(0)
        for piece in self._pieces:
            one = (
                Affine(len(piece))
                if isinstance(piece, str)
                else Affine.of(("characters", piece.message, piece.operations))
            )
            affine = affine.plus(one)
        return SymbolicNumber(self.recorder, affine)


def _also_joined(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that joins a text where it is not possible segment by segment."""

    @functools.wraps(method)
    def wrapped(self: Text, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except NotCompilableError:
            if len(self._pieces) < 2:
                raise
            return method(self.whole(), *args, **kwargs)

    return wrapped


_JOINED = "__contains__ startswith endswith removeprefix removesuffix replace lower upper capitalize title _cut"
for _name in _JOINED.split():
    setattr(Text, _name, _also_joined(getattr(Text, _name)))


def text_of(recorder: Recording, source: TextSource) -> Text:
    """A text by where it comes from."""
    return Text(recorder, (Ref(source, ""),))  # type: ignore[arg-type]


def source_of(segment: Segment) -> tuple[str | TextSource, tuple[Operation, ...]]:
    """What a segment is in an instruction."""
    if isinstance(segment, str):
        return segment, ()
    return segment.message, segment.operations  # type: ignore[return-value]


def _end(end: object) -> Built:
    """Start, stop or step of a slice."""
    return Built("constant", ("None",)) if end is None else Built("number", (affine_of(end),))


ZERO = Affine(0)


class Printable(Value):
    """A symbolic value that can be printed."""

    __slots__ = ()

    @abstractmethod
    def text(self) -> Rope:
        """What printing it gives."""


class SymbolicNumber(Printable):
    """A number that differs from row to row."""

    __slots__ = ("affine",)

    def __init__(self, recorder: Recording, affine: Affine) -> None:
        super().__init__(recorder)
        self.affine = affine

    def text(self) -> Text:
        return text_of(self.recorder, TextSource("number", self.affine))

    def __add__(self, other: object) -> SymbolicNumber:
        return SymbolicNumber(self.recorder, self.affine.plus(affine_of(other)))

    __radd__ = __add__

    def __sub__(self, other: object) -> SymbolicNumber:
        return SymbolicNumber(self.recorder, self.affine.plus(affine_of(other), -1))

    def __rsub__(self, other: object) -> SymbolicNumber:
        return SymbolicNumber(self.recorder, affine_of(other).plus(self.affine, -1))

    def __mul__(self, other: object) -> Any:
        if type(other) is not int:
            reject("multiplies two numbers that differ from row to row")
        return SymbolicNumber(self.recorder, Affine(0).plus(self.affine, other))

    __rmul__ = __mul__

    def _divided(self, name: str, other: object) -> SymbolicNumber:
        if type(other) is not int or other <= 0:
            reject("divides by something other than a positive number")
        return SymbolicNumber(self.recorder, Affine.of((name, self.affine, other)))

    __mod__ = functools.partialmethod(_divided, "mod")
    __floordiv__ = functools.partialmethod(_divided, "div")

    def __bool__(self) -> bool:
        return self != 0

    def __eq__(self, other: object) -> bool:
        if type(other) not in (int, bool) and not isinstance(other, SymbolicNumber):
            return False
        return self.recorder.compare("==", self.affine.plus(affine_of(other), -1))

    __hash__ = Symbol.__hash__

    def __lt__(self, other: object) -> bool:
        return self.recorder.compare("<", self.affine.plus(affine_of(other), -1))

    def __ge__(self, other: object) -> bool:
        return not self < other

    def __gt__(self, other: object) -> bool:
        return self.recorder.compare("<", affine_of(other).plus(self.affine, -1))

    def __le__(self, other: object) -> bool:
        return not self > other


def affine_of(value: object) -> Affine:
    if isinstance(value, SymbolicNumber):
        return value.affine
    if type(value) not in (int, bool):
        reject("calculates with a number that differs from row to row and another value")
    return Affine(int(value))  # type: ignore[call-overload]


class Scalar(Printable):
    """A number in the data, which can be printed."""

    __slots__ = ("kind", "place")

    def __init__(self, recorder: Recording, place: Place, kind: str) -> None:
        super().__init__(recorder)
        self.place, self.kind = place, kind

    def text(self) -> Text:
        return text_of(self.recorder, TextSource("str", self.place))

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, str):
            return False
        reject("compares a number of a conversation")

    __hash__ = Symbol.__hash__


_ESCAPES = (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;"))  # as `markupsafe` has them


class Safe(Printable):
    """A text after the filter `safe`. It can be printed, and added to texts, which are escaped."""

    __slots__ = ("_text",)

    def __init__(self, recorder: Recording, text: Rope) -> None:
        super().__init__(recorder)
        self._text = text

    def text(self) -> Rope:
        return self._text

    def __add__(self, other: object) -> Safe:
        return Safe(self.recorder, self._text + _escaped(other))

    def __radd__(self, other: object) -> Safe:
        return Safe(self.recorder, _escaped(other) + self._text)


def _escaped(value: Any) -> Any:
    """A text as it is added to one that is safe."""
    if isinstance(value, Safe):
        return value.text()
    if type(value) is not str and not isinstance(value, Rope):
        reject("adds something other than a text to one that is safe")
    for character, escape in _ESCAPES:
        value = value.replace(character, escape)
    return value


class Range(Value):
    """`range` with numbers that differ from row to row: start, start + step, …, as many as `length` says."""

    __slots__ = ("length", "start", "step")

    def __init__(self, recorder: Recording, start: Affine, stop: Affine, step: int) -> None:
        super().__init__(recorder)
        if step not in (1, -1):
            reject("calls range with a step other than 1 and -1")
        size = Affine(0).plus(stop, step).plus(start, -step)
        self.length = Affine(0) if recorder.compare("<", size) else size
        self.start, self.step = start, step

    def element(self, index: Affine) -> SymbolicNumber:
        return SymbolicNumber(self.recorder, self.start.plus(index, self.step))
