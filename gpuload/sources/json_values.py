"""JSON as Python objects, by msgspec: in half the time of `json`, and in a tenth where values stay text.

msgspec takes less than `json` does: no NaN, no lone surrogates, no numbers out of range, only UTF-8. What it takes, it
reads as `json` does, so `json` reads the rest, or says what is wrong.
"""

import json
from typing import Any

import msgspec

_value = msgspec.json.Decoder().decode
_texts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`: a `ValueError` if it is not JSON, or not UTF-8, a `RecursionError` if it is nested too
    deeply."""
    try:
        return _value(text)
    except Exception:
        return json.loads(text)


def parse_members(text: bytes) -> Any:
    """As `parse_json`, but the values of an object may be `msgspec.Raw`: their JSON text, which is valid. That the text
    is UTF-8 is not checked."""
    try:
        return _texts(text)
    except Exception:
        return json.loads(text)
