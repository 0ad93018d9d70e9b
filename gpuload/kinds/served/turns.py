"""What inference would have seen: prompt and answer of each turn of a conversation, as text. The definition, row-wise.

For the assistant's message t of a conversation:

    P   render(messages[:t], add_generation_prompt=True), the prompt
    R   render(messages[:t + 1], add_generation_prompt=False)
    A   the answer: what the model would have had to write behind P to say the same

    (a) R starts with P. A is the rest, up to and with the first stop token that the template writes. Without one, A is
        all of the rest.
    (b) P ends with an opened thinking block, and without it is what R starts with. A is the reasoning, the closing
        literal and the rest of R.
    (c) P ends with an empty thinking block, and R starts with what is before it, and goes on without one, as with
        Gemma 4 31B. A is the rest of R.
    (d) Otherwise nothing is known about the answer, and the turn is not learned.

Nothing here is fast. Verification and tests compare with it.
"""

import copy
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from gpuload.core.options import MissingReasoning
from gpuload.reference.template_call import TemplateCall
from gpuload.template.marks import texts_in, with_texts

REASONS = (
    "the prompt is not what the template writes before the answer",
    "the template rejects the prompt, or the conversation up to the answer",
    "the prompt opens a thinking block that the template does not write with the answer: pass thinking=(open, close)",
    "the answer has no reasoning, and the template has no prompt without thinking that is written before it",
    "the answer has no reasoning (missing_reasoning='skip')",
    "the text of the answer has a stop token, and the template changes that text",
    "the template writes nothing for the answer",
    "no token of the answer is in a {% generation %} block",
    "its prompt_token_ids are not those of the prompt",
    "its token_ids are empty",
)
"""Why a turn is not learned. Stored tokens have the number: new reasons come last."""

OTHER, FAILS, OPENED, NO_SWITCH, SKIPPED, STOP_IN_TEXT, NOTHING, NO_BLOCK, OTHER_IDS, NO_IDS = range(len(REASONS))

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Literals with which templates open and close the reasoning of an answer."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of messages with reasoning."""

SWITCHES = ("enable_thinking", "thinking")  # arguments of templates that are false for prompts without thinking
_STOPS = ("<|eom_id|>", "<|eot_id|>", "<|call|>", "<|return|>")  # some are written next to calls of tools only
_FILLER = "\ue000"
_NEAR = 256  # characters around the place where an answer begins


@dataclass(frozen=True)
class Turn:
    """A turn as inference would have it."""

    number: int  # of the message with the answer
    prompt: str  # P
    answer: str  # A
    start: int | None  # the place of `answer` in R, in characters; None if it is not a part of R
    rendered: str  # R
    without_thinking: bool = False  # P is that of the template's switch for prompts without thinking
    lost: bool = False  # the message has reasoning that A lacks
    stopped: bool = True  # A ends with a stop token
    empties: bool = False  # A has an empty thinking block, which is in the text of the message


@dataclass(eq=False)
class TurnWriter:
    """Finds the turns of a conversation."""

    call: TemplateCall  # how whole conversations are rendered
    serving: TemplateCall  # how prompts are rendered; with generation prompt
    missing_reasoning: MissingReasoning = "prompt"
    # The literals that open and close the reasoning, white space included; None if nobody has said so.
    thinking: tuple[str, str] | None = None
    known_stops: re.Pattern[str] | None = None  # if they were found before
    render: Callable[[TemplateCall, Sequence[Any]], str] | None = None  # renders messages; None for transformers

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Literals that may open and close the reasoning, without white space around them."""
        own = ((self.thinking[0].strip(), self.thinking[1].strip()),) if self.thinking else ()
        return (*own, *THINKING)

    @cached_property
    def stops(self) -> re.Pattern[str]:
        """Finds stop tokens."""
        if self.known_stops is None:
            tokens = sorted(stop_tokens(self.call), key=len, reverse=True)
            return re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        return self.known_stops

    def _render(self, call: TemplateCall, messages: Sequence[Any]) -> str:
        return call.render(messages) if self.render is None else self.render(call, messages)

    @property
    def empty(self) -> re.Pattern[str]:
        """Finds empty thinking blocks."""
        return _finds_empty(self.pairs)

    def rendering(self, render: Callable[[TemplateCall, Sequence[Any]], str]) -> "TurnWriter":
        """The same with another way to render; what was found of the template is not looked for again."""
        _ = self.stops, self.switches
        other = copy.copy(self)
        other.render = render
        return other

    @property
    def learning(self) -> "TurnWriter":
        """The same for answers that `missing_reasoning` does not concern."""
        _ = self.stops
        other = copy.copy(self)
        other.missing_reasoning = "learn"
        return other

    @cached_property
    def switches(self) -> list[tuple[TemplateCall, TemplateCall]]:
        """How prompts and whole conversations are rendered without thinking."""
        text, calls = self.serving.text(), (self.serving, self.call)
        names = [name for name in SWITCHES if name in text and name not in self.serving.kwargs]
        found = [[replace(call, kwargs={**call.kwargs, name: False}) for call in calls] for name in names]
        return [(serving, call) for serving, call in found]

    def turn(self, messages: Sequence[Mapping[str, Any]], number: int) -> Turn | int:
        """The turn of the message with this number, or the number of the reason why it is not learned."""
        try:
            prompt = self._render(self.serving, messages[:number])
            rendered = self._render(self.call, messages[: number + 1])
        except Exception:
            return FAILS
        message = messages[number]
        start: int | None = len(prompt)
        answer: Any = rendered[len(prompt) :]
        if not rendered.startswith(prompt):
            found = self._opened(message, prompt, rendered)
            if isinstance(found, int):
                return found
            start, answer = found
        without = False
        if (
            self.missing_reasoning != "learn"
            and self._thinks_nothing(prompt, answer)
            and not self._has_reasoning(message, answer)
        ):
            if self.missing_reasoning == "skip":
                return SKIPPED
            other = self._without_thinking(messages, number, rendered)
            if other is None:
                return NO_SWITCH
            prompt, rendered = other
            start, answer, without = len(prompt), rendered[len(prompt) :], True
        if not answer.strip():
            return NOTHING
        answer, stopped = self._stopped(messages, number, rendered, start, answer)
        if answer is None:
            return STOP_IN_TEXT
        reasoning = field_with_reasoning(message)
        lost = bool(reasoning) and reasoning.strip() not in answer
        own = any(self.empty.search(text) for text in texts_in(message.get("content")))
        empties = own and bool(self.empty.search(answer))
        return Turn(number, prompt, answer, start, rendered, without, lost, stopped, empties)

    def _opened(self, message: Mapping[str, Any], prompt: str, rendered: str) -> tuple[int | None, str] | int:
        """Cases (b) and (c): where the answer begins in R, and its text; or why the turn is not learned."""
        opened = prompt.rstrip()
        for literal, close in self.pairs:
            inside = opened.removesuffix(close).rstrip()
            base = inside.removesuffix(literal)
            if opened.endswith(close) and inside.endswith(literal) and rendered.startswith(base):
                rest = rendered[len(base) :]
                return OTHER if rest.lstrip().startswith((literal, close)) else (len(base), rest)
        for literal, close in self.pairs:
            base = opened.removesuffix(literal)
            if base == opened or not rendered.startswith(base):
                continue
            rest = rendered[len(base) :]
            inside = rest.lstrip()
            if inside.startswith(literal):  # with other white space behind it
                inside = inside[len(literal) :].lstrip()
                return len(rendered) - len(inside), inside
            if self.thinking is None or self.thinking[0].strip() != literal:
                return OPENED
            reasoning = reasoning_of(message, (literal, close)).strip()
            close = self.thinking[1]
            return None, reasoning + close + (rest.lstrip() if close[-1:].isspace() else rest)
        return OTHER

    def _thinks_nothing(self, prompt: str, answer: str) -> bool:
        """Whether an answer has, or closes, a thinking block with nothing in it."""
        end, start = prompt[-_NEAR:].rstrip(), answer[:_NEAR].lstrip()  # blocks with more white space are not empty
        for literal, close in self.pairs:
            opened, text = end.endswith(literal), start
            if not opened and text.startswith(literal):
                text, opened = text[len(literal) :].lstrip(), True
            if opened:
                return text.startswith(close)
        return False

    def _has_reasoning(self, message: Mapping[str, Any], answer: str) -> bool:
        """Whether a message says itself that the reasoning of an answer is nothing: its text begins with an empty
        block, or the template has taken one from it. A text that is behind the block as it is, such as one about
        `<think>`, says nothing."""
        if field_with_reasoning(message):
            return True
        behind = re.split("|".join(re.escape(close) for _, close in self.pairs), answer, maxsplit=1)[-1]
        texts = list(texts_in(message.get("content")))
        taken = [text for text in texts if text.strip() not in behind]
        return any(self.empty.match(text.lstrip()) for text in texts) or any(
            each in text for text in taken for pair in self.pairs for each in pair
        )

    def _without_thinking(
        self, messages: Sequence[Mapping[str, Any]], number: int, rendered: str
    ) -> tuple[str, str] | None:
        """P by the template's prompt without thinking, and R: as it is, or rendered in the same way."""

        def fits(prompt: str, text: str) -> bool:
            return text.startswith(prompt) and not self._thinks_nothing(prompt, text[len(prompt) :])

        for serving, call in self.switches:
            try:
                prompt = self._render(serving, messages[:number])
                if fits(prompt, rendered):
                    return prompt, rendered
                other = self._render(call, messages[: number + 1])
                if fits(prompt, other):
                    return prompt, other
            except Exception:
                continue
        return None

    def _stopped(
        self, messages: Sequence[Mapping[str, Any]], number: int, rendered: str, start: int | None, answer: str
    ) -> tuple[Any, bool]:
        """An answer up to the first stop token that the template writes, and whether there is one. None: unknown."""
        found = self.stops.search(answer)
        if found is None:
            return answer, False
        texts = list(texts_in(messages[number]))
        if not any(self.stops.search(text) for text in texts):
            return answer[: found.end()], True
        # Something else of the same length in place of stop tokens.
        masked = with_texts(messages[number], partial(self.stops.sub, lambda token: _FILLER * len(token[0])))
        other = self._render(self.call, [*messages[:number], masked])
        if start is None or len(other) != len(rendered):
            return None, False
        if any(one != two and two != _FILLER for one, two in zip(rendered, other, strict=True)):
            return None, False
        found = self.stops.search(other, start)
        return (answer, False) if found is None else (rendered[start : found.end()], True)


def stop_tokens(call: TemplateCall) -> set[str]:
    """The tokens with which a template ends answers: the tokenizer's EOS token, and those that it writes behind short
    ones, with a call of a tool and without."""
    added = {str(token) for token in call.tokenizer.get_added_vocab()}
    template = call.text()
    found = {token for token in _STOPS if token in added and token in template}
    if call.tokenizer.eos_token:
        found.add(str(call.tokenizer.eos_token))

    def tokens_in(tail: str) -> list[str]:
        some = sorted((token for token in added if token in tail), key=len, reverse=True)  # of thousands
        return re.findall("|".join(map(re.escape, some)) or "(?!)", tail)

    mark = f"text {secrets.token_hex(8)}"
    contents: list[Any] = [mark, [{"type": "text", "text": mark}]]
    for tail in _tails(call, mark, [{"content": content} for content in contents]):
        if tokens := tokens_in(tail):
            found.add(tokens[0])
            break
    functions = [{"name": "f", "arguments": arguments} for arguments in ({"x": mark}, f'{{"x": "{mark}"}}')]
    calls = [[{"type": "function", "id": f"call0000{k}", "function": each} for k in (1, 2)] for each in functions]
    for tail in _tails(call, mark, [{"content": "", "tool_calls": each[:1]} for each in calls]):
        tokens = tokens_in(tail)
        if not found.intersection(tokens):
            # What is behind the first of two calls as well ends no answer.
            texts = _texts(call, mark, [{"content": "", "tool_calls": each} for each in calls])
            between = next((tokens_in(text.split(mark)[1]) for text in texts if text.count(mark) == 2), [])
            found |= set([token for token in tokens if token not in between][-1:])
        break
    return found


def _tails(call: TemplateCall, mark: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a template writes behind a mark in some answers, of those that it takes and prints."""
    return (text.rpartition(mark)[2] for text in _texts(call, mark, answers))


def _texts(call: TemplateCall, mark: str, answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Conversations with some answers, of those in which it takes and prints a mark."""
    for answer in answers:
        question: Any = "q" if isinstance(answer["content"], str) else [{"type": "text", "text": "q"}]
        try:
            text = call.render([{"role": "user", "content": question}, {"role": "assistant", **answer}])
        except Exception:
            continue
        if mark in text:
            yield text


@lru_cache(8)
def _finds_empty(pairs: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, empty_blocks(pairs))))


def empty_blocks(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of empty thinking blocks."""
    return [start + blank + end for start, end in pairs for blank in ("", " ", "\n", "\n\n")]


def field_with_reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning in a field of its own; empty if there is none."""
    return next((value for name in REASONING if isinstance(value := message.get(name), str) and value.strip()), "")


def reasoning_of(message: Mapping[str, Any], pair: tuple[str, str]) -> str:
    """The reasoning of a message: that in a field of its own, or that in its text."""
    text = "".join(texts_in(message.get("content")))
    inside = text.partition(pair[0])[2].partition(pair[1]) if pair[0] in text else text.partition(pair[1])
    return field_with_reasoning(message) or (inside[0] if inside[1] else "")
