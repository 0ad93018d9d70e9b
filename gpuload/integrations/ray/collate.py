"""Rows of a Ray Data dataset → the batches of `PromptDataset`, `ChatDataset` and `PairDataset`.

loader = dataset.iter_torch_batches(batch_size=256, collate_fn=collate_fn(dataset))
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
from ray.data.collate_fn import ArrowBatchCollateFn

from gpuload.core.options import Options, Padding, check_choice
from gpuload.dataset.origins import Origins
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Loaded, prompt_too_long
from gpuload.integrations.ray.dataset import about_dataset
from gpuload.integrations.ray.worker import ORIGIN
from gpuload.kinds.pairs.dataset import LABEL
from gpuload.pipeline.kind import Kind
from gpuload.sources.columns import Columns

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
    check_choice("padding", padding, (None, *get_args(Padding)))
    return Collate(about.kind, about.options, about.pad_token_id, padding, about.empty.files)


class Collate(ArrowBatchCollateFn):  # type: ignore[misc]
    """Collates rows of a kind, which were loaded with these options. Made by `collate_fn`."""

    def __init__(self, kind: Kind[Any], options: Options, pad_token_id: int, padding: Padding | None, files: list[str]):
        self._kind, self._options, self._pad_id = kind, options, pad_token_id
        self._padding, self._files = padding, files

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        """B rows → a batch; a `PromptTooLongError` if a prompt is longer than the limit, and `truncation="error"`."""
        kind, options = self._kind, self._options
        ids, origins, limit = kind.from_arrow(batch), batch.column(ORIGIN.name), options.max_prompt_length
        sizes = kind.sizes(ids)
        lengths = kind.limited(sizes)
        if options.truncation == "error" and lengths.max(initial=0) > limit:
            number = int(np.argmax(lengths > limit))
            origin = origins[number].as_py()
            raise prompt_too_long(f"{self._files[origin['file']]} row {origin['row']}", int(lengths[number]), limit)
        own = {*(field.name for field in kind.fields), ORIGIN.name} - {LABEL}  # which batches are made of
        columns = Columns([batch.select([name for name in batch.schema.names if name not in own])])
        rows = np.arange(len(ids))
        loaded = Loaded(
            ids,
            sizes,
            columns,
            Origins(rows, np.array([0, len(ids)]), np.zeros(1, np.int64)),  # of the batch; messages are made above
            kind.engine(replace(options, device="cpu"), None, False),  # which makes batches, and opens no tokenizer
            options,
            self._pad_id,
            Report(self._files, limit),
            {"options": {}},
        )
        width = {} if self._padding is None else {"padding": self._padding}
        return dict(kind.dataset(loaded).batch(rows, **width))
