"""What an automaton has printed for one row: a text in parts, of which it is known where they come from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gpuload.template.program import Path, Ref

_PLAIN = frozenset(("role", "content"))


class Content(str):
    """The content of a message."""

    __slots__ = ("message",)
    message: int  # its number

    def __new__(cls, text: str, message: int) -> Content:
        made = super().__new__(cls, text)
        made.message = message
        return made


class Unknown(str):
    """A text that is neither a literal nor the content of a message."""

    __slots__ = ()


def parts_of(messages: Sequence[Mapping[str, Any]], out: Sequence[str]) -> tuple[Path, dict[Ref, str]] | None:
    """What a text is made of, as `marks.taken_apart` finds it; None if that has to look."""
    for message in messages:
        content = message.get("content")
        if not message.keys() <= _PLAIN or type(content) is not str or "think>" in content:
            return None
    segments: list[str | Ref] = []
    texts: dict[Ref, str] = {}
    for number, text in enumerate(out):
        if type(text) is Content:
            if messages[text.message]["content"]:
                segments.append(segment := Ref(text.message, f"text {number}"))
                texts[segment] = text
        elif type(text) is Unknown:
            return None
        else:
            segments.append(text)
    return Path(tuple(segments)), texts


def blocks_of(out: Sequence[str], blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each `{% generation %}` block in what was printed, in characters.

    `blocks` has the numbers of the texts in blocks, ascending: k for the first one of a block, ~k for the others.
    """
    places = list(itertools.accumulate(map(len, out), initial=0))
    found: list[tuple[int, int]] = []
    for text in blocks:
        if text >= 0:
            found.append((places[text], places[text + 1]))
        else:
            found[-1] = found[-1][0], places[~text + 1]
    return found
