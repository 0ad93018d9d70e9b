"""Where a text may be split by many threads at once: the boundaries that do not depend on what lies before them.

A splitter goes through a text match by match, each beginning where the one before ended. But whatever match is under
way, after some classes of code points it cannot go on: no match of Qwen2.5's regex has a space behind a letter. There
another thread may begin, and finds what the first one would have found.
"""

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.splitter import DEAD, MATCH_BEFORE, START, STATE, Stage

NOWHERE, CLOSED, OPEN = range(3)


def restarts(stage: Stage) -> npt.NDArray[np.uint8]:
    """Between which classes the search for a match begins anew, whatever came before.

    Let a, b be the classes of two code points side by side in one piece of the stage before. A match that is under way
    after a is in one of few states, found by following all ways through the table.

    - CLOSED: in every one of them a match ends before b, and nothing goes on. And a begins matches, so it was in one.
    - OPEN: there are none of them: a is in no match at all, so it is in a gap, which goes on at b if no match begins.
    - NOWHERE: neither can be said.

    Returns:
        (classes, classes) uint8, by a and b.
    """
    following, ends = stage.table[:, :-1] & STATE, stage.table[:, :-1] & MATCH_BEFORE != 0
    states, count = following.shape
    reachable = np.zeros(states, np.bool_)
    reachable[START] = True
    while True:
        wider = reachable.copy()
        wider[following[reachable]] = True
        wider[DEAD] = False
        if (wider == reachable).all():
            break
        reachable = wider
    over = (following == DEAD) & ends
    found = np.full((count, count), NOWHERE, np.uint8)
    for a in range(count):
        after = np.unique(following[reachable, a])
        after = after[after != DEAD]
        if not len(after):
            found[a] = OPEN
        elif following[START, a] != DEAD:
            found[a, over[after].all(axis=0)] = CLOSED
    return found
