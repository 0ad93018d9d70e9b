"""The engine without a GPU: Arrow columns, a compiled tokenizer, NumPy batches."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.arrays import Ragged
from gpuload.template import Rendered, render_rows
from gpuload.tokenizer.host import host_encoder
from gpuload.tokenizer.reference import Reference


class CpuEngine:
    """The `Engine` of the host.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, row by row.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, reference: Reference, exact_only: bool = False):
        self._reference = reference
        self._encoder = host_encoder(reference, exact_only)
        self.description = f"cpu: rendered by transformers, encoded by {self._encoder.name}"
        self.notes = tuple(f"not used: {reason}" for reason in self._encoder.passed_over)

    def render(self, prompts: pa.Array) -> Rendered:
        return render_rows(prompts, self._reference)

    def encode(self, text: pa.LargeStringArray) -> Ragged:
        return self._encoder.encode(pc.fill_null(text, "") if text.null_count else text)

    def pad(self, rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
        # Column c of a row with k tokens is its token c - (width - k).
        positions = np.arange(width) - (width - rows.lengths)[:, None]
        mask = positions >= 0
        ids = np.full(mask.shape, pad_id, np.int64)
        ids[mask] = rows.values
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "position_ids": torch.from_numpy(np.maximum(positions, 0, out=positions)),
        }
