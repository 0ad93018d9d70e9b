"""From a template to a path: run the vendor's template once on a conversation whose texts are unknown.

One trace follows one *example*, a real row: where the template asks something about a text, the example's text answers,
and question and answer are written down. The result holds for every row that answers the same. So the number of traces
is the number of ways that rows really take through the template, never the number of ways there could be.

    1. let transformers prepare the conversation, each text replaced by a unique stand-in (it drops fields that are
    None,
       copies reasoning under other names ...), and read back what its template would see;
    2. put a rope in the place of each stand-in;
    3. render, in transformers' own environment (`sandbox.py`);
    4. the output's pieces are the path, the answers given are the way to it;
    5. probe the path (`probe.py`), and trust it only then.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from gpuload.reference.template_call import TemplateCall
from gpuload.template.probe import Prober
from gpuload.template.program import (
    EMPTY_LIST,
    TEXT,
    ByReference,
    Leaf,
    Path,
    Predicate,
    Ref,
    Rejected,
    Shape,
    holds,
)
from gpuload.template.rope import NotCompilableError, Rope
from gpuload.template.sandbox import EndlessError, Meter, TracingTemplate

__all__ = ["Texts", "Tracer", "conversation"]

MOST_STEPS = 2_000_000
MOST_STEPS_A_PAIR = 200
MOST_SECONDS = 15.0
MOST_QUESTIONS = 1024
"""The bounds of one trace: loop passes and calls (and more for every pair of messages, for templates that look from
each message at all others), seconds, and questions about texts. They are far beyond any template that is meant to
end."""

_READ_BACK = "{{ messages | tojson }}"

Texts = Mapping[tuple[int, str], str]
"""The texts of one conversation, by message number and field."""


def conversation(shape: Shape, texts: Texts) -> list[dict[str, Any]]:
    """The messages of that shape with those texts, as a row of a table gives them (absent values are None)."""
    messages = []
    for k, fields in enumerate(shape):
        values: dict[str, Any] = {}
        for name, value in fields:
            values[name] = texts[k, name] if value == TEXT else [] if value == EMPTY_LIST else value
        messages.append(values)
    return messages


@dataclass
class _Example:
    """The oracle: answers as one row's texts do, and remembers what was asked."""

    texts: Texts
    answers: dict[Predicate, bool] = field(default_factory=dict)

    def ask(self, predicate: Predicate) -> bool:
        if predicate not in self.answers:
            if len(self.answers) >= MOST_QUESTIONS:
                raise NotCompilableError(f"more than {MOST_QUESTIONS} questions about one conversation")
            self.answers[predicate] = holds(predicate, self.texts[predicate.ref.message, predicate.ref.field])
        return self.answers[predicate]


class Tracer:
    """Traces one call's template.

    Args:
        call: tokenizer, template and constants.

    Raises:
        NotCompilableError: nothing of this call can be traced; the message says why.
    """

    def __init__(self, call: TemplateCall) -> None:
        obstacle = call.obstacle()
        if obstacle:
            raise NotCompilableError(obstacle)
        self.call = call
        self._meter = Meter()
        self._meter.reset(MOST_STEPS, MOST_SECONDS)
        self._patience = 1.0
        try:
            self._template = TracingTemplate(call.text(), self._meter, call.strftime_now)
            self._context = call.context()
        except NotCompilableError:
            raise
        except Exception as error:
            raise NotCompilableError(f"{type(error).__name__}: {error}") from error
        self._prober = Prober(call)

    def trace(self, shape: Shape, texts: Texts) -> tuple[list[tuple[Predicate, bool]], Leaf]:
        """The leaf for every row of `shape` that answers the template's questions as `texts` do, and those answers."""
        example = _Example(texts)
        try:
            messages = self._prepared(shape, example)
            steps = MOST_STEPS + MOST_STEPS_A_PAIR * len(shape) ** 2
            self._meter.reset(int(steps * self._patience), MOST_SECONDS)
            leaf: Leaf = self._path(self._template.render({**self._context, "messages": messages}))
        except NotCompilableError as error:
            leaf = ByReference(str(error))
        except (EndlessError, MemoryError) as error:
            # The reference would not come back from it. Having waited once, be quicker to give up.
            self._patience = 0.01
            leaf = Rejected(str(error))
            return list(example.answers.items()), leaf
        except Exception as error:
            leaf = _raised(error)
        decisions = list(example.answers.items())
        if not isinstance(leaf, ByReference):
            leaf = self._prober.probed(leaf, shape, texts, decisions, lambda t: conversation(shape, t))
        return decisions, leaf

    def example(self, plain: Texts, decisions: Sequence[tuple[Predicate, bool]]) -> Texts | None:
        """Texts that take the way of `decisions`: `plain` ones, changed where they must be; None where none are
        known."""
        return self._prober.example(plain, decisions)

    @staticmethod
    def _path(rendered: str | Rope) -> Path:
        path = Path(rendered._pieces if isinstance(rendered, Rope) else (rendered,) if rendered else ())
        for segment in path.segments:
            known = [segment] if isinstance(segment, str) else [a for o in segment.operations for a in o.arguments]
            if any("\ud800" <= character <= "\udfff" for text in known for character in text):
                raise NotCompilableError("a lone surrogate, which UTF-8 cannot hold")
        return path

    def _prepared(self, shape: Shape, example: _Example) -> Any:
        """The conversation as the template will see it, with ropes for texts."""
        token = secrets.token_hex(8)
        names = [(k, name) for k, fields in enumerate(shape) for name, value in fields if value == TEXT]
        stand_ins = {key: f"gpuload {token} {i}" for i, key in enumerate(names)}
        ropes = {text: Rope(example, (Ref(*key),)) for key, text in stand_ins.items()}

        def fill(value: Any) -> Any:
            if isinstance(value, str):
                if token in value and value not in ropes:
                    raise NotCompilableError("this version of transformers changes texts before the template sees them")
                return ropes.get(value, value)
            if isinstance(value, dict):
                return {key: fill(item) for key, item in value.items()}
            return [fill(item) for item in value] if isinstance(value, list) else value

        return fill(json.loads(self.call.render(conversation(shape, stand_ins), template=_READ_BACK)))


def _raised(error: Exception) -> Leaf:
    """What an exception out of the template means. (A probe turns a rejection of known words into that of
    transformers.)"""
    try:
        words = f"{type(error).__name__}: {error}"
    except NotCompilableError:
        return ByReference("raises an error with text of a message in it")
    return Rejected(words) if isinstance(error, jinja2.TemplateError) else ByReference(words)
