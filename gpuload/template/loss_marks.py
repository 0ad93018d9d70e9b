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

OTHERS = ("system", "developer", "user", "tool", "function", None)
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
    """Whether a key of a message that nobody has explained is a mark: a weight may be any number, whereas a loss that
    is no truth value may be one that was measured."""
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


def spans_with_loss(
    spans: Sequence[tuple[int, int]],
    texts: Sequence[tuple[int, int]],
    loss: Sequence[float],
    ours: Sequence[bool],
) -> dict[tuple[int, int], float]:
    """The answers of messages that have loss, in order, and its weight.

    An answer is that of the messages whose texts it has. One without any text, such as an empty one, belongs to a
    message between that of the text before it and that of the text behind it. An `UnknownAnswersError` if messages with
    other weights are one answer, or it is unknown whose answer one is.

    Args:
        spans: start and end of all answers of a conversation, in characters.
        texts: where texts of messages begin, ascending, and the number of their message.
        loss: of each message, the weight of its answer's loss, 0 if it has none.
        ours: which messages are answers.
    """
    places = [place for place, _ in texts]
    found: dict[tuple[int, int], float] = {}
    empty: dict[int, list[tuple[int, int]]] = {}  # number of the text behind → answers without texts
    for start, end in sorted(spans):
        first, last = bisect_left(places, start), bisect_left(places, end)
        if first == last:
            empty.setdefault(first, []).append((start, end))
            continue
        of_texts = {loss[message] for _, message in texts[first:last]}
        if len(of_texts) > 1:
            what = "different weights" if all(of_texts) else "and without loss"
            raise UnknownAnswersError(f"messages with {what} are one answer in what the template renders")
        found[start, end] = of_texts.pop()
    for behind, some in empty.items():
        before = texts[behind - 1][1] if behind else -1
        after = texts[behind][1] if behind < len(texts) else len(loss)
        candidates = {loss[k] for k in range(max(before, 0), min(after + 1, len(loss))) if ours[k]}
        between = [k for k in range(before + 1, after) if ours[k]]
        if len(candidates) == 1:
            found.update(dict.fromkeys(some, candidates.pop()))
        elif len(between) == len(some):
            found.update(zip(some, (loss[k] for k in between), strict=True))
        else:
            raise UnknownAnswersError("the template does not show whose answer one without a text is")
    return {span: found[span] for span in spans if found[span]}
