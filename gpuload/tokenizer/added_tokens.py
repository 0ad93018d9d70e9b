"""Added tokens as a trie over their bytes, which finds the longest token that begins at a position."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.spec import AddedToken

NORMALIZED, LSTRIP, RSTRIP = 1, 2, 4  # flags, as in `added.cu`


@dataclass(frozen=True)
class Trie:
    """A trie of k tokens in compressed sparse row form.

    Nodes are numbered level by level, node 0 is the root. Every node but the root is the end of exactly one edge, and
    edges are listed in the order of their start nodes. So edge e ends in node e + 1.

    Attributes:
        begins: (256,) uint8; bit 0 is set if a token that is not normalized begins with the byte, bit 1 if a normalized
            one does.
        first: (nodes + 1,) int32; the edges of node n are first[n] to first[n + 1] - 1, by ascending bytes.
        byte: (edges,) uint8.
        token: (nodes,) int32, the number of the token that ends at the node, or -1.
        ids: (k,) int32, by a token's number.
        lengths: (k,) int32, in bytes.
        flags: (k,) int32, a sum of `NORMALIZED`, `LSTRIP` and `RSTRIP`.
    """

    begins: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int32]
    byte: npt.NDArray[np.uint8]
    token: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    flags: npt.NDArray[np.int32]


def trie(added: Sequence[AddedToken]) -> Trie:
    """Build the trie of added tokens. No two tokens have the same text."""
    texts = sorted((token.content.encode(), number) for number, token in enumerate(added))
    begins = np.zeros(256, np.uint8)
    for text, number in texts:
        begins[text[0]] |= 2 if added[number].normalized else 1
    first, byte, token = [0], list[int](), list[int]()
    level = [texts]  # for each node of a level: the remaining bytes and the number of every token below it
    while level:
        below: list[list[tuple[bytes, int]]] = []
        for node in level:
            token.append(next((number for text, number in node if not text), -1))
            for letter, group in groupby((item for item in node if item[0]), lambda item: item[0][0]):
                byte.append(letter)
                below.append([(text[1:], number) for text, number in group])
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


def can_overlap(added: Sequence[AddedToken]) -> bool:
    """Return whether some text can contain two added tokens that overlap, other than two at the same position."""
    texts = {token.content.encode() for token in added}
    starts = {text[:size] for text in texts for size in range(1, len(text) + 1)}
    ends = {text[at:] for text in texts for at in range(1, len(text))}
    # Either a token ends with the beginning of another one, or it contains the whole of it.
    return bool(ends & starts) or any(end[:size] in texts for end in ends for size in range(1, len(end)))
