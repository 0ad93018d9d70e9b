"""What gpuload asks of the `tokenizers.Tokenizer` inside a tokenizer, whichever version of the library it is of.

Version 1.0 only encodes: its objects have neither `to_str` and `encode_batch_fast` nor parts that could be asked. But
one says what it is when it is pickled, as a tokenizer.json of version 2.0, and nothing changes it later except for its
padding and truncation. Which of the two an object is, the object tells, not what is installed.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuload.core.arrays import Ragged

Encode = Callable[[list[str]], Ragged]


def is_reworked(backend: Any) -> bool:
    """Whether an object is of version 1.0 of `tokenizers`."""
    return not hasattr(backend, "to_str")


def serialized(backend: Any) -> str:
    """An object as the text of a tokenizer.json: several megabytes. That of 1.0 has another form: version 2.0."""
    return snapshot(backend)().decode()


def snapshot(backend: Any) -> Callable[[], bytes]:
    """What writes an object as it is now as a tokenizer.json, without its padding and truncation.

    Its vocabulary takes a tenth of a second, in which no other thread of Python works. It is that of the object's model
    of now: another model or added tokens that the object gets later make no difference, only training this model and
    setting its attributes do (`small_state` tells the latter).
    """
    if is_reworked(backend):
        return lambda: str(backend.__reduce__()[1][0]).encode()
    start, model = _parts(backend).encode(), backend.model
    return lambda: b'%b"model":%b}' % (start, model.__getstate__())


_OF_MODELS = (
    "dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges"
).split()


def settings(backend: Any) -> tuple[Any, ...] | None:
    """`small_state` of an object whose ids are those that it returns without further arguments; None for one of 1.0,
    and for one that truncates or pads."""
    if is_reworked(backend) or backend.truncation is not None or backend.padding is not None:
        return None
    return small_state(backend)


def small_state(backend: Any) -> tuple[Any, ...]:
    """All of an object of now but its vocabulary and merges, truncation and padding, in a thousandth of the time that
    the vocabulary takes. Nothing for one of 1.0, which nothing changes."""
    if is_reworked(backend):
        return ()
    model = backend.model
    return _parts(backend), type(model), *(getattr(model, name, None) for name in _OF_MODELS)


def _parts(backend: Any) -> str:
    """The beginning of an object's tokenizer.json, up to its model."""
    added = [{"id": number, **token.__getstate__()} for number, token in sorted(added_tokens(backend).items())]
    parts = {"added_tokens": json.dumps(added, ensure_ascii=False, separators=(",", ":"))}
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        parts[name] = "null" if part is None else part.__getstate__().decode()
    return '{"version":"1.0","truncation":null,"padding":null,' + "".join(f'"{k}":{text},' for k, text in parts.items())


@lru_cache(maxsize=2)
def _small_parts(backend: Any) -> dict[str, Any]:
    """All of an object of 1.0 but its vocabulary."""
    parts: dict[str, Any] = json.loads(serialized(backend))
    parts["model"] = None
    return parts


def state(backend: Any, name: str) -> Any:
    """A part of an object ("normalizer", "pre_tokenizer") as it is in a tokenizer.json; None if it has none."""
    if is_reworked(backend):
        return _small_parts(backend)[name]
    part = getattr(backend, name)  # not the whole tokenizer.json, which would take a tenth of a second
    return None if part is None else json.loads(part.__getstate__())


def added_tokens(backend: Any) -> Mapping[int, Any]:
    """id → what has the attributes of a `tokenizers.AddedToken`."""
    if is_reworked(backend):
        return {token["id"]: SimpleNamespace(**token) for token in _small_parts(backend)["added_tokens"]}
    found: Mapping[int, Any] = backend.get_added_tokens_decoder()
    return found


def stored_pad_token(backend: Any) -> str | None:
    """The text of the token that an object pads with; None if it does not pad."""
    padding = backend.padding
    return padding.get("pad_token") if isinstance(padding, dict) else getattr(padding, "pad_token", None)


def why_not_plain(backend: Any) -> str | None:
    """Why the ids of a text are not always those that the object returns for it without further arguments."""
    if getattr(backend, "encode_special_tokens", False):  # of 1.0, that is an argument
        return "split_special_tokens is set"
    if getattr(getattr(backend, "model", None), "dropout", None):  # 1.0 has none
        return "the model has dropout: its ids are random"
    return None


def batch_encoder(backend: Any, model_json: Callable[[], str]) -> Encode:
    """How an object encodes texts: without special tokens, and without the truncation and the padding that may be
    stored in it, which `apply_chat_template` does not use. `model_json` returns what `serialized` does."""
    if is_reworked(backend):
        return partial(_encode_reworked, backend)
    if backend.truncation is not None or backend.padding is not None:
        backend = type(backend).from_str(model_json())
        backend.no_truncation()
        backend.no_padding()
    return partial(_encode_fast, backend)


def with_own_settings(tokenizer: Any) -> Any:
    """A tokenizer with the same vocabulary, in the same memory, whose truncation and padding are its own: those of the
    given one are set by any call on any thread, and count for calls that others are in. The same one if it has no
    object of `tokenizers` 0.x, or no equal one can be made."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None or is_reworked(backend):
        return tokenizer
    try:
        own = type(backend)(backend.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (part := getattr(backend, name)) is not None:
                setattr(own, name, part)
        added = backend.get_added_tokens_decoder()
        own.add_tokens([added[number] for number in sorted(added)])
        own.encode_special_tokens = backend.encode_special_tokens
        if own.get_added_tokens_decoder() != added:
            return tokenizer
        made = copy.copy(tokenizer)
        made._tokenizer = own
    except Exception:  # whatever an object with parts of its own raises
        return tokenizer
    return made


def _encode_fast(backend: Any, texts: list[str]) -> Ragged:
    return Ragged.from_lists([row.ids for row in backend.encode_batch_fast(texts, add_special_tokens=False)])


def _encode_reworked(backend: Any, texts: Sequence[str]) -> Ragged:
    rows = backend.encode_batch(texts, add_special_tokens=False, padding=None, truncation=None)
    ids = [row.ids_array for row in rows]
    # Ids are below 2^31, so the unsigned array can be viewed as a signed one.
    values = np.concatenate(ids).view(np.int32) if ids else np.zeros(0, np.int32)
    return Ragged(values, np.cumsum([0, *map(len, ids)], dtype=np.int64))
