"""What a rendered conversation is made of: the texts of its messages, and literals of the template.

The conversation is rendered once more with a mark for each text. What is between two marks must be in the rendered text
as well, and between these parts the texts, in a form that templates print.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpuload.reference.template_call import OwnReasonError
from gpuload.template.program import Path, Ref, Segment

_NAMES = ("role", "name", "type", "id", "tool_call_id", "tool_name")
"""Fields that templates look up or compare, or print in other messages than their own."""

_ARGUMENTS = ("arguments", "parameters")
CALLS = ("tool_calls", "function_call")
_THINK = re.compile(r"(\s*</?think>\s*)")  # what templates look for in contents
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?')

# A mark is this, which no text contains by chance, and six hexadecimal digits: the number of the text in its
# conversation. One expression finds all marks: to compile one for each conversation took half of the time.
_BEGINNING = f"text {secrets.token_hex(8)}"
_MARK = re.compile(f"({_BEGINNING}[0-9a-f]{{6}})")


_Place = tuple[str, bool]  # of a text: a field of a message, and whether that has tool calls


class UnknownAnswersError(OwnReasonError):
    """The answers of a conversation are unknown; the message says why."""

    subject = "its answers are unknown"


@dataclass
class _Marks:
    """One conversation with marks."""

    only_contents: bool
    empty: Collection[_Place] = ()  # where empty texts have marks as well
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)  # mark → number of its message, and its text
    names: set[str] = field(default_factory=set)  # marks of functions' names, which templates may print again
    others: list[str] = field(default_factory=list)  # text that has no mark, and that the template may print
    empty_places: dict[_Place, None] = field(default_factory=dict)  # where there are empty texts
    _place: _Place = ("", False)  # of the texts that are given marks now

    def message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked, calls = {}, any(map(message.get, CALLS))
        for name, value in message.items():
            self._place = name, calls
            if name == "content":
                marked[name] = self._content(number, value)
            elif name in CALLS and not self.only_contents:
                marked[name] = self._calls(number, value)
            elif isinstance(value, str) and name not in _NAMES and not self.only_contents:
                marked[name] = self._mark(number, value)
            else:
                marked[name] = value
                if name != "role":
                    self.others += texts_in(value)
        return marked

    def _mark(self, number: int, text: str) -> str:
        if not text:
            self.empty_places[self._place] = None
            if self._place not in self.empty:
                return text
        mark = f"{_BEGINNING}{len(self.texts):06x}"
        self.texts[mark] = number, text
        return mark

    def _content(self, number: int, content: Any) -> Any:
        if isinstance(content, str):
            if not content:
                return self._mark(number, content)
            parts = _THINK.split(content)  # what is empty between tags is no text of its own
            return "".join(self._mark(number, part) if part and k % 2 == 0 else part for k, part in enumerate(parts))
        if isinstance(content, list):
            return [self._content(number, part) for part in content]
        if isinstance(content, dict) and "text" in content:
            return content | {"text": self._content(number, content["text"])}
        self.others += texts_in(content)
        return content

    def _calls(self, number: int, value: Any) -> Any:
        """Tool calls with marks in their arguments."""
        if isinstance(value, list):
            return [self._calls(number, each) for each in value]
        if isinstance(value, dict):
            self.others += list(value)
            known = len(self.texts)
            marked = {
                name: self._arguments(number, each) if name in _ARGUMENTS else self._calls(number, each)
                for name, each in value.items()
            }
            if len(self.texts) == known and isinstance(value.get("name"), str):  # a call without texts
                marked["name"] = self._mark(number, value["name"])
                self.names.add(marked["name"])
            return marked
        self.others += texts_in(value)
        return value

    def _arguments(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            marked = self._json_text(number, value)
        else:
            marked = with_texts(value, partial(self._mark, number))
        self.others.append(marked if isinstance(marked, str) else json.dumps(marked, ensure_ascii=False, default=str))
        return marked

    def _json_text(self, number: int, text: str) -> str:
        """Arguments as JSON text, with marks in its strings that are no keys; any other text is one mark."""
        try:
            json.loads(text)
        except ValueError:
            return self._mark(number, text)
        return _JSON_STRING.sub(
            lambda found: found[0] if found[1] or found[0] == '""' else f'"{self._mark(number, found[0][1:-1])}"', text
        )


def with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Plain data with something else in place of each text that is no key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_texts(each, change) for name, each in value.items()}
    return [with_texts(each, change) for each in value] if isinstance(value, list) else value


def texts_in(value: Any) -> Iterator[str]:
    """All texts in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from texts_in(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts_in(each)


Render = Callable[[list[Any]], str]
"""Renders a conversation."""


Parts = tuple[Path, dict[Ref, str], list[str]]
"""What the text of a conversation is made of: segments; the text of each that is no literal; and texts of the
conversation that may be within literals."""


def taken_apart(render: Render, messages: Sequence[Any], text: str, empty: bool = False) -> Parts:
    """What the text of a conversation is made of, which `render` has made of it; an `UnknownAnswersError` if that is
    something else.

    With `empty`, texts that are empty are segments as well, where the template prints them whether they are or not: to
    find that takes several times as long.
    """
    try:
        return _with_marks(render, messages, text, False, empty)
    except Exception:  # the template may look into other fields, and raise any error
        fields = {name for message in messages for name, value in message.items() if value}
        if fields <= {"role", "content"} or fields & set(CALLS):
            raise
        return _with_marks(render, messages, text, True, empty)


def _with_marks(render: Render, messages: Sequence[Any], text: str, only_contents: bool, empty: bool) -> Parts:
    def with_marks_for(places: Collection[_Place]) -> Parts:
        marks = _Marks(only_contents, places)
        return _aligned(render([marks.message(k, message) for k, message in enumerate(messages)]), text, marks)

    places = _empty_places(messages, only_contents) if empty else []
    if places:
        with suppress(Exception):  # most templates ask whether some texts are empty
            return with_marks_for(places)
    kept: list[_Place] = []
    for place in places if len(places) > 1 else ():
        with suppress(Exception):  # likewise
            with_marks_for([*kept, place])
            kept.append(place)
    return with_marks_for(kept)


def has_empty(message: Mapping[str, Any]) -> bool:
    """Whether a field of a message is an empty text, or a part of its content."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return "" in message.values() or any(isinstance(part, dict) and part.get("text") == "" for part in parts)


def _empty_places(messages: Sequence[Any], only_contents: bool) -> list[_Place]:
    """Where some messages have empty texts."""
    marks = _Marks(only_contents)
    for number, message in enumerate(messages):
        marks.message(number, message)
    return list(marks.empty_places)


def _aligned(rendered: str, text: str, marks: _Marks) -> Parts:
    found = marks.texts
    parts = _MARK.split(rendered)
    segments: list[Segment] = []
    texts: dict[Ref, str] = {}
    named: set[str] = set()
    at = 0
    for number, part in enumerate(parts):
        if number % 2:
            message, value = found[part]
            form = next((form for form in _forms(value) if text.startswith(form + parts[number + 1], at)), None)
            if form is None:
                raise UnknownAnswersError("the template changes the text of a message")
            segment = Ref(message, f"text {number}")
            segments.append(form if part in named else segment)
            texts[segment] = form
            named |= {part} & marks.names
            at += len(form)
        elif not text.startswith(part, at):
            raise UnknownAnswersError("the template changes with the texts of messages")
        elif part:
            segments.append(part)
            at += len(part)
    if at != len(text):
        raise UnknownAnswersError("the template changes with the texts of messages")
    return Path(tuple(segments)), texts, marks.others


def _forms(text: str) -> list[str]:
    """The forms in which templates print a text, longest first: as it is, stripped, in JSON, or as Python prints it."""
    if text.isascii() and text.isprintable() and text == text.strip() and not any(mark in text for mark in "\"'\\"):
        return [text]  # they are all the same
    plain = {text}
    for characters in (None, "\n"):
        plain |= {text.strip(characters), text.lstrip(characters), text.rstrip(characters)}
    escaped = {json.dumps(each, ensure_ascii=ascii)[1:-1] for each in plain for ascii in (False, True)}
    return sorted(plain | escaped | {repr(each)[1:-1] for each in plain}, key=len, reverse=True)
