"""Prompts with images: rows have ids and references, batches also what the model needs to know of the images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import Padding
from gpuload.dataset.rows import Loaded, Made, Numbers, Rows, Values
from gpuload.engines.batches import BatchLayout
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.pixels import Pixels, Place, filled_ahead, is_deferred
from gpuload.kinds.images.positions import rope_positions
from gpuload.kinds.prompts import PromptDataset

# Not position_ids: those of many vision models have several dimensions, see `ImageRows`.
LAYOUT = BatchLayout("left", ("input_ids", "attention_mask"))

_SHOWN = ("height", "width", "format", "path")

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
        image_ids: the ids of tokens that stand for images, for positions.
        merge: see `positions.merge_of`; None also if these ids are not known.
    """

    key: str
    names: tuple[str, ...] = ()
    of_size: Mapping[Any, Extras] = field(default_factory=dict)
    of_row: Mapping[Any, Sequence[Extras]] = field(default_factory=dict)
    type_ids: tuple[str, tuple[int, ...]] | None = None
    image_ids: tuple[int, ...] = ()
    merge: int | None = None

    def extras(self, name: str, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any]]:
        """The values of the images of a row."""
        if tuple(sizes) in self.of_row:
            return [each[name] for each in self.of_row[tuple(sizes)]]
        return [self.of_size[size][name] for size in sizes]


class ImageRows(Rows):
    """Tokenized rows with images. Compared with rows without:

    - `input_ids` have the ids of images in their places, as `processor.apply_chat_template(..., tokenize=True)`.
    - The column of images has a reference for each image: a dict of `height`, `width`, `format` and `path`; with
      `media="pil"` the decoded images.
    - `position_ids` are in batches only, `(3, B, L)`, and only for the processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL,
      GLM-4V and GLM-4.6V: those of `get_rope_index` of their models. Other models make them.
    - `image_grid_thw` and the like, if the processor returns them: int64 tensors `(k, ...)` for the k images of a row,
      or for all images of a batch, one row after the other.
    - `mm_token_type_ids`, if the processor returns them: int64 like `input_ids`, 1 for tokens of images.
    - With `media="inputs"`, batches have what the processor makes of the images of their rows, such as `pixel_values`.
      Rows have it as `multi_modal_inputs`, a dict. A loader makes that of the next batches in threads.
    """

    _truncates = False  # what belongs to an image would be cut

    def __init__(
        self, loaded: Loaded, layout: BatchLayout, facts: ImageFacts, images: ImageOptions, pixels: Pixels | None
    ):
        super().__init__(loaded, layout)
        self._facts, self._media, self._pixels = facts, images.media, pixels

    def images(self, row: int) -> list[Any]:
        """Return the decoded images of a row, as the processor gets them.

        Args:
            row: Row number.

        Returns:
            A list of `PIL.Image.Image`, RGB.

        Raises:
            OptionError: The load has kept no images: `media="reference"`.
            DataError: An image cannot be read any more, or has changed since the load.
        """
        numbers = self._check([row])
        return self._decoded(self._references(numbers), numbers)[0]

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        return filled_ahead(batches, self._fill) if self._media == "inputs" else super().ahead(batches)

    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        made = dict(super()._lists(numbers, columns))  # type: ignore[safe-super]
        references = self._references(numbers)
        made |= {name: self._of_rows(name, references) for name in self._facts.names}
        if self._media == "inputs":
            places = self._places(numbers)
            pairs = zip(references, places, strict=True)
            made["multi_modal_inputs"] = [self._inputs([row], [place]) for row, place in pairs]
        return made

    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        made = dict(super()._tensors(numbers, padding, columns))  # type: ignore[safe-super]
        for prefix in ("", *(["KL_"] if "KL_input_ids" in made else [])):
            given, mask = made[f"{prefix}input_ids"], made[f"{prefix}attention_mask"]
            assert isinstance(given, torch.Tensor)
            assert isinstance(mask, torch.Tensor)
            made |= {f"{prefix}{name}": value for name, value in self._type_ids(given, mask).items()}
        return made

    def _type_ids(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Which tokens stand for images, under the name that the processor has for it; if it has one."""
        if self._facts.type_ids is None:
            return {}
        name, wanted = self._facts.type_ids
        # By NumPy: threads of torch's would wait for each other longer than this takes.
        return {name: torch.from_numpy(np.isin(ids.numpy(), wanted) * mask.numpy())}

    def _positions(self, ids: torch.Tensor, mask: torch.Tensor, references: Sequence[Sequence[Any]]) -> torch.Tensor:
        """(3, B, L) positions of the tokens of some rows, if the model has such."""
        assert self._facts.merge is not None
        images = np.isin(ids.numpy(), self._facts.image_ids)
        grids = self._of_rows("image_grid_thw", references)
        return torch.from_numpy(rope_positions(images, mask.numpy() != 0, grids, self._facts.merge))

    def _batch(self, rows: Any, padding: Padding) -> Any:
        return self._with_images(super()._batch(rows, padding), self._check(rows))

    def _with_images(self, batch: Any, numbers: Numbers) -> Any:
        """Adds to a batch what it has of the images of its rows; the pixels later, where that is deferred."""
        references = self._references(numbers)
        for name in self._facts.names:
            batch[name] = torch.cat([self._no_rows(name), *self._of_rows(name, references)])
        for prefix in ("", "KL_") if self._facts.merge is not None else ():
            if f"{prefix}attention_mask" in batch:
                given = batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
                batch[f"{prefix}position_ids"] = self._positions(*given, references)
        if self._media != "inputs":
            return batch
        if is_deferred():
            return batch, numbers
        return self._fill((batch, numbers))

    def _fill(self, given: Any) -> Any:
        """Adds the inputs of the model to a batch."""
        batch, numbers = given
        made = self._inputs(self._references(numbers), self._places(numbers))
        for name in self._facts.names:
            if name in made and made[name].tolist() != batch[name].tolist():
                raise DataError(
                    f"the processor returns another {name} than when the rows were loaded. Were its settings changed? "
                    "Load again"
                )
        for name, value in made.items():
            batch[name] = value
        return batch

    def _inputs(self, rows: Sequence[Sequence[Any]], places: Sequence[Place]) -> dict[str, Any]:
        assert self._pixels is not None
        return self._pixels.inputs(rows, places)

    def _decoded(self, rows: Sequence[Sequence[Any]], numbers: Numbers) -> list[list[Any]]:
        if self._pixels is None:
            raise OptionError("media='reference' keeps no images: load with media='pil' or media='inputs'")
        return self._pixels.images(rows, self._places(numbers))

    def _places(self, numbers: Numbers) -> list[Place]:
        return [self.origin(int(number)) for number in numbers]

    def _references(self, numbers: Numbers) -> list[list[dict[str, Any]]]:
        """What the column of images has for some rows."""
        key = self._facts.key
        return [row or [] for row in self.passed_through.take(numbers, [key])[key]]

    def _column(self, name: str, numbers: Numbers) -> list[Any]:
        if name != self._facts.key:
            return super()._column(name, numbers)
        rows = self._references(numbers)
        if self._media == "pil":
            return self._decoded(rows, numbers)
        return [[{key: each[key] for key in _SHOWN} for each in row] for row in rows]

    def _no_rows(self, name: str) -> torch.Tensor:
        """The values of no image."""
        shape = next((np.shape(each[name]) for each in self._all_extras()), (3,))
        return torch.zeros((0, *shape), dtype=torch.int64)

    def _of_rows(self, name: str, references: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
        """(B,) tensors, one row for each image."""
        nothing, found = self._no_rows(name), []
        for images in references:
            values = self._facts.extras(name, [(image["height"], image["width"]) for image in images])
            found.append(torch.from_numpy(np.array(values, np.int64)) if values else nothing)
        return found

    def _all_extras(self) -> Iterator[Extras]:
        yield from self._facts.of_size.values()
        for each in self._facts.of_row.values():
            yield from each


class ImagePromptDataset(ImageRows, PromptDataset):
    """Tokenized prompts with images: see `ImageRows`. Made by `gpuload.load` with a processor."""

    def __init__(self, loaded: Loaded, facts: ImageFacts, images: ImageOptions, pixels: Pixels | None = None):
        super().__init__(loaded, LAYOUT, facts, images, pixels)
