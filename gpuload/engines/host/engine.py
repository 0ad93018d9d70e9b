"""The engine without a GPU: Arrow columns, a compiled tokenizer, NumPy batches."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.arrays import Ragged
from gpuload.engines.host.encode import HostEncoder, host_encoder
from gpuload.engines.host.prompts import render_column, render_rows
from gpuload.engines.host.rendered import Rendered
from gpuload.options import Truncation
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, with_prompts
from gpuload.template import ChatProgram


class CpuEngine:
    """The `Engine` of the host.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, prompt by prompt.
        notes: further ones for the report.

    Attributes:
        program: the compiled chat template.
        by_prompt: whether rendering and encoding are one step, prompt by prompt.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, reference: Reference, exact_only: bool = False, notes: tuple[str, ...] = ()):
        self._reference, self._notes = reference, notes
        self.program = ChatProgram(reference.call)
        self.by_prompt = exact_only or not reference.encodes_rendered_text

    @cached_property
    def encoder(self) -> HostEncoder:
        """Built when it is first needed: that takes half a second, and not every load needs it."""
        return host_encoder(self._reference)

    @property
    def description(self) -> str:
        if self.by_prompt:
            return f"cpu: rendered and encoded by {type(self._reference.tokenizer).__name__}, prompt by prompt"
        return f"cpu: chat template compiled, encoded by {self.encoder.name}"

    @property
    def notes(self) -> tuple[str, ...]:
        passed_over = () if self.by_prompt else self.encoder.passed_over
        return (*(f"not used: {reason}" for reason in passed_over), *self._notes)

    @staticmethod
    def loading() -> AbstractContextManager[Any]:
        return nullcontext()

    @staticmethod
    def read(source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        return with_prompts(source, prompt_key)

    def render(self, prompts: pa.Array) -> Rendered:
        if self.by_prompt:
            return render_rows(prompts, self._reference, with_ids=True)
        return render_column(prompts, self._reference, self.program)

    def encode(self, text: Rendered) -> tuple[Ragged, int]:
        if text.ids is not None:
            return text.ids, 0
        return self.ids(pc.fill_null(text.text, "") if text.rejected else text.text), 0

    def ids(self, text: pa.LargeStringArray) -> Ragged:
        """n texts, none of them null → n rows of ids."""
        return self.encoder.encode(text)

    @staticmethod
    def keep(tokens: Ragged, rows: np.ndarray[Any, Any] | None) -> Ragged:
        if rows is None:
            return tokens
        kept = np.zeros(len(tokens), bool)
        kept[rows] = True
        return tokens.filter(kept)

    @staticmethod
    def store(parts: list[Ragged], order: np.ndarray[Any, Any] | None) -> Ragged:
        whole = Ragged.concatenate(parts)
        return whole if order is None else whole.take(order)

    @staticmethod
    def batches(store: Ragged, limit: int, keep: Truncation, pad_id: int) -> "HostBatches":
        return HostBatches(pad_id)

    @staticmethod
    def pad(rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
        """B rows of at most `width` ids → `input_ids`, `attention_mask`, `position_ids`, each int64 (B, width)."""
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


@dataclass(frozen=True)
class HostBatches:
    """The `Batches` of the host."""

    pad_id: int

    def __call__(self, numbers: np.ndarray[Any, Any], rows: Ragged, width: int) -> dict[str, torch.Tensor]:
        return CpuEngine.pad(rows, width, self.pad_id)

    @staticmethod
    def ahead(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return batches
