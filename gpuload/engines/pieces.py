"""Pieces of text: what the splitter hands on to be looked up and merged."""

from dataclasses import dataclass

from gpuload.arrays import Array


@dataclass(frozen=True, eq=False)
class Pieces:
    """m pieces of n texts. Piece j is `data[start[j] : start[j] + length[j]]`; where length is negative it is the added
    token with id ~length.

    Attributes:
        first: (n + 1,) int64, the pieces of text i are first[i] .. first[i + 1].
        start, length: (m,) int32.
        data: uint8.
        left: (n,) bool, texts that are for the reference; they have no pieces.
    """

    first: Array
    start: Array
    length: Array
    data: Array
    left: Array
