"""The stages of a load of rows as served on the host.

    render   prompts and answers of all turns as text, by the compiled template where that is possible (`turns.py`);
             rows are those texts that no other one of the conversation begins with
    encode   the rows of all conversations in one call. The ids of a prompt are those at the beginning of its row if

             1. a token begins where the answer does, and one where what follows it does,
             2. the tokens before it are those of the end of the prompt, from its last special token on. In front of
                that, texts may be cut (`kinds/prefixes.py`), so all before is encoded as in the prompt alone.

Conversations for which this does not hold are encoded by the reference: an answer that begins with a line break, for
example, merges with the one that ends the prompt.
"""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.arrow import as_arrow
from gpuload.core.errors import TokenizerError
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import BY_PROMPT, attempt, render_rows
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Prompts, Tokenized, add_seconds
from gpuload.kinds.prefixes import cutting_tokens
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.stored import LOST, WITHOUT_THINKING, ServedRows
from gpuload.kinds.served.turns import NO_BLOCK, SWITCHES, Turn
from gpuload.kinds.training_engine import encodable, why_by_row
from gpuload.kinds.training_reference import KWARGS, TOOLS, own_arguments
from gpuload.reference.template_call import TemplateCall
from gpuload.sources.columns import to_python
from gpuload.sources.types import is_plain
from gpuload.template.compiler import FEWEST_ROWS, ChatProgram
from gpuload.template.program import ByReference, RenderedRow

_MOST_KWARGS = 32  # different arguments of rows for which the template is compiled
_TAIL = 512  # characters at the end of a prompt in which its last special token is looked for


@dataclass(eq=False)
class TextTurns:
    """The turns of a conversation as text.

    Attributes:
        turns: number of a message → its turn, or why it is not learned.
        wanted, messages, call: as for `ServedReference.rows_of_turns`.
        rows: the texts of its rows, and the message with which each ends.
        answers: of each learned turn, its row and what has loss in it, in characters of the answer.
    """

    turns: dict[int, Turn | int]
    wanted: dict[int, float]
    messages: Sequence[Any]
    call: TemplateCall
    rows: list[tuple[str, int]] = field(default_factory=list)
    answers: list[tuple[Turn, int, list[tuple[int, int]]]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class ServedText(HostText):
    """n conversations; a `protocol.RenderedText`.

    Attributes:
        conversations: row → its turns; rejected rows have none.
    """

    conversations: dict[int, TextTurns] = field(default_factory=dict)


class ServedEngine(HostEngine):
    """The `Engine` of a load of rows as served. For the arguments see `HostEngine`."""

    _reference: ServedReference

    def __init__(self, reference: Any, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self._by_call: dict[str, ChatProgram] = {}
        self._given_kwargs: list[dict[str, Any]] = []  # arguments of many rows
        self._tails: dict[str, tuple[int, ...]] = {}

    @cached_property
    def by_prompt(self) -> bool:
        """Whether the reference does everything: also for a tokenizer that does not say where its tokens are."""
        if self._exact_only or not self._reference.encodes_rendered_text:
            return True
        try:
            return self.spans.table is None
        except TokenizerError:
            return True

    # -- rendering ---------------------------------------------------------------------------------------------------

    @garbage_collection_paused()
    def render(self, prompts: Prompts) -> HostText:
        column: pa.Array = prompts.column  # type: ignore[attr-defined]
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
        rows = to_python(column)
        rejected: dict[int, str] = {}
        reasons: dict[int, str] = {}
        seconds: dict[str, float] = {}
        found: dict[int, TextTurns] = {}
        self._count_kwargs(rows)
        plain = is_plain(column.type)
        for number, row in enumerate(rows):
            if why := self._reference.problem(row) or ("the row is text" if isinstance(row, str) else None):
                rejected[number] = why
                continue
            why_not, started = [] if plain else ["they are not plain data"], time.perf_counter()
            made = attempt(rejected, number, partial(self._turns, why_not=why_not), row)
            if why_not:
                reasons[number] = why_not[0]
                add_seconds(seconds, {why_not[0]: time.perf_counter() - started})
            if made is not None:
                found[number] = made
        texts = ["".join(text for text, _ in found[k].rows) if k in found else None for k in range(len(rows))]
        return ServedText(
            text=as_arrow(texts, pa.large_string()),
            rejected=rejected,
            by_reference=reasons,
            reason_seconds=seconds,
            conversations=found,
        )

    def _turns(self, row: Any, why_not: list[str]) -> TextTurns:
        """The turns of one conversation.

        Args:
            why_not: why transformers renders it; it grows.
        """
        reference, own = self._reference, own_arguments(row)
        messages, wanted = reference.wanted(row)
        call, tools = reference.call_with(own), own.get(TOOLS)
        if not isinstance(tools, list | None):
            why_not.append(why_by_row(row))

        def render(call: TemplateCall, messages: Sequence[Any]) -> str:
            program = None if why_not else self._program_of(call)
            if program is not None and messages:
                made = program.render_row(messages, tools)
                if isinstance(made, RenderedRow):
                    return made.text
                if isinstance(made, ByReference):
                    why_not.append(made.reason)
            elif not why_not:
                why_not.extend([why_by_row(row)] if messages else [])
            return call.render(messages)

        writer = reference.writer_of(own, render)
        made = TextTurns({}, wanted, messages, call)
        for number in wanted:
            turn = writer.turn(messages, number)
            loss = [] if isinstance(turn, int) else reference.loss_in(turn, messages, call)
            made.turns[number] = turn if loss or isinstance(turn, int) else NO_BLOCK
            if not isinstance(turn, int) and loss:
                made.answers.append((turn, 0, loss))
        texts = encodable([turn.prompt + turn.answer for turn, *_ in made.answers])
        kept = _maximal(texts)
        made.rows = [(texts[k], made.answers[k][0].number) for k in kept]
        for at, (turn, _, loss) in enumerate(made.answers):
            row = next(row for row, k in enumerate(kept) if texts[k].startswith(texts[at]))
            made.answers[at] = turn, row, loss
        return made

    def _program_of(self, call: TemplateCall) -> ChatProgram | None:
        """The template of a call, compiled; None if too few rows have its arguments."""
        switch = {name: value for name, value in call.kwargs.items() if name in SWITCHES and value is False}
        kwargs = {name: value for name, value in call.kwargs.items() if name not in switch}
        common = [self._reference.call.kwargs, *self._given_kwargs]
        if all(each not in (kwargs, dict(call.kwargs)) for each in common):
            return None
        call = replace(call, tools=self._reference.call.tools)
        key = repr((call.template, call.kwargs, call.add_generation_prompt))
        with self._lock:
            if key not in self._by_call:
                self._by_call[key] = ChatProgram(call)
            return self._by_call[key]

    def _count_kwargs(self, rows: Sequence[Any]) -> None:
        """Finds the `chat_template_kwargs` that many of some rows have."""
        base = self._reference.call.kwargs
        given = [row[KWARGS] for row in rows if isinstance(row, dict) and isinstance(row.get(KWARGS), dict)]
        counts = Counter(map(repr, given))
        for kwargs in {repr(each): each for each in given}.values():
            with self._lock:
                if counts[repr(kwargs)] >= FEWEST_ROWS and len(self._given_kwargs) < _MOST_KWARGS:
                    merged = {**base, **kwargs}
                    self._given_kwargs += [merged] * (merged not in self._given_kwargs)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: HostText) -> Tokenized:
        if not isinstance(text, ServedText):
            return super().encode(text)
        found = list(text.conversations.values())
        first = np.cumsum([0, *(len(each.rows) for each in found)])
        rows = as_arrow([row for each in found for row, _ in each.rows], pa.large_string())
        ids = self.ids(rows) if len(rows) else Ragged.from_lists([])
        marked, words = self._marked(found, first, rows, ids), []
        for each, low, answers in zip(found, first[:-1].tolist(), marked, strict=True):
            if answers is None:
                made = self._reference.rows_of_turns(each.turns, each.wanted, each.messages, each.call)
            else:
                made = ServedRows([(ids[low + k], number) for k, (_, number) in enumerate(each.rows)], answers)
                for turn in each.turns.values():
                    if isinstance(turn, int):
                        made.reasons[turn] = made.reasons.get(turn, 0) + 1
                    else:
                        made.counts[LOST] += turn.lost
                        made.counts[WITHOUT_THINKING] += turn.without_thinking
            words.append(made.words())
        nothing = np.zeros(0, np.int32)
        by_row = dict(zip(text.conversations, words, strict=True))
        stored = [by_row.get(row, nothing) for row in range(len(text))]
        offsets = np.cumsum([0, *map(len, stored)], dtype=np.int64)
        return text.tokenized(Ragged(np.concatenate([nothing, *stored]), offsets))

    def _marked(
        self, found: Sequence[TextTurns], first: RowNumbers, rows: pa.LargeStringArray, ids: Ragged
    ) -> list[list[tuple[int, int, int, int]] | None]:
        """Sets the bits of tokens with loss, and finds the answers of conversations: row, begin, end and message of
        each. None where only the reference can.

        Args:
            found: conversations.
            first: (n + 1,) the number of the first row of each.
            rows, ids: of all conversations.
        """
        places: list[tuple[int, int, int]] = []  # row, and where the answer begins and ends, in bytes
        tails: list[tuple[int, ...]] = []
        spans: list[tuple[int, int, int, int]] = []  # row, begin, end and bits of what has loss
        usable = [True] * len(found)
        sizes = [[(len(t.prompt.encode()), len((t.prompt + t.answer).encode())) for t, *_ in c.answers] for c in found]
        for at, each in enumerate(found):
            for (turn, row, loss), (begin, end) in zip(each.answers, sizes[at], strict=True):
                tail = self._tail(turn)
                usable[at] &= tail is not None
                tails.append(tail or ())
                places.append((int(first[at]) + row, begin, end))
                bits = self._reference.bits_of(each.wanted[turn.number])
                for low, high in loss:
                    inside, until = (begin + len(turn.answer[:k].encode()) for k in (low, high))
                    spans.append((int(first[at]) + row, inside, until, bits))
        of, begins, stops = np.array(places, np.int64).reshape(-1, 3).T
        starts, ends = np.split(self.spans.beginning(rows, ids, np.tile(of, 2), np.concatenate([begins, stops])), 2)
        loss_rows, lows, highs, weights = np.array(sorted(spans), np.int64).reshape(-1, 4).T
        marks = self.spans.bits(rows, ids, loss_rows, lows, highs, weights.astype(np.int32))
        made: list[list[tuple[int, int, int, int]] | None] = []
        number = itertools.count()
        for at, each in enumerate(found):
            answers = []
            for turn, own, _ in each.answers:
                k = next(number)
                start, stop, tail = int(starts[k]), int(ends[k]), tails[k]
                of_row = ids[int(of[k])]
                same = len(tail) <= start and tuple(of_row[start - len(tail) : start].tolist()) == tail
                usable[at] &= start >= 0 and stop > start and same
                answers.append((own, start, stop, turn.number))
            made.append(answers if usable[at] else None)
        ids.values[:] |= marks
        return made

    def _tail(self, turn: Turn) -> tuple[int, ...] | None:
        """The ids of the end of a prompt, from its last special token on; None if only the reference can encode the
        turn."""
        cuts, closing = self._cutting
        if not turn.stopped or not turn.answer.endswith(closing):
            return None
        end = turn.prompt[-_TAIL:]
        place = max((end.rfind(token) for token in cuts), default=-1)
        if place < 0:
            return None
        text = end[place:]
        if text not in self._tails:
            self._tails[text] = tuple(self._reference.encode(text))
        return self._tails[text]

    @cached_property
    def _cutting(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The special tokens in front of which texts may be cut, and those behind which they may be cut, too: no longer
        one begins with them."""
        reference = self._reference
        special = [token for token in reference.special_texts() if token]
        texts = [reference.template_text, *(token for token in special if reference.writer.stops.fullmatch(token))]
        cuts = tuple(token.decode() for token in cutting_tokens(reference, texts))
        longer = [token for token in cuts if any(one != token and one.startswith(token) for one in special)]
        return cuts, tuple(token for token in cuts if token not in longer)


def _maximal(texts: Sequence[str]) -> list[int]:
    """The texts that no other one begins with, of equal ones the first: their numbers, ascending."""
    order = sorted(range(len(texts)), key=lambda k: (texts[k], -k))
    # Among texts in order, those that begin with one follow it directly.
    found = [k for k, after in itertools.pairwise(order) if not texts[after].startswith(texts[k])]
    return sorted(found + order[-1:])
