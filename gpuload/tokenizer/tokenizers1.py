"""`tokenizers` 1.0, as an encoder next to the version that transformers needs.

transformers 5 does not import with 1.0. So 1.0 is installed into a folder of its own, which an environment variable
names, and imported under another name; without the variable, nothing here is reached. It encodes some ten times as fast
as 0.23, and is for tokenizers that gigatoken is not known to encode exactly.

It is used only for configurations that this module lists, and that tests/test_tokenizers1.py compares with 0.23. On
some code points the two always differ, as their parts are built for different versions of Unicode: 0.23's NFC for 9.0,
the punctuation of its BertNormalizer for another one. Both libraries are asked which these are: once for each
tokenizer, by encoding every code point in one context. What a text with one of them becomes, 0.23 says.
"""

import importlib.util
import json
import os
import sys
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gpuload.core.backends import Encode
from gpuload.tokenizer.spec import steps_of
from gpuload.tokenizer.tables import cached, model_digest

VARIABLE = "GPULOAD_TOKENIZERS1"

_NAME = "gpuload_tokenizers1"
_VERSION = 1  # of the rules
_CONTEXT = (
    "a{0}b {0}{0}1{0}\u0301!{0}'s\n'{0}q\u0301{0}\u0316{0}12345"  # next to letters, digits, symbols, spaces and marks
)

# Without added tokens that have flags, in all combinations. Other kinds of parts were not compared.
_MODELS = frozenset(("BPE", "Unigram", "WordPiece"))
_NORMALIZERS = frozenset(
    "BertNormalizer Lowercase NFC NFD NFKC NFKD Precompiled Prepend Replace Strip StripAccents".split()
)
_PRE_TOKENIZERS = frozenset("BertPreTokenizer ByteLevel Digits Metaspace Split Whitespace WhitespaceSplit".split())


def tokenizers1_version() -> str | None:
    """The name and the version of what the variable's folder has; None if it is not set."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    found = sorted(Path(folder).glob("tokenizers-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").replace("-", " ", 1) if found else "tokenizers, not found"


def _library() -> ModuleType:
    """`tokenizers` 1.0 from the variable's folder.

    Raises:
        ImportError: it is not there.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    folder = Path(os.environ[VARIABLE]) / "tokenizers"
    if not (tokenizers1_version() or "").startswith("tokenizers 1."):
        raise ImportError(
            f"{VARIABLE}={folder.parent}: no tokenizers 1.x there: pip install --no-deps --target {folder.parent} "
            "tokenizers==1.0.0rc3"
        )
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # its `__init__.py` imports from itself
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module


@lru_cache(maxsize=2)
def opened(model_json: str) -> Any:
    """A `Tokenizer` of 1.0.

    Args:
        model_json: the result of `to_str` of 0.2x.

    Raises:
        ImportError: there is no 1.0.
        ValueError: it does not support this tokenizer.
    """
    library = _library()
    with tempfile.TemporaryDirectory() as folder:  # it reads this version of the form from files only
        file = Path(folder) / "tokenizer.json"
        file.write_text(model_json, encoding="utf-8")
        return library.Tokenizer.from_file(str(file))


def not_known_equal(model_json: str) -> str | None:
    """Why 1.0 is not known to encode a tokenizer as 0.23 does; None if it is.

    Args:
        model_json: the result of `to_str` of 0.2x.
    """
    parts = json.loads(model_json)
    if parts["model"].get("type") not in _MODELS:
        return f"the model {parts['model'].get('type')} was not compared"
    for part, known in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS)):
        for step in steps_of(parts.get(part)):
            if step["type"] not in known:
                return f"the {part} {step['type']} was not compared"
    if any(step.get("prepend_scheme") == "first" for step in steps_of(parts.get("pre_tokenizer"))):
        return "the two differ on what is the first word for Metaspace"
    for token in parts.get("added_tokens") or []:
        if flags := [flag for flag in ("normalized", "lstrip", "rstrip", "single_word") if token[flag]]:
            return f"the added token {token['content']!r} is {flags[0]}, where the two can differ"
    return None


def differing_code_points(model_json: str, versions: str, here: Encode, there: Encode) -> tuple[int, ...]:
    """The code points of Unicode 14 on which the two differ for a tokenizer: some seconds, cached on disk.

    Args:
        model_json: the result of `to_str` of 0.2x.
        versions: of both.
        here, there: the encoders of 0.2x and of 1.0.

    Raises:
        ValueError: they differ on ASCII.
    """
    from gpuload.tokenizer.nfc import normalized_otherwise

    found = cached(
        "tokenizers1", f"{_VERSION} {versions} {model_digest(model_json)}", partial(_ask, here=here, there=there)
    )
    if len(found["code_points"]) and found["code_points"].min() < 0x80:
        raise ValueError(f"differs on {chr(found['code_points'].min())!r}")
    return tuple(sorted({*found["code_points"].tolist(), *normalized_otherwise()}))


def _ask(here: Encode, there: Encode) -> dict[str, Any]:
    from gpuload.tokenizer.nfc import asked_characters

    characters = asked_characters()
    texts = [_CONTEXT.format(character) for character in characters]
    pairs = zip(characters, here(texts).to_lists(), there(texts).to_lists(), strict=True)
    return {"code_points": np.array([ord(character) for character, one, other in pairs if one != other], np.int64)}
