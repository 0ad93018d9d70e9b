"""Samples over columns: each is made when it is accessed, and belongs to the caller."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from slime.utils.types import Sample

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, RowNumbers, row_number
from gpuload.core.marks import LOSS
from gpuload.sources.columns import Columns


@dataclass(frozen=True)
class SampleColumns:
    """n samples as columns."""

    columns: Columns  # n rows
    prompt: str  # the column with prompts: texts, or messages
    label: str | None  # further columns; None: samples have none
    metadata: str | None
    tools: str | None
    has_processor: bool  # the model has a processor, so samples say that they have no images
    tokens: Ragged | DiskTokens | None = None  # n rows, of prompts; None: slime tokenizes them, if anything does
    conversations: Ragged | DiskTokens | None = None  # for SFT, n rows with a bit for loss; empty where slime tokenizes

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: RowNumbers) -> list[Sample]:
        """Makes samples of rows (m,). No object is shared between two of them, or with those of a later call."""
        names = [name for name in (self.prompt, self.label, self.metadata, self.tools) if name is not None]
        columns = self.columns.take(rows, names)
        tokens = None if self.tokens is None else self.tokens.take(rows).to_lists()
        conversations = None if self.conversations is None else self.conversations.take(rows)
        samples = []
        for number in range(len(rows)):
            metadata = (columns[self.metadata][number] if self.metadata is not None else None) or {}
            if self.tools is not None:
                metadata["tools"] = tools_of(columns[self.tools][number])
            sample = Sample(
                prompt=columns[self.prompt][number],
                label=columns[self.label][number] if self.label is not None else None,
                metadata=metadata,
                multimodal_inputs={"images": None, "videos": None} if self.has_processor else None,
            )
            if tokens is not None:
                sample.tokens = tokens[number]
            if conversations is not None and len(conversations[number]):
                set_conversation(sample, conversations[number])
            samples.append(sample)
        return samples


def tools_of(value: Any) -> Any:
    """The tools of a row, which may be JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def set_conversation(sample: Sample, ids: np.ndarray[Any, Any]) -> None:
    """Gives a sample what slime's rollout for SFT gives it, except for the reward, of its ids (k,) with a bit for
    loss."""
    loss = (ids & LOSS) != 0
    # slime's response begins with the first token that has loss.
    length = len(loss) - int(loss.argmax()) if loss.any() else 0
    sample.tokens = (ids & ~LOSS).tolist()
    sample.response_length = length
    sample.loss_mask = loss.astype(np.int64).tolist()[-length:]  # -0 is the whole mask, as in slime


class LazySamples(Sequence[Sample]):
    """The list of samples of slime's dataset, in an order of rows (n,), or as they are. A slice of it is a list."""

    def __init__(self, columns: SampleColumns, order: RowNumbers | None = None):
        self._columns = columns
        self._order = np.arange(len(columns)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._columns.take(self._order[index])
        return self._columns.take(self._order[[row_number(index, len(self))]])[0]


class SampleDataset:
    """slime's `Dataset`, as slime's data source uses it: samples in the order of the epoch, and in that of the file."""

    def __init__(self, columns: SampleColumns, seed: int):
        self._columns = columns
        self.samples = self.origin_samples = LazySamples(columns)
        self.epoch_id = -1  # not shuffled yet
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Puts samples into the order of an epoch. As in slime, this seeds Python's global generator."""
        if self.epoch_id == new_epoch_id:
            return
        random.seed(self.seed + new_epoch_id)
        permutation = list(range(len(self.samples)))
        random.shuffle(permutation)
        self.samples = LazySamples(self._columns, np.array(permutation, np.int64))
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)
