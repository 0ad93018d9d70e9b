"""Rows of any shape: rendered by the functions of an automaton that grows, and compared with transformers.

A row goes through the functions (`functions.py`). Where no row has been yet, the template is executed for this row with
symbols in place of its messages (`recorder.py`), and what it did is added. Nothing of this is trusted:

- Each row that is traced is rendered by transformers, too, and so are rows like it with adversarial texts.
- So is each row in which a pass of a loop follows another one for the first time.

After one difference, transformers renders all rows.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpuload.reference.deadline import EndlessError
from gpuload.reference.template_call import READ_BACK, Changes, TemplateCall, describe_error, rejection, without_none
from gpuload.reference.template_source import vendor_environment
from gpuload.template.answers import UNSEEN, Answers, first_unseen, has_blocks, spans_in_bytes
from gpuload.template.automaton.environment import RecordingTemplate
from gpuload.template.automaton.functions import Functions
from gpuload.template.automaton.nodes import Automaton
from gpuload.template.automaton.printed import blocks_of, parts_of
from gpuload.template.automaton.recorder import NotDeterministicError, Recorder
from gpuload.template.known import TOOL, KnownTemplates, identity
from gpuload.template.marks import UnknownAnswersError
from gpuload.template.probe import ADVERSARIAL
from gpuload.template.program import ByReference, Rejected, RenderedRow
from gpuload.template.symbol import NotCompilableError
from gpuload.template.trace import MOST_SECONDS, MOST_STEPS, instrumented, raised

FREE_TRACES, ROWS_PER_TRACE = 256, 16
"""So many rows are traced whatever they bring, and then one in so many rows. A trace costs as much as rendering some
dozen rows with transformers."""

PROBED_TEXTS, MOST_PROBES = 400, 48
"""For each row that is traced, so many texts are replaced by adversarial ones, in rows that are compared; in fewer rows
after the first traces."""

MOST_KNOWN = 4
"""For so many templates, what was learned is kept for later loads."""

REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))
_NO_WAY = "more paths through the template than are traced"
BEGIN, END = -1, -2

Row = dict[str, Any]
"""The variables of the template that differ from row to row."""


@dataclass
class _Progress:
    """What has become of the rows so far."""

    wrong: str | None = None  # why transformers renders all rows
    rows: int = 0  # rendered
    traces: int = 0
    verified: int = 0  # compared with transformers


class RowRenderer:
    """Renders conversations of any shape, each of which may have tools of its own. Several threads may do so at once.

    Raises:
        NotCompilableError: this template cannot be recorded at all.
    """

    def __init__(self, call: TemplateCall, answers: Answers | None = None, own_tools: bool = False) -> None:
        self._template, self._meter, self._context = instrumented(call, RecordingTemplate)
        if call.sanitizes:
            raise NotCompilableError("control tokens are marked row by row in such messages")
        if own_tools and replace(call, tools=[TOOL]).text() != replace(call, tools=None).text():
            raise NotCompilableError("the tokenizer has another template for tools")
        self._call, self._answers, self._own_tools = call, answers, own_tools
        self._changes = call.changes
        environment = vendor_environment()
        assert environment is not None  # there is a template
        self._tojson = environment.filters["tojson"]
        self._automaton = Automaton()
        self._blocks = answers is not None and has_blocks(call.text())
        contents = answers is not None and not self._blocks
        self._functions = Functions(self._automaton, self._tojson, self._blocks, contents)
        self._seen: set[tuple[int, int]] = set()  # passes of loops that follow each other in a row that was compared
        self._random = random.Random(0)
        self._lock = threading.RLock()
        self._progress = _Progress()

    def of_call(self, call: TemplateCall, answers: Answers | None) -> RowRenderer:
        """The same for another load with the same template and constants."""
        other = copy.copy(self)
        other._call, other._answers = call, answers
        return other

    @property
    def wrong(self) -> str | None:
        return self._progress.wrong

    @property
    def known(self) -> tuple[Automaton, set[tuple[int, int]]] | None:
        """The automaton, and the pairs of nodes at which passes end, one after the other, in rows that were compared:
        for engines that send many rows through it at once. None if rows need more than what is printed."""
        whole = self._answers is None or self._answers.loss_on == "assistant"
        return (self._automaton, self._seen) if whole and not self.wrong else None

    def count_rows(self, rows: int) -> None:
        """Counts rows that an engine has rendered."""
        self._progress.rows += rows

    @property
    def traces(self) -> int:
        return self._progress.traces

    @property
    def verified(self) -> int:
        return self._progress.verified

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> RenderedRow | Rejected | ByReference:
        """Renders one conversation: plain data, as `json.loads` returns it, with its tools if it has `own_tools`. Or
        says why the template rejects it, or transformers must render it."""
        self._progress.rows += 1
        row: Row = {"messages": prepared(messages, self._changes)} | ({"tools": tools} if self._own_tools else {})
        while not self.wrong:
            out, blocks, trail, (end, reason) = self._walk(row)
            if end == "reference":
                return ByReference(reason)
            if end == "raise":
                return Rejected(reason)
            if end == "end":
                try:
                    made = self._made(messages, row, out, blocks)
                except UnknownAnswersError as error:
                    return ByReference(str(error))
                if self._seen.issuperset(_pairs(trail)):
                    return made
                with self._lock:
                    self._verify(messages, row, made, trail)
                continue
            with self._lock:
                if why_not := self._trace(messages, row):
                    return ByReference(why_not)
                if self._walk(row)[-1][0] == "open":
                    return ByReference("the template is not deterministic")
        return ByReference(self.wrong)

    def _of_row(self, row: Row) -> TemplateCall:
        """How transformers renders a row."""
        return replace(self._call, tools=row["tools"]) if self._own_tools else self._call

    def _walk(self, row: Row) -> tuple[list[str], list[int], list[int], tuple[str, str]]:
        """`Functions.walk`. What fails is for transformers: data such as JSON that is nested too deep."""
        try:
            return self._functions.walk(row)
        except Exception:  # maybe another thread has added a trace meanwhile
            with self._lock:
                try:
                    return self._functions.walk(row)
                except Exception as error:
                    return [], [], [], ("reference", describe_error(error))

    def _made(self, messages: Sequence[Mapping[str, Any]], row: Row, out: list[str], blocks: list[int]) -> RenderedRow:
        """A row's text and its parts with loss, from what was printed."""
        if self._answers is None:
            return RenderedRow("".join(out), [])
        text = "".join(out)
        if self._blocks and blocks and first_unseen(out[: blocks[0]]):
            raise UnknownAnswersError(UNSEEN)
        if self._blocks and self._answers.loss_on == "assistant":
            return RenderedRow(text, spans_in_bytes(text, blocks_of(out, blocks)))
        known: dict[str, Any] = (
            {"blocks": blocks_of(out, blocks)} if self._blocks else {"parts": parts_of(messages, out)}
        )
        render = partial(self._text, row)
        return RenderedRow(text, self._answers.in_bytes(messages, text, render=render, **known))

    def _text(self, row: Row, messages: list[Any]) -> str:
        """A row with other messages, as transformers renders it; an `UnknownAnswersError` if it does not: maybe the row
        itself, which has not been compared yet, is rendered neither."""
        out, _, trail, (end, _) = self._walk({**row, "messages": prepared(messages, self._changes)})
        if end == "end" and self._seen.issuperset(_pairs(trail)):
            return "".join(out)
        try:
            return self._of_row(row).render(messages)
        except Exception as error:
            raise UnknownAnswersError(describe_error(error)) from error

    def _verify(self, messages: Sequence[Any], row: Row, made: RenderedRow, trail: Sequence[int]) -> None:
        """Compares a row with transformers."""
        self._progress.verified += 1
        call = self._of_row(row)
        try:
            same = call.render(messages) == made.text
            if same and self._answers is not None:
                same = self._answers.with_call(call).in_bytes(messages, made.text) == made.answers
        except UnknownAnswersError:
            pass  # only the parts of the automaton show where the answers are
        except Exception:
            same = False
        if same:
            self._seen.update(_pairs(trail))
        else:
            self._progress.wrong = "the automaton of the template and transformers differ"

    def _trace(self, messages: Sequence[Any], row: Row, probes: bool = True) -> str | None:
        """Adds what the template does for a row. Returns why transformers must render it, or None."""
        if self._walk(row)[-1][0] != "open":  # another thread has traced it meanwhile
            return self.wrong
        if self.traces >= max(FREE_TRACES, self._progress.rows // ROWS_PER_TRACE):
            return _NO_WAY
        self._progress.traces += 1
        try:
            seen = json.loads(self._of_row(row).render(messages, template=READ_BACK))
            # As texts: keys in their order, and NaN is equal to NaN.
            if json.dumps(seen) != json.dumps([row["messages"], row.get("tools", seen[1])]):
                self._progress.wrong = "this version of transformers changes messages before the template sees them"
        except Exception as error:
            return describe_error(error)
        if self.wrong:
            return self.wrong
        self._meter.reset(MOST_STEPS, MOST_SECONDS)
        recorder = Recorder(self._automaton, row, self._tojson)
        try:
            try:
                self._template.run(recorder, self._context)
                end: tuple[str, ...] = ("end",)
            except NotDeterministicError:
                raise
            except NotCompilableError as error:
                end = ("reference", str(error))
            except (EndlessError, MemoryError) as error:
                end = ("reference", rejection(error))
            except Exception as error:
                end = self._raised(error, messages, row)
            recorder.record(end)
        except NotDeterministicError:
            self._progress.wrong = "the template is not deterministic"
        self._functions.changed(recorder.changed)
        if probes:
            self._probe_like(messages, row)
        return self.wrong

    def _probe_like(self, messages: Sequence[Any], row: Row) -> None:
        """Compares rows like this one, with adversarial texts."""
        most = MOST_PROBES if self.traces < 32 else 2
        texts = [*ADVERSARIAL, *_around(self._automaton)]
        replaced = 0
        for _ in range(most):
            if self.wrong or replaced >= PROBED_TEXTS:
                break
            other, count = _with_other_texts(messages, texts, self._random)
            replaced += max(1, count)
            self._probe(other, {**row, "messages": prepared(other, self._changes)})

    def _raised(self, error: Exception, messages: Sequence[Any], row: Row) -> tuple[str, str]:
        """How the path of an exception ends. The reason for a rejection is that of transformers."""
        leaf = raised(error)
        if isinstance(leaf, ByReference):
            return "reference", leaf.reason
        try:
            self._of_row(row).render(messages)
        except Exception as truth:
            return "raise", rejection(truth)
        return "reference", "the trace was rejected, but the template accepts such rows"

    def _probe(self, messages: Sequence[Any], row: Row) -> None:
        """Compares a row with adversarial texts with transformers."""
        if self._walk(row)[-1][0] == "open" and self._trace(messages, row, probes=False):
            return
        out, blocks, trail, (end, reason) = self._walk(row)
        if end == "end":
            try:
                self._verify(messages, row, self._made(messages, row, out, blocks), trail)
            except UnknownAnswersError:
                return
        elif end == "raise":
            try:
                self._of_row(row).render(messages)
            except Exception as error:
                if rejection(error) == reason:
                    return
            self._progress.wrong = "the automaton of the template and transformers differ in what they reject"


def row_renderer(call: TemplateCall, answers: Answers | None, own_tools: bool) -> RowRenderer:
    """As `RowRenderer`; what earlier loads of this process have learned of the same template and constants is used."""
    if (constants := identity(call, own_tools)) is None:
        return RowRenderer(call, answers, own_tools)
    key = (*constants, None if answers is None else answers.loss_on)
    if (known := _known.get(key)) is None:
        known = RowRenderer(call, answers, own_tools)
        _known.keep(key, known.of_call(call, None))
    elif reason := call.not_compilable_reason():
        raise NotCompilableError(reason)
    return known.of_call(call, answers)


_known = KnownTemplates(MOST_KNOWN)


def prepared(messages: Sequence[Any], changes: Changes) -> Sequence[Any]:
    """Messages as transformers gives them to the template. Each row that is traced is compared with transformers."""
    if changes.drops_none and any(None in message.values() for message in messages):
        messages = without_none(messages)
    if not changes.fills_reasoning or all(map(REASONING.isdisjoint, messages)):
        return messages
    found = []
    for message in messages:
        names = [name for name in ("reasoning_content", "thinking", "reasoning") if message.get(name) is not None]
        reasoning = message[names[0]] if names else None
        found.append({"thinking": reasoning, **message, "reasoning_content": reasoning} if names else message)
    return found


def _pairs(trail: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise((BEGIN, *trail, END))


def _around(automaton: Automaton) -> list[str]:
    """Texts around what the template has looked for so far."""
    asked = [node.instruction[1] for node in automaton.nodes if node.instruction and node.instruction[0] == "ask"]
    marks = dict.fromkeys(predicate.value for predicate in asked if predicate.value)
    return [text for mark in marks for text in (mark, f"{mark}x", f"x {mark}", f"\n{mark} a {mark}\n")]


def _with_other_texts(messages: Sequence[Any], texts: Sequence[str], draw: random.Random) -> tuple[list[Any], int]:
    """The same messages with adversarial texts in some places, and how many."""
    replaced = 0

    def other(value: Any, name: str = "") -> Any:
        nonlocal replaced
        if isinstance(value, str):
            if name in ("role", "type") or draw.random() < 0.25:
                return value
            replaced += 1
            return draw.choice(texts)
        if isinstance(value, dict):
            return {key: other(each, key) for key, each in value.items()}
        return [other(each) for each in value] if isinstance(value, list) else value

    return [other(message) for message in messages], replaced
