"""Short conversations with marks for texts, by which the turns of a chat template are found."""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuload.reference.template_call import TemplateCall

_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}, "required": []},
    },
}
_CALL_ID = "abcdefgh1"  # Mistral's templates accept only ids of nine letters or digits

_CONVERSATIONS = ("ucrara", "ucrcra", "uprra", "uara", "ra", "uctaucta")
"""One letter for each message: "u" of a user, "t" of a tool, "r" of the role in question, "a" an answer, "c" a call of
a tool, "p" two of them."""


@dataclass(frozen=True)
class Probe:
    """A message, and the marks in it."""

    given: dict[str, Any]
    marks: Sequence[str]

    @property
    def is_answer(self) -> bool:
        return bool(self.given["role"] == "assistant")

    def rest(self, text: str) -> str | None:
        """What follows the message's last mark; None if it has none in the text."""
        end = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in self.marks)
        return None if end < 0 else text[end:]

    def until(self, other: "Probe", text: str) -> str | None:
        """What is between the last mark of this message and the first mark of another one behind it; None if either has
        none there."""
        rest = self.rest(text)
        first = min((rest.find(mark) for mark in other.marks if mark in rest), default=None) if rest else None
        return None if rest is None or first is None else rest[:first]


def probes(call: TemplateCall, role: str) -> Iterator[tuple[TemplateCall, list[Probe]]]:
    """Conversations with calls of tools and messages of a role, and how to render them."""
    calls = [call]
    if not call.tools:
        with_tools = replace(call, tools=[_TOOL])
        calls += [with_tools] if with_tools.text() == call.text() else []
    thinking = any(word in call.text() for word in ("reasoning", "thinking"))
    for each in calls:
        for as_text in (False, True):
            for style in ("", "content", *(["thinking"] if thinking else [])):
                for kinds in _CONVERSATIONS:
                    yield each, [_probe(kind, role, style, as_text) for kind in kinds]


def _probe(kind: str, role: str, style: str, as_text: bool) -> Probe:
    """A message of a kind as in `_CONVERSATIONS`.

    Calls of tools have nothing else in one `style`; in the others "content", or "content" and "thinking". With
    `as_text`, their arguments are JSON text.
    """
    marks = [f"text {secrets.token_hex(8)}" for _ in range(3)]
    if kind in "utr":
        message: dict[str, Any] = {"role": {"u": "user", "t": "tool", "r": role}[kind], "content": marks[0]}
        if message["role"] not in ("user", "system", "developer"):
            message |= {"name": "f", "tool_call_id": _CALL_ID}
        return Probe(message, marks[:1])
    message = {"role": "assistant", "content": marks[0] if style or kind == "a" else ""}
    if style == "thinking":
        message |= {"reasoning_content": marks[1]}
    if kind in "cp":
        given: list[Any] = [{"x": marks[2]}, {}][: 1 + (kind == "p")]
        functions = [{"name": "f", "arguments": json.dumps(each) if as_text else each} for each in given]
        message |= {"tool_calls": [{"id": _CALL_ID, "type": "function", "function": each} for each in functions]}
    return Probe(message, marks)


def between(text: str, one: str, other: str) -> str:
    """What is between two marks."""
    return text.partition(one)[2].partition(other)[0]


def leaves_out_calls(call: TemplateCall, content: str | None) -> bool:
    """Whether a template prints nothing of a call in a message with this content, as templates without tools do."""
    mark, rendered = f"text {secrets.token_hex(8)}", False
    for as_text in (False, True):
        given: Any = {"x": mark}
        function = {"name": "f", "arguments": json.dumps(given) if as_text else given}
        calls = [{"id": _CALL_ID, "type": "function", "function": function}]
        made = {"role": "assistant", "content": content, "tool_calls": calls}
        result = {"role": "tool", "content": "r", "name": "f", "tool_call_id": _CALL_ID}
        for results in ([], [result]):
            try:
                text = call.render([{"role": "user", "content": "q"}, made, *results])
            except Exception:  # of a template that knows calls
                continue
            if mark in text:
                return False
            rendered = True
    return rendered
