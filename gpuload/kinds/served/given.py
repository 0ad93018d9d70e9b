"""Conversations in which answers come with their ids, many at once: prompts by the compiled template, and all texts
encoded in one call. What `sampled.py` makes of each, which verification compares with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.core.arrays import Ragged
from gpuload.kinds.served.sampled import PROMPT_IDS, TOKEN_IDS, Encoding, text_with_stop
from gpuload.kinds.served.stored import RESAMPLED, REWRITTEN, LearnedAnswer, ServedRows, count_answer
from gpuload.kinds.served.turns import FAILS, NOTHING, OTHER, OTHER_IDS, Turn, TurnWriter


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
    rewritten: bool = False  # there are earlier answers with ids, and the prompt begins with none of them


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
    known: list[tuple[str, int]] = []  # texts up to answers
    for number, message in enumerate(messages):
        given = message.get(TOKEN_IDS)
        if message.get("role") != "assistant" or (given is None and number not in wanted):
            continue
        turn = writer.turn(messages, number)
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
        begins = [(text, at) for text, at in earlier if prompt.startswith(text)]
        begun, base = begins[-1] if begins else (prompt, None)
        rewritten = bool(earlier) and base is None
        if given is not None and isinstance(turn, Turn):
            known.append((text_with_stop(reference, writer, turn, given), len(made)))
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
            if each.message.get(PROMPT_IDS) not in (None, prompt):
                if given is not None and reference.history == "sampled":  # no later prompt begins with this answer then
                    return None
                found = OTHER_IDS
            else:
                mask = np.full(len(whole[-1]) - len(prompt), bits, np.int32)
                answer = LearnedAnswer(each.number, np.array(whole[-1], np.int32), len(prompt), mask)
                found = answer if len(mask) else NOTHING
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
