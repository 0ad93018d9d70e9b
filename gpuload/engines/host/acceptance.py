"""Texts on which nearly equal tokenizers differ. An encoder is used only if it agrees with the tokenizer on all.

Some are the same for every tokenizer. The others are made from its added tokens, each in all contexts that its
flags refer to.
"""

import itertools
import unicodedata
from collections.abc import Sequence
from typing import Any

from gpuload.core.backends import added_tokens
from gpuload.reference.reference import Reference
from gpuload.tokenizer.spec import WHITE_SPACE

_MOST_CHARACTERS = 200_000
"""Of texts made from added tokens: encoding them takes about 0.1 s. Tokenizers with hundreds have more."""

_GENERAL = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\u00a0no-break\u2003spaces\u3000\n\n\n \n x",
    "\r\n\r\nline ends\r",
    "It's we'LL they'Re I'M 'tis don\u2019t",
    "1234567890 12 345,678.90 \u0661\u0662\u0663 \u0967 \u00bd\u2460 x  5",
    "e\u0301 \u00e9 A\u030a \u212b \ufb01 \u1e9b\u0323 \uac00 \u1100\u1161",
    "\u0130I\u0131 \u017f \u212a stra\u00dfe",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "\x00\x01\x1f\x7f\u0085\u200b\u2028\ufeff\ufffd\U0010ffff",
    "def f(x):\n\treturn x**2  # \u2211\u222b\u221e \\frac{a}{b} $$ <b> &amp; {{ x }} {% if %}",
    "a" * 300 + " " * 70 + "\n" * 40 + "=" * 90,
    "http://example.com/a?b=c&d=e#f snake_case camelCase ALLCAPS \u2581 \u0120 \u010a",
]
_SPACES = ["  ", "\n", "\t \r\n", "\u00a0", "\u2003", "\u3000", "\x85\u2028", "\u1680\u205f"]
_LETTERS = ["b", "7", "_", "-", "\u00e9", "\u4f60", "\u0301", "\u0338", "\u0663", "\u200d"]


def acceptance_texts(reference: Reference) -> list[str]:
    """The texts for a tokenizer."""
    added = [token for token in added_tokens(reference.backend).values() if token.content]
    return [*_GENERAL, *added_token_texts(added)]


def added_token_texts(added: Sequence[Any]) -> list[str]:
    """Texts with each added token: alone, adjacent to a token of every kind, truncated and inside words; and where its
    flags matter, next to white space, letters and marks, and in other forms that normalization may turn into it.

    Args:
        added: `tokenizers.AddedToken`.
    """
    kinds: dict[tuple[Any, ...], Any] = {}
    for token in added:
        kinds.setdefault(_kind(token), token)
    contents = [other.content for other in kinds.values()]
    # Every token in a word and at a word's end, many in one text: this is all that some of thousands of tokens get.
    texts = [
        ".".join(f"a{token.content}b{token.content}" for token in added[start : start + 16])
        for start in range(0, len(added), 16)
    ]
    characters = sum(map(len, texts))
    for contexts in ([_of_flags(token) for token in added], [_of_neighbors(token, contents) for token in added]):
        for level in itertools.zip_longest(*contexts):
            found = [text for text in level if text is not None]
            characters += sum(map(len, found))
            if characters > _MOST_CHARACTERS:
                return texts
            texts += found
    return texts


def _kind(token: Any) -> tuple[Any, ...]:
    flags = token.lstrip, token.rstrip, token.single_word, token.normalized, token.special
    return *flags, token.content[0] in WHITE_SPACE, token.content[-1] in WHITE_SPACE


def _of_flags(token: Any) -> list[str]:
    text, contexts = token.content, list[str]()
    if token.lstrip or token.rstrip or text[0] in WHITE_SPACE or text[-1] in WHITE_SPACE:
        contexts.append("a".join(f"{space}{text}{space}" for space in _SPACES))
        contexts += [f"{space}{text}{space}" for space in _SPACES[:3]]
    if token.single_word:
        contexts.append(" ".join(f"{text}{letter} {letter}{text}" for letter in _LETTERS))
    if token.normalized:
        forms = [text.upper(), text.lower(), text.title(), f" {text}"]
        forms += [unicodedata.normalize(form, text) for form in ("NFC", "NFD", "NFKC", "NFKD")]
        forms += [f"{text}{mark}" for mark in ("\u0301", "\u0338")] + [f"e{text}", f"{text[0]}\u0301{text[1:]}"]
        contexts.append(". ".join(dict.fromkeys(forms)))
    return contexts


def _of_neighbors(token: Any, others: Sequence[str]) -> list[str]:
    text = token.content
    contexts = [text, f"{text}{text} {text} . {text[:-1]}{text}\n{text}  {text[:-1]}", f"{text} x", f"x {text}"]
    contexts += [
        f"{text}{other} {text}  {other}{text}\n{other}\t{text}.{other[:-1]}{text}{other[1:]}" for other in others
    ]
    return contexts
