"""Rows of a Ray Data dataset → the batches of `PromptDataset`, `ChatDataset` and `PairDataset`.

loader = dataset.iter_torch_batches(batch_size=256, collate_fn=collate_fn(dataset))
"""

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

from gpuload.core.arrays import Ragged, appended, offsets_of
from gpuload.core.errors import OptionError
from gpuload.core.marks import LOSS, with_loss
from gpuload.core.options import Options, Padding, Truncation
from gpuload.dataset.rows import object_array, prompt_too_long
from gpuload.engines.host.batches import pad
from gpuload.engines.host.packs import IGNORED
from gpuload.integrations.ray.dataset import about_dataset
from gpuload.integrations.ray.worker import ORIGIN
from gpuload.kinds.chats.dataset import LAYOUT as CHATS
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.dataset import layout_of
from gpuload.kinds.pairs.formats import MARGIN
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import LAYOUT as PROMPTS
from gpuload.kinds.prompts import PromptKind, index_of
from gpuload.pipeline.kind import Kind
from gpuload.reference.reference import messages_of
from gpuload.sources.columns import to_python

if TYPE_CHECKING:
    from ray.data import Dataset


def collate_fn(dataset: "Dataset", padding: Padding | None = None) -> "Collate":
    """Returns the collate function of a dataset, for `iter_torch_batches`.

    It can be pickled and sent to the workers of a trainer, for the iterators of `streaming_split`.

    Args:
        dataset: the result of `read_prompts`, `read_chats` or `read_pairs` itself.
        padding: width L of the tensors: "max_length" for the limit, "longest" for the longest row of the batch. None:
            as the `batch` of `PromptDataset`, `ChatDataset` or `PairDataset`.

    Returns:
        A function from B rows to a dict of int64 tensors `(B, L)`, and of object arrays `(B,)` for other columns.

    Raises:
        OptionError: it is another dataset, or an unknown padding.
    """
    about = about_dataset(dataset)
    if padding is not None and padding not in get_args(Padding):
        raise OptionError(f"padding={padding!r}: expected one of {', '.join(map(repr, get_args(Padding)))}")
    width = padding or ("max_length" if isinstance(about.kind, PromptKind) else "longest")
    return Collate(about.kind, about.options, about.pad_token_id, width, about.empty.files)


class Collate(ArrowBatchCollateFn):  # type: ignore[misc]
    """Collates rows. Made by `collate_fn`.

    Args:
        kind: of rows.
        options: of the load.
        pad_token_id: the padding token.
        padding: width of batches.
        files: their names, for messages.
    """

    def __init__(self, kind: Kind[Any], options: Options, pad_token_id: int, padding: Padding, files: list[str]):
        self._kind, self._options, self._pad_id = kind, options, pad_token_id
        self._padding, self._files = padding, files

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        """B rows → a batch.

        Raises:
            PromptTooLongError: a prompt is longer than the limit, and `truncation="error"`.
        """
        own = {field.name for field in self._kind.fields} | {ORIGIN.name}
        columns = {
            name: object_array(to_python(batch.column(name).combine_chunks()))
            for name in batch.schema.names
            if name not in own
        }
        if isinstance(self._kind, PromptKind):
            return columns | self._prompts(batch, columns)
        return columns | (self._chats(batch) if isinstance(self._kind, ChatKind) else self._pairs(batch, columns))

    def _width(self, longest: int) -> int:
        limit = self._options.max_prompt_length
        return limit if self._padding == "max_length" else min(limit, longest)

    def _prompts(self, batch: pa.Table, columns: dict[str, Any]) -> dict[str, Any]:
        ids, limit = _rows(batch, "raw_prompt_ids"), self._options.max_prompt_length
        for number in np.flatnonzero(ids.lengths > limit):
            origin = batch.column(ORIGIN.name)[int(number)].as_py()
            row = f"{self._files[origin['file']]} row {origin['row']}"
            raise prompt_too_long(row, int(ids.lengths[number]), limit)
        if self._options.return_raw_chat:
            columns["raw_prompt"] = object_array([messages_of(prompt) for prompt in columns["raw_prompt"]])
        extra_info = columns.get("extra_info", [None] * len(ids))
        return {
            **pad(ids, self._width(int(ids.lengths.max(initial=0))), PROMPTS, self._pad_id),
            "raw_prompt_ids": object_array(ids.to_lists()),
            "index": object_array([index_of(extra) for extra in extra_info]),
        }

    def _chats(self, batch: pa.Table) -> dict[str, torch.Tensor]:
        ids, labels = _rows(batch, "input_ids"), _rows(batch, "labels")
        tokens = with_loss(ids, labels.values != IGNORED)
        return pad(tokens, self._width(int(ids.lengths.max(initial=0))), CHATS, self._pad_id)

    def _pairs(self, batch: pa.Table, columns: dict[str, Any]) -> dict[str, torch.Tensor]:
        assert isinstance(self._kind, PairKind)
        sequences = [_rows(batch, name) for name in ("chosen_ids", "rejected_ids")]
        if self._kind.objective == "dpo":
            prompts = _rows(batch, "prompt_ids")
            completions = (Ragged(ids.values | LOSS, ids.offsets) for ids in sequences)
            sequences = [appended(prompts, completion) for completion in completions]
        side: Truncation = "left" if self._options.truncation == "left" else "right"
        rows = Ragged.concatenate([ids.truncate(self._options.max_prompt_length, side) for ids in sequences])
        width, layout = self._width(int(rows.lengths.max(initial=0))), layout_of(self._kind.objective)
        tensors = pad(rows, width, layout, self._pad_id)
        if self._kind.objective == "rm" and MARGIN in columns:
            tensors[MARGIN] = torch.tensor(list(columns[MARGIN]), dtype=torch.float32)
        return tensors


def _rows(batch: pa.Table, name: str) -> Ragged:
    """A column of lists of int32, none of them null."""
    column = batch.column(name).combine_chunks()
    return Ragged(column.flatten().to_numpy(zero_copy_only=False), offsets_of(column.value_lengths().to_numpy()))
