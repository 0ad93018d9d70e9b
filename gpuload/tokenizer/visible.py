"""What tokens and texts look like to people: nothing in them is invisible, or controls a terminal."""

import unicodedata
from typing import Any

from gpuload.tokenizer.token_bytes import TokenBytes, token_bytes

_ARROWS = {"\n": "⏎", "\t": "→", " ": "·", "\r": "␍"}
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs")


class Pieces:
    """id of a token → its bytes.

    Args:
        tokenizer: one of transformers.
        model_json: the text of its tokenizer.json; None if it has none.
    """

    def __init__(self, tokenizer: Any, model_json: str | None):
        self._tokenizer = tokenizer
        table = "" if model_json is None else token_bytes(model_json)
        self._table: TokenBytes | None = None if isinstance(table, str) else table

    def __call__(self, token: int) -> bytes:
        """The bytes of a token; those of its name in the vocabulary where tokens have no bytes of their own."""
        table = self._table
        if table is not None and token < len(table.offsets) - 1:
            piece = table.data[table.offsets[token] : table.offsets[token + 1]].tobytes()
            if piece:
                return piece.replace(table.space.encode(), b" ")
        name = self._tokenizer.convert_ids_to_tokens(token)
        return str(name).encode(errors="surrogatepass") if name is not None else b""


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
