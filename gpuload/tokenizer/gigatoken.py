"""Which tokenizers gigatoken is known to encode exactly.

gigatoken reads a part of a tokenizer's configuration and ignores the rest without an error: `single_word`, `Digits`,
how a `Split` treats its matches, that a normalized added token is searched for in normalized text. So it is used only
for configurations that this module lists, and that tests/test_encoder_matrix.py compares with `tokenizers`.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from gpuload.tokenizer.spec import GPT2_PATTERN, WHITE_SPACE, BpeSpec, Split, bpe_spec, byte_entries, byte_letters
from gpuload.tokenizer.tables import of_model

_VERSION = 1  # of the rules

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Split regexes whose matches cover any text, so that it does not matter whether the gaps between them are kept.
ONE_STAGE = {
    GPT2_PATTERN,
    # Qwen 2 to 3
    rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}",
    # Qwen 3.5
    rf"{_CONTRACTIONS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
    # Llama 3, OLMo 2
    rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}",
    # cl100k: Phi-4
    rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # o200k: gpt-oss
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}",
    # Tekken: Mistral-Nemo
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}",
}
_DEEPSEEK = (
    Split(r"\p{N}{1,3}"),
    Split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    Split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)


def not_known_exact(model_json: str) -> str | None:
    """Why gigatoken is not known to be exact for a tokenizer; None if it is.

    Reading a large vocabulary takes a second, so the answer is cached on disk.

    Args:
        model_json: the result of `tokenizers.Tokenizer.to_str()`.
    """

    def reason() -> str:
        spec = bpe_spec(model_json)
        if isinstance(spec, str):
            return spec
        return _wrong_stages(spec) or _wrong_added(spec) or _wrong_vocabulary(spec) or ""

    answer = of_model("gigatoken", _VERSION, model_json, lambda: {"reason": np.array(reason())})
    return str(answer["reason"]) or None


def needs_nfc_text(added: Iterable[Any]) -> bool:
    """Whether gigatoken is exact only for texts in NFC, if the tokenizer normalizes to it.

    It searches for added tokens in the original text, also for those that have to be found in normalized text. And a
    pre-token that becomes equal to an added token by normalization gets the token's id, also if the token has to be
    found in the original text. (The only ASCII characters that something else normalizes to are `K`, `;` and a grave
    accent.)

    Args:
        added: `tokenizers.AddedToken`.
    """
    return any(token.normalized or not token.content.isascii() or set(token.content) & set("K;`") for token in added)


def _wrong_stages(spec: BpeSpec) -> str | None:
    if spec.fallback:
        known = spec.fallback.prefix in ("", "\u2581") and spec.fallback.space == "\u2581"
        return None if known else "gigatoken is not known to be exact for this normalizer with byte fallback"
    if spec.stages == _DEEPSEEK:
        return None
    if len(spec.stages) == 1:
        (stage,) = spec.stages
        if isinstance(stage, Split) and stage.pattern in ONE_STAGE and stage.keep != "gaps":
            return None
    return "gigatoken is not known to be exact for this pre-tokenizer"


def _wrong_added(spec: BpeSpec) -> str | None:
    """Added tokens for which one search for all of them differs from one for the tokens that are not normalized and
    then one for the others."""
    normalized, others = ([t.content for t in spec.added if t.normalized == wanted] for wanted in (True, False))
    for late, early in _overlaps(normalized, others):
        return f"the normalized added token {late!r} can overlap {early!r}, which gigatoken is not known to handle"
    if any(t.lstrip for t in spec.added) and any(t.content[-1] in WHITE_SPACE for t in spec.added):
        return "an added token with lstrip could remove the white space at the end of another one"
    if spec.prefix_space and any(t.content[0] == " " for t in spec.added):
        return "an added token begins with the space that ByteLevel prepends"
    return None


def _overlaps(normalized: Sequence[str], others: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Pairs of which the first can be found to the left of, or around, the second one."""
    beginnings = {text[:length] for text in others for length in range(1, len(text) + 1)}
    for late in normalized:
        # Nearly always no beginning of another token is in this one except for its first character.
        if any(late[start:] in beginnings for start in range(1, len(late))) or any(text in late for text in others):
            yield from (pair for pair in product([late], others) if _overlap(*pair))


def _overlap(late: str, early: str) -> bool:
    return early in late or any(early.startswith(late[start:]) for start in range(1, len(late)))


def _wrong_vocabulary(spec: BpeSpec) -> str | None:
    if spec.fallback:
        # gigatoken's parser of byte entries takes lower-case digits and a plus sign as well.
        alike = re.findall(r"^<0x..>$", "\n".join(spec.vocab), re.MULTILINE)
        return "an entry of the vocabulary looks like a byte" if set(alike) - set(byte_entries()) else None
    letters = byte_letters()
    foreign = re.compile(f"[^{re.escape(''.join(letters))}]")
    contents = {token.content for token in spec.added}
    for entry in spec.vocab if foreign.search("".join(spec.vocab)) else ():
        if foreign.search(entry):
            # ByteLevel never produces such an entry. gigatoken takes it as text.
            as_bytes = "".join(letters[byte] for byte in entry.encode(errors="surrogatepass"))
            if as_bytes in spec.vocab or (spec.ignore_merges and entry not in contents):
                return f"the entry {entry!r} of the vocabulary is not written in ByteLevel's alphabet"
    return None
