"""The stages of a load of rows as served on the host.

    render   prompts and answers of all turns as text, by the compiled template where that is possible (`turns.py`);
             rows are those texts that no other one of the conversation begins with
    encode   the rows of all conversations in one call, by columns without what they begin with in common (`pieces.py`).
             The ids of a prompt are those at the beginning of its row if

             1. a token begins where the answer does, and one where what follows it does,
             2. the tokens before it are those of the end of the prompt, from its last special token on. In front of
                that, texts may be cut (`kinds/prefixes.py`), so all before is encoded as in the prompt alone.

Conversations for which this does not hold are encoded by the reference: an answer that begins with a line break, for
example, merges with the one that ends the prompt.
"""

import itertools
import time
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.arrow import as_arrow
from gpuload.core.errors import TokenizerError
from gpuload.core.marks import LOSS
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.conversations import from_arrow, from_rows
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.prompts import BY_PROMPT, attempt, encodable, render_rows
from gpuload.engines.host.render import HostText
from gpuload.engines.host.texts import HostTexts
from gpuload.engines.protocol import ArrowPrompts, Tokenized, add_seconds
from gpuload.kinds.prefixes import cutting_tokens
from gpuload.kinds.served.column_rows import ColumnTurns
from gpuload.kinds.served.columns import ColumnFinder
from gpuload.kinds.served.pieces import RowPieces
from gpuload.kinds.served.programs import TurnPrograms
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.sampled import given_answers, is_sampled, rows_of_given, texts_to_encode
from gpuload.kinds.served.stored import COUNTS, LOST, WITHOUT_THINKING, ServedRows, count_answer
from gpuload.kinds.served.texts import ServedText, TextTurns, byte_count, joined_rows, maximal
from gpuload.kinds.served.turns import NO_BLOCK, TurnWriter, empty_blocks
from gpuload.kinds.training_engine import why_by_row
from gpuload.kinds.training_reference import TOOLS, own_arguments
from gpuload.reference.template_call import TemplateCall
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_messages, is_plain
from gpuload.template.compiler import ChatProgram, known_program
from gpuload.template.program import ByReference, RenderedRow

_TAIL = 512  # characters at the end of a prompt in which its last special token is looked for


class ServedEngine(HostEngine):
    """The `Engine` of a load of rows as served. For the arguments see `HostEngine`."""

    may_be_few = False
    _reference: ServedReference

    def __init__(self, reference: Any, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self._tails: dict[str, tuple[int, ...]] = {}

    @cached_property
    def _calls(self) -> tuple[TemplateCall, TemplateCall]:
        """How the template is called for conversations, and for prompts; a cached tokenizer is not opened for them."""
        return self._reference.call, self._reference.prompting

    @cached_property
    def _writer(self) -> TurnWriter:
        """Finds the turns of rows without arguments of their own."""
        return self._reference.writer_of(self._calls)

    @cached_property
    def _programs(self) -> TurnPrograms:
        """The compiled templates of rows."""
        return TurnPrograms(self._reference, self._calls, self._writer)

    def _new_program(self) -> ChatProgram:
        return known_program(self._reference.call)

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
    def _render(self, prompts: ArrowPrompts) -> HostText:
        column = prompts.column
        if self.by_prompt:
            return render_rows(column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
        columns, rows = self._by_columns(column)
        rejected: dict[int, str] = {}
        reasons: dict[int, str] = {}
        seconds: dict[str, float] = {}
        found: dict[int, TextTurns] = {}
        self._programs.count_kwargs(rows)
        plain = is_plain(column.type)
        done = set() if columns is None else set(columns.numbers.tolist())
        for number, row in enumerate(rows):
            if number in done:
                continue
            if why := self._reference.problem(row):
                rejected[number] = why
                continue
            why_not, started = [] if plain else ["they are not plain data"], time.perf_counter()
            made = attempt(rejected, number, partial(self._turns, why_not=why_not), row)
            if why_not:
                reasons[number] = why_not[0]
                add_seconds(seconds, {why_not[0]: time.perf_counter() - started})
            if made is not None:
                found[number] = made
        if columns is not None and len(columns.numbers) == len(column):
            text = columns.joined
        else:
            texts = ["".join(text for text, _ in found[k].rows) if k in found else None for k in range(len(column))]
            text = as_arrow(texts, pa.large_string())
            if columns is not None:
                order, joined = np.arange(len(column)), columns.joined
                order[columns.numbers] = len(column) + np.arange(len(joined))
                text = pa.concat_arrays([text, joined]).take(as_arrow(order))
        return ServedText(
            columns=columns,
            given=column,
            text=text,
            rejected=rejected,
            by_reference=reasons,
            reason_seconds=seconds,
            conversations=found,
        )

    def _by_columns(self, column: pa.Array) -> tuple[ColumnTurns | None, Sequence[Any]]:
        """The conversations of a column that can be made as a whole, and all of them as Python objects, if some are
        left."""
        rows = None
        found = None
        if self._finder is not None and column.type == JSON_TYPE:
            rows = to_python(column)
            other = {k: "" for k, row in enumerate(rows) if not isinstance(row, list) or self._reference.problem(row)}
            found = self._finder.find(from_rows(HostTexts(), rows, other))
        elif self._finder is not None and is_messages(column.type):
            found = self._finder.find(from_arrow(HostTexts(), column))
            if found is not None and len(found.numbers) == len(column):
                return found, ()
        return found, to_python(column) if rows is None else rows

    @cached_property
    def _finder(self) -> ColumnFinder | None:
        """None for templates of which no answer is known, and for data in which messages decide what is learned."""
        reference, writer = self._reference, self._reference.writer
        loss_on = reference.loss_on
        if loss_on not in ("assistant", "last", "last_turn") or reference.blocks or self.program.not_compilable:
            return None
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        reasoned = [messages[0], {**messages[1], "reasoning_content": "c"}]
        if all(isinstance(writer.turn(each, 1), int) for each in (messages, reasoned)):
            return None
        literals = [token for token in reference.special_texts() if token and writer.stops.fullmatch(token)]
        prompting = self._programs.of(self._calls[1])
        without = next((self._programs.of(call) for call, _ in self._writer.switches), None)
        assert prompting is not None
        apart = [*literals, *empty_blocks(writer.pairs)]
        return ColumnFinder(reference, writer, self.program, prompting, without, apart, self._cutting[0])

    def _turns(self, row: Any, why_not: list[str]) -> TextTurns:
        """The turns of one conversation. `why_not` grows by why transformers renders it."""
        reference, own = self._reference, own_arguments(row)
        messages, wanted = reference.wanted(row)
        calls = self._calls if not own else (reference.call_with(own), reference.call_with(own, prompt_only=True))
        call, tools = calls[0], own.get(TOOLS)
        if not isinstance(tools, list | None):
            why_not.append(why_by_row(row))

        def render(call: TemplateCall, messages: Sequence[Any]) -> str:
            program = None if why_not else self._programs.of(call)
            if program is not None and messages:
                made = program.render_row(messages, tools)
                if isinstance(made, RenderedRow):
                    return made.text
                if isinstance(made, ByReference):
                    why_not.append(made.reason)
            elif not why_not:
                why_not.extend([why_by_row(row)] if messages else [])
            return call.render(messages)

        writer = reference.writer_of(calls, render) if own else self._writer.rendering(render)
        made = TextTurns({}, wanted, messages, call)
        if is_sampled(messages):
            made.sampled = row
            made.given = given_answers(reference, writer, partial(render, calls[1]), messages, wanted)
            for text in texts_to_encode(made.given or (), ""):
                encodable(text)
            why_not.extend([] if made.given is not None else ["they have blocks, and token_ids of some answers only"])
            return made
        for number in wanted:
            turn = writer.turn(messages, number)
            loss = [] if isinstance(turn, int) else reference.loss_in(turn, messages, call)
            made.turns[number] = turn if loss or isinstance(turn, int) else NO_BLOCK
            if not isinstance(turn, int) and loss:
                made.answers.append((turn, 0, loss))
        texts = [encodable(turn.prompt + turn.answer) for turn, *_ in made.answers]
        kept = maximal(texts)
        made.rows = [(texts[k], made.answers[k][0].number) for k in kept]
        for at, (turn, _, loss) in enumerate(made.answers):
            row = next(row for row, k in enumerate(kept) if texts[k].startswith(texts[at]))
            made.answers[at] = turn, row, loss
        return made

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: HostText) -> Tokenized:
        if not isinstance(text, ServedText):
            return super().encode(text)
        found = list(text.conversations.values())
        first = np.cumsum([0, *(len(each.rows) for each in found)])
        rows = as_arrow([row for each in found for row, _ in each.rows], pa.large_string())
        ids = self.ids(rows) if len(rows) else Ragged.from_lists([])
        marked, words = self._marked(found, first, rows, ids), []
        sampled = self._given_rows(found)
        for each, low, answers in zip(found, first[:-1].tolist(), marked, strict=True):
            if each.sampled is not None:
                made = sampled.get(id(each)) or self._reference.rows_of(each.sampled)
            elif answers is None:
                made = self._reference.rows_of_turns(each.turns, each.wanted, each.messages, each.call)
            else:
                made = ServedRows([(ids[low + k], number) for k, (_, number) in enumerate(each.rows)], answers)
                for turn in each.turns.values():
                    if isinstance(turn, int):
                        made.reasons[turn] = made.reasons.get(turn, 0) + 1
                    else:
                        count_answer(made.counts, turn)
            words.append(made.words())
        stored = joined_rows(words)
        numbers = np.array(list(text.conversations), np.int64)
        if text.columns is not None:
            columns, exact = self._of_columns(text.columns), {}
            for at in np.flatnonzero(columns.lengths == 0).tolist():
                (row,) = to_python(text.given.take(as_arrow(text.columns.numbers[[at]])))  # type: ignore[union-attr]
                exact[int(text.columns.numbers[at])] = self._reference.rows_of(row).words()
            stored = Ragged.concatenate([stored, columns, joined_rows(list(exact.values()))])
            numbers = np.concatenate([numbers, text.columns.numbers, np.array(list(exact), np.int64)])
        if np.array_equal(numbers, np.arange(len(text))):
            return text.tokenized(stored)
        order = np.full(len(text), len(stored))
        order[numbers] = np.arange(len(stored))
        empty = Ragged(np.zeros(0, np.int32), np.zeros(2, np.int64))
        return text.tokenized(Ragged.concatenate([stored, empty]).take(order))

    def _given_rows(self, found: Sequence[TextTurns]) -> dict[int, ServedRows | None]:
        """The rows of conversations in which answers have ids of their own, by the `id` of each."""
        reference, some = self._reference, [each for each in found if each.given is not None]
        texts = [texts_to_encode(each.given or (), reference.anchor) for each in some]
        ids = self.ids(as_arrow(list(itertools.chain(*texts)), pa.large_string())) if some else Ragged.from_lists([])
        made, at = {}, 0
        for each, own in zip(some, texts, strict=True):
            made[id(each)] = rows_of_given(reference, each.given or (), each.wanted, ids, at, reference.anchor_size)
            at += len(own)
        return made

    def _of_columns(self, found: ColumnTurns) -> Ragged:
        """What is stored of conversations; nothing where only the reference can make them."""
        _, closing = self._cutting
        pieces = RowPieces.of(found.text, found.shared)
        own = self.ids(pieces.text)
        ids = pieces.joined(own)
        counts = np.diff(found.answer_offsets)
        conversation = np.repeat(np.arange(len(counts)), counts)
        of = found.row_offsets[conversation] + found.row
        places = np.concatenate([found.begin, found.end])
        begin, end = np.split(pieces.beginning(self.spans, own, np.tile(of, 2), places), 2)
        same = np.zeros(len(of), bool)
        for number, literal in enumerate(found.prompt_ends):
            tail = self._tail_of(literal)
            if tail is not None:
                some = np.flatnonzero((found.prompt_end == number) & (begin >= len(tail)))
                at = (ids.offsets[of[some]] + begin[some] - len(tail))[:, None] + np.arange(len(tail))
                same[some] = (ids.values[at] == np.array(tail, ids.values.dtype)).all(axis=1)
        good = same & (begin >= 0) & (end > begin)
        ends = [encoded[0] for token in closing if len(encoded := self._reference.encode(token)) == 1]
        good &= np.isin(ids.values[np.maximum(ids.offsets[of] + end - 1, 0)], np.array(ends, np.int64))
        kept = found.decided & np.logical_and.reduceat(good, found.answer_offsets[:-1])
        edges = np.zeros(len(ids.values) + 1, np.int8)
        marked = good & kept[conversation]
        edges[(ids.offsets[of] + begin)[marked]] = 1
        edges[(ids.offsets[of] + end)[marked]] -= 1
        values = ids.values | np.where(np.cumsum(edges[:-1], dtype=np.int8), LOSS, 0).astype(np.int32)
        answers = np.stack([found.row, begin, end, found.message], axis=1)
        said = np.zeros((len(counts), len(COUNTS)), np.int64)
        for number, which in ((LOST, found.lost), (WITHOUT_THINKING, found.quiet)):
            said[:, number] = np.bincount(conversation, which, len(counts))
        return found.stored(Ragged(values, ids.offsets), answers, said, kept)

    def _marked(
        self, found: Sequence[TextTurns], first: RowNumbers, rows: pa.LargeStringArray, ids: Ragged
    ) -> list[list[tuple[int, int, int, int]] | None]:
        """Sets the bits of tokens with loss, and finds the answers of conversations: row, begin, end and message of
        each. None where only the reference can. `first` (n + 1,) is the number of each conversation's first row."""
        places: list[tuple[int, int, int]] = []  # row, and where the answer begins and ends, in bytes
        tails: list[tuple[int, ...]] = []
        spans: list[tuple[int, int, int, int]] = []  # row, begin, end and bits of what has loss
        usable, (_, closing) = [True] * len(found), self._cutting
        for at, each in enumerate(found):
            for turn, row, loss in each.answers:
                begin = byte_count(turn.prompt)
                end = begin + byte_count(turn.answer)
                # None if only the reference can encode the turn.
                tail = self._tail_of(turn.prompt) if turn.stopped and turn.answer.endswith(closing) else None
                usable[at] &= tail is not None
                tails.append(tail or ())
                places.append((int(first[at]) + row, begin, end))
                bits = self._reference.bits_of(each.wanted[turn.number])
                for low, high in loss:
                    inside, until = (begin + byte_count(turn.answer[:k]) for k in (low, high))
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

    def _tail_of(self, prompt: str) -> tuple[int, ...] | None:
        """The ids of the end of a prompt, from its last special token on; None if it is not near."""
        cuts, _ = self._cutting
        end = prompt[-_TAIL:]
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
