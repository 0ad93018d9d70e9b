"""Loss masks: from byte spans of rendered texts to a mask over their tokens, exactly as transformers makes it.

transformers, in `apply_chat_template(..., return_assistant_tokens_mask=True)`, marks for each span of characters the
tokens from `char_to_token(start)` to `char_to_token(end - 1)`. `char_to_token` is the first token whose offsets contain
the character, or None: at the end of the text, or where a post-processor trims white space from offsets. What
transformers does with None, and with token 0, is part of the definition:

- a start without a token ends the row: this span and all later ones of the row mark nothing;
- an end without a token, or in token 0, marks everything from the start to the end of the row.

An empty span ends before it starts. It marks nothing unless one of the two rules applies, or its start is inside a
token. At the start of a text transformers raises OverflowError for it; here it marks nothing.

There are two ways to find the token of a character. Where tokens lie end to end in the text (`token_bytes.py`), it is a
search in sums of token lengths, for all rows at once. That is verified row by row: the tokens must have the length of
the text, and its bytes if the tokenizer may have normalized them. All other rows are encoded by the tokenizer itself,
which knows its offsets.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of, ranges
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.errors import TokenizerError
from gpuload.engines.host.acceptance import acceptance_texts
from gpuload.engines.host.encode import needs_itself
from gpuload.reference.reference import Reference
from gpuload.tokenizer.token_bytes import TokenBytes, token_bytes

_ROWS = 256
"""Texts that the tokenizer encodes at a time: their encodings take hundreds of bytes per token."""

_BLOCK = 16  # tokens whose lengths are summed

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


class TokenSpans:
    """Makes loss masks for one tokenizer.

    Args:
        reference: the tokenizer.

    Attributes:
        slow: for the report, why the tokenizer encodes every text again for its offsets; None if it encodes only those
            whose tokens do not lie end to end.
        table: the bytes of its tokens, where they lie end to end in most texts; None otherwise.
        encoded_again: how many texts it has encoded again so far.

    Raises:
        TokenizerError: the tokenizer has no offsets.
    """

    def __init__(self, reference: Reference):
        self._tokenizer = reference.tokenizer
        if not getattr(self._encode(["a"]), "encodings", None):
            raise TokenizerError(
                f"tokenizer {reference.name} has no offsets, which loss masks need, because "
                f"{type(self._tokenizer).__name__} is a slow tokenizer: use a fast one, which has a tokenizer.json"
            )
        self._search: _Search | None = None
        self.table: TokenBytes | None = None
        table = needs_itself(reference) or token_bytes(reference.model_json)
        if isinstance(table, str):
            reason: str | None = table
        else:
            search = _Search(table)
            reason = self._difference(search, reference)
            if reason is None:
                self._search, self.table = search, table
        self.slow = f"offsets of the tokenizer itself: {reason}" if reason else None
        self.encoded_again = 0

    def bits(
        self,
        text: pa.LargeStringArray,
        ids: Ragged,
        rows: Numbers,
        start: Numbers,
        end: Numbers,
        bits: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """Marks the tokens of k spans.

        Args:
            text: n texts, none of them null.
            ids: n rows, the tokenizer's ids of these texts in host memory.
            rows: (k,) the text of each span, ascending.
            start: (k,) where each span begins, in bytes of the text's UTF-8; ascending within a text.
            end: (k,) where it ends. Spans begin and end between two characters, and do not overlap.
            bits: (k,) what the tokens of each span get.

        Returns:
            (len(ids.values),) the bits of each token, 0 outside of spans. A token of two spans has those of the first.
        """
        if not len(rows):
            return np.zeros(len(ids.values), np.int32)
        first, last = np.full((2, len(rows)), -1, np.int64)
        if self._search:
            found = self._search.tokens(text, ids, np.tile(rows, 2), np.concatenate([start, end - 1]))
            fast, (first, last) = found[0], np.split(found[1], 2)
        else:
            fast = np.zeros(len(text), np.bool_)
        others = np.flatnonzero(~fast[rows])
        if len(others):
            self.encoded_again += len(np.unique(rows[others]))
            where = np.concatenate([start[others], end[others] - 1])
            first[others], last[others] = np.split(self._by_offsets(text, np.tile(rows[others], 2), where), 2)
        return _mark(ids, rows, first, last, bits, empty=end == 0)

    def owners(
        self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
    ) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Finds for each token the first of k spans of which it has a byte.

        A token has the bytes from which it was made; where tokens do not lie end to end, those of its offsets.

        Args:
            text, ids, rows, start, end: as for `bits`.

        Returns:
            (len(ids.values),) int64, the number of the span, -1 where a token has no byte of any. And (n,) bool, false
            for texts that the tokenizer does not encode to these ids, about whose tokens nothing is known.
        """
        some = np.flatnonzero(start < end)
        rows, start, end = rows[some], start[some], end[some]
        owner = np.full(len(ids.values), -1, np.int64)
        known = np.zeros(len(text), np.bool_)
        if self._search:
            known, (begin, stop), (first, last) = self._search.laid(text, ids, rows, start, end)
            owner = _first_touched(begin, stop, first, last)
        others = np.flatnonzero(~known)
        self.encoded_again += len(others)
        places = np.searchsorted(rows, others), np.searchsorted(rows, others, side="right")
        for chunk in range(0, len(others), _ROWS):
            texts = text.take(as_arrow(others[chunk : chunk + _ROWS])).to_pylist()
            for at, (one, encoding) in enumerate(zip(texts, self._encode(texts).encodings, strict=True), chunk):
                row, of_row = others[at], slice(places[0][at], places[1][at])
                tokens = slice(ids.offsets[row], ids.offsets[row + 1])
                known[row] = encoding.ids == ids.values[tokens].tolist()
                if known[row]:
                    # The byte at which each character begins, and the end of the text.
                    byte = np.flatnonzero((np.frombuffer(f"{one}.".encode(), np.uint8) & 0xC0) != 0x80)
                    begin, stop = byte[np.array(encoding.offsets, np.int64).reshape(-1, 2)].T
                    number = _first_touched(begin, stop, start[of_row], end[of_row])
                    owner[tokens] = np.where(number < 0, -1, number + of_row.start)
        return np.where(owner < 0, -1, some[owner] if len(some) else -1), known

    def _encode(self, texts: list[str]) -> Any:
        """As `apply_chat_template` encodes rendered texts."""
        return self._tokenizer(texts, padding=False, truncation=False, add_special_tokens=False)

    def _by_offsets(self, text: pa.LargeStringArray, rows: Numbers, at: Numbers) -> Numbers:
        """(q,) texts and bytes in them → (q,) the number of the token of the character there, -1 if it has none."""
        order = np.argsort(rows, kind="stable")
        different, begins = np.unique(rows[order], return_index=True)
        queries = np.split(order, begins[1:])
        found = np.full(len(rows), -1, np.int64)
        for chunk in range(0, len(different), _ROWS):
            texts = text.take(as_arrow(different[chunk : chunk + _ROWS])).to_pylist()
            encodings = self._encode(texts).encodings
            for one, encoding, query in zip(texts, encodings, queries[chunk : chunk + _ROWS], strict=True):
                # The number of the character at each byte, and one more at the end of the text.
                character = np.cumsum((np.frombuffer(f"{one}.".encode(), np.uint8) & 0xC0) != 0x80) - 1
                inside = query[(at[query] >= 0) & (at[query] < len(character))]
                tokens = map(encoding.char_to_token, character[at[inside]].tolist())
                found[inside] = [-1 if token is None else token for token in tokens]
        return found

    def _difference(self, search: "_Search", reference: Reference) -> str | None:
        """The shortest of the hostile texts for which the search differs from the tokenizer."""
        texts = acceptance_texts(reference)
        text = as_arrow(texts, pa.large_string())
        offsets = offsets_of(as_numpy(pc.binary_length(text)))
        byte = np.arange(0, offsets[-1], 3)  # every third byte of all texts: thousands of them
        rows = np.searchsorted(offsets, byte, side="right") - 1
        at = byte - offsets[rows]
        fast, found = search.tokens(text, Ragged.from_lists(reference.encode_many(texts)), rows, at)
        some = np.flatnonzero(fast[rows])
        wrong = rows[some[found[some] != self._by_offsets(text, rows[some], at[some])]]
        return f"differs on {min((texts[row] for row in wrong), key=len)!r:.60}" if len(wrong) else None


class _Search:
    """Finds the tokens of characters by sums of token lengths."""

    def __init__(self, table: TokenBytes):
        self._table = table
        self._lengths = np.diff(table.offsets).astype(np.int32)
        self._words = _words_of(table.data)
        self._first = self._words[table.offsets[:-1]]  # the first eight bytes of each token, and which of them it has
        self._used = _FIRST_BYTES[np.minimum(self._lengths, 8)]

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
        table = self._table
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
        leading = table.leading[ids.values[token]]
        if table.keeps_first:
            leading[(number == 0) & (leading == 1)] = 0
        trimmed = byte < begin + leading
        trimmed |= byte >= begin + self._lengths[ids.values[token]] - table.trailing[ids.values[token]]
        found = np.full(len(rows), -1, np.int64)
        found[inside] = np.where(trimmed, -1, number)
        return fast, found

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


def _first_touched(begin: Numbers, stop: Numbers, first: Numbers, last: Numbers) -> Numbers:
    """The first span of which a token has a byte, -1 if there is none.

    Args:
        begin, stop: (m,) first byte and end of each token.
        first, last: (k,) first byte and end of each span; ascending, none of them empty.
    """
    if not len(first):
        return np.full(len(begin), -1, np.int64)
    number = np.searchsorted(last, begin, side="right")  # the first span that ends behind the token's beginning
    touches = (number < len(first)) & (begin < stop)
    touches &= first[np.minimum(number, len(first) - 1)] < stop
    return np.where(touches, number, -1)


def _mark(
    ids: Ragged,
    rows: Numbers,
    first: Numbers,
    last: Numbers,
    bits: npt.NDArray[np.int32],
    empty: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int32]:
    """transformers' loop over spans.

    Args:
        ids: n rows of ids.
        rows: (k,) the row of each span, ascending.
        first, last: (k,) the tokens of its first and last character, -1 for None.
        bits: (k,) for its tokens.
        empty: (k,) spans that mark nothing: the empty ones at the start of a text.
    """
    lengths = ids.lengths[rows]
    none = offsets_of((first < 0) & ~empty)  # how many of the spans before have a start without a token
    of_row = none[np.searchsorted(rows, rows)]  # the same, before the first span of the row
    begin = ids.offsets[rows] + first
    # Never into the next row, whatever the ids.
    end = ids.offsets[rows] + np.minimum(np.where(last > 0, last + 1, lengths), lengths)
    marks = (none[1:] == of_row) & ~empty & (begin < end)
    begin, end, bits = begin[marks], end[marks], bits[marks]
    begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])  # two spans may share a token
    end = np.maximum(begin, end)
    edges = np.stack([begin, end], axis=1).ravel()
    of_edges = np.zeros(len(edges) + 1, np.int32)
    of_edges[1::2] = bits
    found: npt.NDArray[np.int32] = np.repeat(of_edges, np.diff(edges, prepend=0, append=len(ids.values)))
    return found
