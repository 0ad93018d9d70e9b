"""Rows as tokens, to be shown: plain data for a page and for a terminal.

A row is a list of named token sequences: one for a prompt or a conversation, several next to each other for a pair.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.core.arrays import Ragged, common_prefix
from gpuload.core.marks import CHOSEN, LOSS, REJECTED, sequence, split, with_loss
from gpuload.inspect.roles import UNKNOWN, Codes
from gpuload.reference.reference import Reference
from gpuload.tokenizer.visible import Pieces
from gpuload.tokenizer.visible import shown as shown
from gpuload.tokenizer.visible import visible as visible
from gpuload.tokenizer.visible import visible_text as visible_text


@dataclass(frozen=True)
class Token:
    """One token."""

    id: int  # its id
    piece: bytes  # its bytes. Those of one character may be in several tokens.
    role: str | None  # of the message from which it comes; "template"; or None if that is unknown
    loss: bool | None  # whether it has loss; None where no token has, as in a prompt
    special: bool  # whether it is an added token, such as <|im_start|>


@dataclass(frozen=True)
class TokenSequence:
    """Some tokens of a sequence."""

    name: str  # "prompt", "conversation", "chosen" or "rejected"
    length: int  # number of all its tokens
    parts: Sequence[tuple[int, Sequence[Token]]]  # consecutive ones that are shown, each from a number on; ascending
    first: int = 0  # of the tokens that are looked at
    last: int | None = None  # the token behind these; None if they end with the sequence

    @property
    def tokens(self) -> list[Token]:
        """All tokens that are shown."""
        return [token for _, tokens in self.parts for token in tokens]

    def between(self, first: int, last: int) -> "TokenSequence":
        """Some of the tokens: those from `first` up to `last`."""
        parts = [
            (max(start, first), tokens[max(0, first - start) : max(0, last - start)])
            for start, tokens in self.parts
            if start < last and start + len(tokens) > first
        ]
        return TokenSequence(self.name, self.length, parts, first, min(last, self.length))

    @property
    def gaps(self) -> list[int]:
        """How many tokens are not shown before each part, and after the last one."""
        ends = [self.first, *(start + len(tokens) for start, tokens in self.parts)]
        last = self.length if self.last is None else self.last
        return [start - end for start, end in zip([*(start for start, _ in self.parts), last], ends, strict=True)]


@dataclass(frozen=True)
class SampleRow:
    """A row to be shown."""

    about: str  # why it is shown: "longest", "shortest", "random" or "dropped"; or nothing
    file: str
    number: int  # in the file
    sequences: Sequence[TokenSequence]  # its tokens
    dropped: str | None = None  # why a load drops it; None if it does not
    text: str | None = None  # its columns as JSON, in the place of tokens

    @property
    def difference(self) -> int | None:
        """The number of the first token in which two sequences differ; None if they are equal or not two.

        What is shown of a pair has it: before it, the same tokens are shown of both.
        """
        if len(self.sequences) != 2:
            return None
        one, other = (
            {start + at: token.id for start, tokens in sequence.parts for at, token in enumerate(tokens)}
            for sequence in self.sequences
        )
        return min((at for at in one.keys() | other.keys() if one.get(at) != other.get(at)), default=None)


class TokenReader:
    """Describes the tokens of one tokenizer."""

    def __init__(self, reference: Reference):
        tokenizer = reference.tokenizer
        self._added = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        self.piece = functools.cache(Pieces(tokenizer, reference.model_json if reference.backend is not None else None))

    def sequence(
        self,
        name: str,
        ids: Sequence[int],
        codes: Codes,
        names: Sequence[str],
        with_loss: bool,
        most: int | None,
        around: int = 0,
    ) -> TokenSequence:
        """The tokens of one sequence.

        Args:
            ids: its n ids, with a bit where they have loss, if they are `with_loss`.
            codes: (n,) the role of each, as an index into `names`.
            most, around: as for `shown_ranges`.
        """

        def described(number: int) -> Token:
            token, code = ids[number] & ~int(LOSS), codes[number]
            role = None if code == UNKNOWN else names[code]
            loss = bool(ids[number] & int(LOSS)) if with_loss else None
            return Token(token, self.piece(token), role, loss, token in self._added)

        parts = shown_ranges(len(ids), most, around)
        return TokenSequence(name, len(ids), [(part.start, list(map(described, part))) for part in parts])


def pair_of(reader: TokenReader, ids: Sequence[int], most: int | None) -> list[TokenSequence]:
    """The two sequences of a pair, whose ids have bits (`gpuload.core.marks`). Their roles are `prompt` and
    `completion`, completions have loss, and `most` tokens of each are kept; None for all."""
    row = Ragged.from_lists([ids])
    (chosen, of_chosen), (rejected, of_rejected) = (split(sequence(row, other)) for other in (REJECTED, CHOSEN))
    around = common_prefix(chosen.values.tolist(), rejected.values.tolist())
    return [
        reader.sequence(
            name,
            with_loss(own, completion.values).values.tolist(),
            completion.values.astype(np.int64),
            ("prompt", "completion"),
            True,
            most,
            around,
        )
        for name, own, completion in (("chosen", chosen, of_chosen), ("rejected", rejected, of_rejected))
    ]


def shown_ranges(length: int, most: int | None, around: int) -> list[range]:
    """Which of `length` tokens are shown: all, or the first and last ones, or the first ones and those around one of
    them.

    At most so many are, if not None; those before and around number `around` are the same whatever the length is.
    """
    if most is None or (length <= most and around < most // 2):
        return [range(length)]
    half, quarter = most // 2, most // 4
    if around < half:
        return [range(half), range(length - half, length)]
    return [range(quarter), range(around - quarter, min(length, around + half))]
