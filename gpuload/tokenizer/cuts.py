"""Where texts can be cut so that their pieces, encoded one by one, have the ids of the whole.

A tokenizer searches a text for added tokens, normalizes what is between them, and splits it by a regex; every match is
encoded by itself. So a text can be cut between two characters if no match and no added token can have both, and what is
on the right of the cut changes no match on its left. (None of the regexes looks to the left of where a match begins.)
This module knows such places for the regexes of `ONE_STAGE`, whose matches are of five kinds:

    contraction   an apostrophe and letters; on its own, or at the end of a word
    word          one character that is no letter, numeral or line end, or none; then letters, or marks
    number        one or more numerals; for some a space before them
    symbols       a space, or none; what is neither white space nor letter nor numeral; line ends, for some also slashes
    white space   up to the last line end, for all that have `\\s*[\\r\\n]`; else all, but without the last one if a
                  character that is no white space follows

The places, between characters of ASCII, which normalization to NFC neither changes nor joins with what is before them:

1. Before a space or a tab, if no white space is before it. It can only begin a match, or be in white space.
2. Between a letter or a digit and a line end. Line ends follow only symbols and white space.
3. Between a letter or a digit and a symbol that is no apostrophe.
4. Between a letter or a symbol and a digit; between a digit and a letter.
5. Between a line feed and a letter, a digit or a symbol that is no slash, if white space up to a line end is one match
   whatever follows.

In all of them the character on the right continues no match, as the end of the text does not, so that the match on the
left is the same without it. The only atom that looks ahead, of white space, is not tried at these places, or (5) after
another alternative has matched.
"""

import string
from typing import Any

import numpy as np

from gpuload.core.backends import added_tokens, state
from gpuload.tokenizer.gigatoken import ONE_STAGE
from gpuload.tokenizer.spec import Split, UnsupportedError, normalizes_to_nfc, stages_of

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int64]]


def _bytes_of(characters: str) -> Bools:
    """(256,) bool: the bytes of characters of ASCII."""
    return np.isin(np.arange(256), [*characters.encode()])


_LETTER, _DIGIT, _SYMBOL = map(_bytes_of, (string.ascii_letters, string.digits, string.punctuation))
_WIDE = np.arange(256) >> 6 == 0b10  # the last byte of a character outside ASCII
_WHITE = np.array(  # white space outside ASCII: its last three bytes, the first of them 0 for those of two bytes
    sorted(
        int.from_bytes(character.encode(), "big")
        for character in "\x85\xa0\u1680\u180e\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028"
        "\u2029\u202f\u205f\u3000"
    )
)


def cut_table(backend: Any) -> Bools:
    """Between which bytes a tokenizer's texts can be cut, except for white space outside ASCII: see `cut_places`.

    Args:
        backend: a `tokenizers.Tokenizer`.

    Returns:
        (65536,) bool, by `first << 8 | second`.

    Raises:
        UnsupportedError: no such places are known for this tokenizer.
    """
    nfc = normalizes_to_nfc(state(backend, "normalizer"))
    stages, prefix_space = stages_of(state(backend, "pre_tokenizer"))
    stage = stages[0] if len(stages) == 1 else None
    if prefix_space or not isinstance(stage, Split) or stage.keep == "gaps" or stage.pattern not in ONE_STAGE:
        raise UnsupportedError("it is not known where texts can be cut for this pre-tokenizer")
    table = _table(lines=r"\s*[\r\n]" in stage.pattern)
    for token in added_tokens(backend).values():
        if token.lstrip or token.rstrip or token.single_word:
            raise UnsupportedError(f"the added token {token.content!r} depends on what is around it")
        if nfc and token.normalized and not token.content.isascii():
            raise UnsupportedError(f"the added token {token.content!r} is found in normalized text")
        code = np.frombuffer(token.content.encode(), np.uint8).astype(np.int64)
        table[code[:-1] << 8 | code[1:]] = False  # no cut is in any occurrence of the token
    return table


def cut_places(table: Bools, data: Bytes, offsets: Places) -> Places:
    """Where texts begin, can be cut and end.

    Args:
        table: from `cut_table`.
        data: the bytes of all texts.
        offsets: (n + 1,) where the texts begin in them, and where the last one ends.

    Returns:
        Ascending places in `data`, each once.
    """
    low = int(offsets[0])
    part = data[low : int(offsets[-1])]
    cut = np.zeros(len(part) + 1, np.bool_)
    cut[1:-1] = table[part[:-1].astype(np.uint16) << 8 | part[1:]]
    if len(part) and part.max() >= 0x80:
        wide = np.flatnonzero(cut[1:-1] & (part[:-1] >= 0x80)) + 1
        last = [part[np.maximum(wide - back, 0)].astype(np.int64) for back in (3, 2, 1)]
        code = last[0] << 16 | last[1] << 8 | last[2]
        white = np.isin(code, _WHITE) | np.isin(code & 0xFFFF, _WHITE)
        cut[wide[white]] = False
    cut[offsets - low] = True
    return np.flatnonzero(cut) + low


def _table(lines: bool) -> Bools:
    """The table without regard to added tokens.

    Args:
        lines: whether white space up to a line end is one match whatever follows.
    """
    pairs = np.zeros((256, 256), np.bool_)
    word, ink = _LETTER | _DIGIT, _LETTER | _DIGIT | _SYMBOL

    def allow(first: Bools, second: Bools) -> None:
        pairs[np.ix_(first, second)] = True

    allow(ink | _WIDE, _bytes_of(" \t"))
    allow(word, _bytes_of("\r\n"))
    allow(word, _SYMBOL & ~_bytes_of("'"))
    allow(_LETTER | _SYMBOL, _DIGIT)
    allow(_DIGIT, _LETTER)
    if lines:
        allow(_bytes_of("\n"), ink & ~_bytes_of("/"))
    return pairs.ravel()
