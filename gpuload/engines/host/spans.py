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

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged, offsets_of
from gpuload.engines.host.acceptance import acceptance_texts
from gpuload.engines.host.encode import needs_itself
from gpuload.errors import TokenizerError
from gpuload.reference.reference import Reference
from gpuload.tokenizer.token_bytes import TokenBytes, token_bytes

_ROWS = 256
"""Texts that the tokenizer encodes at a time: their encodings take hundreds of bytes per token."""

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

    def mask(
        self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
    ) -> npt.NDArray[np.bool_]:
        """Marks the tokens of k spans.

        Args:
            text: n texts, none of them null.
            ids: n rows, the tokenizer's ids of these texts in host memory.
            rows: (k,) the text of each span, ascending.
            start: (k,) where each span begins, in bytes of the text's UTF-8; ascending within a text.
            end: (k,) where it ends. Spans begin and end between two characters, and do not overlap.

        Returns:
            (len(ids.values),) true for the tokens of spans.
        """
        if not len(rows):
            return np.zeros(len(ids.values), np.bool_)
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
        return _mark(ids, rows, first, last, empty=end == 0)

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
            texts = text.take(pa.array(different[chunk : chunk + _ROWS])).to_pylist()
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
        text = pa.array(texts, pa.large_string())
        offsets = offsets_of(np.array(pc.binary_length(text), np.int64))
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
        data, offsets = _buffers(text)
        if table.space != " ":
            spaces = np.flatnonzero(data == ord(" "))
            # A space before a byte moves it by the bytes that its replacement has more.
            before = np.searchsorted(spaces, offsets[rows] + at) - np.searchsorted(spaces, offsets[rows])
            at = at + (len(table.space.encode()) - 1) * before
            data, offsets = _buffers(pc.replace_substring(text, " ", table.space))
        lengths = self._lengths[ids.values]
        ends = offsets_of(lengths)  # ends[j]: where token j begins if all tokens of all rows lie end to end
        shift = offsets[:-1] - ends[ids.offsets[:-1]]  # (n,) from there to its place in `data`
        fast = ends[ids.offsets[1:]] - ends[ids.offsets[:-1]] == np.diff(offsets)
        fast[_rows_of(np.flatnonzero(lengths == 0), ids)] = False  # none of the tokenizer's tokens
        if table.nfc:
            changeable = fast & ~np.asarray(pc.string_is_ascii(text))
            token = np.flatnonzero(np.repeat(changeable, ids.lengths))
            place = ends[token] + np.repeat(shift[changeable], ids.lengths[changeable])
            different = self._different(data, ids.values[token], lengths[token], place)
            fast[_rows_of(token[different], ids)] = False

        length = offsets[rows + 1] - offsets[rows]
        inside = np.flatnonzero(fast[rows] & (at >= 0) & (at < length))
        byte = (offsets[rows] + at)[inside]
        for _ in range(3):  # to the first byte of the character
            byte -= (data[byte] & 0xC0) == 0x80
        byte -= shift[rows[inside]]
        token = np.searchsorted(ends, byte, side="right") - 1
        number = token - ids.offsets[rows[inside]]
        # Only spaces are trimmed, and a space is in one token, so no other token can have the character.
        leading = table.leading[ids.values[token]]
        if table.keeps_first:
            leading[(number == 0) & (leading == 1)] = 0
        trimmed = byte < ends[token] + leading
        trimmed |= byte >= ends[token + 1] - table.trailing[ids.values[token]]
        found = np.full(len(rows), -1, np.int64)
        found[inside] = np.where(trimmed, -1, number)
        return fast, found

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


def _mark(
    ids: Ragged, rows: Numbers, first: Numbers, last: Numbers, empty: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """transformers' loop over spans.

    Args:
        ids: n rows of ids.
        rows: (k,) the row of each span, ascending.
        first, last: (k,) the tokens of its first and last character, -1 for None.
        empty: (k,) spans that mark nothing: the empty ones at the start of a text.
    """
    lengths = ids.lengths[rows]
    none = offsets_of((first < 0) & ~empty)  # how many of the spans before have a start without a token
    of_row = none[np.searchsorted(rows, rows)]  # the same, before the first span of the row
    begin = ids.offsets[rows] + first
    # Never into the next row, whatever the ids.
    end = ids.offsets[rows] + np.minimum(np.where(last > 0, last + 1, lengths), lengths)
    marks = (none[1:] == of_row) & ~empty & (begin < end)
    begin, end = begin[marks], end[marks]
    begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])  # two spans may share a token
    end = np.maximum(begin, end)
    edges = np.stack([begin, end], axis=1).ravel()
    inside: npt.NDArray[np.bool_] = np.repeat(
        np.arange(len(edges) + 1) % 2 == 1, np.diff(edges, prepend=0, append=len(ids.values))
    )
    return inside
