"""Checks of messages, and of what the template makes of them."""

import itertools
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import mask_of
from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.core.words import counted
from gpuload.inspect.checks.findings import RowMask
from gpuload.inspect.checks.messages import NONE, OBJECT, TEXT, TEXT_PART, FlatMessages, matches
from gpuload.inspect.checks.rows import CheckedRows, Hit
from gpuload.kinds.chats.load import is_good
from gpuload.kinds.normalize import argument_forms
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_list
from gpuload.template.probes import leaves_out_calls

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_COLUMNS = (("image", "images"), ("video", "videos"), ("audio", "audios"))
_PLACEHOLDERS = (r"<image>|<\|image_pad\|>|<start_of_image>", r"<video>|<\|video_pad\|>", r"<audio>|<\|AUDIO\|>")
_COMPARED = 80  # characters of a reasoning, or of an answer, that are looked for
_MOST_SHAPES = 256  # of rows with null contents that are rendered twice


class TextChecks:
    """Checks of the messages of rows.

    `label` is the column that says which answers are good ones, in data for SFT, if there is one. If a trainer
    `inserts_placeholders`, rows may have none.
    """

    def __init__(self, reference: Reference, label: str | None, inserts_placeholders: bool):
        self._reference, self._label, self._inserts = reference, label, inserts_placeholders
        self._nulls: dict[Any, bool] = {}  # shape of a row → whether the template prints None for its null contents

    def of(self, rows: CheckedRows) -> Iterator[Hit]:
        """What is wrong with some rows."""
        count, rejected, useless = rows.messages.count, rows.rejected, rows.useless
        yield Hit("rows dropped", mask_of(rejected, count), rejected.__getitem__)
        yield Hit("no loss", mask_of(useless.keys() - rejected.keys(), count), useless.__getitem__)
        yield from self._media(rows)
        if self._label is not None and self._label in rows.table.schema.names:
            yield self._bad_answers(rows, self._label)
        if not self._reference.uses_template:
            return
        yield self._control(rows)
        yield self._unknown_roles(rows.messages)
        yield from self._arguments(rows.messages)
        yield from self._reasoning(rows)
        yield self._dropped(rows)
        yield self._null(rows)

    # -- messages ----------------------------------------------------------------------------------------------------

    @cached_property
    def _special(self) -> str:
        """A pattern for the texts of special tokens; empty if there are none."""
        tokenizer = self._reference.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        media = re.compile("|".join(_PLACEHOLDERS) + r"|<\|vision_(start|end)\|>")
        return "|".join(map(_escaped, sorted(text for text in texts if text.strip() and not media.fullmatch(text))))

    def _control(self, rows: CheckedRows) -> Hit:
        messages = rows.messages
        found = matches(messages.text, self._special) if self._special else np.zeros(len(messages), np.bool_)
        if rows.column.type == JSON_TYPE:  # texts among conversations are not rendered
            found = found & (messages.part != TEXT_PART)

        def detail(row: int) -> str:
            at = _first(messages, found, row)
            token = pc.struct_field(pc.extract_regex(messages.text[at : at + 1], f"(?P<t>{self._special})"), "t")[0]
            return f"{token} in a message of {messages.role[at].as_py() or 'the prompt'}"

        return Hit("control tokens", messages.rows_of(found), detail)

    def _unknown_roles(self, messages: FlatMessages) -> Hit:
        found = ~messages.has_role(*_ROLES, "")

        def detail(row: int) -> str:
            return f"role {messages.role[_first(messages, found, row)].as_py()!r:.60}"

        return Hit("unknown roles", messages.rows_of(found), detail)

    @cached_property
    def _forms(self) -> tuple[bool, bool]:
        return argument_forms(self._reference.call, exactly=True)

    def _arguments(self, messages: FlatMessages) -> Iterator[Hit]:
        calling = messages.arguments != NONE
        if not calling.any():
            return
        some = as_numpy(pc.binary_length(messages.text)) > 0
        left_out = np.zeros(len(messages), np.bool_)
        for content, those in ((None, messages.null), ("", ~messages.null & ~some), ("a", ~messages.null & some)):
            if (those & calling).any() and leaves_out_calls(self._reference.call, content):
                left_out |= those & calling
        yield Hit("calls dropped", messages.rows_of(left_out), lambda row: "the template prints nothing of a tool call")
        objects, text = self._forms
        if objects and not text:
            found = messages.arguments == TEXT
            yield Hit("arguments as text", messages.rows_of(found), lambda row: "the template prints objects")
        elif text and not objects:
            found = messages.arguments == OBJECT
            yield Hit("arguments as objects", messages.rows_of(found), lambda row: "the template takes JSON text")

    # -- rendered texts ----------------------------------------------------------------------------------------------

    def _reasoning(self, rows: CheckedRows) -> Iterator[Hit]:
        messages = rows.messages
        number = np.arange(len(messages))
        last = np.full(messages.count, -1)
        ours = messages.has_role("assistant")
        last[messages.row[ours]] = number[ours]
        final, earlier = np.zeros((2, messages.count), np.bool_)
        there = as_numpy(messages.reasoning.is_valid())
        for at in _not_printed(rows, np.flatnonzero(there), messages.reasoning.filter(as_arrow(there)).to_pylist()):
            row = int(messages.row[at])
            (final if at == last[row] else earlier)[row] = True
        yield Hit("reasoning dropped", final, lambda row: "the reasoning of the last answer is not in the text")
        about = "the reasoning of an earlier answer is not in the text"
        yield Hit("reasoning dropped", earlier & ~final, lambda row: about, "info")

    def _dropped(self, rows: CheckedRows) -> Hit:
        messages = rows.messages
        ours = messages.has_role("assistant") & (messages.part != TEXT_PART)
        texts = messages.text.filter(as_arrow(ours)).to_pylist()
        # Of a text with a thinking block, which many templates take apart, what is behind it.
        answers = [text.rpartition("</think>")[2] for text in texts]
        found = np.zeros(len(messages), np.bool_)
        found[_not_printed(rows, np.flatnonzero(ours), answers)] = True

        def detail(row: int) -> str:
            text = messages.text[_first(messages, found, row)].as_py()
            return f"the template does not print {text.strip()[:40]!r}"

        return Hit("text dropped", messages.rows_of(found), detail)

    def _null(self, rows: CheckedRows) -> Hit:
        messages = rows.messages
        found = np.zeros(messages.count, np.bool_)
        for row in np.flatnonzero(messages.rows_of(messages.null)).tolist():
            text = rows.texts[0][row].as_py()
            if text is None or "None" not in text:
                continue
            own = messages.row == row
            key = (tuple(messages.role.filter(as_arrow(own)).to_pylist()), *messages.null[own].tolist())
            if key not in self._nulls and len(self._nulls) < _MOST_SHAPES:
                self._nulls[key] = self._prints_none(to_python(rows.column.slice(row, 1))[0])
            found[row] = self._nulls.get(key, False)
        return Hit("null printed", found, lambda row: "a content that is null is printed as None")

    def _prints_none(self, row: Any) -> bool:
        texts = getattr(self._reference, "texts", None)
        try:
            both = (row, _without_null_contents(row))
            text, other = (self._reference.render(each) if texts is None else texts(each)[0] for each in both)
        except Exception:  # the template may want a null
            return False
        return bool(other.count("None") < text.count("None"))

    # -- other columns -----------------------------------------------------------------------------------------------

    def _bad_answers(self, rows: CheckedRows, label: str) -> Hit:
        values = to_python(rows.table.column(label).combine_chunks())
        bad = np.array([is_good(value) is False for value in values], np.bool_)
        return Hit("KTO labels", bad, lambda row: f"{label} is {values[row]!r:.20}")

    def _media(self, rows: CheckedRows) -> Iterator[Hit]:
        messages = rows.messages
        for number, names in enumerate(_COLUMNS):
            name = next((each for each in reversed(names) if each in rows.table.schema.names), None)
            if name is None:
                continue
            given = _counts(rows.table.column(name).combine_chunks())
            marks = as_numpy(pc.count_substring_regex(messages.text, _PLACEHOLDERS[number])).astype(np.int64)
            marks += messages.media[:, number]
            written = np.bincount(messages.row, marks, messages.count).astype(np.int64)
            wrong = written != given
            if self._inserts:
                wrong &= written > 0

            def detail(row: int, given: Any = given, written: Any = written, name: str = name) -> str:
                return (
                    f"{counted(written[row], 'placeholders')}, and {counted(given[row], 'values')} in column {name!r}"
                )

            yield Hit("media", wrong, detail)


def has_media(messages: FlatMessages, others: pa.Table) -> RowMask:
    """(n,) bool: rows with images, videos or audios, whose texts alone do not say what is asked. `others` are their
    other columns."""
    found = messages.rows_of(messages.media.sum(axis=1) > 0)
    for name in itertools.chain(*_COLUMNS):
        if name in others.schema.names:
            found |= _counts(others.column(name).combine_chunks()) > 0
    return found


def _counts(column: pa.Array) -> npt.NDArray[np.int64]:
    """(n,) how many images each value of a column has: as many as a list has, otherwise one, or none if it is null."""
    if column.type == JSON_TYPE:
        values = to_python(column)
        return np.array([len(v) if isinstance(v, list) else int(v is not None) for v in values], np.int64)
    if is_list(column.type):
        return as_numpy(fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return as_numpy(column.is_valid()).astype(np.int64)


def _without_null_contents(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null_contents(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "role" in value:
        return value | {"content": ""} if value.get("content") is None else value
    return {key: _without_null_contents(each) for key, each in value.items()}


def _first(messages: FlatMessages, found: RowMask, row: int) -> int:
    """The number of the first message of a row that was found."""
    return int(np.flatnonzero(found & (messages.row == row))[0])


def _escaped(text: str) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _not_printed(rows: CheckedRows, numbers: npt.NDArray[np.int64], values: list[str]) -> list[int]:
    """The numbers of messages, of those given in order, whose values are not in the texts of their rows."""
    found = []
    of, texts = -1, [""]
    for at, row, value in zip(numbers.tolist(), rows.messages.row[numbers].tolist(), values, strict=True):
        if row != of:
            of, texts = row, [each[row].as_py() for each in rows.texts]
        start = value.strip()[:_COMPARED].strip()
        if start and None not in texts and not any(start in text for text in texts):
            found.append(at)
    return found
