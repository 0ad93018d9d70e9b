"""Rows as tokens, to be shown: plain data for a page and for a terminal.

A row is a list of named token sequences: one for a prompt or a conversation, several next to each other for a pair.
"""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.core.arrays import Ragged, common_prefix
from gpuload.core.marks import CHOSEN, LOSS, REJECTED, sequence, split, with_loss
from gpuload.inspect.roles import UNKNOWN, Codes
from gpuload.reference.reference import Reference
from gpuload.tokenizer.token_bytes import TokenBytes, token_bytes

_ARROWS = {"\n": "⏎", "\t": "→", " ": "·", "\r": "␍"}
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


@dataclass(frozen=True)
class Token:
    """One token.

    Attributes:
        id: its id.
        piece: its bytes. Those of one character may be in several tokens.
        role: of the message from which it comes; "template"; or None if that is unknown.
        loss: whether it has loss; None where no token has, as in a prompt.
        special: whether it is an added token, such as <|im_start|>.
    """

    id: int
    piece: bytes
    role: str | None
    loss: bool | None
    special: bool


@dataclass(frozen=True)
class TokenSequence:
    """Some tokens of a sequence.

    Attributes:
        name: "prompt", "conversation", "chosen" or "rejected".
        length: number of all its tokens.
        parts: consecutive tokens that are shown, and the number of the first of them; ascending.
    """

    name: str
    length: int
    parts: Sequence[tuple[int, Sequence[Token]]]

    @property
    def tokens(self) -> list[Token]:
        """All tokens that are shown."""
        return [token for _, tokens in self.parts for token in tokens]

    @property
    def gaps(self) -> list[int]:
        """How many tokens are not shown before each part, and after the last one."""
        ends = [0, *(start + len(tokens) for start, tokens in self.parts)]
        return [
            start - end for start, end in zip([*(start for start, _ in self.parts), self.length], ends, strict=True)
        ]


@dataclass(frozen=True)
class SampleRow:
    """A row to be shown.

    Attributes:
        about: why it is shown: "longest", "shortest" or "random"; or nothing.
        file, number: where it comes from.
        sequences: its tokens.
        dropped: why a load drops it; None if it does not.
    """

    about: str
    file: str
    number: int
    sequences: Sequence[TokenSequence]
    dropped: str | None = None

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
    """Describes the tokens of one tokenizer.

    Args:
        reference: the tokenizer.
    """

    def __init__(self, reference: Reference):
        self._tokenizer = reference.tokenizer
        table = token_bytes(reference.model_json) if reference.backend is not None else ""
        self._table: TokenBytes | None = None if isinstance(table, str) else table
        self._added = {*self._tokenizer.get_added_vocab().values(), *self._tokenizer.all_special_ids}
        self.piece = functools.cache(self._piece)

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
            name: of the sequence.
            ids: its n ids, with a bit where they have loss.
            codes: (n,) the role of each.
            names: the names of roles.
            with_loss: whether the bits mean anything.
            most: how many tokens are kept; None for all.
            around: the number of a token that is kept.
        """

        def described(number: int) -> Token:
            token, code = ids[number] & ~int(LOSS), codes[number]
            role = None if code == UNKNOWN else names[code]
            loss = bool(ids[number] & int(LOSS)) if with_loss else None
            return Token(token, self.piece(token), role, loss, token in self._added)

        parts = shown_ranges(len(ids), most, around)
        return TokenSequence(name, len(ids), [(part.start, list(map(described, part))) for part in parts])

    def _piece(self, token: int) -> bytes:
        """The bytes of a token; those of its name in the vocabulary where tokens have no bytes of their own."""
        table = self._table
        if table is not None and token < len(table.offsets) - 1:
            piece = table.data[table.offsets[token] : table.offsets[token + 1]].tobytes()
            if piece:
                return piece.replace(table.space.encode(), b" ")
        name = self._tokenizer.convert_ids_to_tokens(token)
        return str(name).encode(errors="surrogatepass") if name is not None else b""


def pair_of(reader: TokenReader, ids: Sequence[int], most: int | None) -> list[TokenSequence]:
    """The two sequences of a pair. Their roles are `prompt` and `completion`, and completions have loss.

    Args:
        reader: of the tokenizer.
        ids: of the pair, with their bits (`gpuload.core.marks`).
        most: how many tokens of each are kept; None for all.
    """
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
    """Which of n tokens are shown: all, or the first and last ones, or the first ones and those around one of them.

    Args:
        length: n.
        most: how many at most; None for all.
        around: number of a token; those before and around it are the same whatever n is.
    """
    if most is None or (length <= most and around < most // 2):
        return [range(length)]
    half, quarter = most // 2, most // 4
    if around < half:
        return [range(half), range(length - half, length)]
    return [range(quarter), range(around - quarter, min(length, around + half))]


def with_loss_bits(ids: Ragged, row: int, loss: Ragged | None) -> list[int]:
    """The ids of one row, with a bit where they have loss."""
    some: list[int] = (ids[row] if loss is None else ids[row] | loss[row] * LOSS).tolist()
    return some


def visible(piece: bytes) -> list[tuple[str, bool]]:
    """Text in which everything can be seen.

    White space is shown by marks (· ⏎ → ␍), other control and format characters by their code point, and bytes that are
    no character, or only a part of one, in hexadecimal.

    Args:
        piece: UTF-8, or a part of it.

    Returns:
        Parts of the text, and whether each is such a mark.
    """
    text = piece.decode(errors="surrogateescape")
    parts: list[tuple[str, bool]] = []
    for character in text:
        mark = _mark_of(character)
        shown = character if mark is None else mark
        if parts and parts[-1][1] == (mark is not None):
            parts[-1] = parts[-1][0] + shown, parts[-1][1]
        else:
            parts.append((shown, mark is not None))
    return parts


def shown(text: str) -> str:
    """A text with its spaces and line breaks; other characters that cannot be seen are marked."""
    lines = [visible(line.encode(errors="surrogatepass")) for line in text.split("\n")]
    return "\n".join("".join(part.replace("·", " ") if mark else part for part, mark in line) for line in lines)


def visible_text(piece: bytes) -> str:
    """`visible`, as one string."""
    return "".join(part for part, _ in visible(piece))


def _mark_of(character: str) -> str | None:
    if character in _ARROWS:
        return _ARROWS[character]
    if 0xDC80 <= ord(character) <= 0xDCFF:  # surrogateescape: a byte that is no text
        return f"⟨{ord(character) - 0xDC00:02X}⟩"
    if unicodedata.category(character) in _HIDDEN:
        return f"⟨U+{ord(character):04X}⟩"
    return None
