"""Encoding on the host: a column of text → token ids, by the fastest encoder that is exact for this tokenizer.

Five encoders, tried in this order:

1. gigatoken, which reads Arrow's buffers zero-copy and returns one flat array of ids;
2. `tokenizers` 1.0 next to the installed one, where there is one (`gpuload.tokenizer.tokenizers1`);
3. the `tokenizers` object inside the tokenizer, for each different word of the texts once (`words.py`);
4. the same object, for whole texts, in batches;
5. the tokenizer itself, text by text (slow tokenizers, and classes that override how text is encoded).

Building gigatoken takes half a second, and as long again for a tokenizer that was never seen before. So words come
first for little data, until so many of them were different that gigatoken would have been built meanwhile. Both are
used only for configurations for which they are known to be exact (`gpuload.tokenizer.gigatoken`,
`gpuload.tokenizer.cuts`). And every encoder must agree with the tokenizer on a set of hostile texts before it is used.

With gigatoken, some texts are encoded by `tokenizers` all the same. The two know different versions of Unicode
(4,787 code points are split differently for DeepSeek-V3, 13 for Llama-3.1), so these are texts with code points newer
than Unicode 14; for tokenizers that normalize, texts with 100 others, which tokenizers normalizes as Unicode 9 did
(`normalized_otherwise`); and, for some added tokens, texts that are not in NFC.
"""

import threading
import unicodedata
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.backends import Encode, added_tokens, batch_encoder, is_reworked, settings, why_not_plain
from gpuload.core.memory import room_to_encode
from gpuload.core.words import counted
from gpuload.engines.host.acceptance import acceptance_texts
from gpuload.engines.host.texts import Bytes, Ints
from gpuload.engines.host.words import EncodeColumn, WordEncoder, encode_joined, separator_of, text_buffers
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import first_line
from gpuload.tokenizer.cuts import cut_table
from gpuload.tokenizer.gigatoken import needs_nfc_text, not_known_exact
from gpuload.tokenizer.tokenizers1 import tokenizers1_version

_CHECK_ARGUMENTS = frozenset(("BloomTokenizerFast", "CodeGenTokenizerFast", "CohereTokenizerFast", "GPT2TokenizerFast"))

MOST_BY_WORDS = 32 << 20
"""Bytes of prompts up to which a load begins with words rather than build gigatoken."""

MOST_WORDS = 4 << 20
"""Bytes of different words, and 8 more for each, that are encoded in the time that it takes to build gigatoken."""

LEAST_TOKENIZERS1 = 1 << 20
"""Bytes of prompts up to which opening a tokenizer in `tokenizers` 1.0 takes longer than encoding them."""

_CALL_BYTES = 1 << 22  # of texts that tokenizers encodes in one call; a text that is longer is on its own


@dataclass
class HostEncoder:
    """An encoder. What is said of it may change while it encodes: words are for little data.

    Attributes:
        name: for the report.
        encode: (n,) large_string without nulls → n rows of ids, without adding special tokens.
        unused: why faster encoders are not used for this tokenizer.
        live: whether it asks the tokenizer's own object for ids, so that another vocabulary is no reason to make
            another encoder. Then the object neither truncates nor pads.
        forget: forgets the ids that it keeps, before the object may have another vocabulary.
    """

    name: str
    encode: EncodeColumn
    unused: tuple[str, ...] = ()
    live: bool = False
    forget: Callable[[], None] = lambda: None


def host_encoder(reference: Reference, nbytes: int | None = None, as_whole: bool = False) -> HostEncoder:
    """The fastest encoder that is exact for the reference's tokenizer.

    Args:
        nbytes: about how many bytes of prompts it will encode; None for many.
        as_whole: whether they are so few that texts are encoded as they are (`few.py`).
    """
    by_itself = HostEncoder(
        f"{type(reference.tokenizer).__name__}, text by text",
        lambda text: Ragged.from_lists([reference.encode(t) for t in text.to_pylist()]),
    )
    reason = needs_itself(reference)
    if reason:
        return HostEncoder(by_itself.name, by_itself.encode, (reason,))
    unused: list[str] = []
    texts = acceptance_texts(reference)
    expected = reference.encode_many(texts)
    for make in (_tokenizers,) if as_whole else _makers(reference, nbytes):
        name = make.__name__.strip("_")
        try:
            encoder = make(reference)
            found = encoder.encode(as_arrow(texts, pa.large_string()))
        except Exception as error:  # each library reports unsupported tokenizers in its own way
            unused.append(f"{name}: {first_line(error):.160}")
            continue
        wrong = [text for i, text in enumerate(texts) if found[i].tolist() != expected[i]]
        if not wrong:
            encoder.encode, encoder.unused = _guarded(encoder.name, encoder.encode, by_itself), tuple(unused)
            return encoder
        unused.append(f"{name}: differs from the tokenizer on {min(wrong, key=len)!r:.60}")
    return HostEncoder(by_itself.name, by_itself.encode, tuple(unused))


def _makers(reference: Reference, nbytes: int | None) -> tuple[Callable[[Reference], HostEncoder], ...]:
    """What makes encoders, in the order in which they are tried."""
    if is_reworked(reference.backend):  # as fast as the others, which are compared with 0.2x only
        return (_tokenizers,)
    further = (_tokenizers1,) if tokenizers1_version() and (nbytes is None or nbytes > LEAST_TOKENIZERS1) else ()
    if nbytes is not None and nbytes <= MOST_BY_WORDS:
        return (_words_first, _gigatoken, *further, _tokenizers)
    return (_gigatoken, *further, _words, _tokenizers)


def _guarded(name: str, fast: EncodeColumn, by_itself: HostEncoder) -> EncodeColumn:
    """The function of an encoder, which falls back to the tokenizer itself where the encoder panics."""

    def encode(text: pa.LargeStringArray) -> Ragged:
        try:
            return fast(text)
        except RuntimeError as error:
            slow = counted(len(text), "rows with the tokenizer itself, which is slow")
            warnings.warn(f"gpuload: {name} {error}. Encoding {slow}", stacklevel=2)
            return by_itself.encode(text)

    return encode


def needs_itself(reference: Reference) -> str | None:
    """Why only the tokenizer object itself returns its ids; None if the backend inside it returns the same."""
    tokenizer, backend = reference.tokenizer, reference.backend
    if backend is None:
        return f"{type(tokenizer).__name__} is a slow tokenizer"
    from transformers import PreTrainedTokenizerFast

    for method in _MAKING_IDS:
        own = getattr(type(tokenizer), method, None)
        changed = own is not getattr(PreTrainedTokenizerFast, method, None) and not _only_checks_arguments(own)
        if changed or method in vars(tokenizer):
            return f"{type(tokenizer).__name__} overrides {method}"
    if getattr(tokenizer, "split_special_tokens", False):
        return "split_special_tokens is set"
    return why_not_plain(backend)


_MAKING_IDS = (
    *("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding"),
    "_batch_encode_plus",  # in transformers 4 only
)
"""The methods through which a text goes to the backend, and its ids come back."""


def tokenizer_state(reference: Reference) -> tuple[Any, ...] | None:
    """All of a tokenizer of now but its vocabulary and merges, to be compared with that of a later load; None if only
    the object itself returns its ids, or this cannot be told."""
    backend, tokenizer = reference.backend, reference.tokenizer
    parts = None if backend is None or needs_itself(reference) else settings(backend)
    return None if parts is None else (type(tokenizer), sorted(vars(tokenizer)), parts)


def _only_checks_arguments(method: Any) -> bool:
    """Whether a method is one of transformers 4 that checks an argument which we do not pass, and then calls its
    parent's method."""
    owner = getattr(method, "__qualname__", "").partition(".")[0]
    return getattr(method, "__module__", "").startswith("transformers.models.") and owner in _CHECK_ARGUMENTS


@lru_cache(maxsize=2)
def _gigatoken_of(model_json: str) -> Any:
    """Cached, because building it takes longer than encoding a small dataset, and a run loads train and test files."""
    import gigatoken

    return _without_panic(gigatoken.Tokenizer.from_json, model_json)


def _without_panic(function: Callable[[Any], Any], argument: Any) -> Any:
    """Calls a function written in Rust, whose panics `except Exception` does not catch.

    Raises:
        RuntimeError: it panicked.
    """
    try:
        return function(argument)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"panicked: {error}") from error


def _gigatoken(reference: Reference) -> HostEncoder:
    import awkward

    from gpuload.tokenizer.nfc import normalized_otherwise
    from gpuload.tokenizer.unassigned import texts_with_unassigned

    reason = not_known_exact(reference.model_json)
    if reason:
        raise ValueError(reason)
    tokenizer = _gigatoken_of(reference.model_json)

    def encode_all(chars: Bytes, offsets: Ints) -> Ragged:
        layout = awkward.contents.ListOffsetArray(
            awkward.index.Index64(offsets),
            awkward.contents.NumpyArray(chars, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        ids = _without_panic(tokenizer.encode_batch, awkward.Array(layout)).layout
        # Ids are below 2^31, so the unsigned array can be viewed as a signed one.
        return Ragged(ids.content.data.view(np.int32), np.asarray(ids.offsets.data, np.int64))

    backend: Any = reference.backend
    composes = backend.normalizer is not None and backend.normalizer.normalize_str("e\u0301") == "\u00e9"
    nfc_only = composes and needs_nfc_text(added_tokens(backend).values())
    contested = normalized_otherwise() if composes else ()
    by_tokenizers = _tokenizers(reference).encode

    def encode(text: pa.LargeStringArray) -> Ragged:
        if not len(text):
            return Ragged.from_lists([])
        offsets, chars = text_buffers(text)
        ids = encode_all(chars, offsets)
        # Contested rows are encoded by tokenizers, and put into their places.
        rows = texts_with_unassigned(chars, offsets, contested)
        if nfc_only:
            rows = np.union1d(rows, _not_nfc(text))
        return _with_rows(ids, rows, by_tokenizers(text.take(as_arrow(rows)))) if len(rows) else ids

    return HostEncoder(f"gigatoken {version('gigatoken')}", encode)


def _with_rows(ids: Ragged, rows: Ints, others: Ragged) -> Ragged:
    """Ids with some of the rows replaced by others."""
    order = np.arange(len(ids))
    order[rows] = len(ids) + np.arange(len(rows))
    return Ragged.concatenate([ids, others]).take(order)


def _tokenizers1(reference: Reference) -> HostEncoder:
    from gpuload.tokenizer.tokenizers1 import differing_code_points, not_known_equal, opened
    from gpuload.tokenizer.unassigned import texts_with_unassigned

    if reason := not_known_equal(reference.model_json):
        raise ValueError(reason)
    here = _tokenizers(reference)
    there = batch_encoder(opened(reference.model_json), lambda: reference.model_json)
    versions = f"{here.name} {tokenizers1_version()}"
    differing = differing_code_points(
        reference.model_json,
        versions,
        batch_encoder(reference.calling.backend_tokenizer, lambda: reference.model_json),
        there,
    )
    encode_all = in_calls(there)

    def encode(text: pa.LargeStringArray) -> Ragged:
        offsets, chars = text_buffers(text)
        ids, rows = encode_all(text), texts_with_unassigned(chars, offsets, differing)
        return _with_rows(ids, rows, here.encode(text.take(as_arrow(rows)))) if len(rows) else ids

    return HostEncoder(str(tokenizers1_version()), encode)


def _not_nfc(text: pa.LargeStringArray) -> Ints:
    """The numbers of the texts that are not in NFC. ASCII always is."""
    rows = np.flatnonzero(~as_numpy(pc.string_is_ascii(text)))
    some = text.take(as_arrow(rows)).to_pylist()
    return rows[[not unicodedata.is_normalized("NFC", one) for one in some]]


def _words(reference: Reference, instead: Callable[[int], EncodeColumn | None] = lambda nbytes: None) -> HostEncoder:
    backend: Any = reference.backend
    table, whole = cut_table(backend), _tokenizers(reference)
    added = added_tokens(backend)

    def encode(words: pa.LargeStringArray) -> Ragged:
        separator = separator_of(added, words)
        return whole.encode(words) if separator is None else encode_joined(words, separator, whole.encode)

    by_words = WordEncoder(table, encode, instead)
    name = f"{whole.name}, each different word once"
    return HostEncoder(name, by_words, live=whole.live, forget=by_words.forget)


def _words_first(reference: Reference) -> HostEncoder:
    """Words, until too many of them were different: texts that do not repeat themselves are for the other encoders."""
    lock, seen = threading.Lock(), 0
    other: HostEncoder | None = None
    # The encoder refers to the function: a cycle would keep the tokenizer until the next garbage collection.
    encoder: Callable[[], HostEncoder | None]

    def instead(nbytes: int) -> EncodeColumn | None:
        nonlocal seen, other
        with lock:
            seen += nbytes
            if seen <= MOST_WORDS:
                return None
            if other is None:
                other = host_encoder(reference)
                if (words := encoder()) is not None:
                    if other.name != words.name:
                        words.name = f"{words.name}, then {other.name}"
                    words.unused, words.live = words.unused + other.unused, words.live and other.live
            return other.encode

    words = _words(reference, instead)
    encoder = weakref.ref(words)
    return words


def _tokenizers(reference: Reference) -> HostEncoder:
    encode_all = batch_encoder(reference.calling.backend_tokenizer, lambda: reference.model_json)
    live = settings(reference.backend) is not None
    import tokenizers  # `version` would parse the metadata of its package, for a thousandth of a second

    return HostEncoder(f"tokenizers {tokenizers.__version__}", in_calls(encode_all), live=live)


def in_calls(encode_all: Encode) -> EncodeColumn:
    """Encodes a column of text in calls of some megabytes."""

    def encode(text: pa.LargeStringArray) -> Ragged:
        sizes = as_numpy(pc.binary_length(text))
        offsets, parts, low = offsets_of(sizes), [Ragged.from_lists([])], 0
        while low < len(text):
            # Its results take some 30 times as much memory as the text, until they are converted.
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _CALL_BYTES, side="right")) - 1)
            with room_to_encode(int(sizes[low:high].max())):
                parts.append(_without_panic(encode_all, text.slice(low, high - low).to_pylist()))
            low = high
        return Ragged.concatenate(parts)

    return encode
