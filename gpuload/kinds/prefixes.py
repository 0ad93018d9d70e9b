"""What the texts of one row have in common, encoded once.

A prompt is encoded alone, with the chosen and with the rejected completion. These texts begin with the same bytes, and
may be cut in front of a special token among them: tokenizers searches a text for added tokens before anything else, and
normalizes, splits and merges what is between two of them by itself. So the ids of the text are those of the two parts,
if the token is found at this place in the whole text and at the beginning of the second part. That is so for tokens

1. that are searched for in the text as it is (`normalized=False`) and wherever they stand (not `single_word`),
2. that take no white space from the text before (not `lstrip`), nor lose their own to a token before (`rstrip`),
3. that no other such token can take the place of: no match that begins earlier can contain their beginning, and no
   longer token that begins with them needs to be a single word.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, equal_beginnings
from gpuload.core.backends import added_tokens
from gpuload.engines.host.encode import needs_itself
from gpuload.engines.host.texts import Bytes, HostTexts, Ints, gather
from gpuload.engines.protocol import TextColumn
from gpuload.reference.reference import Reference

_BLOCK_BYTES = 1 << 21  # of texts that are compared at once


def cutting_tokens(reference: Reference, texts: Sequence[str]) -> tuple[bytes, ...]:
    """The tokens in front of which texts may be cut; none if only the tokenizer object itself can encode.

    `texts` are some of those to be cut: only tokens that they have are looked at, because there may be thousands.
    """
    backend = reference.backend
    if backend is None or needs_itself(reference) or reference.sanitizes:
        return ()
    tokens = [token for token in added_tokens(backend).values() if not token.normalized]
    return tuple(
        token.content.encode()
        for token in tokens
        if any(token.content in text for text in texts)
        and not (token.single_word or token.lstrip or token.rstrip or token.content[:1].isspace())
        and not any(_displaces(other, token.content) for other in tokens)
    )


def _displaces(other: Any, token: str) -> bool:
    """Whether a text may have `token` somewhere without its being found there, because of another added token."""
    text: str = other.content
    if other.single_word and text.startswith(token):
        return True
    beginnings = (token[:k] for k in range(1, min(len(token), len(text))))
    return token in text[1:] or any(map(text.endswith, beginnings))


def cut(columns: Sequence[pa.LargeStringArray], tokens: Sequence[bytes]) -> pa.LargeStringArray:
    """Cuts k columns of n texts, none of them null. The texts of a row are cut at the same place: the last one in what
    they all begin with, that is in front of one of the tokens.

    Returns:
        (n * (k + 1),) texts: the beginnings that the rows' texts share, then the rest of each column's texts.
    """
    data = [np.frombuffer(column.buffers()[2] or b"", np.uint8) for column in columns]
    bounds = [np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column) + 1] for column in columns]
    size = np.zeros(len(columns[0]), np.int64)  # bytes before each row's cut
    if tokens and len(size):
        shortest = min(range(len(columns)), key=lambda number: bounds[number][-1] - bounds[number][0])
        begin = bounds[shortest][:-1]
        beginnings = TextColumn(data[shortest], begin, _common(data, bounds, shortest))
        for token in tokens:
            rows, at = HostTexts().last(beginnings, token)
            size[rows] = np.maximum(size[rows], at - begin[rows])
    base = np.cumsum([0, *map(len, data)])[:-1]
    start = [bounds[0][:-1]] + [each[:-1] + size + at for each, at in zip(bounds, base, strict=True)]
    stop = [bounds[0][:-1] + size] + [each[1:] + at for each, at in zip(bounds, base, strict=True)]
    count = len(size) * (len(columns) + 1)
    offsets, made = gather(np.concatenate(data), np.concatenate(start), np.concatenate(stop), np.arange(count))
    return pa.LargeStringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(made))


def _common(data: Sequence[Bytes], bounds: Sequence[Ints], shortest: int) -> Ints:
    """(n,) how many bytes the texts of each row begin with in common. `shortest` is the number of a column: the others
    are compared with it, block by block, so that what is compared stays in the processor's cache."""
    start, common = bounds[shortest][:-1], np.diff(bounds[shortest])
    for number in set(range(len(data))) - {shortest}:
        other, most = bounds[number][:-1], np.minimum(common, np.diff(bounds[number]))
        for rows in np.split(np.arange(len(most)), np.flatnonzero(np.diff(np.cumsum(most) // _BLOCK_BYTES)) + 1):
            which, size = np.arange(len(rows)), most[rows]
            offsets, one = gather(data[shortest], start[rows], start[rows] + size, which)
            _, two = gather(data[number], other[rows], other[rows] + size, which)
            common[rows] = equal_beginnings(one, two, offsets)
    return common


def divided(ids: Ragged, parts: int) -> list[Ragged]:
    """The rows of some columns, `parts`, that were encoded as one."""
    count = len(ids) // parts
    offsets = [ids.offsets[part * count : (part + 1) * count + 1] for part in range(parts)]
    return [Ragged(ids.values[each[0] : each[-1]], each - each[0]) for each in offsets]
