"""Shared by the tests of BPE tokenizers."""

from typing import Any

from hypothesis import strategies as st


@st.composite
def made_up_merges(draw: Any, letters: str) -> list[tuple[str, str]]:
    """Draw random merges, in any order, with several ways to one entry, and pairs listed twice."""
    known, listed = list(letters), []
    for left, right in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=25)):
        pair = (known[left % len(known)], known[right % len(known)])
        listed.append(pair)
        known.append("".join(pair))
    draw(st.randoms(use_true_random=False)).shuffle(listed)
    return listed
