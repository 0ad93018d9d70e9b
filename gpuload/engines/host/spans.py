"""Loss masks: from byte spans of rendered texts to a mask over their tokens, exactly as transformers makes it.

For `apply_chat_template(..., return_assistant_tokens_mask=True)`, transformers 5.24 marks each token whose offsets
overlap one of the spans of characters: they begin before its end, and end behind its start. An empty span is in the
token inside of which it is, and a token without characters in the span inside of which it is.

Versions before mark for each span the tokens from `char_to_token(start)` to `char_to_token(end - 1)`. `char_to_token`
is the first token whose offsets contain the character, or None: at the end of the text, or where a post-processor trims
white space from offsets. What transformers does with None, and with token 0, is part of the definition:

- a start without a token ends the row: this span and all later ones of the row mark nothing;
- an end without a token, or in token 0, marks everything from the start to the end of the row.

An empty span ends before it starts. It marks nothing unless one of the two rules applies, or its start is inside a
token. At the start of a text transformers raises OverflowError for it; here it marks nothing.

There are two ways to find the token of a character. Where tokens lie end to end in the text (`token_bytes.py`), it is a
search in sums of token lengths, for all rows at once. That is verified row by row: the tokens must have the length of
the text, and its bytes if the tokenizer may have normalized them. Of texts that are not in NFC this is tried with their
normal forms. All other rows are encoded by the tokenizer itself, which knows its offsets.

All that is for templates with `{% generation %}` blocks. With other ones the second definition holds, but a row with a
span whose first or last character has no token, such as a line break that a normalizer drops, has loss in the tokens
that have characters of its spans.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of, ranges
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.backends import serialized
from gpuload.core.errors import TokenizerError
from gpuload.engines.host.acceptance import acceptance_texts
from gpuload.engines.host.encode import needs_itself, tokenizer_state
from gpuload.engines.host.normal_form import in_normal_form
from gpuload.engines.host.token_search import Numbers, TokenSearch
from gpuload.reference.mask_rules import mask_rules
from gpuload.reference.reference import Reference
from gpuload.template.answers import has_blocks
from gpuload.tokenizer.spec import byte_letters
from gpuload.tokenizer.token_bytes import TokenBytes, token_bytes

_ROWS = 256
"""Texts that the tokenizer encodes at a time: their encodings take hundreds of bytes per token."""


class TokenSpans:
    """Makes loss masks for one tokenizer.

    Args:
        reference: the tokenizer.

    Attributes:
        slow: for the report, why the tokenizer encodes every text again for its offsets; None if it encodes only those
            whose tokens do not lie end to end.
        table: the bytes of its tokens, where they lie end to end in most texts; None otherwise.
        overlapping: whether spans mark what overlaps them, as transformers 5.24 does it.
        encoded_again: how many texts it has encoded again so far.

    Raises:
        TokenizerError: the tokenizer has no offsets.
    """

    def __init__(self, reference: Reference):
        self._reference, self._tokenizer = reference, reference.tokenizer
        template = reference.template_text
        self._as_transformers = not template or has_blocks(template)
        self.overlapping = self._as_transformers and mask_rules().overlapping
        if not getattr(self._encode(["a"]), "encodings", None):
            raise TokenizerError(
                f"tokenizer {reference.name} has no offsets, which loss masks need, because "
                f"{type(self._tokenizer).__name__} is a slow tokenizer: use a fast one, which has a tokenizer.json"
            )
        self.encoded_again = 0
        self._find_table()

    def _find_table(self) -> None:
        """Makes the table, or takes that of an earlier load with this tokenizer: making it takes a tenth of a second,
        in which no other thread of Python works."""
        state = _state_of(self._reference)
        known = None if state is None else _known.get(self._tokenizer)
        if known is not None and known[0] == state:
            _, self._search, self.table, self.slow = known
            self.again()
            return
        self._read_table(lambda: self._reference.model_json)
        if state is not None:
            _known[self._tokenizer] = state, self._search, self.table, self.slow

    def _read_table(self, model_json: Callable[[], str]) -> None:
        table = needs_itself(self._reference) or token_bytes(model_json())
        search = None if isinstance(table, str) else TokenSearch(table)
        reason = table if search is None else self._difference(search, self._reference)
        self._search = None if reason else search
        self.table = None if reason or isinstance(table, str) else table
        self.slow = f"offsets of the tokenizer itself: {reason}" if reason else None
        self._left: npt.NDArray[np.bool_] | None = None

    def again(self) -> None:
        """Prepares for another load, in which the tokenizer may have other entries: those of ids are then compared with
        the table, each once; at first all are left."""
        self._left = self._search.not_compared() if self._search else None

    def _check(self, ids: Ragged) -> None:
        """Makes a table of an earlier load again if it has not the tokenizer's entries of some ids."""
        search, left = self._search, self._left
        if search and left is not None and not search.has_entries(self._tokenizer.backend_tokenizer, ids, left):
            self._read_table(lambda: serialized(self._tokenizer.backend_tokenizer))

    def bits(
        self,
        text: pa.LargeStringArray,
        ids: Ragged,
        rows: Numbers,
        start: Numbers,
        end: Numbers,
        bits: npt.NDArray[np.int32],
        overlapping: bool = False,
    ) -> npt.NDArray[np.int32]:
        """Marks the tokens of k spans.

        Args:
            text: n texts, none of them null.
            ids: n rows, the tokenizer's ids of these texts in host memory.
            rows: (k,) the text of each span, ascending.
            start: (k,) where each span begins, in bytes of the text's UTF-8; ascending within a text.
            end: (k,) where it ends. Spans begin and end between two characters, and do not overlap.
            bits: (k,) what the tokens of each span get.
            overlapping: mark what overlaps them, whichever version of transformers is installed.

        Returns:
            (len(ids.values),) the bits of each token, 0 outside of spans. A token of two spans has those of the first.
        """
        if not len(rows):
            return np.zeros(len(ids.values), np.int32)
        self._check(ids)
        if overlapping or self.overlapping:
            return self._bits_of_overlapping(text, ids, rows, start, end, bits)
        fast, first, last = self._find(False, text, ids, rows, start, end)
        others = np.flatnonzero(~fast[rows])
        if len(others):
            self.encoded_again += len(np.unique(rows[others]))
            where = np.concatenate([start[others], end[others] - 1])
            first[others], last[others] = np.split(self._by_offsets(text, np.tile(rows[others], 2), where), 2)
        marks = _mark(ids, rows, first, last, bits, empty=end == 0)
        if not self._as_transformers and len(unclear := np.unique(rows[(first < 0) | (last < 0)])):
            of, own = np.isin(rows, unclear), ids.take(unclear)
            spans = np.searchsorted(unclear, rows[of]), start[of], end[of]
            owner, _ = self.owners(text.take(as_arrow(unclear)), own, *spans)
            tokens = ranges(ids.offsets[unclear], own.lengths, own.offsets)
            marks[tokens] = np.where(owner < 0, 0, bits[of][owner])
        return marks

    def _bits_of_overlapping(
        self,
        text: pa.LargeStringArray,
        ids: Ragged,
        rows: Numbers,
        start: Numbers,
        end: Numbers,
        bits: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """As `bits`, for all tokens that overlap a span."""
        fast, first, last = self._find(True, text, ids, rows, start, end)
        some = np.flatnonzero(fast[rows] & (first <= last))
        begin, stop = (ids.offsets[rows[some]] + part[some] for part in (first, last + 1))
        marks = _laid_out(begin, stop, bits[some], len(ids.values))
        others = np.unique(rows[~fast[rows]])
        self.encoded_again += len(others)
        for row, (begin, stop), _ in self._offsets(text, others):
            of_row = slice(*np.searchsorted(rows, [row, row + 1]))
            # As in transformers, a span that ends before some token has no later one.
            owner = _first_touched(np.maximum.accumulate(begin), stop, start[of_row], end[of_row])
            tokens = slice(ids.offsets[row], min(ids.offsets[row] + len(owner), ids.offsets[row + 1]))
            marks[tokens] = np.where(owner < 0, 0, bits[of_row][owner])[: tokens.stop - tokens.start]
        return marks

    def _find(
        self, overlapping: bool, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
    ) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
        """(n,) in which of the texts, or of their normal forms, the tokens lie end to end, and (k,) the numbers of the
        first and of the last token of each span: of its first and last character, or of those that overlap it. Only
        those of these texts are meaningful."""
        search = self._search
        if search is None:
            return np.zeros(len(text), np.bool_), *np.full((2, len(rows)), -1, np.int64)
        find = search.overlapping if overlapping else partial(_first_and_last, search)
        fast, first, last = find(text, ids, rows, start, end)
        spans = np.flatnonzero(~fast[rows])
        if len(spans) and (normalize := self._normalize):
            slow, of = np.unique(rows[spans], return_inverse=True)
            numbers, normal, start, end = in_normal_form(
                text.take(as_arrow(slow)), of, start[spans], end[spans], normalize
            )
            of_normal = np.isin(of, numbers)
            some = spans[of_normal]
            fast[slow[numbers]], first[some], last[some] = find(
                normal,
                ids.take(slow[numbers]),
                np.searchsorted(numbers, of[of_normal]),
                start[of_normal],
                end[of_normal],
            )
        return fast, first, last

    @property
    def _normalize(self) -> Callable[[str], str] | None:
        """What brings texts into NFC, if the tokenizer does nothing else to them."""
        normalizer = getattr(self._tokenizer.backend_tokenizer, "normalizer", None)
        return normalizer.normalize_str if normalizer and self.table and self.table.nfc else None

    def beginning(self, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, at: Numbers) -> Numbers:
        """Finds the tokens that begin at some bytes, where tokens lie end to end.

        Args:
            text, ids: as for `bits`.
            rows, at: (k,) texts, and bytes in them, between two characters.

        Returns:
            (k,) int64, the number of the token, that behind the last one for the end of a text; -1 where no token
            begins, or nothing is known.
        """
        if len(rows):
            self._check(ids)
        if not self._search or not len(rows):
            return np.full(len(rows), -1, np.int64)
        fast, found = self._search.tokens(text, ids, np.tile(rows, 2), np.concatenate([at, at - 1]))
        here, before = np.split(found, 2)
        last = (here < 0) & (before == ids.lengths[rows] - 1)
        here = np.where(last, ids.lengths[rows], here)
        begins = fast[rows] & (here >= 0) & ((before == here - 1) | (at == 0))
        return np.where(begins, here, -1)

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
        self._check(ids)
        some = np.flatnonzero(start < end)
        rows, start, end = rows[some], start[some], end[some]
        owner = np.full(len(ids.values), -1, np.int64)
        known = np.zeros(len(text), np.bool_)
        if self._search:
            known, (begin, stop), (first, last) = self._search.laid(text, ids, rows, start, end)
            owner = np.where(begin < stop, _first_touched(begin, stop, first, last), -1)
        others = np.flatnonzero(~known)
        self.encoded_again += len(others)
        for row, (begin, stop), own in self._offsets(text, others):
            of_row = slice(*np.searchsorted(rows, [row, row + 1]))
            tokens = slice(ids.offsets[row], ids.offsets[row + 1])
            known[row] = own == ids.values[tokens].tolist()
            if known[row]:
                number = np.where(begin < stop, _first_touched(begin, stop, start[of_row], end[of_row]), -1)
                owner[tokens] = np.where(number < 0, -1, number + of_row.start)
        return np.where(owner < 0, -1, some[owner] if len(some) else -1), known

    def _encode(self, texts: list[str]) -> Any:
        """As `apply_chat_template` encodes rendered texts."""
        return self._reference.calling(texts, padding=False, truncation=False, add_special_tokens=False)

    def _offsets(
        self, text: pa.LargeStringArray, some: Numbers
    ) -> Iterator[tuple[int, tuple[Numbers, Numbers], list[int]]]:
        """Numbers of texts → each of them, where its tokens begin and end, in bytes, and their ids."""
        for at in range(0, len(some), _ROWS):
            chunk = some[at : at + _ROWS]
            texts = text.take(as_arrow(chunk)).to_pylist()
            for row, one, encoding in zip(chunk.tolist(), texts, self._encode(texts).encodings, strict=True):
                # The byte at which each character begins, and the end of the text.
                byte = np.flatnonzero((np.frombuffer(f"{one}.".encode(), np.uint8) & 0xC0) != 0x80)
                begin, stop = byte[np.array(encoding.offsets, np.int64).reshape(-1, 2)].T
                yield row, (begin, stop), encoding.ids

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

    def _difference(self, search: TokenSearch, reference: Reference) -> str | None:
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


_known: WeakKeyDictionary[Any, tuple[Any, TokenSearch | None, TokenBytes | None, str | None]] = WeakKeyDictionary()
"""Tokenizer → what it was, and `_search`, `table` and `slow`."""


def _state_of(reference: Reference) -> tuple[Any, ...] | None:
    """All that a table depends on but the vocabulary, whose entries are compared for the ids of each batch; None if
    that cannot be known of this tokenizer."""
    if getattr(type(reference.tokenizer), "__eq__", None) is not vars(object)["__eq__"]:  # others may be equal to it
        return None
    state, backend = tokenizer_state(reference), reference.backend
    if backend is None or state is None or any(backend.token_to_id(letter) is None for letter in byte_letters()):
        return None
    return state


def _first_and_last(
    search: TokenSearch, text: pa.LargeStringArray, ids: Ragged, rows: Numbers, start: Numbers, end: Numbers
) -> tuple[npt.NDArray[np.bool_], Numbers, Numbers]:
    """In which texts tokens lie end to end, and the tokens of the first and of the last character of each span."""
    fast, found = search.tokens(text, ids, np.tile(rows, 2), np.concatenate([start, end - 1]))
    first, last = np.split(found, 2)
    return fast, first, last


def _first_touched(begin: Numbers, stop: Numbers, first: Numbers, last: Numbers) -> Numbers:
    """The first span that overlaps a token, -1 if there is none.

    Args:
        begin, stop: (m,) first byte and end of each token.
        first, last: (k,) first byte and end of each span; ascending.
    """
    if not len(first):
        return np.full(len(begin), -1, np.int64)
    number = np.searchsorted(last, begin, side="right")  # the first span that ends behind the token's beginning
    touches = (number < len(first)) & (first[np.minimum(number, len(first) - 1)] < stop)
    return np.where(touches, number, -1)


def _mark(
    ids: Ragged,
    rows: Numbers,
    first: Numbers,
    last: Numbers,
    bits: npt.NDArray[np.int32],
    empty: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int32]:
    """The loop over spans of versions of transformers before 5.24.

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
    return _laid_out(begin[marks], end[marks], bits[marks], len(ids.values))


def _laid_out(begin: Numbers, end: Numbers, bits: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    """The bits of `count` tokens: those of the first of the (k,) stretches [begin, end) in which it is. Stretches begin
    in ascending order."""
    begin, end = begin.copy(), end.copy()
    begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])  # two spans may share a token
    end = np.maximum(begin, end)
    edges = np.stack([begin, end], axis=1).ravel()
    of_edges = np.zeros(len(edges) + 1, np.int32)
    of_edges[1::2] = bits
    found: npt.NDArray[np.int32] = np.repeat(of_edges, np.diff(edges, prepend=0, append=count))
    return found
