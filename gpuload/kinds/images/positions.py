"""Positions in three dimensions (M-RoPE) of tokens of text and of images, for the models of which this is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import offsets_of

_CLASSES = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Glm4vProcessor", "Glm46VProcessor")

Ints = np.ndarray[Any, np.dtype[np.int64]]


def merge_of(processor: Any) -> int | None:
    """How many patches of an image, in height and in width, are one token of a model with such positions; None if the
    processor is that of another model."""
    kind = type(processor)
    known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _CLASSES
    return int(processor.image_processor.merge_size) if known else None


def rope_positions(images: Any, mask: Any, grids: Sequence[Any], merge: int) -> Ints:
    """(3, B, L) time, height and width of each token, as `get_rope_index` of the models of transformers: those of text
    are equal in all three, an image begins at the position behind the text before it, and the text behind it goes on
    after the largest position of the image. 0 in the padding.

    Args:
        images: (B, L) bool, the tokens that stand for images.
        mask: (B, L) bool, the tokens that are not padding.
        grids: (B,) (k, 3) int64, the patches of each image of a row in time, height and width.
        merge: see `merge_of`.

    Raises:
        ValueError: a row has other tokens of images than its grids say.
    """
    made = np.zeros((3, *np.shape(mask)), np.int64)
    made[:] = np.clip(np.cumsum(mask, axis=1) - 1, 0, None) * mask
    for row, some in enumerate(grids):
        sizes = np.asarray(some, np.int64).reshape(-1, 3) // (1, merge, merge)
        (valid,) = np.nonzero(mask[row])
        (of_images,) = np.nonzero(images[row][valid])
        bounds = offsets_of(sizes.prod(axis=1))
        if bounds[-1] != len(of_images):
            raise ValueError(f"a row has {len(of_images)} tokens of images, and its grids say {bounds[-1]}")
        if not len(of_images):
            continue
        steps = np.ones(len(valid), np.int64)
        steps[of_images] = 0
        steps[of_images[bounds[1:] - 1]] = sizes[:, 1:].max(axis=1)
        made[:, row, valid] = offsets_of(steps)[:-1]
        inside = np.concatenate([np.indices(tuple(size)).reshape(3, -1) for size in sizes], axis=1)
        made[:, row, valid[of_images]] += inside
    return made
