"""Where messages are in a text that was not rendered by a compiled path: their texts are searched for, in order.

For display only. A text that occurs twice may be found in the wrong place: each is looked for behind the message before
it, and behind the name of its role if that comes first.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import offsets_of

_NOT_TEXTS = frozenset(("role", "type", "id", "tool_call_id"))
_FAR = 300  # characters between the texts of a call


def message_spans(messages: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, int, str]]:
    """Start and end in UTF-8, and role, of the parts of a rendered text that come from messages: in order, without
    overlaps. Calls and reasoning belong to their message."""
    found, at = [], 0
    for message in messages:
        role, content = str(message.get("role")), _strings(message.get("content"))
        place = _find(text, content, at)
        named = text.find(role, at)
        if named >= 0 and (place is None or named <= place[0]):
            place = _find(text, content, named + len(role)) or place
        others = _strings({name: value for name, value in message.items() if name != "content"})
        behind = _find(text, others, at if place is None else place[1], _FAR)
        before = _find(text, others, at, _FAR)  # reasoning
        ends = [
            each for each in (place, behind, before if place and before and before[1] <= place[0] else None) if each
        ]
        if ends:
            start, at = min(start for start, _ in ends), max(end for _, end in ends)
            found.append((start, at, role))
    return _in_bytes(text, found)


def _strings(value: Any) -> list[str]:
    """All texts in a message, those of keys that templates do not print left out."""
    if isinstance(value, str):
        return [value.strip()] if value.strip() else []
    if isinstance(value, Mapping):
        value = [item for name, item in value.items() if name not in _NOT_TEXTS]
    return [text for item in value for text in _strings(item)] if isinstance(value, Sequence) else []


def _find(text: str, strings: Sequence[str], at: int, far: int | None = None) -> tuple[int, int] | None:
    """Start and end of texts that follow one another, as they are or as JSON has them; None if none is there. At most
    `far` characters are between them, or before the first one."""
    start, end = None, at
    for string in strings:
        for form in (string, json.dumps(string, ensure_ascii=False)[1:-1], json.dumps(string)[1:-1]):
            place = text.find(form, end, None if far is None else end + far + len(form))
            if place >= 0:
                start, end = place if start is None else start, place + len(form)
                break
    return None if start is None else (start, end)


def _in_bytes(text: str, spans: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The same spans, counted in UTF-8."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    at = offsets_of(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))
    return [(int(at[start]), int(at[end]), role) for start, end, role in spans]
