"""ChatDataset: conversations, or other text to train on, with labels."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from gpuload.arrays import Ragged
from gpuload.dataset import PromptDataset, Row
from gpuload.lazy import LazyDict
from gpuload.loss import split
from gpuload.options import Padding

IGNORED = -100
"""The label of a token without loss, as in PyTorch's `cross_entropy`."""


class ChatDataset(PromptDataset):
    """Tokenized rows with a loss mask, and the other columns of their files. Made by `gpuload.load_chats`.

    A map-style `torch.utils.data.Dataset`. A row is a dict with these keys, for L tokens:

    - `input_ids`: the token ids, a list of int.
    - `labels`: the same, and -100 for tokens without loss.
    - Every other column of the files, as Python objects.

    `batch` and `loader` give tensors `(B, L)` instead, padded on the right.

    Attributes:
        report: What the load did; `print` it.
        options: The options of the load.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    limit_name = "max_length"

    def __repr__(self) -> str:
        columns = "".join(f", {name}" for name in self.passed_through.names)
        return (
            f"ChatDataset({len(self):,} rows, {self._lengths.sum():,} tokens, {self.loss_tokens:,} with loss{columns})"
        )

    @property
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding and not truncated: `values`, int32, and `offsets`, int64 `(n + 1,)`."""
        return split(self._store.to_host())[0]

    @property
    def loss_mask(self) -> Ragged:
        """Which of these ids have loss: `values`, bool, and the same `offsets`."""
        return split(self._store.to_host())[1]

    @cached_property
    def loss_tokens(self) -> int:
        """Number of tokens with loss."""
        return int(self.loss_mask.values.sum())

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Return several rows.

        Args:
            rows: Row numbers; negative numbers count from the end.

        Returns:
            One dict per row, with lists.

        Raises:
            IndexError: A row number is out of range.
        """
        numbers = self._check(rows)
        ids, loss = self._truncated(numbers)
        labels = Ragged(np.where(loss.values, ids.values, IGNORED), ids.offsets)
        columns = {name: self._column(name, numbers) for name in self.passed_through.names}
        columns |= {"input_ids": ids.to_lists(), "labels": labels.to_lists()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "longest") -> LazyDict:
        """Return a batch of B rows.

        Args:
            rows: Row numbers `(B,)`; negative numbers count from the end.
            padding: Width L of the tensors: `"longest"` for the longest row of the batch, `"max_length"` for
                `max_length`.

        Returns:
            A mapping: `input_ids`, `attention_mask`, `position_ids` and `labels`, int64 tensors `(B, L)` padded on the
            right, and an object array `(B,)` for each other column, made when it is first read. Labels of padding and
            of tokens without loss are -100.

        Raises:
            IndexError: A row number is out of range.
        """
        return super().batch(rows, padding)

    def loader(self, batch_size: int, **settings: Any) -> Any:
        return super().loader(batch_size, **{"padding": "longest"} | settings)

    def _truncated(self, numbers: np.ndarray[Any, Any]) -> tuple[Ragged, Ragged]:
        """Ids and loss of some rows."""
        return split(self._store.take(numbers).truncate(self.options.max_prompt_length, self.options.truncation))

    def _taken(
        self, numbers: np.ndarray[Any, Any], padding: Padding
    ) -> dict[str, torch.Tensor | Callable[[], list[Any]]]:
        limit = self.options.max_prompt_length
        ids, loss = self._truncated(numbers)
        width = limit if padding == "max_length" else int(ids.lengths.max(initial=0))
        columns = {name: cache(partial(self._column, name, numbers)) for name in self.passed_through.names}
        return {**columns, **padded(ids, loss, width, self.pad_token_id)}


def padded(ids: Ragged, loss: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Pads rows on the right.

    Args:
        ids: B rows of at most `width` ids.
        loss: one bool for each of them.
        width: columns of the batch.
        pad_id: fills rows up.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` and `labels`, each int64 (B, width).
    """
    position = np.arange(width)[None, :].repeat(len(ids), axis=0)
    mask = position < ids.lengths[:, None]
    tokens, labels = np.full(mask.shape, pad_id, np.int64), np.full(mask.shape, IGNORED, np.int64)
    tokens[mask] = ids.values  # row-major order of the mask is the order of the flat values
    labels[mask] = np.where(loss.values, ids.values, IGNORED)
    position[~mask] = 0
    return {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "position_ids": torch.from_numpy(position),
        "labels": torch.from_numpy(labels),
    }
