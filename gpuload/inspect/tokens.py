"""Rows as tokens, to be shown: plain data for a page and for a terminal.

A row is a list of named token sequences: one for a prompt or a conversation, several next to each other for a pair.
"""

import functools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.arrays import Ragged
from gpuload.inspect.roles import UNKNOWN, Codes
from gpuload.loss import LOSS
from gpuload.pairs.parts import CHOSEN, REJECTED, sequence, split
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
        head, tail: the first and the last of them. If they are not all, those in between are omitted.
    """

    name: str
    length: int
    head: Sequence[Token]
    tail: Sequence[Token] = ()

    @property
    def omitted(self) -> int:
        """Number of tokens between head and tail."""
        return self.length - len(self.head) - len(self.tail)


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
        self, name: str, ids: Sequence[int], codes: Codes, names: Sequence[str], with_loss: bool, most: int | None
    ) -> TokenSequence:
        """The tokens of one sequence.

        Args:
            name: of the sequence.
            ids: its n ids, with a bit where they have loss.
            codes: (n,) the role of each.
            names: the names of roles.
            with_loss: whether the bits mean anything.
            most: how many tokens are kept; None for all.
        """
        described = [
            Token(
                token & ~int(LOSS),
                self.piece(token & ~int(LOSS)),
                None if code == UNKNOWN else names[code],
                bool(token & int(LOSS)) if with_loss else None,
                token & ~int(LOSS) in self._added,
            )
            for token, code in _ends(list(zip(ids, codes.tolist(), strict=True)), most)
        ]
        if len(described) == len(ids):
            return TokenSequence(name, len(ids), described)
        half = len(described) // 2
        return TokenSequence(name, len(ids), described[:half], described[half:])

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
        ids: of the pair, with the bits of their parts (`pairs.parts`).
        most: how many tokens of each are kept; None for all.
    """
    row = Ragged.from_lists([ids])
    sequences = []
    for name, other in (("chosen", REJECTED), ("rejected", CHOSEN)):
        own, completion = split(sequence(row, other))
        marked = own.values | completion.values * LOSS
        codes = completion.values.astype(np.int64)
        sequences.append(reader.sequence(name, marked.tolist(), codes, ("prompt", "completion"), True, most))
    return sequences


def _ends(items: list[Any], most: int | None) -> list[Any]:
    """The items, or as many of the first and of the last ones as `most` allows, an even number."""
    half = len(items) if most is None else most // 2
    return items if most is None or len(items) <= most else items[:half] + items[-half:]


def with_loss_bits(ids: Ragged, row: int, loss: Ragged | None) -> list[int]:
    """The ids of one row, with a bit where they have loss."""
    some: list[int] = (ids[row] if loss is None else ids[row] | loss[row] * LOSS).tolist()
    return some


def first_difference(sequences: Sequence[Sequence[int]]) -> int | None:
    """Where two sequences of ids first differ; None if they are equal, or if there are not two."""
    if len(sequences) != 2 or list(sequences[0]) == list(sequences[1]):
        return None
    pairs: Iterable[tuple[int, tuple[int, int]]] = enumerate(zip(*sequences, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(map(len, sequences)))


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
