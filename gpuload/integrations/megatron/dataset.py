"""`PreparedDataset`: samples for Megatron-LM's SFT, from indexed datasets with loss masks."""

from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.errors import DataError, OptionError
from gpuload.engines.host.packs import IGNORED


class IndexedChats(NamedTuple):
    """The ids of sequences, and which of them have loss."""

    ids: Any
    loss: Any


class MegatronPreparedDataset(MegatronDataset):  # type: ignore[misc]
    """A dataset for `BlendedMegatronDatasetBuilder`. A sample is a document: a row, or a pack.

    A sample has the keys and values of Megatron-LM's `SFTDataset`, for a sequence length L: `tokens`, `labels` and
    `position_ids`, int64 (L,), `loss_mask`, float32 (L,), `cu_seqlens`, int32 (L + 1,), and `max_seqlen`, int32.
    Positions begin with 0 in each row of a pack, and no row's first token has loss. Unlike there, tokens that equal the
    token for padding keep their loss, so that the two may be the same. Each epoch has another order, which
    follows from `random_seed`.

    Raises:
        DataError: A document has more than L tokens, or the loss masks are those of other sequences.
        OptionError: The trainer has context parallelism, for which each row would need padding of its own.
    """

    dataset: IndexedChats

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        if (getattr(self.config, "context_parallel_size", None) or 1) > 1:
            raise OptionError("context_parallel_size: packs are not padded for context parallelism: set it to 1")
        ids, loss = self.dataset
        if not np.array_equal(ids.sequence_lengths, loss.sequence_lengths):
            raise DataError(f"{self.dataset_path}-loss-mask.idx has other sequences: write the directory again")
        bounds = offsets_of(ids.sequence_lengths.astype(np.int64))[ids.document_indices]
        if (longest := int(np.diff(bounds).max(initial=0))) > self.config.sequence_length:
            raise DataError(
                f"{self.dataset_path} has a document of {longest:,} tokens, and the sequence length is "
                f"{self.config.sequence_length:,}: write the directory again with --max-length of at most that"
            )
        self._order: tuple[int, RowNumbers] = -1, np.zeros(0, np.int64)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedChats) -> int:
        return len(low_level_dataset.ids.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedChats:
        mmap = config.mmap_bin_files
        return IndexedChats(*(IndexedDataset(dataset_path + more, mmap=mmap) for more in ("", "-loss-mask")))

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        epoch, number = divmod(int(idx), len(self.indices))
        if self._order[0] != epoch:
            chance = np.random.default_rng([self.config.random_seed, epoch])
            self._order = epoch, chance.permutation(np.asarray(self.indices))
        first, end = self.dataset.ids.document_indices[self._order[1][number] :][:2]
        pieces = range(int(first), int(end))
        lengths = self.dataset.ids.sequence_lengths[first:end].astype(np.int64)
        bounds = offsets_of(lengths)
        length, used = self.config.sequence_length, int(bounds[-1])
        pad = self.config.tokenizer.pad
        ids = np.full(length + 1, pad, np.int64)
        ids[:used] = np.concatenate([self.dataset.ids.get(k) for k in pieces])
        loss = np.zeros(length + 1, bool)
        loss[:used] = np.concatenate([self.dataset.loss.get(k) for k in pieces])
        loss[bounds[:-1]] = False
        labels = np.where(loss, ids, IGNORED)
        labels[used:] = pad
        # As in SFTDataset, padding belongs to the last row.
        bounds[-1] = length
        positions = np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))
        begins = np.full(length + 1, length, np.int32)
        begins[: len(bounds)] = bounds
        return {
            "tokens": torch.from_numpy(ids[:-1]),
            "labels": torch.from_numpy(labels[1:]),
            "loss_mask": torch.from_numpy(loss[1:].astype(np.float32)),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(begins),
            "max_seqlen": torch.tensor(int(np.diff(bounds).max()), dtype=torch.int32),
        }
