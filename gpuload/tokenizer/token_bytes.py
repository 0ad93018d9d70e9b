"""The bytes of every token, for tokenizers whose tokens lie end to end in the text.

A token's offsets are then sums of lengths, so nothing has to be encoded again to find the token of a character. This is
exact for every text that is equal to the bytes of its tokens, end to end. Equal lengths are enough to know that, except
where NFC may have changed a text, which is never one of ASCII:

- BPE joins neighbours, so the tokens of a pre-token lie end to end in it, and an entry's bytes are the text that it
  covers: byte-level BPE writes one letter per byte, and an entry for byte fallback covers one byte of a character.
- What the tokenizer drops (white space at added tokens, the gaps of a split, bytes without an entry) makes the tokens
  shorter than the text, and what it adds (a prefix) makes them longer. So if it only does one of both, equal lengths
  mean that it did neither. A prefix is added only to a piece that does not begin with it.
- NFC can make a text longer or shorter, or another one of the same length. But it never turns a piece into a proper
  beginning of itself, or into itself and more, so the text differs in the first piece that NFC changes. And where it
  changes nothing, every character is aligned with itself: NFC composes what it decomposed.
- A space that is replaced is replaced everywhere, character by character.

Tokenizers that can both drop text and add or normalize it are not supported.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.core.arrays import offsets_of
from gpuload.core.records import dataclass
from gpuload.tokenizer.spec import WHITE_SPACE, BpeSpec, Split, bpe_spec, byte_entries, byte_letters, steps_of
from gpuload.tokenizer.tables import of_model

_VERSION = 2  # of the table and of the rules
_SPACE_LETTER = byte_letters()[ord(" ")]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of m token ids, and what a post-processor trims from their offsets."""

    data: npt.NDArray[np.uint8]  # (bytes,) uint8, the bytes of all tokens end to end
    offsets: npt.NDArray[np.int64]  # (m + 1,) int64, where the bytes of each id begin. An id without a token has none.
    leading: npt.NDArray[np.int32]  # (m,) int32, bytes of spaces at a token's start that are trimmed from its offsets
    trailing: npt.NDArray[np.int32]  # (m,) int32, the same at its end
    keeps_first: bool  # whether the space of a text's first token is not trimmed at its start, if it has only one there
    space: str  # what the tokenizer replaces every space of a text with; a space if it does not
    nfc: bool  # whether the tokenizer normalizes texts to NFC


def token_bytes(model_json: str) -> TokenBytes | str:
    """Reads the bytes of all tokens.

    Reading a large vocabulary takes a second, so the result is cached on disk.

    Args:
        model_json: the result of `tokenizers.Tokenizer.to_str()`.

    Returns:
        The table, or one sentence why the tokens of this tokenizer need not lie end to end in a text.
    """
    arrays = of_model("token-bytes", _VERSION, model_json, lambda: _arrays(model_json))
    reason = str(arrays.pop("reason"))
    if reason:
        return reason
    keeps_first, space, nfc = bool(arrays.pop("keeps_first")), str(arrays.pop("space")), bool(arrays.pop("nfc"))
    return TokenBytes(**arrays, keeps_first=keeps_first, space=space, nfc=nfc)


def _arrays(model_json: str) -> dict[str, Any]:
    """The fields of `TokenBytes`, or only `reason`."""
    spec = bpe_spec(model_json)
    if isinstance(spec, str):
        return {"reason": np.array(spec)}
    processors = steps_of(json.loads(model_json).get("post_processor"))
    # For each step that trims spaces from offsets: whether it keeps that of the first token.
    trims = [bool(step["add_prefix_space"]) for step in processors if step.get("trim_offsets")]
    reason = _reason(spec, processors, trims)
    return {"reason": np.array(reason or "")} | ({} if reason else _table(spec, trims))


def _reason(spec: BpeSpec, processors: Sequence[Mapping[str, Any]], trims: Sequence[bool]) -> str | None:
    """One sentence why tokens need not lie end to end, or are not known to."""
    for step in processors:
        if step["type"] not in ("ByteLevel", "RobertaProcessing", "BertProcessing", "TemplateProcessing"):
            return f"the post-processor {step['type']} is not supported"
    drops = any(token.lstrip or token.rstrip for token in spec.added)
    drops |= any(isinstance(stage, Split) and stage.keep != "all" for stage in spec.stages)
    drops |= not spec.fallback and any(letter not in spec.vocab for letter in byte_letters())
    if drops and (spec.nfc or spec.prefix_space or (spec.fallback and spec.fallback.prefix)):
        return "the tokenizer can drop parts of a text, and normalize it or add a prefix"
    if len(trims) > 1:
        return "the post-processor trims offsets twice"
    if trims and spec.fallback:
        return "the post-processor trims offsets of a tokenizer with byte fallback"
    spaces = {*WHITE_SPACE, _SPACE_LETTER}
    if trims and any(token.content[0] in spaces or token.content[-1] in spaces for token in spec.added):
        return "the post-processor trims white space of added tokens"
    if spec.fallback and not spec.fallback.space:
        return "the tokenizer removes spaces"
    entries = {number: entry for entry, number in spec.vocab.items()}
    for token in spec.added:
        if entries.get(token.id, token.content) != token.content:
            return f"the added token {token.content!r} has the id of another entry"
    return None


def _table(spec: BpeSpec, trims: Sequence[bool]) -> dict[str, Any]:
    texts = _fallback_bytes(spec.vocab) if spec.fallback else _byte_level_bytes(spec.vocab)
    space = spec.fallback.space if spec.fallback else " "
    texts |= {token.id: token.content.replace(" ", space).encode() for token in spec.added}
    size = max([*texts, *spec.vocab.values()], default=-1) + 1
    tokens = [texts.get(number, b"") for number in range(size)]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    leading, trailing = np.zeros((2, len(tokens)), np.int32)
    if trims:  # of byte-level BPE: the only white space in its alphabet is the letter of the space
        leading[:] = [len(token) - len(token.lstrip(b" ")) for token in tokens]
        trailing[:] = [len(token) - len(token.rstrip(b" ")) for token in tokens]
    return {
        "data": np.frombuffer(b"".join(tokens), np.uint8),
        "offsets": offsets_of(lengths),
        "leading": leading,
        "trailing": trailing,
        "keeps_first": np.array(any(trims)),
        "space": np.array(space),
        "nfc": np.array(spec.nfc),
    }


def _byte_level_bytes(vocab: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of all entries in ByteLevel's alphabet. It produces no others."""
    letters = byte_letters()
    known, table = set(letters), {ord(letter): byte for byte, letter in enumerate(letters)}
    return {
        number: entry.translate(table).encode("latin-1") for entry, number in vocab.items() if known.issuperset(entry)
    }


def _fallback_bytes(vocab: Mapping[str, int]) -> dict[int, bytes]:
    of_bytes = {entry: bytes([byte]) for byte, entry in enumerate(byte_entries())}
    return {number: of_bytes.get(entry) or entry.encode(errors="surrogatepass") for entry, number in vocab.items()}
