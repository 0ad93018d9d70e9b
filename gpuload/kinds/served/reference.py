"""The tokenizer of a load of rows as served: what it makes of a conversation. The definition of every token.

ids(P), ids(A)   F = ids(P + A). If F starts with ids(P), the rest are the answer's; otherwise both are encoded by
                 themselves, the answer as what follows a special token
S                ids of P and A; rows are made of them by `ServedRows.of`
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from gpuload.core.errors import TokenizerError
from gpuload.core.marks import loss_bits
from gpuload.core.options import History, LossOn, MissingReasoning
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.served.sampled import is_sampled, rows_of_sampled, sampled_problem
from gpuload.kinds.served.stored import LearnedAnswer, ServedRows, count_answer, holds
from gpuload.kinds.served.turns import NO_BLOCK, Turn, TurnWriter
from gpuload.kinds.training_reference import messages_in, own_arguments
from gpuload.reference.mask_rules import mask_rules
from gpuload.reference.template_call import TemplateCall
from gpuload.reference.volatile import Clock
from gpuload.template.answers import has_blocks
from gpuload.template.loss_marks import weights_of


class ServedReference(ChatReference):
    """As `ChatReference`; the ids of a conversation are those of its rows, as they are stored (`stored.py`). For the
    arguments see that, and `load_chats`."""

    def __init__(
        self,
        tokenizer: Any,
        loss_on: LossOn,
        weights: Sequence[float] = (),
        *,
        missing_reasoning: MissingReasoning = "prompt",
        serving_template: str | None = None,
        thinking: tuple[str, str] | None = None,
        history: History = "rendered",
        **settings: Any,
    ):
        super().__init__(tokenizer, loss_on, weights, **settings)
        assert self.uses_template
        self.missing_reasoning, self.thinking, self.history = missing_reasoning, thinking, history
        self.serving_template = None
        if serving_template is not None:
            self.serving_template = self._template(serving_template, "serving_template")
            if wrong := self.prompting.syntax_error():
                raise TokenizerError(f"serving_template=...: {wrong}: correct the template")

    @property
    def prompting(self) -> TemplateCall:
        """How prompts are rendered."""
        template = self.call.template if self.serving_template is None else self.serving_template
        return replace(self.call, template=template, add_generation_prompt=True)

    @property
    def answers(self) -> None:
        """Rendering need not find answers: they begin behind prompts."""
        return None

    @property
    def template_text(self) -> str:
        own = super().template_text
        return own if self.serving_template is None else f"{own}\n{self.prompting.text()}"

    @cached_property
    def writer(self) -> TurnWriter:
        """Finds the turns of rows without arguments of their own."""
        return TurnWriter(self.call, self.prompting, self.missing_reasoning, self.thinking)

    def writer_of(
        self,
        calls: tuple[TemplateCall, TemplateCall],
        render: Callable[[TemplateCall, Sequence[Any]], str] | None = None,
    ) -> TurnWriter:
        """Finds the turns of rows, whose conversations and prompts are rendered by these calls: see `TurnWriter`."""
        return TurnWriter(*calls, self.missing_reasoning, self.thinking, self.writer.stops, render)

    def at(self, instant: Any) -> Self:
        other = super().at(instant)
        other.__dict__.pop("writer", None)  # it has the other time of day
        return other

    @cached_property
    def blocks(self) -> bool:
        """Whether the template says which parts of an answer are learned."""
        return has_blocks(self.call.text())

    @contextmanager
    def clock_stopped(self) -> Iterator[Clock | None]:
        with ExitStack() as stack:
            clock = stack.enter_context(self.call.clock_stopped())
            own = stack.enter_context(self.prompting.clock_stopped()) if self.serving_template is not None else None
            yield clock or own

    def wanted(self, prompt: Any) -> tuple[list[Any], dict[int, float]]:
        """The messages of a row, and which of them are to be learned, see `wanted_in`."""
        return wanted_in(prompt, self.loss_on)

    def bits_of(self, weight: float) -> int:
        """The bits of tokens with loss of some weight."""
        number = 0 if weight == 1 else int(np.searchsorted(self.weights, weight)) + 1
        return int(loss_bits(number))

    def problem(self, prompt: Any) -> str | None:
        if reason := super().problem(prompt):
            return reason
        messages = messages_in(prompt)
        if isinstance(messages, str):
            return _TEXT
        return sampled_problem(messages, len(self.tokenizer)) if is_sampled(messages) else None

    def ids(self, prompt: Any) -> list[int]:
        """The rows of one conversation, as they are stored."""
        if isinstance(messages_in(prompt), str):
            raise ValueError(_TEXT)
        found: list[int] = self.rows_of(prompt).words().tolist()
        return found

    def compared_in_part(
        self, prompt: Any, found: list[int], below: Callable[[int], int]
    ) -> tuple[list[int], list[int]]:
        """Of a conversation with several answers one is made, at random. If it is not as it was found, all are."""
        messages, wanted = self.wanted(prompt)
        if len(wanted) < 2 or is_sampled(messages):
            return self.compared(prompt, found)
        (call, _), writer = self._writing(prompt)
        number = list(wanted)[below(len(wanted))]
        made, _ = self._learned(writer.turn(messages, number), wanted[number], messages, call)
        return (found, found) if holds(found, list(wanted), number, made) else self.compared(prompt, found)

    def _writing(self, prompt: Any) -> tuple[tuple[TemplateCall, TemplateCall], TurnWriter]:
        """How a row and its prompts are rendered, and what finds its turns."""
        own = own_arguments(prompt)
        calls = self.call_with(own), self.call_with(own, prompt_only=True)
        return calls, self.writer_of(calls) if own else self.writer

    def rows_of(self, prompt: Any) -> ServedRows:
        """The rows of one conversation."""
        messages, wanted = self.wanted(prompt)
        calls, writer = self._writing(prompt)
        if is_sampled(messages):
            return rows_of_sampled(self, calls, writer, messages, wanted)
        return self.rows_of_turns(
            {number: writer.turn(messages, number) for number in wanted}, wanted, messages, calls[0]
        )

    def rows_of_turns(
        self,
        turns: Mapping[int, Turn | int],
        wanted: Mapping[int, float],
        messages: Sequence[Any],
        call: TemplateCall,
    ) -> ServedRows:
        """The rows of one conversation, whose messages and call are for templates with blocks.

        Args:
            turns: number of a message → its turn, or why it is not learned.
            wanted: number of a message → weight of the loss.
        """
        found: list[LearnedAnswer | int] = []
        counts = ServedRows().counts
        for number, turn in turns.items():
            made, merged = self._learned(turn, wanted[number], messages, call)
            if isinstance(turn, Turn) and isinstance(made, LearnedAnswer):
                count_answer(counts, turn, merged)
            found.append(made)
        return ServedRows.of(found, counts)

    def _learned(
        self, turn: Turn | int, weight: float, messages: Sequence[Any], call: TemplateCall
    ) -> tuple[LearnedAnswer | int, bool]:
        """As `answer`, of a turn. In the place of an answer that is not learned is the number of the reason."""
        if isinstance(turn, int):
            return turn, False
        answer, merged = self.answer(turn, self.loss_in(turn, messages, call), self.bits_of(weight))
        return (answer if answer.bits.any() else NO_BLOCK), merged

    def loss_in(self, turn: Turn, messages: Sequence[Any], call: TemplateCall) -> list[tuple[int, int]]:
        """Which parts of an answer have loss, in its characters: `{% generation %}` blocks only narrow it."""
        if not self.blocks or turn.start is None:
            return [(0, len(turn.answer))]
        text, blocks = call.blocks(messages[: turn.number + 1])
        if text != turn.rendered:
            return []
        found = [(max(start - turn.start, 0), min(end - turn.start, len(turn.answer))) for start, end in blocks]
        if mask_rules().overlapping and any(start < end for start, end in found):
            return [(start, end) for start, end in found if start <= end]  # an empty one may be inside of a token
        return [(start, end) for start, end in found if start < end]

    def answer(self, turn: Turn, loss: Sequence[tuple[int, int]], bits: int) -> tuple[LearnedAnswer, bool]:
        """An answer behind its prompt as ids, and whether both were encoded by themselves."""
        prompt = self.encode(turn.prompt)
        encoded = self.calling(turn.prompt + turn.answer, add_special_tokens=False)
        ids, begin, shift = list(encoded["input_ids"]), len(prompt), len(turn.prompt)
        merged = ids[:begin] != prompt
        if merged:
            before = self.anchor
            encoded = self.calling(before + turn.answer, add_special_tokens=False)
            skipped = self.anchor_size
            answer, shift = list(encoded["input_ids"])[skipped:], len(before)
            ids, begin = prompt + answer, len(prompt)
        found = np.zeros(len(ids) - begin, np.int32)
        if loss == [(0, len(turn.answer))]:
            found[:] = bits
        elif mask_rules().overlapping:
            offsets = np.array(encoded.encodings[0].offsets, np.int64).reshape(-1, 2)
            low, high = offsets[len(offsets) - len(found) :].T - shift
            for start, end in loss:
                found[(low < end) & (high > start)] = bits
        else:
            first = begin if not merged else skipped
            for start, end in loss:
                low, high = encoded.char_to_token(shift + start), encoded.char_to_token(shift + end - 1)
                if low is not None:
                    found[max(low - first, 0) : len(found) if high is None else high + 1 - first] = bits
        return LearnedAnswer(turn.number, np.array(ids, np.int32), begin, found), merged

    def encode_behind(self, text: str) -> list[int]:
        """The ids of text behind a special token."""
        return self.encode(self.anchor + text)[self.anchor_size :]

    @cached_property
    def anchor(self) -> str:
        """A special token behind which text is encoded as in the middle of another text; empty if there is none."""
        token = str(self.tokenizer.eos_token or "")
        return token if token and len(self.encode(token)) == 1 else ""

    @property
    def anchor_size(self) -> int:
        """How many ids the anchor has."""
        return 1 if self.anchor else 0

    @property
    def variant(self) -> str:
        served = repr((self.missing_reasoning, self.serving_template, self.thinking, self.history))
        return f"{super().variant} as served 3 {served}"


_TEXT = "the row is text, not a conversation"


def wanted_in(prompt: Any, loss_on: LossOn) -> tuple[list[Any], dict[int, float]]:
    """The messages of a row, and which of them are to be learned: number → weight of the loss. Texts have none."""
    first = 0
    if isinstance(prompt, dict) and "prompt" in prompt:
        messages, first = prompt["prompt"] + prompt["completion"], len(prompt["prompt"])
    else:
        messages = prompt["messages"] if isinstance(prompt, dict) else prompt
    if isinstance(messages, str):
        return [], {}
    weights = weights_of(messages) if loss_on == "marked" else [1.0] * len(messages)
    wanted = [k for k, message in enumerate(messages) if k >= first and message.get("role") == "assistant"]
    if loss_on == "last":
        wanted = wanted[-1:]
    elif loss_on == "last_turn":
        users = [k for k, message in enumerate(messages) if message.get("role") == "user"]
        wanted = [k for k in wanted if not users or k > users[-1]]
    return messages, {k: weights[k] for k in wanted if weights[k]}
