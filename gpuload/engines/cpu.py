"""The engine without a GPU: Arrow columns, a compiled tokenizer, NumPy batches."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.arrays import Ragged
from gpuload.template import ChatProgram, Rendered
from gpuload.template.prompts import render_column, render_rows
from gpuload.tokenizer.host import host_encoder
from gpuload.tokenizer.reference import Reference


class CpuEngine:
    """The `Engine` of the host.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, prompt by prompt.

    Attributes:
        program: the compiled chat template.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, reference: Reference, exact_only: bool = False):
        self._reference = reference
        self.program = ChatProgram(reference.job)
        self._by_prompt = exact_only or not reference.encodes_rendered_text
        if self._by_prompt:
            self.description = f"cpu: rendered and encoded by {type(reference.tokenizer).__name__}, prompt by prompt"
            self.notes: tuple[str, ...] = ()
        else:
            self._encoder = host_encoder(reference)
            self.description = f"cpu: chat template compiled, encoded by {self._encoder.name}"
            self.notes = tuple(f"not used: {reason}" for reason in self._encoder.passed_over)

    def render(self, prompts: pa.Array) -> Rendered:
        if self._by_prompt:
            return render_rows(prompts, self._reference, with_ids=True)
        return render_column(prompts, self._reference, self.program)

    def encode(self, rendered: Rendered) -> Ragged:
        if rendered.ids is not None:
            return rendered.ids
        return self._encoder.encode(pc.fill_null(rendered.text, "") if rendered.refused else rendered.text)

    @staticmethod
    def pad(rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
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
