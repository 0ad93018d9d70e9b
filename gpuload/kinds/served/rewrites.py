"""Whether one row per conversation has its answers as inference would have them: looked up in a sample, for reports.

A template that rewrites no history in a few short conversations is not looked at any further.
"""

import re
import time
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gpuload.core.arrays import RowNumbers
from gpuload.core.options import Verify
from gpuload.engines.protocol import Prompts
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.served.reference import wanted_in
from gpuload.kinds.served.turns import OPENED, OTHER, TurnWriter
from gpuload.kinds.training_reference import own_arguments
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source

_ROWS, _SECONDS, _ROW_BYTES = 32, 0.03, 64 << 10

_ASK: dict[str, Any] = {"role": "user", "content": "q"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "a"}
_THOUGHT = _ANSWER | {"reasoning_content": "r"}
_FUNCTION = {"name": "f", "arguments": {"x": "y"}}
_CALL = _THOUGHT | {"tool_calls": [{"type": "function", "id": "call00001", "function": _FUNCTION}]}
_RESULT: dict[str, Any] = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "t"}
_PROBES = (
    [_ASK, _ANSWER, _ASK, _ANSWER],
    [_ASK, _THOUGHT, _ASK, _THOUGHT],
    [_ASK, _CALL, _RESULT, _ANSWER, _ASK, _ANSWER],
)


class RewriteFinder:
    """Looks for conversations whose answers are not learned as inference would have them. Used by one thread at a time.

    In the mode "off", none are looked at; otherwise at most 32 of the rows of a load, for at most 0.03 seconds. `found`
    are those of them with such answers.
    """

    check: ClassVar[str] = "answers rewritten"

    def __init__(self, mode: Verify, reference: ChatReference, rows: int):
        self._on = mode != "off" and reference.uses_template and reference.loss_on != "all"
        self._reference, self._share, self._due, self._seconds = reference, _ROWS / max(rows, 1), 0.0, _SECONDS
        self._rng, self._probed = np.random.default_rng(0), False
        self._looked = self.found = 0
        self._example = ""

    def look(self, source: Source, numbers: RowNumbers, prompts: Prompts, sizes: RowNumbers) -> None:
        """See `Finder`."""
        if self._on and not self._probed:
            self._on, self._probed = any(self._differs(each, all_of_them=True) for each in _PROBES), True
        if not self._on or self._seconds <= 0:
            return
        began = time.thread_time()
        usable = np.flatnonzero((sizes >= 0) & (sizes <= _ROW_BYTES))
        self._due += self._share * len(sizes)
        rows = np.sort(self._rng.permutation(usable)[: int(np.ceil(self._due))])
        self._due -= len(rows)
        sample = to_python(prompts.to_arrow(rows))
        for at in self._rng.permutation(len(rows)).tolist():  # the time may be over before the last one
            if time.thread_time() - began > self._seconds:
                break
            row, known = rows[at], self._differs(sample[at])
            self._looked += known is not None
            if known:
                self.found += 1
                self._example = self._example or f"{source.name} row {numbers[row]}"
        self._seconds -= time.thread_time() - began

    @property
    def notes(self) -> list[str]:
        """For the report: what was found."""
        if not self.found:
            return []
        return [
            f"{self.found:,} of {self._looked:,} conversations in a sample have answers that inference would not have "
            f"behind the same prompt, because the template rewrites history, for example {self._example}: "
            "turns='served' (docs/served.md)"
        ]

    @cached_property
    def _stops(self) -> re.Pattern[str]:
        return TurnWriter(self._reference.call, self._reference.prompting).stops

    def _differs(self, prompt: Any, all_of_them: bool = False) -> bool | None:
        """Whether an answer with loss is learned otherwise than inference would have it; None if there is none, or
        nothing is known about it."""
        reference, own = self._reference, own_arguments(prompt)
        messages, wanted = wanted_in(prompt, "assistant" if all_of_them else reference.loss_on)
        call, prompting = reference.call_with(own), reference.call_with(own, prompt_only=True)
        writer = TurnWriter(call, prompting, known_stops=self._stops)
        try:
            whole = call.render(messages) if wanted else None
        except Exception:
            whole = None
        if whole is None:
            return None
        turns = [writer.turn(messages, number) for number in wanted]
        return any(
            turn in (OTHER, OPENED) if isinstance(turn, int) else not whole.startswith(turn.prompt + turn.answer)
            for turn in turns
        )
