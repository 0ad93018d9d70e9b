"""What an engine is: the stages of a load that depend on the machine, and the data that passes between them.

    read → Prompts             the prompt column, wherever the engine wants it
    render → RenderedText      one text per prompt
    encode → Tokenized         one row of token ids per text
    keep, store → TokenStore   the ids of all rows that were kept
    batches → Batches          padded tensors from that store

`pipeline/run.py` connects the stages and knows nothing else about the machine. The engines are `host/` and `device/`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Array, Ragged
from gpuload.core.arrow import as_arrow
from gpuload.engines.batches import Batches, BatchLayout
from gpuload.sources.later import LaterTable
from gpuload.sources.read import Source
from gpuload.template.program import Operation, Predicate


@dataclass(frozen=True, eq=False)
class TextColumn:
    """n texts as slices of one buffer: text i is `data[start[i] : start[i] + length[i]]`.

    Slices may overlap, leave gaps and come in any order, so that stripping or cutting a text copies no bytes.
    """

    data: Array  # (bytes,) uint8, UTF-8
    start: Array  # (n,) int64
    length: Array  # (n,) int64, bytes. A null is a text of length 0

    def __len__(self) -> int:
        return len(self.start)


class TextOperations(Protocol):
    """What a compiled template needs to know about a column of text: implemented in NumPy, and by kernels."""

    xp: ModuleType  # the array module of all arguments and results, NumPy or CuPy

    def current(self) -> AbstractContextManager[Any]:
        """Makes the arrays' device the current one of the calling thread."""

    def bytes_at(self, texts: TextColumn, numbers: list[int]) -> list[bytes]:
        """Some of the texts, copied to the host."""

    def operate(self, texts: TextColumn, operation: Operation) -> TextColumn:
        """Every text after one operation; `program.apply_operations` is the definition."""

    def unsupported(self, operation: Operation) -> str | None:
        """Why `operate` does not support this operation, or None."""

    def answer(self, texts: TextColumn, predicate: Predicate) -> Array:
        """(n,) bool: `predicate`'s test for every text, to which its operations have been applied."""

    def contains_any(self, texts: TextColumn, needles: Sequence[str]) -> Array:
        """(n,) bool: whether a text contains one of the strings, none of which is empty."""

    def not_utf8(self, texts: TextColumn) -> Array:
        """(n,) bool: true where a text is not valid UTF-8."""

    def distinct(self, texts: TextColumn) -> tuple[Array, Array, Array]:
        """Groups equal texts; meant for columns with few distinct, short texts, such as roles.

        Returns:
            example (g,) int64: the number of one text of each group.
            group (n,) int64: each text's group.
            stray (n,) bool: true where a text differs from its group's example because their hashes collide.
        """

    def shape_hashes(self, first: Array, count: Array, code: Array) -> Array:
        """(n,) int64: a hash of each row's message codes, `code[first[i] : first[i] + count[i]]`, and their order."""

    def same_shapes(self, first: Array, count: Array, code: Array, example: Array) -> Array:
        """(n,) bool: whether row i has the same message codes as row `example[i]` (an index into `first`)."""


class Prompts(Protocol):
    """n prompts, in the form in which an engine reads them."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray[Any, Any]) -> "Prompts":
        """(k,) ascending row numbers → those prompts, in the same form."""

    def to_arrow(self, rows: np.ndarray[Any, Any]) -> pa.Array:
        """(k,) row numbers → those prompts as an Arrow array in host memory."""


@dataclass(frozen=True)
class ArrowPrompts:
    """Prompts as an Arrow array in host memory."""

    column: pa.Array  # (n,) messages, strings or JSON; see `sources.types.check_prompt_type`

    def __len__(self) -> int:
        return len(self.column)

    def take(self, rows: np.ndarray[Any, Any]) -> "ArrowPrompts":
        return ArrowPrompts(self.to_arrow(rows))

    def to_arrow(self, rows: np.ndarray[Any, Any]) -> pa.Array:
        return self.column.take(as_arrow(rows))


def add_seconds(into: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds seconds by reason to others."""
    for reason, seconds in more.items():
        into[reason] = into.get(reason, 0.0) + seconds


@dataclass(kw_only=True, eq=False)
class RowCounts:
    """How n prompts were rendered."""

    rejected: dict[int, str] = field(default_factory=dict)  # row → why no prompt can be made of it
    compiled_rows: int = 0  # rows rendered by the compiled template, or taken as plain text
    reasons: dict[str, int] = field(default_factory=dict)  # why rows were rendered by transformers → how many
    reason_seconds: dict[str, float] = field(default_factory=dict)  # reason → the time that its rows took
    control_rows: int = 0  # rows whose messages contain the text of a control token

    @property
    def reference_rows(self) -> int:
        """Rows rendered by transformers, one by one."""
        return sum(self.reasons.values())

    def add_counts(self, other: "RowCounts | RenderedRows") -> None:
        """Adds how further rows were rendered, but not which of them were rejected."""
        self.compiled_rows += other.compiled_rows
        add_seconds(self.reason_seconds, other.reason_seconds)
        self.control_rows += other.control_rows
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass(kw_only=True, eq=False)
class RenderedRows:
    """What became of each of n prompts when they were rendered. Every row that is in neither dict was rendered by the
    compiled template, or taken as plain text: so no row is counted twice, and none is missing."""

    rejected: dict[int, str] = field(default_factory=dict)  # row → why no prompt can be made of it
    # Row → why it was given to transformers; some of these rows may be rejected
    by_reference: dict[int, str] = field(default_factory=dict)
    reason_seconds: dict[str, float] = field(default_factory=dict)  # reason → the time that its rows took
    # (n,) bool in host memory, rows whose messages contain the text of a control token; None if nobody looked for it
    with_control: Array | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def control_rows(self) -> int:
        """Rows whose messages contain the text of a control token."""
        return 0 if self.with_control is None else int(self.with_control.sum())

    @property
    def reasons(self) -> dict[str, int]:
        """Why rows were rendered by transformers → how many, the most frequent first."""
        rendered = Counter(why for row, why in self.by_reference.items() if row not in self.rejected)
        return dict(rendered.most_common())

    @property
    def reference_rows(self) -> int:
        """Rows rendered by transformers, one by one."""
        return sum(self.reasons.values())

    @property
    def compiled_rows(self) -> int:
        """Rows rendered by the compiled template, or taken as plain text."""
        return len(self) - len(self.rejected) - self.reference_rows

    def counts(self) -> dict[str, Any]:
        """The attributes of a `RowCounts`, as keyword arguments."""
        names = ("rejected", "compiled_rows", "reasons", "reason_seconds", "control_rows")
        return {name: getattr(self, name) for name in names}

    def reject(self, rejected: Mapping[int, str]) -> None:
        """Rejects further rows, for reasons that come before others."""
        self.rejected = {**self.rejected, **rejected}

    def fates(self) -> dict[str, Any]:
        """The attributes of this class, as keyword arguments of a subclass."""
        names = ("rejected", "by_reference", "reason_seconds", "with_control")
        return {name: getattr(self, name) for name in names}

    def take_fates(self, parts: Sequence["RenderedRows"]) -> None:
        """Takes what became of the rows of all parts, one after the other."""
        first_row = 0
        for part in parts:
            self.rejected.update((first_row + row, reason) for row, reason in part.rejected.items())
            self.by_reference.update((first_row + row, reason) for row, reason in part.by_reference.items())
            add_seconds(self.reason_seconds, part.reason_seconds)
            first_row += len(part)
        self.with_control = joined_control(parts)


def joined_control(parts: Sequence[RenderedRows]) -> Array | None:
    """`with_control` of all parts, one after the other; in rows of which there is no text it may be false."""
    found = []
    for part in parts:
        if part.with_control is None and len(part.rejected) < len(part):
            return None
        found.append(np.zeros(len(part), bool) if part.with_control is None else part.with_control)
    return np.concatenate(found)


class RenderedText(Protocol):
    """n prompts as text, in host or device memory; a `RenderedRows` too. A rejected row's text is empty or null."""

    rejected: dict[int, str]

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) int64 in host memory: bytes of each text, -1 where a row was rejected."""

    @property
    def sampled_sizes(self) -> np.ndarray[Any, Any]:
        """The same, but -1 also where comparing a row with the tokenizer would take too long for a sample."""
        return self.sizes

    @property
    def text(self) -> pa.LargeStringArray:
        """(n,) large_string in host memory, null where a row was rejected; copied there when first asked for."""


@dataclass(kw_only=True, eq=False)
class Tokenized(RowCounts):
    """n rows of token ids, made by an engine or found in the token cache."""

    ids: Ragged  # n rows, in the engine's memory or in a mapped file; a rejected row is empty
    text_sizes: Array  # (n,) int64, bytes of each rendered text, 0 where a row was rejected; in the memory of `ids`
    text_nbytes: int  # their sum
    fallback_rows: int = 0  # rows that the engine's own tokenizer handed to another one
    # Row → which of its other columns is not valid; None where that is not known yet
    invalid: dict[int, str] | None = None
    # Some rows are rejected for a reason that another load may not have, so no cache may keep these
    transient: bool = False
    # What else was counted of these rows, such as those that a trainer's function has tokenized
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray[Any, Any]) -> "Tokenized":
        """(k,) ascending row numbers → those rows. How they were rendered is counted if it is known of single rows, see
        `rendering_of`."""
        rejected, invalid = (
            {at: found[row] for at, row in enumerate(rows.tolist()) if row in found}
            for found in (self.rejected, self.invalid or {})
        )
        sizes = self.text_sizes[rows]
        return Tokenized(
            ids=self.ids.take(rows),
            text_sizes=sizes,
            text_nbytes=int(sizes.sum()),
            rejected=rejected,
            invalid=None if self.invalid is None else invalid,
            **(self.rendering_of(len(rows) - len(rejected)) or {}),
        )

    def rendering_of(self, rows: int) -> dict[str, Any] | None:
        """How some of the rows that were not rejected were rendered, as keyword arguments; None if it is not known of
        single rows, because all n rows were not rendered in one way."""
        if not self.reasons:
            return {"compiled_rows": rows}
        if not self.compiled_rows and len(self.reasons) == 1:
            return {"reasons": dict.fromkeys(self.reasons, rows) if rows else {}}
        return None


class TokenStore(Protocol):
    """The ids of n rows, in the engine's memory. `Ragged` is one, in host memory."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """(n,) int64 in host memory."""

    def take(self, rows: np.ndarray[Any, Any]) -> Ragged:
        """(m,) row numbers → those rows, in host memory."""

    def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
        """The ids of all rows in order, in arrays in host memory."""

    def to_host(self) -> Ragged:
        """All rows in host memory."""


class Engine(Protocol):
    """The stages of a load on one kind of machine."""

    name: str  # "cpu" or "cuda"
    device: torch.device  # where batches are made

    @property
    def host(self) -> "Engine":
        """The engine that takes over where this one fails: that of the host, maybe itself."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the report: why a faster way is not used. Asking may build the encoder."""

    @property
    def counts(self) -> dict[str, int]:
        """What the engine has counted for the report, in words → how many."""

    def describe(self, compiled: bool = True) -> str:
        """One line for the report: what renders and what encodes, and whether the compiled template has rendered any
        row, as far as there is one. Asking may build the encoder."""

    def lost(self) -> str | None:
        """Why nothing in this process can use the engine's device any more, or None; asked after a failure."""

    @property
    def by_tokenizer(self) -> bool:
        """Whether the tokenizer itself renders and encodes the rows of this load, because they are few."""

    def loading(self, nbytes: int | None = None, rows: int | None = None) -> AbstractContextManager[Any]:
        """Surrounds the stages of one load: memory allocated inside is released at its end.

        Args:
            nbytes: about how many bytes of prompts are read; None if that is not known, or if more loads follow.
            rows: how many rows are read; None likewise.
        """

    def read(
        self, source: Source, prompt_key: str, keep_prompts: bool
    ) -> Iterator[tuple[pa.Table | LaterTable, Prompts]]:
        """The rows of a source in order, part by part: their columns in host memory, if `keep_prompts` with that of
        prompts, and their prompts."""

    def render(self, prompts: Prompts) -> RenderedText:
        """(n,) prompts → (n,) texts."""

    @property
    def part_bytes(self) -> int:
        """How many bytes of prompts are worth a batch, to which smaller ones are joined; 0 where any size will do.
        Asked during a load."""

    def encode(self, text: Any) -> Tokenized:
        """(n,) texts from `render` → n rows of ids."""

    def fetch(self, ids: Ragged, rows: np.ndarray[Any, Any]) -> Ragged:
        """Some rows (ascending numbers), in host memory."""

    def keep(self, ids: Ragged, rows: np.ndarray[Any, Any] | None) -> TokenStore:
        """Some rows (ascending numbers, None for all), in memory that outlives the load."""

    def store(self, parts: list[Any], order: np.ndarray[Any, Any] | None) -> TokenStore:
        """Joins what `keep` returned, and brings the rows into the given order. Empties the list."""

    def batches(self, store: Any, layout: BatchLayout, pad_id: int) -> Batches:
        """A builder of batches from `store`."""
