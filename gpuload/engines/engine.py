"""What an engine does: the stages that depend on the machine. load() strings them together and knows no more."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from gpuload.arrays import Ragged
from gpuload.options import Truncation
from gpuload.read import Source
from gpuload.template import Rendered

Batches = Callable[[np.ndarray[Any, Any], Ragged, int], dict[str, torch.Tensor]]
"""(B,) row numbers of the store, the same rows truncated and on the host, a width → `input_ids`, `attention_mask`,
`position_ids`, each int64 (B, width).

Rows are left-padded; positions are clip(cumsum(attention_mask) - 1, 0). A data set keeps this function, and nothing
else of the engine, when it travels to loader workers: it can be pickled, and there it makes host tensors.
"""


class Engine(Protocol):
    """read → render → encode → batches, on one kind of machine.

    Attributes:
        name: "cpu" or "cuda".
        device: where batches are made.
        description: one line for the report: what renders and what encodes.
        notes: lines for the report: why something faster was passed over.
    """

    name: str
    device: torch.device
    description: str
    notes: tuple[str, ...]

    def loading(self) -> AbstractContextManager[Any]:
        """Around the three stages: what they take meanwhile is given back after it."""

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        """The rows of a source in order, part by part: a table on the host, and the prompts for `render`.

        The table may lack the prompt column, unless `keep_prompts`. The prompts are an Arrow array, or of the engine's
        own kind, with `take` (ascending row numbers → the same kind) and `fetch` (row numbers → an Arrow array).
        """

    def render(self, prompts: pa.Array) -> Rendered:
        """(n,) prompts → (n,) texts."""

    def encode(self, rendered: Rendered) -> Ragged:
        """(n,) texts → n rows of ids, no ids for a row that was refused."""

    def batches(self, store: Ragged, limit: int, keep: Truncation, pad_id: int) -> Batches:
        """What makes batches of `store`'s rows, of which at most `limit` ids are kept; see `Ragged.truncate`."""
