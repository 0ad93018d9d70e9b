"""Conversations whose learned answers all come with their ids, many at once: prompts by the compiled template, and all
texts encoded in one call. What `sampled.py` makes of each, which verification compares with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.core.arrays import Ragged
from gpuload.kinds.served.sampled import PROMPT_IDS, TOKEN_IDS, Encoding, text_with_stop
from gpuload.kinds.served.stored import RESAMPLED, REWRITTEN, LearnedAnswer, ServedRows
from gpuload.kinds.served.turns import FAILS, NOTHING, OTHER_IDS, Turn, TurnWriter


@dataclass(frozen=True)
class GivenAnswer:
    """An answer with ids of its own.

    Attributes:
        message: it.
        number: of the message.
        prompt: P; None if the template rejects it.
        turn: as inference would have it, if the template writes P before it.
        base: the earlier answer whose ids the prompt begins with, as an index; None: ids of its text.
        rest: what the template writes behind that answer.
        rewritten: there are earlier answers with ids, and the prompt begins with none of them.
    """

    message: Mapping[str, Any]
    number: int
    prompt: str | None
    turn: Turn | None
    base: int | None = None
    rest: str = ""
    rewritten: bool = False


def given_answers(
    reference: Encoding,
    writer: TurnWriter,
    render: Callable[[Sequence[Any]], str],
    messages: Sequence[Any],
    wanted: Mapping[int, float],
) -> list[GivenAnswer] | None:
    """The answers of a conversation; None if one that is learned has no ids of its own.

    Args:
        render: renders prompts.
        writer, messages, wanted: as for `rows_of_sampled`.
    """
    if any(messages[number].get(TOKEN_IDS) is None for number in wanted):
        return None
    made: list[GivenAnswer] = []
    known: list[tuple[str, int]] = []  # texts up to answers
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or message.get(TOKEN_IDS) is None:
            continue
        try:
            prompt = render(messages[:number])
        except Exception:
            made.append(GivenAnswer(message, number, None, None))
            continue
        written = writer.turn(messages, number)
        turn = written if isinstance(written, Turn) and written.prompt == prompt else None
        base, rest = None, ""
        if reference.history == "sampled":
            base = next((at for text, at in reversed(known) if prompt.startswith(text)), None)
            rest = "" if base is None else prompt[len(next(text for text, at in known if at == base)) :]
        rewritten = bool(known) and base is None and reference.history == "sampled"
        if turn is not None:
            known.append((text_with_stop(reference, writer, turn, message[TOKEN_IDS]), len(made)))
        made.append(GivenAnswer(message, number, prompt, turn, base, rest, rewritten))
    return made


def texts_to_encode(answers: Sequence[GivenAnswer], anchor: str) -> list[str]:
    """For each answer its prompt, or what follows an earlier answer behind the anchor; and the prompt with its text."""
    made = []
    for each in answers:
        if each.prompt is not None:
            made.append(each.prompt if each.base is None else anchor + each.rest)
            made.append(each.prompt + each.turn.answer if each.turn else "")
    return made


def rows_of_given(
    reference: Encoding, answers: Sequence[GivenAnswer], wanted: Mapping[int, float], ids: Ragged, first: int, skip: int
) -> ServedRows | None:
    """The rows of a conversation; None if only the reference can make them.

    Args:
        ids: of `texts_to_encode`, for many conversations.
        first: the first one of this conversation.
        skip: the ids of the anchor.
    """
    whole: list[list[int]] = []
    turns: list[LearnedAnswer | int] = []
    made, at = ServedRows(), first
    for each in answers:
        found: LearnedAnswer | int = FAILS
        whole.append([])
        if each.prompt is not None:
            begin, rendered = ids[at].tolist(), ids[at + 1].tolist()
            at += 2
            prompt = begin if each.base is None else whole[each.base] + begin[skip:]
            given = each.message[TOKEN_IDS]
            whole[-1] = prompt + given
            if each.message.get(PROMPT_IDS) not in (None, prompt):
                if reference.history == "sampled":  # later prompts do not begin with this answer then
                    return None
                found = OTHER_IDS
            else:
                bits = reference.bits_of(wanted.get(each.number, 1.0))
                made.counts[REWRITTEN] += each.rewritten
                made.counts[RESAMPLED] += _differs(reference, each, prompt, rendered, bits)
                mask = np.full(len(given), bits, np.int32)
                answer = LearnedAnswer(each.number, np.array(whole[-1], np.int32), len(prompt), mask)
                found = answer if given else NOTHING
        if each.number in wanted:
            turns.append(found)
    return ServedRows.of_turns(turns, made.counts)


def _differs(
    reference: Encoding, answer: GivenAnswer, prompt: Sequence[int], rendered: Sequence[int], bits: int
) -> bool:
    """Whether the ids of an answer are not those of its text."""
    given: list[int] = answer.message[TOKEN_IDS]
    if answer.turn is None:
        return False
    if answer.base is None and list(rendered[: len(prompt)]) == list(prompt):
        return list(rendered[len(prompt) :]) != given
    own = reference.answer(answer.turn, [(0, len(answer.turn.answer))], bits)[0]
    return bool(own.ids[own.begin :].tolist() != given)
