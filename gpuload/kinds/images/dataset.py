"""Prompts with images: rows have ids and references, batches also what the model needs to know of the images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpuload.core.options import Padding
from gpuload.dataset.rows import Loaded, Made, Numbers, Values
from gpuload.engines.batches import BatchLayout
from gpuload.kinds.prompts import PromptDataset

# Not position_ids: those of many vision models have several dimensions, which the model makes of ids and grids.
LAYOUT = BatchLayout("left", ("input_ids", "attention_mask"))

Extras = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class ImageFacts:
    """What batches need to know of the images of a dataset.

    Attributes:
        key: the column of references.
        names: of what a processor returns of images besides pixels: `image_grid_thw` and the like.
        of_size: height and width of an image → its values of these names.
        of_row: sizes of all images of a row → the same, one row for each image, where they depend on each other.
        type_ids: the name under which the processor says of each token whether it stands for an image, and the ids of
            those that do; None if it does not.
    """

    key: str
    names: tuple[str, ...] = ()
    of_size: Mapping[Any, Extras] = field(default_factory=dict)
    of_row: Mapping[Any, Sequence[Extras]] = field(default_factory=dict)
    type_ids: tuple[str, tuple[int, ...]] | None = None

    def extras(self, name: str, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any]]:
        """The values of the images of a row."""
        if tuple(sizes) in self.of_row:
            return [each[name] for each in self.of_row[tuple(sizes)]]
        return [self.of_size[size][name] for size in sizes]


class ImagePromptDataset(PromptDataset):
    """Tokenized prompts with images. Made by `gpuload.load` with a processor.

    As a `PromptDataset`, with these differences:

    - `input_ids` have the ids of images in their places, as `processor.apply_chat_template(..., tokenize=True)`.
    - The column of images has a reference for each image: a dict of `height`, `width`, `format` and `path`.
    - There are no `position_ids`: the model makes them of ids and grids.
    - `image_grid_thw` and the like, if the processor returns them: int64 tensors `(k, ...)` for the k images of a row,
      or for all images of a batch, one row after the other.
    - `mm_token_type_ids`, if the processor returns them: int64 like `input_ids`, 1 for tokens of images.
    """

    def __init__(self, loaded: Loaded, facts: ImageFacts):
        super().__init__(loaded, LAYOUT)
        self._facts = facts

    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        made = super()._lists(numbers, columns)
        return {**made, **{name: self._of_rows(name, numbers, columns) for name in self._facts.names}}

    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        made = dict(super()._tensors(numbers, padding, columns))
        if self._facts.type_ids is not None:
            name, ids = self._facts.type_ids
            given, mask = made["input_ids"], made["attention_mask"]
            assert isinstance(given, torch.Tensor)
            assert isinstance(mask, torch.Tensor)
            made[name] = torch.isin(given, torch.tensor(ids)) * mask
        return made

    def _batch(self, rows: Any, padding: Padding) -> Any:
        batch = super()._batch(rows, padding)
        numbers = self._check(rows)
        columns = self._columns(numbers)
        for name in self._facts.names:
            batch[name] = torch.cat(self._of_rows(name, numbers, columns))
        return batch

    def _of_rows(self, name: str, numbers: Numbers, columns: Made) -> list[torch.Tensor]:
        """(B,) tensors, one row for each image."""
        width = next((np.shape(each[name]) for each in self._all_extras()), (3,))
        found = []
        for images in columns[self._facts.key]():
            values = self._facts.extras(name, [(image["height"], image["width"]) for image in images or []])
            found.append(torch.from_numpy(np.array(values, np.int64).reshape(-1, *width)))
        return found

    def _all_extras(self) -> Any:
        yield from self._facts.of_size.values()
        for each in self._facts.of_row.values():
            yield from each
