"""The tracer: renders the template once with symbolic texts to find the path that some rows take.

A trace follows one real row. Where the template tests a text (`'</think>' in content`), the row's own text decides, and
predicate and answer are recorded. The resulting path is valid for every row with the same answers, so the number of
traces is the number of paths that rows really take, not the number of possible paths.

    1. Let transformers prepare the conversation with a unique placeholder for each text, and read back the messages
       that its template would see. (transformers drops fields that are None, copies reasoning to other fields, and so
       on.)
    2. Replace each placeholder by a rope.
    3. Render these messages in transformers' own Jinja environment (`sandbox.py`).
    4. The segments of the output are the path; the recorded answers are the decisions that lead to it.
    5. Probe the path (`probe.py`), and use it only if all probes agree with transformers.
"""

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jinja2

from gpuload.reference.deadline import EndlessError
from gpuload.reference.template_call import TemplateCall, describe_error, rejection
from gpuload.template.bounds import deep_size
from gpuload.template.marks import with_texts
from gpuload.template.output import Output
from gpuload.template.probe import Prober
from gpuload.template.program import EMPTY_LIST, TEXT, ByReference, Leaf, Path, Predicate, Ref, Rejected, Shape, holds
from gpuload.template.rope import Rope
from gpuload.template.sandbox import Meter, TracingTemplate
from gpuload.template.symbol import NotCompilableError, reject

MOST_STEPS = 2_000_000
MOST_STEPS_A_PAIR = 200
MOST_SECONDS = 15.0
MOST_PREDICATES = 1024
"""Limits of one trace: loop passes and calls, with an allowance for every pair of messages (some templates loop over
all messages for each message), seconds, and predicates. No template that terminates comes near them."""

_READ_BACK = "{{ messages | tojson }}"

Instrumented = TypeVar("Instrumented", bound=TracingTemplate)

Texts = Mapping[tuple[int, str], str]
"""The texts of one conversation, by message index and field."""


def conversation(shape: Shape, texts: Texts) -> list[dict[str, Any]]:
    """Build the messages of a conversation of `shape` with `texts`, as read from a table (absent values are None)."""
    messages = []
    for k, fields in enumerate(shape):
        values: dict[str, Any] = {}
        for name, value in fields:
            values[name] = texts[k, name] if value == TEXT else [] if value == EMPTY_LIST else value
        messages.append(values)
    return messages


@dataclass
class _Example:
    """The oracle of a trace: evaluates predicates on the texts of one row and records the answers."""

    texts: Texts
    answers: dict[Predicate, bool] = field(default_factory=dict)

    def ask(self, predicate: Predicate) -> bool:
        if predicate not in self.answers:
            if len(self.answers) >= MOST_PREDICATES:
                reject(f"tests the texts of one conversation more than {MOST_PREDICATES} times")
            self.answers[predicate] = holds(predicate, self.texts[predicate.ref.message, predicate.ref.field])
        return self.answers[predicate]


class Tracer:
    """Traces the template of one call; a `NotCompilableError`, which says why, if it cannot be traced at all."""

    def __init__(self, call: TemplateCall) -> None:
        self.call = call
        self._template, self._meter, self._context = instrumented(call, TracingTemplate)
        self._patience = 1.0  # the fraction of MOST_STEPS that a trace may use
        self.prober = Prober(call)

    def trace(self, shape: Shape, texts: Texts) -> tuple[list[tuple[Predicate, bool]], Leaf]:
        """Trace one conversation, whose texts decide the predicates. Return these with their answers, and the leaf for
        every row of `shape` with the same answers."""
        example = _Example(texts)
        try:
            messages = self._prepared(shape, example)
            self._allow(len(shape))
            leaf: Leaf = self._path(self._template.render({**self._context, "messages": messages}))
        except NotCompilableError as error:
            leaf = ByReference(str(error))
        except (EndlessError, MemoryError) as error:
            # transformers would not return from such a row either, so it is rejected. The next trace of this template
            # will probably not terminate either: stop it earlier.
            self._patience = 0.01
            leaf = Rejected(rejection(error))
            return list(example.answers.items()), leaf
        except Exception as error:
            leaf = raised(error)
        decisions = list(example.answers.items())
        if not isinstance(leaf, ByReference):
            leaf = self.prober.probed(leaf, shape, texts, decisions, lambda t: conversation(shape, t))
        return decisions, leaf

    def check(self, messages: Sequence[Any]) -> None:
        """Execute the template with limits for one conversation that transformers will render without them; an
        `EndlessError` or `MemoryError` if the template exceeds one."""
        try:
            prepared = json.loads(self.call.render(messages, template=_READ_BACK))
            self._allow(len(prepared), 16 * deep_size(prepared))
            self._template.render({**self._context, "messages": prepared})
        except (EndlessError, MemoryError):
            self._patience = 0.01
            raise
        except Exception:  # transformers decides what the reason is
            return

    def _allow(self, messages: int, characters: int = 0) -> None:
        """Sets the limits of one execution of the template."""
        steps = MOST_STEPS + MOST_STEPS_A_PAIR * messages**2
        self._meter.reset(int(steps * self._patience), MOST_SECONDS, characters)

    @staticmethod
    def _path(rendered: Output) -> Path:
        parts = [part._pieces if isinstance(part, Rope) else (part,) if part else () for part in rendered.parts]
        first = [0, *itertools.accumulate(map(len, parts))]  # segment with which each part begins
        generated = rendered.generated and tuple((first[low], first[high]) for low, high in rendered.generated)
        path = Path(tuple(segment for part in parts for segment in part), generated)
        for segment in path.segments:
            literals = [segment] if isinstance(segment, str) else [a for o in segment.operations for a in o.arguments]
            if any("\ud800" <= character <= "\udfff" for text in literals for character in text):
                reject("contains a lone surrogate, which UTF-8 cannot encode")
        return path

    def _prepared(self, shape: Shape, example: _Example) -> Any:
        """Return the messages as the template will see them, with ropes for texts."""
        token = secrets.token_hex(8)
        names = [(k, name) for k, fields in enumerate(shape) for name, value in fields if value == TEXT]
        placeholders = {key: f"gpuload {token} {i}" for i, key in enumerate(names)}
        ropes = {text: Rope(example, (Ref(*key),)) for key, text in placeholders.items()}

        def fill(text: str) -> Any:
            # A placeholder inside a longer string: transformers has already joined or changed it.
            if token in text and text not in ropes:
                raise NotCompilableError("this version of transformers changes texts before the template sees them")
            return ropes.get(text, text)

        return with_texts(json.loads(self.call.render(conversation(shape, placeholders), template=_READ_BACK)), fill)


def instrumented(call: TemplateCall, kind: type[Instrumented]) -> tuple[Instrumented, Meter, Mapping[str, Any]]:
    """The template of a call with symbols for texts, what counts its steps, and its constants; a `NotCompilableError`,
    which says why, if there is none."""
    if reason := call.not_compilable_reason():
        raise NotCompilableError(reason)
    meter = Meter()
    meter.reset(MOST_STEPS, MOST_SECONDS)
    try:
        return kind(call.text(), meter, call.strftime_now), meter, call.context()
    except NotCompilableError:
        raise
    except Exception as error:
        raise NotCompilableError(describe_error(error)) from error


def raised(error: Exception) -> ByReference | Rejected:
    """Return the leaf for an exception that the template raised.

    A Jinja error is the template's rejection of the row; the prober replaces its message by the one that transformers
    gives. Other errors may be caused by symbols, so these rows are rendered by transformers.
    """
    try:
        message = describe_error(error)
    except NotCompilableError:  # str(error) met a rope
        return ByReference("the template raises an error whose message contains a message's text")
    return Rejected(message) if isinstance(error, jinja2.TemplateError) else ByReference(message)
