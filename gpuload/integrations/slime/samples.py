"""Samples over columns: each is made when it is accessed, and belongs to the caller."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from slime.utils.types import Sample

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, RowNumbers, row_number
from gpuload.core.marks import LOSS
from gpuload.sources.columns import Columns


@dataclass(frozen=True)
class SampleColumns:
    """n samples as columns.

    Attributes:
        columns: n rows.
        prompt: the column with prompts: texts, or messages.
        label, metadata, tools: further columns; None: samples have none.
        has_processor: the model has a processor, so samples say that they have no images.
        tokens: n rows of the ids of prompts, in memory or on disk; None: slime tokenizes them, if anything does.
        conversations: for SFT, n rows of ids with a bit for loss (`core.marks`), empty where slime has to tokenize; in
            memory or on disk.
    """

    columns: Columns
    prompt: str
    label: str | None
    metadata: str | None
    tools: str | None
    has_processor: bool
    tokens: Ragged | DiskTokens | None = None
    conversations: Ragged | DiskTokens | None = None

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: RowNumbers) -> list[Sample]:
        """Makes samples. No object is shared between two of them, or with those of a later call.

        Args:
            rows: (m,) row numbers.
        """
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
    """Gives a sample what slime's rollout for SFT gives it, except for the reward.

    Args:
        ids: (k,) with a bit for loss.
    """
    loss = (ids & LOSS) != 0
    # slime's response begins with the first token that has loss.
    length = len(loss) - int(loss.argmax()) if loss.any() else 0
    sample.tokens = (ids & ~LOSS).tolist()
    sample.response_length = length
    sample.loss_mask = loss.astype(np.int64).tolist()[-length:]  # -0 is the whole mask, as in slime


class LazySamples(Sequence[Sample]):
    """The list of samples of slime's dataset. A slice of it is a list.

    Args:
        columns: the samples.
        order: (n,) row numbers; None for all, as they are.
    """

    def __init__(self, columns: SampleColumns, order: RowNumbers | None = None):
        self._columns = columns
        self._order = np.arange(len(columns)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return self._columns.take(self._order[index])
        return self._columns.take(self._order[[row_number(index, len(self))]])[0]


class SampleDataset:
    """slime's `Dataset`, as slime's data source uses it.

    Args:
        columns: the samples, in the order of the file.
        seed: of shuffles.

    Attributes:
        samples: in the order of the epoch.
        origin_samples: in the order of the file.
        epoch_id: that `samples` were shuffled for; -1 before.
    """

    def __init__(self, columns: SampleColumns, seed: int):
        self._columns = columns
        self.samples = self.origin_samples = LazySamples(columns)
        self.epoch_id = -1
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
