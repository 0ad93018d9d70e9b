"""Control tokens in messages, by column: marked before the template, encoded as plain text after it.

What is marked and how pieces are encoded is transformers' (`reference/control_tokens.py`). Here it is applied to
columns: only texts that contain a control token are touched one by one, the others go the usual way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy, as_scalar, fill_null
from gpuload.engines.conversations import text_column
from gpuload.engines.host.texts import Bools, HostTexts
from gpuload.reference.control_tokens import END, START, ControlTokens
from gpuload.reference.template_call import rejection
from gpuload.sources.types import JSON_TYPE, is_list, is_text

Encode = Callable[[pa.LargeStringArray], Ragged]


def can_be_marked(kind: pa.DataType) -> bool:
    """Whether `mark_column` reaches all texts in values of this type."""
    if pa.types.is_struct(kind):
        return all(can_be_marked(field.type) for field in kind)
    if is_list(kind):
        return can_be_marked(kind.value_type)
    simple = (pa.types.is_primitive, pa.types.is_null, pa.types.is_decimal, pa.types.is_boolean)
    return is_text(kind) or any(test(kind) for test in simple)


def mark_column(array: pa.Array, control: ControlTokens) -> pa.Array:
    """A column of prompts, or of any part of them, with every control token in its texts marked.

    Args:
        array: (n,) messages or strings. Fields of other types stay as they are.
    """
    kind = array.type
    if pa.types.is_dictionary(kind) and is_text(kind):
        marked = mark_column(array.dictionary.cast(pa.large_string()), control)
        return pa.DictionaryArray.from_arrays(array.indices, marked)
    if is_text(kind):
        return _mark_texts(array, control)
    if pa.types.is_struct(kind):
        fields = [mark_column(array.field(i), control) for i in range(kind.num_fields)]
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(fields, names=names, mask=_nulls(array))
    if is_list(kind):
        offsets = array.offsets
        low, high = (offsets[0].as_py(), offsets[-1].as_py()) if len(offsets) else (0, 0)
        values = mark_column(array.values.slice(low, high - low), control)
        cls = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        return cls.from_arrays(pc.subtract(offsets, offsets[0]), values, mask=_nulls(array))
    return array


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _mark_texts(array: pa.Array, control: ControlTokens) -> pa.Array:
    texts = array.cast(pa.large_string())
    rows = np.flatnonzero(with_control_tokens(texts, (*control.texts, START, END)))
    if not len(rows):
        return array
    mask = np.zeros(len(texts), bool)
    mask[rows] = True
    marked: list[str | bytes | None] = []
    for text in texts.take(as_arrow(rows)).cast(pa.large_binary()).to_pylist():
        try:
            marked.append(None if text is None else control.mark(text.decode()).encode())
        except UnicodeDecodeError:  # its row is rejected
            marked.append(text)
    whole = pc.replace_with_mask(texts.cast(pa.large_binary()), as_arrow(mask), as_arrow(marked, pa.large_binary()))
    # A view: a cast would check that all texts are valid, which is done row by row later.
    return whole.view(pa.large_string())


def with_control_tokens(texts: pa.Array, tokens: tuple[str, ...]) -> Bools:
    """(n,) bool: true where a text contains one of the tokens. A null contains none."""
    found = HostTexts().contains_any(text_column(texts.cast(pa.large_string())), tokens)
    if texts.null_count:
        found &= as_numpy(texts.is_valid())
    return found


def rows_with_control_tokens(column: pa.Array, control: ControlTokens) -> Bools:
    """(n,) bool: true where a row of a column has the text of a control token, in a string however deep in it."""
    kind = column.type
    found = np.zeros(len(column), bool)
    if not control.texts:
        return found
    if kind == JSON_TYPE:
        return _json_with_control_tokens(column.storage, control)
    if is_text(kind):
        return with_control_tokens(column, control.texts)
    if pa.types.is_struct(kind):
        for field, values in zip(kind, column.flatten(), strict=True):
            if field.name not in _NOT_MESSAGES:
                found |= rows_with_control_tokens(values, control)
    elif is_list(kind):
        inside = offsets_of(rows_with_control_tokens(column.flatten(), control))  # without what a null list hides
        ends = offsets_of(as_numpy(fill_null(pc.list_value_length(column), 0)))
        found = inside[ends[1:]] > inside[ends[:-1]]
    return found


_NOT_MESSAGES = ("images", "problem")  # fields of rows with images, and of rows that nothing can be made of


def _json_with_control_tokens(texts: pa.LargeStringArray, control: ControlTokens) -> Bools:
    """Of texts in JSON (n,). Those that may have one are parsed: it can be in a key, and be written with escapes."""
    from gpuload.sources.json_values import parse_json  # few loads need it

    units = {unit for text in control.texts for unit in np.frombuffer(text.encode("utf-16-le"), np.uint16).tolist()}
    escapes = "|".join(f"{unit:04x}" for unit in sorted(units))
    found = as_numpy(fill_null(pc.match_substring_regex(texts, rf"\\(?:/|u(?i:{escapes}))"), False))
    found = found | with_control_tokens(
        texts, tuple(json.dumps(text, ensure_ascii=False)[1:-1] for text in control.texts)
    )
    for row in np.flatnonzero(found).tolist():
        try:
            found[row] = control.found_in(parse_json(texts[row].as_py()))
        except (RecursionError, ValueError):  # its row is rejected
            found[row] = False
    return found


def is_marked(texts: pa.LargeStringArray) -> Bools:
    """(n,) bool: true where a rendered text has marks."""
    return with_control_tokens(texts, (START, END))


def without_marks(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Rendered texts without their marks, for people."""
    for mark in (START, END):
        texts = pc.replace_substring(texts, mark, "")
    return texts


def reject_unplain(texts: pa.LargeStringArray, control: ControlTokens, rejected: dict[int, str]) -> pa.LargeStringArray:
    """Rejects rows with a control token that the tokenizer produces even from plain text, as transformers does."""
    rows = np.flatnonzero(is_marked(texts))
    wrong = unplain(texts.take(as_arrow(rows)).to_pylist(), control)
    if not wrong:
        return texts
    rejected.update((int(rows[i]), why) for i, why in wrong.items())
    valid = np.ones(len(texts), bool)
    valid[list(rejected)] = False
    return pc.if_else(as_arrow(valid), texts, as_scalar(None, pa.large_string()))


def unplain(texts: Sequence[str], control: ControlTokens) -> dict[int, str]:
    """The numbers of those rendered texts that cannot be encoded, with transformers' reason."""
    found = {}
    for i, text in enumerate(texts):
        try:
            for token in filter(None, control.pieces(text)[1::2]):
                control.plain_ids(token)
        except ValueError as error:
            found[i] = rejection(error)
    return found


def encode_marked(texts: pa.LargeStringArray, control: ControlTokens, encode: Encode) -> Ragged:
    """Encodes rendered texts, some of them with marks, as transformers' `encode_marked_chat` does.

    Args:
        texts: (n,) without nulls. The rows of those that are `unplain` have no ids.
        encode: (k,) texts → their ids.
    """
    rows = np.flatnonzero(is_marked(texts))
    if not len(rows):
        return encode(texts)
    mask = np.zeros(len(texts), bool)
    mask[rows] = True
    others = encode(pc.if_else(as_arrow(mask), as_scalar("", texts.type), texts))
    given = texts.take(as_arrow(rows)).to_pylist()
    rejected = unplain(given, control)
    split = [[""] if i in rejected else control.pieces(text) for i, text in enumerate(given)]
    # The first piece of a row begins a text. The others are encoded after a newline, whose ids are then removed.
    firsts = _rows(encode(_texts([pieces[0] or "" for pieces in split])))
    behind = list(dict.fromkeys(piece for pieces in split for piece in pieces[2::2] if piece))
    ids = dict(zip(behind, _after_newline(behind, control.newline, encode), strict=True))
    marked: list[Any] = []
    for pieces, first in zip(split, firsts, strict=True):
        parts = [first]
        for number, piece in enumerate(pieces[1:], start=1):
            if piece:
                parts.append(np.array(control.plain_ids(piece), np.int32) if number % 2 else ids[piece])
        marked.append(np.concatenate(parts))
    order = np.arange(len(texts))
    order[rows] = len(texts) + np.arange(len(rows))
    return Ragged.concatenate([others, Ragged.from_lists(marked)]).take(order)


def _after_newline(pieces: list[str], newline: list[int], encode: Encode) -> list[Any]:
    """The ids of texts that continue a prompt."""
    found = _rows(encode(_texts(["\n" + piece for piece in pieces])))
    merged = [i for i, ids in enumerate(found) if ids[: len(newline)].tolist() != newline]
    alone = dict(zip(merged, _rows(encode(_texts([pieces[i] for i in merged]))), strict=True)) if merged else {}
    return [alone[i] if i in alone else ids[len(newline) :] for i, ids in enumerate(found)]


def _rows(ids: Ragged) -> list[Any]:
    return [ids[i] for i in range(len(ids))]


def _texts(values: list[str]) -> pa.LargeStringArray:
    return as_arrow(values, pa.large_string())
