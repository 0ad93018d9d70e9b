"""The compiled templates that render turns: prompts and conversations, with thinking and without."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.turns import SWITCHES, TurnWriter
from gpuload.kinds.training_reference import KWARGS
from gpuload.reference.template_call import TemplateCall
from gpuload.template.compiler import FEWEST_ROWS, ChatProgram, known_program

_MOST_KWARGS = 32  # different arguments of rows for which the template is compiled


class TurnPrograms:
    """Finds compiled templates, for several threads. The calls, and the writer with these calls, are for rows without
    arguments of their own."""

    def __init__(self, reference: ServedReference, calls: tuple[TemplateCall, TemplateCall], writer: TurnWriter):
        self._reference, self._calls = reference, calls
        # Calls that live as long as this object, so that their ids are theirs.
        self._lasting = [*calls, *(call for switched in writer.switches for call in switched)]
        self._known: dict[int, ChatProgram] = {}  # of these calls, by their ids
        self._by_call: dict[str, ChatProgram] = {}
        self._given_kwargs: list[dict[str, Any]] = []  # arguments of many rows
        self._lock = threading.Lock()

    def of(self, call: TemplateCall) -> ChatProgram | None:
        """The template of a call, compiled; None if too few rows have its arguments."""
        if (known := self._known.get(id(call))) is not None:
            return known
        found = known_program(call) if any(call is each for each in self._calls) else self._of_arguments(call)
        if found is not None and any(call is each for each in self._lasting):
            self._known[id(call)] = found
        return found

    def _of_arguments(self, call: TemplateCall) -> ChatProgram | None:
        switch = {name: value for name, value in call.kwargs.items() if name in SWITCHES and value is False}
        kwargs = {name: value for name, value in call.kwargs.items() if name not in switch}
        common = [self._reference.call.kwargs, *self._given_kwargs]
        if all(each not in (kwargs, dict(call.kwargs)) for each in common):
            return None
        call = replace(call, tools=self._reference.call.tools)
        key = repr((call.template, call.kwargs, call.add_generation_prompt))
        with self._lock:
            if key not in self._by_call:
                self._by_call[key] = known_program(call)
            return self._by_call[key]

    def count_kwargs(self, rows: Sequence[Any]) -> None:
        """Finds the `chat_template_kwargs` that many of some rows have."""
        base = self._reference.call.kwargs
        given = [row[KWARGS] for row in rows if isinstance(row, dict) and isinstance(row.get(KWARGS), dict)]
        counts = Counter(map(repr, given))
        for kwargs in {repr(each): each for each in given}.values():
            with self._lock:
                if counts[repr(kwargs)] >= FEWEST_ROWS and len(self._given_kwargs) < _MOST_KWARGS:
                    merged = {**base, **kwargs}
                    self._given_kwargs += [merged] * (merged not in self._given_kwargs)
