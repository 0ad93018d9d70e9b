"""Conversations whose answers come with the ids that were sampled: `token_ids` of messages. Row-wise, as in `turns.py`.

The ids of such an answer are these, whatever its text would be encoded as, and no stop token is added. Its prompt is
P, also where the template does not write P before the answer.

history="rendered"   the ids of a prompt are those of its text, as for a chat API
history="sampled"    a prompt that begins with P and the text of an earlier sampled answer has that answer's ids, and
                     those of what the template writes behind it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpuload.core.arrays import Ragged
from gpuload.core.options import History
from gpuload.kinds.served.stored import RESAMPLED, REWRITTEN, LearnedAnswer, ServedRows, count_answer
from gpuload.kinds.served.turns import FAILS, NO_BLOCK, NO_IDS, NOTHING, OTHER, OTHER_IDS, Turn, TurnWriter
from gpuload.reference.template_call import TemplateCall

TOKEN_IDS, PROMPT_IDS = "token_ids", "prompt_token_ids"


def is_sampled(messages: Any) -> bool:
    """Whether a message of a conversation has ids of its own."""
    return isinstance(messages, list) and any(
        isinstance(each, dict) and (each.get(TOKEN_IDS) is not None or each.get(PROMPT_IDS) is not None)
        for each in messages
    )


def sampled_problem(messages: Any, size: int) -> str | None:
    """Why ids of messages cannot be used with a vocabulary of some size; None if they can."""
    for number, message in enumerate(messages):
        for name in (TOKEN_IDS, PROMPT_IDS):
            ids = message.get(name)
            if ids is None:
                continue
            what = f"{name} of message {number} is not a list of ids from 0 to {size - 1}"
            if not isinstance(ids, list):
                return what
            if wrong := [type(each).__name__ for each in ids if type(each) is not int]:  # one 5.0 makes all floats
                return f"{what}: it has values of type {wrong[0]}"
            if any(not 0 <= each < size for each in ids):
                return what
            if ids and message.get("role") != "assistant":
                return f"message {number} has {name}, and its role is not assistant"
    return None


class Encoding(Protocol):
    """What a `ServedReference` does for this."""

    history: History

    @property
    def blocks(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...
    def encode_behind(self, text: str) -> list[int]: ...
    def answer(self, turn: Turn, loss: Sequence[tuple[int, int]], bits: int) -> tuple[LearnedAnswer, bool]: ...
    def loss_in(self, turn: Turn, messages: Sequence[Any], call: TemplateCall) -> list[tuple[int, int]]: ...
    def bits_of(self, weight: float) -> int: ...


def text_with_stop(reference: Encoding, writer: TurnWriter, turn: Turn, given: Sequence[int]) -> str:
    """The text up to the end of an answer with ids of its own: without the stop token if its ids lack it. That one of
    the template follows then, without loss."""
    *_, stop = (len(turn.answer), *(found.start() for found in writer.stops.finditer(turn.answer)))
    if turn.stopped and list(given[-1:]) != reference.encode(turn.answer[stop:]):
        return turn.prompt + turn.answer[:stop]
    return turn.prompt + turn.answer


def rows_of_sampled(
    reference: Encoding,
    calls: tuple[TemplateCall, TemplateCall],
    writer: TurnWriter,
    messages: Sequence[Any],
    wanted: Mapping[int, float],
) -> ServedRows:
    """The rows of a conversation with sampled ids. The calls, and the writer of these calls, are for conversations and
    prompts; for messages and `wanted` see `wanted_in`."""
    call, serving = calls
    counts = ServedRows().counts
    # With history="sampled", the texts up to earlier answers and their ids; no text if the template does not write it.
    known: list[tuple[str, list[int]]] = []

    def ids_of(prompt: str) -> list[int]:
        for later, (text, ids) in enumerate(reversed(known)):
            if text and prompt.startswith(text):
                counts[REWRITTEN] += later > 0
                return ids + reference.encode_behind(prompt[len(text) :])
        counts[REWRITTEN] += bool(known)
        return reference.encode(prompt)

    def sampled(number: int, turn: Turn | int, bits: int) -> LearnedAnswer | int:
        given = messages[number][TOKEN_IDS]
        try:
            text = serving.render(messages[:number])
        except Exception:
            return FAILS
        prompt = ids_of(text)
        if messages[number].get(PROMPT_IDS) not in (None, [], prompt):
            return OTHER_IDS
        ids, until = prompt + given, ""
        if isinstance(turn, Turn) and turn.prompt == text:
            rendered, _ = reference.answer(turn, [(0, len(turn.answer))], bits)
            counts[RESAMPLED] += rendered.ids[rendered.begin :].tolist() != given
            until = text_with_stop(reference, writer, turn, given)
        if reference.history == "sampled":
            known.append((until, ids))
        if not given:
            return NO_IDS
        return LearnedAnswer(number, np.array(ids, np.int32), len(prompt), np.full(len(given), bits, np.int32))

    def rendered(turn: Turn, bits: int) -> LearnedAnswer | int:
        prompt = ids_of(turn.prompt)
        if messages[turn.number].get(PROMPT_IDS) not in (None, [], prompt):
            return OTHER_IDS
        answer, merged = reference.answer(turn, reference.loss_in(turn, messages, call), bits)
        if not answer.bits.any():
            return NO_BLOCK
        count_answer(counts, turn, merged)
        ids = np.array([*prompt, *answer.ids[answer.begin :]], np.int32)
        return LearnedAnswer(turn.number, ids, len(prompt), answer.bits)

    turns: list[LearnedAnswer | int] = []
    for number, message in enumerate(messages):
        given = message.get(TOKEN_IDS) is not None
        if message.get("role") != "assistant" or not (number in wanted or given):
            continue
        turn = (writer.learning if given else writer).turn(messages, number)
        bits = reference.bits_of(wanted.get(number, 1.0))
        found = sampled(number, turn, bits) if given else turn if isinstance(turn, int) else rendered(turn, bits)
        if number in wanted:
            turns.append(found)
    return ServedRows.of(turns, counts)


# -- many conversations at once: prompts by the compiled template, and all texts encoded in one call -------------------


@dataclass(frozen=True)
class GivenAnswer:
    """An answer with ids of its own, or one that is learned."""

    message: Mapping[str, Any]
    number: int  # of the message
    prompt: str | None  # P; None if there is none
    turn: Turn | int  # as inference would have it, if the template writes P before it; or why the answer is not learned
    # The earlier answer with ids that the prompt begins with, as an index; None: ids of its text
    base: int | None = None
    rest: str = ""  # what the template writes behind that answer
    rewritten: bool = False  # there are earlier answers with ids, and the prompt does not begin with the last of them


def given_answers(
    reference: Encoding,
    writer: TurnWriter,
    render: Callable[[Sequence[Any]], str],
    messages: Sequence[Any],
    wanted: Mapping[int, float],
) -> list[GivenAnswer] | None:
    """The answers of a conversation, whose prompts `render` renders; None if generation blocks say what is learned of
    some. For the other arguments see `rows_of_sampled`."""
    if reference.blocks and any(messages[number].get(TOKEN_IDS) is None for number in wanted):
        return None
    made: list[GivenAnswer] = []
    known: list[tuple[str, int]] = []  # texts up to answers with ids; empty where the template does not write them
    for number, message in enumerate(messages):
        given = message.get(TOKEN_IDS)
        if message.get("role") != "assistant" or (given is None and number not in wanted):
            continue
        turn = (writer if given is None else writer.learning).turn(messages, number)
        prompt = turn.prompt if isinstance(turn, Turn) else None
        if given is not None:
            try:
                prompt = render(messages[:number])
            except Exception:
                prompt, turn = None, FAILS
            if isinstance(turn, Turn) and turn.prompt != prompt:
                turn = OTHER
        if prompt is None:
            made.append(GivenAnswer(message, number, None, turn))
            continue
        earlier = known if reference.history == "sampled" else []
        begins = [(text, at) for text, at in earlier if text and prompt.startswith(text)]
        begun, base = begins[-1] if begins else (prompt, None)
        rewritten = bool(earlier) and base != earlier[-1][1]
        if given is not None:
            until = text_with_stop(reference, writer, turn, given) if isinstance(turn, Turn) else ""
            known.append((until, len(made)))
        made.append(GivenAnswer(message, number, prompt, turn, base, prompt.removeprefix(begun), rewritten))
    return made


def texts_to_encode(answers: Sequence[GivenAnswer], anchor: str) -> list[str]:
    """For each answer its prompt, the prompt with the answer's text, and what follows an earlier answer behind the
    anchor."""
    made = []
    for each in answers:
        if each.prompt is not None:
            made.append(each.prompt)
            made.append(each.prompt + each.turn.answer if isinstance(each.turn, Turn) else "")
            made.append("" if each.base is None else anchor + each.rest)
    return made


def rows_of_given(
    reference: Encoding, answers: Sequence[GivenAnswer], wanted: Mapping[int, float], ids: Ragged, first: int, skip: int
) -> ServedRows | None:
    """The rows of a conversation; None if only the reference can make them. The ids are of `texts_to_encode`, for many
    conversations, of which this one has the `first`; `skip` of them are those of the anchor."""
    whole: list[list[int]] = []
    turns: list[LearnedAnswer | int] = []
    made, at = ServedRows(), first
    for each in answers:
        found: LearnedAnswer | int = each.turn if isinstance(each.turn, int) else FAILS
        whole.append([])
        if each.prompt is not None:
            text, both, rest = (ids[at + k].tolist() for k in range(3))
            at += 3
            prompt = text if each.base is None else whole[each.base] + rest[skip:]
            given, bits = each.message.get(TOKEN_IDS), reference.bits_of(wanted.get(each.number, 1.0))
            own, merged = _ids_of_text(reference, each, text, both, bits)
            whole[-1] = prompt + (own if given is None else given)
            made.counts[REWRITTEN] += each.rewritten
            if each.message.get(PROMPT_IDS) not in (None, [], prompt):
                if given is not None and reference.history == "sampled":  # no later prompt begins with this answer then
                    return None
                found = OTHER_IDS
            else:
                mask = np.full(len(whole[-1]) - len(prompt), bits, np.int32)
                answer = LearnedAnswer(each.number, np.array(whole[-1], np.int32), len(prompt), mask)
                found = answer if len(mask) else NOTHING if given is None else NO_IDS
                if isinstance(each.turn, Turn):
                    made.counts[RESAMPLED] += given not in (None, own)
                    if given is None:
                        count_answer(made.counts, each.turn, merged)
        if each.number in wanted:
            turns.append(found)
    return ServedRows.of(turns, made.counts)


def _ids_of_text(
    reference: Encoding, answer: GivenAnswer, prompt: list[int], both: list[int], bits: int
) -> tuple[list[int], bool]:
    """The ids of an answer's text, and whether it would merge with the prompt: by the ids of that, and of both as one
    text."""
    if not isinstance(answer.turn, Turn) or both[: len(prompt)] == prompt:
        return both[len(prompt) :], False
    own, _ = reference.answer(answer.turn, [(0, len(answer.turn.answer))], bits)
    return own.ids[own.begin :].tolist(), True
