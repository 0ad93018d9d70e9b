"""The whole encoder over the compiled tables, in plain Python: slow, short, and the definition for kernels.

1. Added tokens are found, the leftmost first and the longest of those: first the ones that are looked for in the text
   as it came, then, in what is left, the ones that are looked for in normalized text.
2. Text that is not surely in Unicode's normal form C is for the reference, where the tokenizer has that normalizer.
3. The splitter cuts what is left into pieces; with byte fallback, it is cut where no merge can cross.
4. A piece that is a vocabulary entry is that entry; the others are merged.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gpuload.reference.reference import Reference
from gpuload.tokenizer import fallback
from gpuload.tokenizer.fallback import FallbackTables, fallback_tables
from gpuload.tokenizer.merges import MergeTables, look_up_words, merge, merge_tables
from gpuload.tokenizer.regex import UnsupportedRegexError
from gpuload.tokenizer.spec import WHITE_SPACE, AddedToken, BpeSpec, bpe_spec
from gpuload.tokenizer.splitter import Splitter, compile_splitter, pieces
from gpuload.tokenizer.unassigned import UNASSIGNED

Section = str | int  # text, or the id of an added token


@dataclass(frozen=True)
class CompiledTokenizer:
    """A tokenizer's tables, all that a device needs."""

    spec: BpeSpec
    splitter: Splitter
    tables: MergeTables | FallbackTables


def compile_tokenizer(reference: Reference) -> CompiledTokenizer | str:
    """The tables of a load's tokenizer, or one sentence why there are none."""
    if reference.backend is None:
        return f"{type(reference.tokenizer).__name__} is not a fast tokenizer"
    spec = bpe_spec(reference.model_json)
    if isinstance(spec, str):
        return spec
    try:
        return compile_spec(spec)
    except UnsupportedRegexError as error:
        return str(error)


def compile_spec(spec: BpeSpec) -> CompiledTokenizer:
    """All tables of a tokenizer.

    Raises:
        UnsupportedRegexError: the splitter does not take one of its patterns.
    """
    tables = fallback_tables(spec) if spec.fallback else merge_tables(spec)
    return CompiledTokenizer(spec, compile_splitter(spec.stages), tables)


def encode(twin: CompiledTokenizer, text: str) -> list[int] | None:
    """The ids of a text, no special tokens added; None where the text is for the reference."""
    parts = cut(twin, text)
    if parts is None:
        return None
    words = [part.encode() for part in parts if isinstance(part, str)]
    base = twin.tables.base if isinstance(twin.tables, FallbackTables) else twin.tables
    whole = look_up_words(base, np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)]))
    rest = [words[number] for number in np.flatnonzero(whole < 0)]
    if isinstance(twin.tables, FallbackTables):
        merged, bounds = fallback.merge(twin.tables, [word.decode() for word in rest])
    else:
        merged, bounds = merge(twin.tables, np.frombuffer(b"".join(rest), np.uint8), np.cumsum([0, *map(len, rest)]))
    entries, merges = iter(whole.tolist()), iter(np.split(merged, bounds[1:-1]) if rest else [])
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            entry = next(entries)
            ids += next(merges).tolist() if entry < 0 else [entry]
    return ids


def cut(twin: CompiledTokenizer, text: str) -> list[Section] | None:
    """The pieces of a text and the added tokens between them; None where the text is for the reference."""
    spec = twin.spec
    if spec.nfc and not surely_nfc(text):
        return None
    sections: list[Section] = [text]
    for normalized in (False, True):
        added = {token.content: token for token in spec.added if token.normalized == normalized}
        if added:
            sections = [part for section in sections for part in _cut(added, section)]
    return [piece for section in sections for piece in _pieces(twin, section)]


def _pieces(twin: CompiledTokenizer, section: Section) -> list[Section]:
    if isinstance(section, int):
        return [section]
    if not section:
        return []
    spec = twin.spec
    if spec.prefix_space and not section.startswith(" "):
        section = " " + section
    if isinstance(twin.tables, FallbackTables):
        assert spec.fallback
        return [*fallback.pieces(twin.tables, spec.fallback.prefix + section.replace(" ", spec.fallback.space))]
    return [section[start:end] for start, end in pieces(twin.splitter, section)]


def _cut(added: dict[str, AddedToken], section: Section) -> Iterator[Section]:
    if isinstance(section, int):
        yield section
        return
    start = 0
    for match in _finder(tuple(added)).finditer(section):
        token = added[match[0]]
        before, after = match.span()
        if token.lstrip:
            before = max(start, len(section[:before].rstrip(WHITE_SPACE)))
        if token.rstrip:
            after = len(section) - len(section[after:].lstrip(WHITE_SPACE))
        if start < before:
            yield section[start:before]
        yield token.id
        start = after
    if start < len(section):
        yield section[start:]


@lru_cache(maxsize=16)
def _finder(contents: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)))


def surely_nfc(text: str) -> bool:
    """Whether a text is in normal form C by every version of Unicode in use: with code points that 14.0 did not know,
    versions may differ."""
    return text.isascii() or (unicodedata.is_normalized("NFC", text) and not _young().search(text))


@lru_cache(maxsize=1)
def _young() -> re.Pattern[str]:
    spans = [(span.split("-") * 2)[:2] for span in UNASSIGNED.split()]
    return re.compile("[" + "".join(f"{chr(int(a, 16))}-{chr(int(b, 16))}" for a, b in spans) + "]")
