"""Where the tokens of texts are that lie end to end: sums of token lengths, for all rows at once."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of, ranges
from gpuload.core.arrow import as_numpy
from gpuload.core.backends import added_tokens
from gpuload.tokenizer.spec import byte_letters
from gpuload.tokenizer.token_bytes import TokenBytes

_BLOCK = 16  # tokens whose lengths are summed

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


class TokenSearch:
    """Finds the tokens of characters by sums of token lengths.

    Args:
        table: the bytes of the tokenizer's tokens.
    """

    def __init__(self, table: TokenBytes):
        self._table = table
        self._lengths = np.diff(table.offsets).astype(np.int32)
        self._words = _words_of(table.data)
        self._first = self._words[table.offsets[:-1]]  # the first eight bytes of each token, and which of them it has
        self._used = _FIRST_BYTES[np.minimum(self._lengths, 8)]

    def not_compared(self) -> npt.NDArray[np.bool_]:
        """For `has_entries`, at the beginning of a load."""
        return np.ones(len(self._lengths), np.bool_)

    def has_entries(self, backend: Any, ids: Ragged, left: npt.NDArray[np.bool_]) -> bool:
        """Whether a tokenizer with ByteLevel's alphabet still has those entries for some ids that the table is of. Of
        each id that is `left`, which is cleared for them: other batches have the same ids."""
        used = np.zeros(max(len(self._lengths), int(ids.values.max(initial=-1)) + 1), np.bool_)
        used[ids.values] = True
        if used[len(self._lengths) :].any():
            return False
        numbers = np.flatnonzero(used & left)
        if not len(numbers):
            return True
        letters, model, added = byte_letters(), backend.model, added_tokens(backend)
        if any(model.token_to_id(letter) is None for letter in letters):
            return False
        bounds = (self._table.offsets[numbers + more].tolist() for more in (0, 1))
        for number, begin, end in zip(numbers.tolist(), *bounds, strict=True):
            token, entry = self._table.data[begin:end].tobytes(), model.id_to_token(number)
            if number in added:
                if token != added[number].content.encode() or entry not in (None, added[number].content):
                    return False
            elif entry != "".join([letters[byte] for byte in token]):
                return False
        left[numbers] = False
        return True

    def tokens(
        self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, at: Numbers
    ) -> tuple[npt.NDArray[np.bool_], Numbers]:
        """Finds the tokens of characters.

        Args:
            text, ids: n texts and their ids.
            rows, at: (q,) texts, and bytes in them.

        Returns:
            (n,) in which texts the tokens lie end to end, and (q,) the number of the token of the character at each
            byte, -1 if it has none. Only those of these texts are meaningful.
        """
        data, offsets, at = self._with_spaces(text, rows, at)
        fast, sums = self._end_to_end(text, data, offsets, ids)
        length = offsets[rows + 1] - offsets[rows]
        inside = np.flatnonzero(fast[rows] & (at >= 0) & (at < length))
        byte = (offsets[rows] + at)[inside]
        for _ in range(3):  # to the first byte of the character
            byte -= (data[byte] & 0xC0) == 0x80
        byte -= (offsets[:-1] - sums.before(ids.offsets[:-1]))[rows[inside]]
        token, begin = sums.token_at(byte)
        number = token - ids.offsets[rows[inside]]
        # Only spaces are trimmed, and a space is in one token, so no other token can have the character.
        leading, trailing = self._trimmed(ids.values[token], number)
        trimmed = byte < begin + leading
        trimmed |= byte >= begin + self._lengths[ids.values[token]] - trailing
        found = np.full(len(rows), -1, np.int64)
        found[inside] = np.where(trimmed, -1, number)
        return fast, found

    def overlapping(
        self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
    ) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
        """Finds the tokens that overlap spans.

        Args:
            text, ids, rows, start, end: as for `laid`.

        Returns:
            (n,) in which texts the tokens lie end to end, and (k,) the numbers of the first and of the last token that
            begins, without the spaces that are trimmed, before the end of a span, and ends behind its start; the last
            one is before the first one if there is none. Only those of these texts are meaningful.
        """
        data, offsets, at = self._with_spaces(text, np.tile(rows, 2), np.concatenate([start, end]))
        start, end = np.split(at, 2)
        fast, sums = self._end_to_end(text, data, offsets, ids)
        found = np.full((2, len(rows)), -1, np.int64)
        found[0] = 0
        inside = np.flatnonzero(fast[rows] & (start < offsets[rows + 1] - offsets[rows]) & (end > 0))
        before, first_id = sums.before(ids.offsets[:-1])[rows[inside]], ids.offsets[rows[inside]]
        start, end = start[inside] + before, end[inside] + before
        for side, byte in enumerate((start, end - 1)):
            token, begin = sums.token_at(byte)
            number, entry = token - first_id, ids.values[token]
            stop = begin + self._lengths[entry]
            leading, trailing = self._trimmed(entry, number)
            begin = np.minimum(begin + leading, stop)
            stop = np.maximum(stop - trailing, begin)
            outside = (begin >= end) | (stop <= start)
            found[side, inside] = np.where(outside, number - 1 if side else number + 1, number)
        return fast, found[0], found[1]

    def laid(
        self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
    ) -> tuple[npt.NDArray[np.bool_], tuple[Numbers, Numbers], tuple[Numbers, Numbers]]:
        """Finds where tokens and spans are.

        Args:
            text, ids: n texts and their ids.
            rows, start, end: (k,) spans of these texts, ascending.

        Returns:
            (n,) in which texts the tokens lie end to end; the first byte and the end of every token, and of every span,
            counted over all texts. Those of tokens are meaningful only in these texts; elsewhere tokens are empty.
        """
        data, offsets, at = self._with_spaces(text, np.tile(rows, 2), np.concatenate([start, end]))
        fast, sums = self._end_to_end(text, data, offsets, ids)
        first, last = np.split(offsets[np.tile(rows, 2)] + at, 2)
        ends = offsets_of(sums.lengths)
        shift = np.repeat(offsets[:-1] - ends[ids.offsets[:-1]], ids.lengths)
        begin, stop = (part + shift for part in (ends[:-1], ends[1:]))
        return fast, (begin, np.where(np.repeat(fast, ids.lengths), stop, begin)), (first, last)

    def _trimmed(self, entries: Ids, number: Numbers) -> tuple[Ids, Ids]:
        """(k,) bytes of spaces that offsets leave out at the beginning and at the end of tokens, by their ids and their
        numbers in their texts."""
        leading = self._table.leading[entries]
        if self._table.keeps_first:
            leading[(number == 0) & (leading == 1)] = 0
        return leading, self._table.trailing[entries]

    def _with_spaces(self, text: pa.LargeStringArray, rows: Numbers, at: Numbers) -> tuple[Bytes, Numbers, Numbers]:
        """The bytes of n texts in which spaces are replaced as the tokenizer does, (n + 1,) where each text begins, and
        (q,) places in texts as places there."""
        data, offsets = _buffers(text)
        if self._table.space == " ":
            return data, offsets, at
        spaces = np.flatnonzero(data == ord(" "))
        # A space before a byte moves it by the bytes that its replacement has more.
        before = np.searchsorted(spaces, offsets[rows] + at) - np.searchsorted(spaces, offsets[rows])
        at = at + (len(self._table.space.encode()) - 1) * before
        return *_buffers(pc.replace_substring(text, " ", self._table.space)), at

    def _end_to_end(
        self, text: pa.LargeStringArray, data: Bytes, offsets: Numbers, ids: Ragged
    ) -> tuple[npt.NDArray[np.bool_], "_Sums"]:
        """Whether the tokens of each row lie end to end in its text.

        Args:
            text, ids: n texts and their ids.
            data, offsets: from `_with_spaces`.

        Returns:
            (n,) bool, and the lengths of all tokens.
        """
        lengths = self._lengths[ids.values]
        sums = _Sums(lengths)
        fast = np.diff(sums.before(ids.offsets)) == np.diff(offsets)
        fast[_rows_of(np.flatnonzero(lengths == 0), ids)] = False  # none of the tokenizer's tokens
        if self._table.nfc:
            changeable = np.flatnonzero(fast & ~as_numpy(pc.string_is_ascii(text)))
            bounds = offsets_of(ids.lengths[changeable])
            token = ranges(ids.offsets[changeable], np.diff(bounds), bounds)
            ends = offsets_of(lengths[token])
            place = ends[:-1] + np.repeat(offsets[changeable] - ends[bounds[:-1]], np.diff(bounds))
            different = self._different(data, ids.values[token], lengths[token], place)
            fast[_rows_of(token[different], ids)] = False
        return fast, sums

    def _different(self, data: Bytes, ids: Ids, lengths: Ids, place: Numbers) -> Numbers:
        """The numbers of the tokens that are not the bytes at their places."""
        words = _words_of(data)
        wrong = [np.flatnonzero((words[place] ^ self._first[ids]) & self._used[ids])]
        token = np.flatnonzero(lengths > 8)
        begin, left, place = self._table.offsets[ids[token]], lengths[token], place[token]
        while len(token):  # the next eight bytes of those that have more
            begin, left, place = begin + 8, left - 8, np.minimum(place + 8, len(data))
            used = _FIRST_BYTES[np.minimum(left, 8)]
            wrong.append(token[(words[place] ^ self._words[begin]) & used != 0])
            more = left > 8
            token, begin, left, place = token[more], begin[more], left[more], place[more]
        return np.concatenate(wrong)


class _Sums:
    """Sums of the (t,) lengths of tokens: those before each block are kept, as few others are needed."""

    def __init__(self, lengths: Ids) -> None:
        self.lengths = lengths
        whole = len(lengths) // _BLOCK * _BLOCK
        blocks = lengths[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.int64)
        self._before = offsets_of(np.append(blocks, lengths[whole:].sum(dtype=np.int64)))

    def before(self, token: Numbers) -> Numbers:
        """(k,) numbers of tokens, up to t → the sum of the lengths before each."""
        block, inside = np.divmod(token, _BLOCK)
        sums: Numbers = sum((np.where(at < inside, part, 0) for at, part in self._parts(block)), self._before[block])
        return sums

    def token_at(self, byte: Numbers) -> tuple[Numbers, Numbers]:
        """(k,) bytes → the last token that begins there or before, and where it begins."""
        block = np.searchsorted(self._before[:-1], byte, side="right") - 1
        token, begin, end = block * _BLOCK, self._before[block], self._before[block]
        for _, part in self._parts(block):
            end = end + part
            token += end <= byte
            begin = np.where(end <= byte, end, begin)
        return token, begin

    def _parts(self, block: Numbers) -> Iterator[tuple[int, Ids]]:
        """(k,) blocks → (k,) the lengths of their first tokens, of their second ones …, 0 behind the last token."""
        lengths = self.lengths if len(self.lengths) else np.zeros(1, np.int32)
        for at in range(_BLOCK):
            token = block * _BLOCK + at
            yield at, np.where(token < len(self.lengths), lengths.take(token, mode="clip"), 0)


def _rows_of(token: Numbers, ids: Ragged) -> Numbers:
    """Numbers of tokens → the rows that have them."""
    return np.searchsorted(ids.offsets, token, side="right") - 1


_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], "<u8")
"""Which bits of a word are its first bytes, by their number."""


def _words_of(data: Bytes) -> npt.NDArray[np.uint64]:
    """(n,) bytes → (n + 1,) the eight bytes that begin at each place, with zeros after the end."""
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    return words


def _buffers(text: pa.LargeStringArray) -> tuple[Bytes, Numbers]:
    """The UTF-8 bytes of n texts end to end, and (n + 1,) where each begins."""
    offsets = np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]
    # An array of empty strings may have no character buffer.
    data = np.frombuffer(text.buffers()[2] or b"", np.uint8)
    return data[offsets[0] : offsets[-1]], offsets - offsets[0]
