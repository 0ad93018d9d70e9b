"""The role of each token: that of the message from which it comes.

A token belongs to the first message of which it has a byte, see `engines/host/parts.py`; all other tokens are the
template's, and so are special tokens that a tokenizer adds to plain text. Texts and completions in text have the roles
`text`, `prompt` and `completion`. In rows of other shapes, such as those with calls of tools, messages are searched for
(`searched.py`).
"""

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_numpy, as_scalar
from gpuload.core.errors import TokenizerError
from gpuload.engines.conversations import messages_of_users
from gpuload.engines.host.parts import Parts, message_parts
from gpuload.engines.host.render import Spans
from gpuload.engines.host.spans import TokenSpans
from gpuload.inspect.searched import message_spans
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.training_engine import with_eos
from gpuload.kinds.training_reference import messages_in
from gpuload.reference.reference import Reference, messages_of
from gpuload.sources.columns import to_python
from gpuload.sources.types import is_messages, is_text
from gpuload.template.compiler import ChatProgram

TEMPLATE, UNKNOWN = 0, -1  # codes of tokens that come from no message, and of those of which it is unknown
_MOST_SEARCHED = 5_000  # in so many rows messages are searched for; transformers renders each of them
Codes = npt.NDArray[np.int64]


class RoleFinder:
    """Finds the roles of tokens.

    Attributes:
        names: the name of each code from 0, which is that of the template.
    """

    def __init__(self, reference: Reference):
        self.names = ["template"]
        self._reference = reference
        self._program = ChatProgram(reference.call)
        self._spans: TokenSpans | None = None
        self._rows_searched = 0
        if reference.encodes_rendered_text:
            with suppress(TokenizerError):  # no offsets
                self._spans = TokenSpans(reference)

    def codes(self, column: pa.Array, ids: Ragged, texts: pa.LargeStringArray | None = None) -> Codes:
        """(len(ids.values),) int64, the roles of all tokens of n rows.

        Args:
            column: (n,) prompts, or what is made of chats; none of them null.
            ids: their ids, without loss.
            texts: what was encoded, if it is not what the template makes of the rows.
        """
        if self._spans is None:
            return np.full(len(ids.values), UNKNOWN)
        parts = self._parts(column) if texts is None else None
        if parts is None or not parts.known.all():
            parts = self._searched(column, parts, texts)
        codes = np.full(len(ids.values), TEMPLATE)
        inside = self._own(ids) if self._is_plain(column.type) else np.ones(len(codes), np.bool_)
        counted = offsets_of(inside)
        own = Ragged(ids.values[inside], counted[ids.offsets])
        owner, known = self._spans.owners(parts.text, own, *parts.spans)
        roles = np.array([self._code(name) for name in parts.roles], np.int64)[parts.role]
        codes[inside] = np.where(owner < 0, TEMPLATE, np.append(roles, TEMPLATE)[owner])
        return np.where(np.repeat(known & parts.known, ids.lengths), codes, UNKNOWN)

    def _code(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def _is_plain(self, kind: pa.DataType) -> bool:
        """Whether rows are texts that no template renders."""
        if isinstance(self._reference, ChatReference):
            return is_text(kind) or (pa.types.is_struct(kind) and is_text(kind.field("prompt").type))
        return is_text(kind) and not self._reference.uses_template

    def _own(self, ids: Ragged) -> npt.NDArray[np.bool_]:
        """Which ids are those of the texts, and not special tokens that the tokenizer adds to each."""
        if not isinstance(self._reference, ChatReference):
            return np.ones(len(ids.values), np.bool_)
        before, after = map(len, self._reference.added)
        positions, end = ids.positions, np.repeat(ids.lengths - after, ids.lengths)
        inside: npt.NDArray[np.bool_] = (positions >= before) & (positions < end)
        return inside

    def _parts(self, column: pa.Array) -> Parts | None:
        """The texts of rows and where messages are in them; None if that is unknown of all rows."""
        if self._is_plain(column.type):
            return self._plain_parts(column)
        if is_text(column.type):
            column = messages_of_users(column.cast(pa.large_string()))
        parts = [field.type for field in column.type] if pa.types.is_struct(column.type) else [column.type]
        if not all(map(is_messages, parts)):
            return None
        return message_parts(self._program, column)

    def _searched(self, column: pa.Array, parts: Parts | None, given: pa.LargeStringArray | None = None) -> Parts:
        """The same, with what a search finds in rows whose parts are unknown: in the first ones, it takes long."""
        known = np.zeros(len(column), np.bool_) if parts is None else parts.known.copy()
        texts = [""] * len(column) if parts is None else parts.text.to_pylist()
        names = [] if parts is None else list(parts.roles)
        spans = [] if parts is None else [np.stack([*parts.spans, parts.role], axis=1)]
        some = np.flatnonzero(~known)[: max(0, _MOST_SEARCHED - self._rows_searched)]
        self._rows_searched += len(some)
        for row in some.tolist():
            value = to_python(column.slice(row, 1))[0]
            messages = messages_in(value)
            try:
                texts[row] = self._reference.render(value) if given is None else given[row].as_py()
                found = message_spans(messages_of(messages), texts[row])
            except Exception:  # dropped, or rendered in a way of its own
                continue
            known[row] = True
            names += [role for role in dict.fromkeys(role for *_, role in found) if role not in names]
            spans += [np.array([[row, start, end, names.index(role)]]) for start, end, role in found]
        every = np.concatenate([np.zeros((0, 4), np.int64), *spans])
        every = every[np.lexsort((every[:, 1], every[:, 0]))]
        row, start, end, role = every.T
        return Parts(pa.array(texts, pa.large_string()), Spans(row, start, end), role, tuple(names), known)

    def _plain_parts(self, column: pa.Array) -> Parts:
        fields: dict[str, Any] = {"text": column}
        if pa.types.is_struct(column.type):
            fields = {name: column.field(name) for name in ("prompt", "completion")}
        columns = [each.cast(pa.large_string()) for each in fields.values()]
        ended = list(columns)
        if isinstance(self._reference, ChatReference):
            ended[-1] = with_eos(columns[-1], self._reference.eos)
        text = pc.binary_join_element_wise(*ended, as_scalar("", pa.large_string()))
        lengths = np.stack([as_numpy(pc.binary_length(each)) for each in columns], axis=1)
        end = np.cumsum(lengths, axis=1)
        rows = np.repeat(np.arange(len(text)), len(columns))
        spans = Spans(rows, (end - lengths).ravel(), end.ravel())
        role = np.tile(np.arange(len(columns)), len(text))
        return Parts(text, spans, role, tuple(fields), np.ones(len(text), np.bool_))
