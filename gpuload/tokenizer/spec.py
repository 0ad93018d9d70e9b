"""A byte-pair tokenizer as plain data, read from the JSON of the `tokenizers` object.

`backend_tokenizer.to_str()` describes the tokenizer as it runs, which may differ from the file that it was loaded from.
`bpe_spec` supports the pipelines that LLMs use today. For every other it returns one sentence that says why it is not
supported; such a tokenizer encodes on the host.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gpuload.core.records import dataclass
from gpuload.tokenizer.tables import model_digest

Keep = Literal["all", "matches", "gaps"]

# ByteLevel(use_regex=True) splits by this regex: OpenAI's GPT-2 encoder.py, copied from byte_level.rs of tokenizers
# 0.23.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The white space that is stripped around added tokens: Unicode's property White_Space.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # fmt: skip # noqa: E501


@dataclass(frozen=True)
class Split:
    """A stage of the pre-tokenizer: the matches of a regex and the gaps between them become pre-tokens."""

    pattern: str  # in Oniguruma's Ruby syntax, as in `tokenizers`
    keep: Keep = "all"  # which pre-tokens are kept: all, only the matches, or only the gaps


@dataclass(frozen=True)
class Digits:
    """A stage that separates numerals (`char::is_numeric` in Rust) from other text."""

    individual: bool  # whether each numeral becomes its own pre-token, rather than each run of numerals


@dataclass(frozen=True)
class AddedToken:
    """A text that becomes one token wherever it occurs, before normalizer and pre-tokenizer.

    Attributes:
        content: the text.
        id: the token's id.
        normalized: whether it is searched for in normalized text: in a second pass, between the matches of the first.
        lstrip: whether the white space before it is removed.
        rstrip: whether the white space after it is removed.
    """

    content: str
    id: int
    normalized: bool
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class Fallback:
    """How text between added tokens is changed by a tokenizer with byte fallback: by its normalizer, or by Metaspace.

    Attributes:
        prefix: prepended to the text.
        space: replaces every space, usually `▁`.
        unless_space: whether text that begins with a space or with `space` has no prefix.
        first_only: whether only text at the start of the input has a prefix, not the text after an added token.
        split: whether pre-tokens begin at every `space`. Otherwise the whole text is one pre-token.
    """

    prefix: str
    space: str
    unless_space: bool = False
    first_only: bool = False
    split: bool = False


@dataclass(frozen=True)
class BpeSpec:
    """A BPE tokenizer: byte-level, or over characters with byte fallback.

    Attributes:
        nfc: whether text is normalized to NFC first.
        stages: the pre-tokenizer's stages, each applied within the pre-tokens of the one before.
        prefix_space: whether a space is prepended to text between added tokens that does not begin with one.
        vocab: entry → id. Entries are in ByteLevel's alphabet (one letter per byte); ids need not be contiguous.
        merges: pairs of entries, by ascending rank.
        ignore_merges: whether a pre-token that is a vocabulary entry always becomes that entry, whatever the merges.
        added: the added tokens.
        digest: identifies the content, for caches.
        fallback: set if characters are merged; then there are no stages, and vocabulary entries are plain text.
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


class UnsupportedError(Exception):
    """The tokenizer is not supported. The message is one sentence that says why."""


def bpe_spec(model_json: str) -> BpeSpec | str:
    """Read a tokenizer.

    Args:
        model_json: the result of `tokenizers.Tokenizer.to_str()`. Truncation, padding, post-processor and decoder are
            ignored: they do not affect encoding without special tokens.

    Returns:
        The spec, or one sentence why the tokenizer is not supported.
    """
    parts = json.loads(model_json)
    try:
        model = parts["model"]
        _check_model(model)
        vocab = model["vocab"]
        fallback = _fallback(parts, model) if model.get("byte_fallback") else None
        stages, prefix_space = ((), False) if fallback else stages_of(parts.get("pre_tokenizer"))
        nfc = False if fallback else normalizes_to_nfc(parts.get("normalizer"))
        return BpeSpec(
            nfc=nfc,
            stages=stages,
            prefix_space=prefix_space,
            vocab=vocab,
            merges=_merges(model["merges"], fallback is not None),
            ignore_merges=bool(model.get("ignore_merges")),
            added=_added(parts.get("added_tokens") or [], nfc),
            digest=model_digest(model_json),
            fallback=fallback,
        )
    except UnsupportedError as error:
        return str(error)


def _check_model(model: Mapping[str, Any]) -> None:
    # Old files have no type; a model with merges is BPE.
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind != "BPE":
        raise UnsupportedError(f"the model is {kind}, not BPE")
    if model.get("dropout"):
        raise UnsupportedError("the model has dropout, so its ids are random")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedError(f"the model uses {key}, which is not supported")
    vocab = model["vocab"]
    ids = set(vocab.values())
    if len(ids) != len(vocab):
        raise UnsupportedError("two vocabulary entries have the same id")
    # Kernels pack ids into 21 bits and ranks into 20.
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 21:
        raise UnsupportedError("the model has ids of 2,097,152 or more")
    if model.get("byte_fallback"):
        if any(entry not in vocab for entry in byte_entries()):
            raise UnsupportedError("the model uses byte fallback, but its vocabulary lacks an entry for some byte")
    elif model.get("unk_token") is not None and any(letter not in vocab for letter in byte_letters()):
        raise UnsupportedError("the vocabulary lacks a byte, which the model encodes as its unknown token")
    if len(model["merges"]) >= 1 << 20:
        raise UnsupportedError("the model has 1,048,576 merges or more")


def _fallback(parts: Mapping[str, Any], model: Mapping[str, Any]) -> Fallback:
    if model.get("ignore_merges"):
        raise UnsupportedError("byte fallback with ignore_merges is not supported")
    normalizer, stages = steps_of(parts.get("normalizer")), steps_of(parts.get("pre_tokenizer"))
    if not normalizer and len(stages) == 1 and stages[0]["type"] == "Metaspace":
        return _metaspace(stages[0])
    prefix, space = "", " "
    for step in normalizer:
        if step["type"] == "Prepend" and not prefix and space == " ":
            prefix = step["prepend"]
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and space == " ":
            space = step["content"]
        else:
            raise UnsupportedError(f"the normalizer {step['type']} with byte fallback is not supported")
    prefix = prefix.replace(" ", space)
    if normalizer and any(token["normalized"] for token in parts.get("added_tokens") or []):
        raise UnsupportedError("an added token is normalized, which is not supported with byte fallback")
    for step in stages:
        # Gemma's pre-tokenizer splits at spaces, but its normalizer has replaced all of them before. So it does
        # nothing.
        if step["type"] != "Split" or step["pattern"] != {"String": " "} or " " in space:
            raise UnsupportedError(f"the pre-tokenizer {step['type']} with byte fallback is not supported")
    return Fallback(prefix, space)


def _metaspace(step: Mapping[str, Any]) -> Fallback:
    """Read the pre-tokenizer that transformers gives to Llama 2 and similar tokenizers, instead of a normalizer."""
    space, scheme = step["replacement"], step["prepend_scheme"]
    return Fallback(
        prefix="" if scheme == "never" else space,
        space=space,
        unless_space=True,
        first_only=scheme == "first",
        split=bool(step["split"]),
    )


def byte_entries() -> list[str]:
    """Return the vocabulary entries of single bytes, used for characters without an entry."""
    return [f"<0x{byte:02X}>" for byte in range(256)]


def byte_letters() -> list[str]:
    """Return ByteLevel's alphabet, the letter for each byte.

    Printable bytes are their own letters; the others have letters from U+0100 on.

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
        raise UnsupportedError("a merge is not a pair")
    if fallback:
        from_bytes = set(byte_entries())
        if any(left in from_bytes or right in from_bytes for left, right in pairs):
            raise UnsupportedError("the model merges entries of its byte fallback, which is not supported")
    return pairs


def normalizes_to_nfc(part: Any) -> bool:
    """Return whether text is normalized to NFC."""
    nfc = False
    for step in steps_of(part):
        if step["type"] != "NFC":
            raise UnsupportedError(f"the normalizer {step['type']} is not supported")
        nfc = True
    return nfc


def stages_of(part: Any) -> tuple[tuple[Split | Digits, ...], bool]:
    """Return the stages, and whether a space is prepended."""
    stages: list[Split | Digits] = []
    parts = steps_of(part)
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise UnsupportedError("the pre-tokenizer does not end with ByteLevel")
    for step in parts[:-1]:
        if step["type"] == "Split":
            stages.append(_split(step))
        elif step["type"] == "Digits":
            stages.append(Digits(bool(step["individual_digits"])))
        else:
            raise UnsupportedError(f"the pre-tokenizer {step['type']} is not supported")
    last = parts[-1]
    prefix_space = bool(last.get("add_prefix_space"))
    if prefix_space and stages:
        raise UnsupportedError("ByteLevel's add_prefix_space after another pre-tokenizer is not supported")
    if last.get("use_regex", True):
        stages.append(Split(GPT2_PATTERN))
    return tuple(stages), prefix_space


def _split(step: Mapping[str, Any]) -> Split:
    ((kind, text),) = step["pattern"].items()
    if kind == "String":  # a literal string: escape it
        text = "".join(c if c.isalnum() or c.isspace() or not c.isascii() else "\\" + c for c in text)
    if step["behavior"] == "Isolated":  # keeps matches and gaps, so `invert` has no effect
        return Split(text)
    if step["behavior"] == "Removed":
        return Split(text, "matches" if step["invert"] else "gaps")
    raise UnsupportedError(f"the pre-tokenizer Split with behavior {step['behavior']} is not supported")


def _added(added: Sequence[Mapping[str, Any]], nfc: bool) -> tuple[AddedToken, ...]:
    tokens = []
    for item in added:
        content = item["content"]
        if not content:
            continue
        if item["single_word"]:
            raise UnsupportedError(f"the added token {content!r} has single_word set, which is not supported")
        if nfc and item["normalized"] and not unicodedata.is_normalized("NFC", content):
            raise UnsupportedError(f"the added token {content!r} is not in NFC")
        flags = bool(item["normalized"]), bool(item["lstrip"]), bool(item["rstrip"])
        tokens.append(AddedToken(content, int(item["id"]), *flags))
    if any(t.rstrip for t in tokens) and any(t.content[0] in WHITE_SPACE for t in tokens):
        raise UnsupportedError("an added token with rstrip could remove the white space at the start of another one")
    if len({t.content for t in tokens}) != len(tokens):
        raise UnsupportedError("two added tokens have the same text")
    return tuple(tokens)


def steps_of(part: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a part of the pipeline, with nested sequences flattened."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    members: list[Any] = next((part[k] for k in ("normalizers", "pretokenizers", "processors") if k in part), [])
    return [step for member in members for step in steps_of(member)]
