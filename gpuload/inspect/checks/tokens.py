"""Checks of tokens and of their loss, for many rows at once."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, RowNumbers, mask_of
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.marks import IDS, LOSS, loss_tokens, split
from gpuload.inspect.checks.findings import RowMask
from gpuload.inspect.checks.messages import NONE, FlatMessages, matches
from gpuload.inspect.checks.rows import CheckedRows, Hit
from gpuload.inspect.roles import TEMPLATE, RoleFinder
from gpuload.inspect.tokens import TokenReader, visible_text
from gpuload.reference.reference import Reference

_BEHIND = 2  # tokens behind which an end token may be, such as a line break after it
_SHOWN = 12  # tokens of an example
_THINKING = r"<think>\s*</think>"


class TokenChecks:
    """Checks of what one tokenizer makes of rows of a kind ("prompts", "chats" or "pairs"). All tokens may be learned,
    as in plain text."""

    def __init__(self, reference: Reference, kind: str, everything_learned: bool):
        self._reference, self._kind, self._everything = reference, kind, everything_learned
        self._reader = TokenReader(reference)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(getattr(self._reference.tokenizer, "added_tokens_decoder", {}))

    @cached_property
    def _special(self) -> npt.NDArray[np.bool_]:
        """(ids,) which ids are special tokens."""
        special = {number for number, token in self._added.items() if token.special}
        return _of_ids(special | set(self._reference.tokenizer.all_special_ids))

    @cached_property
    def _control(self) -> npt.NDArray[np.bool_]:
        """(ids,) which ids a template writes as its syntax: all added tokens but those around reasoning."""
        return self._special | _of_ids(n for n, token in self._added.items() if "think" not in token.content)

    @cached_property
    def _finder(self) -> RoleFinder:
        return RoleFinder(self._reference)

    def of(self, rows: CheckedRows) -> Iterator[Hit]:
        """What is wrong with some rows."""
        yield self._any("double BOS", rows, self._double_bos)
        if self._kind == "prompts":
            return
        if not self._everything:
            hit = self._any("all loss", rows, self._all_loss)
            yield hit if rows.cut is None else hit._replace(rows=hit.rows & ~rows.cut)
        yield self._any("answer cut", rows, lambda tokens: self._ends(tokens)[0])
        yield self._any("end not learned", rows, lambda tokens: self._ends(tokens)[1])
        if self._kind == "chats" and not self._everything:
            yield self._inserted(rows)

    def _any(self, check: str, rows: CheckedRows, test: Any) -> Hit:
        """The rows that have a place in one of their sequences. `test` makes of tokens the place in each row, (n,)
        int64, -1 for none."""
        found = [test(tokens) for tokens in rows.tokens]

        def detail(row: int) -> str:
            number = next(k for k, places in enumerate(found) if places[row] >= 0)
            place = f" in {('chosen', 'rejected')[number]}" if len(found) > 1 else ""
            return self._around(rows.tokens[number], row, int(found[number][row])) + place

        return Hit(check, np.any([places >= 0 for places in found], axis=0), detail)

    def _around(self, tokens: Ragged, row: int, place: int) -> str:
        """Some tokens of a row, those up to a place."""
        ids = (tokens[row] & IDS).tolist()[max(0, place - _SHOWN + 3) : place + 3]
        return "".join(f"[{visible_text(self._reader.piece(token))}]" for token in ids)

    def _double_bos(self, tokens: Ragged) -> npt.NDArray[np.int64]:
        bos = self._reference.tokenizer.bos_token_id
        found = np.full(len(tokens), -1)
        if bos is not None:
            rows = np.flatnonzero(tokens.lengths > 1)
            first = tokens.offsets[rows]
            two = ((tokens.values[first] & IDS) == bos) & ((tokens.values[first + 1] & IDS) == bos)
            found[rows[two]] = 1
        return found

    def _all_loss(self, tokens: Ragged) -> npt.NDArray[np.int64]:
        lengths = tokens.lengths
        return np.where((lengths > 0) & (loss_tokens(tokens) == lengths), 0, -1)

    def _ends(self, tokens: Ragged) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where answers end without an end token, and where they have one without loss: (n,) each, -1 for nowhere."""
        ids, loss = tokens.values & IDS, (tokens.values & LOSS) != 0
        last = np.append(loss[:-1] & ~loss[1:], loss[-1:])
        ends = tokens.offsets[1:][tokens.lengths > 0] - 1
        last[ends] = loss[ends]
        at = np.flatnonzero(last)
        row = np.searchsorted(tokens.offsets, at, side="right") - 1
        learned, behind = np.zeros(len(at), np.bool_), np.zeros(len(at), np.bool_)
        for step in range(_BEHIND + 1):
            back, ahead = at - step, at + step + 1
            inside = back >= tokens.offsets[row]
            back = np.maximum(back, 0)
            learned |= inside & loss[back] & self._special[ids[back]]
            inside = ahead < tokens.offsets[row + 1]
            ahead = np.minimum(ahead, max(len(ids) - 1, 0))
            behind |= inside & ~loss[ahead] & self._special[ids[ahead]]
        return _first_places(at[~learned & ~behind], tokens), _first_places(at[~learned & behind], tokens)

    def _inserted(self, rows: CheckedRows) -> Hit:
        """Rows with text of the template that is learned in front of a text of a message: neither control tokens, nor
        what follows one, such as a name behind <|channel|>, nor white space. Around calls and reasoning, a template has
        to write something: there, only empty thinking blocks count."""
        (tokens,), messages = rows.tokens, rows.messages
        places = _first_places(self._empty_thinking(rows, tokens), tokens)
        more = messages.rows_of((messages.arguments != NONE) | as_numpy(messages.reasoning.is_valid()))
        left = (tokens.lengths > 0) & (places < 0) & ~more
        # A template inserts text by the roles of messages: all rows are searched only if some with these roles have it.
        for some in (left & _some_of_each_shape(messages, left), left):
            at = np.flatnonzero(some)
            if not len(at):
                break
            part = tokens.filter(some)
            found = _first_places(self._inserted_text(rows, at, part), part)
            places[at] = found
            if not (found >= 0).any():
                break
        return Hit("inserted text learned", places >= 0, lambda row: self._around(tokens, row, int(places[row])))

    def _inserted_text(self, rows: CheckedRows, at: RowNumbers, tokens: Ragged) -> RowNumbers:
        """The numbers of the tokens of some rows that are learned text of the template in front of a text of a
        message."""
        ids, with_loss = split(tokens)
        loss, some = with_loss.values, as_arrow(at)
        codes = self._finder.codes(rows.column.take(some), ids, rows.texts[0].take(some) if rows.as_served else None)
        # Stretches of tokens with one role and either with or without loss.
        change = np.ones(len(codes) + 1, np.bool_)
        change[1:-1] = (codes[1:] != codes[:-1]) | (loss[1:] != loss[:-1])
        change[tokens.offsets] = True
        starts = np.flatnonzero(change)[:-1]
        ends = np.append(starts[1:], len(codes))
        inside = np.flatnonzero(~np.isin(ends, tokens.offsets))
        after, wanted = ends[inside], np.zeros(len(starts), np.bool_)
        wanted[inside] = loss[after] & (codes[after] >= 0) & (codes[after] != TEMPLATE)
        wanted &= loss[starts] & (codes[starts] == TEMPLATE) & ~self._control[ids.values[starts]]
        inserted = np.repeat(wanted, ends - starts)
        for token in np.unique(ids.values[inserted]).tolist():
            if not self._reader.piece(token).strip() or self._control[token]:
                inserted &= ids.values != token
        return np.flatnonzero(inserted)

    def _empty_thinking(self, rows: CheckedRows, tokens: Ragged) -> RowNumbers:
        """The numbers of the tokens with loss that begin an empty thinking block, in rows whose messages have none."""
        found = [np.zeros(0, np.int64)]
        blocks = pc.struct_field(pc.extract_regex(rows.texts[0], f"(?P<block>{_THINKING})"), "block").unique()
        if blocks.null_count == len(blocks):
            return found[0]
        ids, loss = split(tokens)
        allowed = loss.values & np.repeat(~rows.messages.rows_of(matches(rows.messages.text, _THINKING)), ids.lengths)
        for block in blocks.drop_null().to_pylist():
            wanted = self._reference.encode(block)
            wanted = wanted[1:-1] if len(wanted) > 3 else wanted  # characters next to it may be in the same tokens
            places = np.flatnonzero(ids.values[: len(ids.values) - len(wanted) + 1] == wanted[0])
            for step, token in enumerate(wanted):
                places = places[(ids.values[places + step] == token) & allowed[places + step]]
            found.append(places)
        return np.unique(np.concatenate(found))


_OF_EACH_SHAPE = 16  # rows that are searched first


def _some_of_each_shape(messages: FlatMessages, rows: RowMask) -> RowMask:
    """(n,) bool: the first ones of some rows with each sequence of roles."""
    shape = as_numpy(messages.shapes.dictionary_encode().indices)
    some = np.flatnonzero(rows)
    some = some[np.argsort(shape[some], kind="stable")]
    begin = np.flatnonzero(np.diff(shape[some], prepend=-1))
    number = np.arange(len(some)) - np.repeat(begin, np.diff(begin, append=len(some)))
    return mask_of(some[number < _OF_EACH_SHAPE], len(rows))


def _first_places(at: RowNumbers, tokens: Ragged) -> npt.NDArray[np.int64]:
    """(n,) the place of the first of some tokens in each row, -1 if it has none of them; their numbers ascend."""
    at = at[::-1]  # of several, the first one stays
    places = np.full(len(tokens), -1)
    row = np.searchsorted(tokens.offsets, at, side="right") - 1
    places[row] = at - tokens.offsets[row]
    return places


def _of_ids(ids: Iterable[int]) -> npt.NDArray[np.bool_]:
    return mask_of(ids, int(IDS) + 1)
