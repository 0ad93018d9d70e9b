"""What a byte-pair tokenizer is, as plain data, read from the `tokenizers` object itself.

`backend_tokenizer.to_str()` is the tokenizer as it will run, whatever file it came from. `bpe_spec` takes the pipelines
that LLMs use today and rejects every other in one sentence; whoever is rejected is encoded on the host.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Keep = Literal["all", "matches", "gaps"]

# ByteLevel(use_regex=True) splits by this: OpenAI's GPT-2 encoder.py, as tokenizers 0.23 has it in byte_level.rs.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# What `\s` means to the engine that strips white space around added tokens: Unicode's White_Space.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # fmt: skip # noqa: E501


@dataclass(frozen=True)
class Split:
    """A stage of the pre-tokenizer: matches of a regex, and what lies between them, become pieces.

    Attributes:
        pattern: in Oniguruma's Ruby syntax, as `tokenizers` takes it.
        keep: which pieces stay: all, only the matches, or only the gaps between them.
    """

    pattern: str
    keep: Keep = "all"


@dataclass(frozen=True)
class Digits:
    """A stage that sets numerals apart, each alone or in runs. Which they are, Rust says, not the regex engine."""

    individual: bool


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token wherever it stands, before anything else is looked at.

    Attributes:
        normalized: it is looked for in the second pass, in what the others left.
        lstrip, rstrip: it swallows the white space before it, after it.
    """

    content: str
    id: int
    normalized: bool
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class Fallback:
    """What is done to each text between added tokens before characters are merged, instead of a pre-tokenizer.

    Attributes:
        prefix: put in front of it.
        space: what stands for each blank.
    """

    prefix: str
    space: str


@dataclass(frozen=True)
class BpeSpec:
    """A BPE tokenizer: byte-level, or over characters with a fallback to bytes.

    Attributes:
        nfc: text is brought into Unicode's normal form C first.
        stages: of the pre-tokenizer, each applied within the pieces of the one before.
        prefix_space: a space is put in front of each text between added tokens that does not begin with one.
        vocab: entry → id, in ByteLevel's alphabet (one letter per byte); ids may have holes.
        merges: pairs of entries, the first one first.
        ignore_merges: a piece that is a vocabulary entry is that entry, whatever the merges say.
        added: added tokens.
        digest: tells contents apart, for caches.
        fallback: set where it merges characters; then there are no stages, and the vocabulary is plain text.
    """

    nfc: bool
    stages: tuple[Split | Digits, ...]
    prefix_space: bool
    vocab: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    ignore_merges: bool
    added: tuple[AddedToken, ...]
    digest: str
    fallback: Fallback | None = None


class _UnsupportedError(Exception):
    """One sentence why not."""


def bpe_spec(model_json: str) -> BpeSpec | str:
    """The spec of a tokenizer, or one sentence why there is none.

    Args:
        model_json: what `tokenizers.Tokenizer.to_str()` gives. Truncation, padding, post-processor and decoder are not
            looked at: encoding without special tokens is not touched by them.
    """
    parts = json.loads(model_json)
    try:
        model = parts["model"]
        _check_model(model)
        vocab = model["vocab"]
        fallback = _fallback(parts, model) if model.get("byte_fallback") else None
        stages, prefix_space = ((), False) if fallback else _pre_tokenizer(parts.get("pre_tokenizer"))
        nfc = False if fallback else _normalizer(parts.get("normalizer"))
        return BpeSpec(
            nfc=nfc,
            stages=stages,
            prefix_space=prefix_space,
            vocab=vocab,
            merges=_merges(model["merges"], fallback is not None),
            ignore_merges=bool(model.get("ignore_merges")),
            added=_added(parts.get("added_tokens") or [], nfc),
            digest=hashlib.blake2b(model_json.encode(errors="surrogatepass"), digest_size=16).hexdigest(),
            fallback=fallback,
        )
    except _UnsupportedError as rejection:
        return str(rejection)


def _check_model(model: Mapping[str, Any]) -> None:
    # Files older than the field hold BPE where they hold merges.
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind != "BPE":
        raise _UnsupportedError(f"the model is {kind}, not BPE")
    if model.get("dropout"):
        raise _UnsupportedError("the model has dropout: its ids are random")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _UnsupportedError(f"the model has a {key}")
    vocab = model["vocab"]
    ids = set(vocab.values())
    if len(ids) != len(vocab):
        raise _UnsupportedError("two vocabulary entries share an id")
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 21:
        raise _UnsupportedError("the model has ids of 2,097,152 or more")
    if model.get("byte_fallback"):
        if any(entry not in vocab for entry in byte_entries()):
            raise _UnsupportedError("the vocabulary lacks a byte to fall back to")
    elif model.get("unk_token") is not None and any(letter not in vocab for letter in byte_letters()):
        raise _UnsupportedError("the vocabulary lacks a byte, for which the model has an unknown token")
    if len(model["merges"]) >= 1 << 20:
        raise _UnsupportedError("the model has 1,048,576 merges or more")


def _fallback(parts: Mapping[str, Any], model: Mapping[str, Any]) -> Fallback:
    if model.get("ignore_merges"):
        raise _UnsupportedError("byte fallback with ignore_merges")
    prefix, space = "", " "
    for one in _flat(parts.get("normalizer"), "normalizers"):
        if one["type"] == "Prepend" and not prefix and space == " ":
            prefix = one["prepend"]
        elif one["type"] == "Replace" and one["pattern"] == {"String": " "} and space == " ":
            space = one["content"]
        else:
            raise _UnsupportedError(f"the normalizer {one['type']} with byte fallback")
    prefix = prefix.replace(" ", space)
    if any(one["normalized"] for one in parts.get("added_tokens") or []):
        raise _UnsupportedError("an added token is looked for in normalized text, with byte fallback")
    for one in _flat(parts.get("pre_tokenizer"), "pretokenizers"):
        # Gemma's splits at blanks, of which its normalizer has left none.
        if one["type"] != "Split" or one["pattern"] != {"String": " "} or " " in space:
            raise _UnsupportedError(f"the pre-tokenizer {one['type']} with byte fallback")
    return Fallback(prefix, space)


def byte_entries() -> list[str]:
    """The entries that stand for bytes where a character has none."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_letters() -> list[str]:
    """ByteLevel's alphabet, the letter that stands for each byte: printable ones for themselves, others from U+0100 on.

    Source: `bytes_to_unicode` of OpenAI's GPT-2 encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _merges(merges: Sequence[Any], fallback: bool) -> Sequence[tuple[str, str]]:
    if merges and isinstance(merges[0], str):
        pairs = [tuple(merge.split(" ")) for merge in merges]
    else:
        pairs = [tuple(pair) for pair in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise _UnsupportedError("a merge is not a pair")
    if fallback:
        from_bytes = set(byte_entries())
        if any(left in from_bytes or right in from_bytes for left, right in pairs):
            raise _UnsupportedError("bytes that were fallen back to are merged")
    return pairs


def _normalizer(part: Any) -> bool:
    """Whether text is brought into NFC."""
    nfc = False
    for one in _flat(part, "normalizers"):
        if one["type"] != "NFC":
            raise _UnsupportedError(f"the normalizer {one['type']}")
        nfc = True
    return nfc


def _pre_tokenizer(part: Any) -> tuple[tuple[Split | Digits, ...], bool]:
    """The stages, and whether a space is put in front."""
    stages: list[Split | Digits] = []
    parts = _flat(part, "pretokenizers")
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise _UnsupportedError("the pre-tokenizer does not end with ByteLevel")
    for one in parts[:-1]:
        if one["type"] == "Split":
            stages.append(_split(one))
        elif one["type"] == "Digits":
            stages.append(Digits(bool(one["individual_digits"])))
        else:
            raise _UnsupportedError(f"the pre-tokenizer {one['type']}")
    last = parts[-1]
    prefix_space = bool(last.get("add_prefix_space"))
    if prefix_space and stages:
        raise _UnsupportedError("ByteLevel puts spaces in front of pieces that were split before")
    if last.get("use_regex", True):
        stages.append(Split(GPT2_PATTERN))
    return tuple(stages), prefix_space


def _split(one: Mapping[str, Any]) -> Split:
    ((kind, text),) = one["pattern"].items()
    if kind == "String":
        text = "".join(c if c.isalnum() or c.isspace() or not c.isascii() else "\\" + c for c in text)
    if one["behavior"] == "Isolated":  # `invert` only swaps which pieces are called matches
        return Split(text)
    if one["behavior"] == "Removed":
        return Split(text, "matches" if one["invert"] else "gaps")
    raise _UnsupportedError(f"the pre-tokenizer's Split with behavior {one['behavior']}")


def _added(added: Sequence[Mapping[str, Any]], nfc: bool) -> tuple[AddedToken, ...]:
    tokens = []
    for one in added:
        content = one["content"]
        if not content:
            continue
        if one["single_word"]:
            raise _UnsupportedError(f"the added token {content!r} is for single words only")
        if nfc and one["normalized"] and not unicodedata.is_normalized("NFC", content):
            raise _UnsupportedError(f"the added token {content!r} is not in NFC")
        token = AddedToken(content, int(one["id"]), bool(one["normalized"]), bool(one["lstrip"]), bool(one["rstrip"]))
        tokens.append(token)
    if any(t.rstrip for t in tokens) and any(t.content[0] in WHITE_SPACE for t in tokens):
        raise _UnsupportedError("an added token swallows white space with which another one begins")
    if len({t.content for t in tokens}) != len(tokens):
        raise _UnsupportedError("two added tokens are the same text")
    return tuple(tokens)


def _flat(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a part of the pipeline, with sequences (and sequences in sequences) laid out in a row."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[inner] for step in _flat(one, inner)]
    return [part]
