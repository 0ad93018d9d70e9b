"""Marks in messages that say which answers have loss, and how much it weighs.

Trainers have several names for them, and one meaning: whether the answer of this message is learned.

    loss              slime, LLaMA-Factory
    loss_mask         verl
    step_loss_mask    slime
    train, training   axolotl
    weight            OpenAI's format of data for fine-tuning

A mark is a truth value or one of the numbers 0 and 1, and a weight any number that is not negative, as float32; null is
no mark. An answer without a mark has loss, of the weight 1. Marks of users, tools and systems mean nothing: their
messages never have loss.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuload.template.marks import UnknownAnswersError
from gpuload.template.program import Shape

KEYS = ("loss", "loss_mask", "step_loss_mask", "train", "training", "weight")

_TRUTH_VALUES = frozenset(("true", "false", "yes", "no", "0", "1", "0.0", "1.0"))

OTHERS = ("system", "developer", "user", "tool", "function", "ipython", "observation", "environment", None)
"""Roles whose messages are never answers."""


def marks_of(message: Any) -> dict[str, Any]:
    """The marks of a message."""
    if not isinstance(message, Mapping):
        return {}
    return {key: message[key] for key in KEYS if message.get(key) is not None}


def is_mark(value: Any) -> bool:
    """Whether a value says that an answer has loss, or that it has none."""
    return isinstance(value, bool | int | float) and value in (0, 1)


def is_likely_mark(key: str, value: Any) -> bool:
    """Whether a key of a message that nobody has explained is a mark, or is meant as one: a weight may be any number,
    whereas a loss that is no truth value may be one that was measured. Rows with a truth value as text are then
    dropped, see `mark_problem`, and not learned as if they had no mark."""
    if isinstance(value, str):
        return value.strip().lower() in _TRUTH_VALUES
    return is_mark(value) or (key == "weight" and isinstance(value, int | float))


def mark_problem(messages: Sequence[Any]) -> str | None:
    """Why it is unknown which answers of a conversation have loss; None if it is known."""
    for number, message in enumerate(messages):
        marks = {} if not isinstance(message, Mapping) or message.get("role") in OTHERS else marks_of(message)
        for key, value in marks.items():
            if not is_mark(value):
                what = "a mark is true, false, 1 or 0"
                if key == "weight":
                    what = "a weight is 0 or a positive number of float32"
                if key != "weight" or weight_of(value) is None:
                    return (
                        f"{key} of message {number} is {value!r:.40}: {what}: correct it, or pass loss_on='assistant' "
                        "to ignore marks"
                    )
        if len(set(map(bool, marks.values()))) > 1:
            found = ", ".join(f"{key} is {value!r}" for key, value in marks.items())
            return f"the marks of message {number} contradict each other: {found}"
    return None


def shape_problem(shape: Shape) -> str | None:
    """The same for a shape, whose values are texts, lists or nulls."""
    for number, message in enumerate(shape):
        fields = dict(message)
        if fields.get("role") not in OTHERS:
            for key in KEYS:
                if fields.get(key) is not None:
                    return f"{key} of message {number} is a text or a list: a mark is true, false, 1 or 0"
    return None


def weight_of(value: Any) -> float | None:
    """The weight that a value other than 0 stands for, as float32; None if it is none."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        weight = float(np.float32(value))
    except OverflowError:
        return None
    return weight if 0 < weight < float("inf") else None


def weights_of(messages: Sequence[Any]) -> list[float]:
    """The weight of the loss of each message's answer, if it has an answer: 0 for no loss. They have no
    `mark_problem`."""
    marks = map(marks_of, messages)
    return [(weight_of(each.get("weight", 1)) or 0) if all(each.values()) else 0 for each in marks]


Span = tuple[int, int]


def spans_with_loss(
    spans: Sequence[Span], texts: Sequence[tuple[int, int]], loss: Sequence[float], ours: Sequence[bool], alone: bool
) -> dict[Span, float]:
    """The answers of messages that have loss, in order, and its weight.

    An `UnknownAnswersError` if messages with other weights are one answer, or it is unknown whose answer one is. For
    the other arguments see `messages_of`.

    Args:
        loss: of each message, the weight of its answer's loss, 0 if it has none.
    """
    found = {}
    for span, (messages, by_text) in messages_of(spans, texts, ours, alone).items():
        weights = {loss[message] for message in messages}
        if len(weights) != 1:
            what = "different weights" if all(weights) else "and without loss"
            one = f"messages with {what} are one answer in what the template renders"
            raise UnknownAnswersError(one if by_text else _WHOSE)
        found[span] = weights.pop()
    return {span: found[span] for span in spans if found[span]}


def spans_of_last(
    spans: Sequence[Span], texts: Sequence[tuple[int, int]], ours: Sequence[bool], alone: bool
) -> list[Span]:
    """The answers of the last message that is one, in order; an `UnknownAnswersError` if it is unknown whether one is.
    For the arguments see `messages_of`."""
    found, message = messages_of(spans, texts, ours, alone), max((k for k, own in enumerate(ours) if own), default=-1)
    if any(message in messages and len(messages) > 1 and not by_text for messages, by_text in found.values()):
        raise UnknownAnswersError(_WHOSE)
    return [span for span in spans if message in found[span][0]]


_WHOSE = "the template does not show whose answer one without a text is"


def messages_of(
    spans: Sequence[Span], texts: Sequence[tuple[int, int]], ours: Sequence[bool], alone: bool
) -> dict[Span, tuple[set[int], bool]]:
    """The messages that each answer is of, and whether its texts say so: then it is of all these messages.

    One without any text, such as an empty one, is that of one of the messages between that of the text before it and
    that of the text behind it, these included.

    Args:
        spans: start and end of all answers of a conversation, in any unit.
        texts: where texts of messages begin, ascending, and the number of their message.
        ours: which messages are answers.
        alone: whether no message has more than one answer without a text, and none if it has one with a text.
    """
    places = [place for place, _ in texts]
    found: dict[Span, tuple[set[int], bool]] = {}
    empty: dict[int, list[Span]] = {}  # number of the text behind → answers without texts
    for start, end in sorted(spans):
        first, last = bisect_left(places, start), bisect_left(places, end)
        within = {message for _, message in texts[first:last]}
        if own := {message for message in within if ours[message]}:
            found[start, end] = own, True
        else:  # a text without characters may be at the beginning of an answer that it is before
            found[start, end] = within, bool(within)
            empty.setdefault(first, []).append((start, end))
    for behind, some in empty.items():
        before = texts[behind - 1][1] if behind else -1
        after = texts[behind][1] if behind < len(texts) else len(ours)
        around = [k for k in range(max(before, 0), min(after + 1, len(ours))) if ours[k]]
        between = [k for k in around if before < k < after]
        in_turn = alone and len(between) == len(some)
        of_each = [{message} for message in between] if in_turn else [{*around}] * len(some)
        if around:
            found.update((span, (messages, False)) for span, messages in zip(some, of_each, strict=True))
    return found
