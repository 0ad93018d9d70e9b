"""What an engine does: the stages that depend on the machine. load() strings them together and knows no more."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from gpuload.arrays import Ragged
from gpuload.options import Truncation
from gpuload.sources.read import Source


class Batches(Protocol):
    """What makes batches of a store's rows.

    A data set keeps this, and nothing else of the engine, when it travels to loader workers: it can be pickled, and
    there it makes host tensors.
    """

    def __call__(self, numbers: np.ndarray[Any, Any], rows: Ragged, width: int) -> dict[str, torch.Tensor]:
        """(B,) row numbers of the store, the same rows truncated and on the host, a width → `input_ids`,
        `attention_mask`, `position_ids`, each int64 (B, width).

        Rows are left-padded; positions are clip(cumsum(attention_mask) - 1, 0).
        """

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same batches, for whoever takes one after the other; some made early, where that saves waiting."""


class Text(Protocol):
    """A column of prompts as text, wherever it lies. `template.Rendered` is one on the host.

    Attributes:
        rejected: row → why.
        compiled_rows: how many rows went through the compiled template.
        reasons: why rows took the reference, and how many each.
        nbytes: of the texts.
        sizes: (n,) int64 on the host, bytes of each text, -1 for a row that was rejected.
        wide: (n,) bool on the host, true for a text that is not all ASCII.
        text: (n,) large_string on the host, null where a row was rejected; copied there when it is asked for.
    """

    rejected: dict[int, str]
    compiled_rows: int
    reasons: dict[str, int]

    @property
    def nbytes(self) -> int: ...

    @property
    def sizes(self) -> np.ndarray[Any, Any]: ...

    @property
    def wide(self) -> np.ndarray[Any, Any]: ...

    @property
    def text(self) -> pa.LargeStringArray: ...


class Engine(Protocol):
    """read → render → encode → keep → batches, on one kind of machine.

    Attributes:
        name: "cpu" or "cuda".
        device: where batches are made.
        description: one line for the report: what renders and what encodes.
        notes: lines for the report: why something faster was passed over.

    To ask for the last two may build the encoder.
    """

    name: str
    device: torch.device

    @property
    def description(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def loading(self) -> AbstractContextManager[Any]:
        """Around the three stages: what they take meanwhile is given back after it."""

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        """The rows of a source in order, part by part: a table on the host, and the prompts for `render`.

        The table may lack the prompt column, unless `keep_prompts`. The prompts are an Arrow array, or of the engine's
        own kind, with `take` (ascending row numbers → the same kind) and `fetch` (row numbers → an Arrow array).
        """

    def render(self, prompts: pa.Array) -> Text:
        """(n,) prompts → (n,) texts."""

    def encode(self, text: Any) -> tuple[Ragged, int]:
        """(n,) texts that `render` gave → n rows of ids, no ids for a row that was rejected; and how many rows the
        engine's own tokenizer left to another one."""

    def keep(self, tokens: Ragged, rows: np.ndarray[Any, Any] | None) -> Ragged:
        """Some rows of ids, ascending (None for all), in memory that stays when the load is over."""

    def store(self, parts: list[Ragged], order: np.ndarray[Any, Any] | None) -> Ragged:
        """All that was kept, one part after the other, or the rows of that in the given order. Empties the list."""

    def batches(self, store: Ragged, limit: int, keep: Truncation, pad_id: int) -> Batches:
        """What makes batches of `store`'s rows, of which at most `limit` ids are kept; see `Ragged.truncate`."""
