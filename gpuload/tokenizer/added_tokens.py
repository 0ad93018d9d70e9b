"""Added tokens as a trie over their bytes, to find the longest one that begins at a place."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.spec import AddedToken

NORMALIZED, LSTRIP, RSTRIP = 1, 2, 4


@dataclass(frozen=True)
class Trie:
    """k tokens. Nodes are numbered level by level, so the node behind edge e is e + 1; 0 is the root.

    Attributes:
        begins: (256,) uint8: 1 where a token that is not normalized begins with the byte, plus 2 where another does.
        first: (nodes + 1,) int32; node n has the edges first[n] to first[n + 1], by ascending bytes.
        byte: (edges,) uint8.
        token: (nodes,) int32, the number of the token that ends there, or -1.
        ids, lengths, flags: (k,) int32 by a token's number: its id, its bytes, and NORMALIZED, LSTRIP, RSTRIP.
    """

    begins: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int32]
    byte: npt.NDArray[np.uint8]
    token: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]


def trie(added: Sequence[AddedToken]) -> Trie:
    """The trie of added tokens, no two of which are the same text."""
    texts = sorted((token.content.encode(), number) for number, token in enumerate(added))
    begins = np.zeros(256, np.uint8)
    for text, number in texts:
        begins[text[0]] |= 2 if added[number].normalized else 1
    first, byte, token = [0], list[int](), list[int]()
    level = [texts]  # for each node of a level, what is left of the texts behind it
    while level:
        below: list[list[tuple[bytes, int]]] = []
        for node in level:
            token.append(next((number for text, number in node if not text), -1))
            for letter, behind in groupby((one for one in node if one[0]), lambda one: one[0][0]):
                byte.append(letter)
                below.append([(text[1:], number) for text, number in behind])
            first.append(len(byte))
        level = below
    flags = [NORMALIZED * t.normalized | LSTRIP * t.lstrip | RSTRIP * t.rstrip for t in added]
    return Trie(
        begins,
        np.array(first, np.int32),
        np.array(byte, np.uint8),
        np.array(token, np.int32),
        np.array([t.id for t in added], np.int32),
        np.array([len(t.content.encode()) for t in added], np.int32),
        np.array(flags, np.int32),
    )
