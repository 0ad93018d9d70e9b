"""A stored conversation of which the tokenizer makes one answer.

To make all answers of a conversation by the definition costs their number times its length, and verification has a
tenth of a second for a load: of long conversations it would see two or three.
"""

from collections.abc import Sequence

import numpy as np

from gpuload.core.arrays import Ragged
from gpuload.core.marks import IDS, LOSS
from gpuload.kinds.served.stored import Headers, LearnedAnswer


def holds(found: Sequence[int], wanted: Sequence[int], number: int, made: LearnedAnswer | int) -> bool:
    """Whether a conversation, as it is stored, has an answer as it should be, and rows that are possible at all.

    Of the messages that are to be learned (`wanted`), the one with this number has the answer `made` by the definition,
    or a reason why it is not learned. False also where one cannot say so, such as for an answer that shares tokens with
    loss with another one.
    """
    words = np.array(found, np.int32)
    headers = Headers.of(Ragged(words, np.array([0, len(words)])))
    ends = headers.size[0] + np.cumsum(headers.rows[:, 0])
    if not len(ends) or ends[-1] != len(words):
        return False
    rows = np.split(words, [headers.size[0], *ends[:-1]])[1:]
    texts = [(row & IDS).tobytes() for row in rows]
    places = headers.answers[:, :3].tolist()
    answers = dict(zip(headers.answers[:, 3].tolist(), places, strict=True))
    turns = len(places) + int(headers.reasons[:, 1].sum())
    if len(answers) != len(places) or turns != len(wanted) or not answers.keys() <= set(wanted):
        return False
    # Each answer is learned in the first row that begins with it, and nothing else is. No row is needed that another
    # one begins with.
    for row, _, end in places:
        if row != next(k for k, text in enumerate(texts) if text.startswith(texts[row][: 4 * end])):
            return False
    for k, (row, number_at_end) in enumerate(zip(rows, headers.rows[:, 1].tolist(), strict=True)):
        learned = np.zeros(len(row), bool)
        for of, begin, end in places:
            learned[begin:end] |= of == k
        ended = answers.get(number_at_end, (-1, 0, 0))
        if (ended[0], ended[2]) != (k, len(row)) or ((row & LOSS) != 0)[~learned].any():
            return False
        if sum(text.startswith(texts[k]) for text in texts) != 1:
            return False
    if isinstance(made, int) or number not in answers:
        return number not in answers and made in headers.reasons[:, 0].tolist()
    of, begin, end = answers[number]
    ids, bits = rows[of][:end] & IDS, rows[of][begin:end] & ~IDS
    return begin == made.begin and np.array_equal(ids, made.ids) and np.array_equal(bits, made.bits)
