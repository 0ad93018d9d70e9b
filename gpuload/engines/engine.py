"""What an engine does: the stages that depend on the machine. load() strings them together and knows no more."""

from typing import Protocol

import pyarrow as pa
import torch

from gpuload.arrays import Ragged
from gpuload.template import Rendered


class Engine(Protocol):
    """read → render → encode → pad, on one kind of machine.

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

    def render(self, prompts: pa.Array) -> Rendered:
        """(n,) prompts → (n,) texts."""

    def encode(self, rendered: Rendered) -> Ragged:
        """(n,) texts → n rows of ids, no ids for a row that was refused."""

    @staticmethod
    def pad(rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
        """B rows of at most `width` ids → `input_ids`, `attention_mask`, `position_ids`, each int64 (B, width).

        Rows are left-padded with `pad_id`; positions are clip(cumsum(attention_mask) - 1, 0).
        Static: a data set keeps this function, and none of the engine, when it travels to loader workers.
        """
