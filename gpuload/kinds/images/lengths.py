"""How many tokens rendered texts with images have, for the filters of trainers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.kinds.images.engine import ImageEngine
from gpuload.media.dry_run import NotUnderstoodError, Size


def lengths_of(
    engine: ImageEngine, texts: Sequence[str | None], sizes: Sequence[Sequence[Size]], special: bool = False
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(n,) tokens that the processor makes of n texts.

    Args:
        engine: has a rule.
        texts: rendered, with a placeholder for each image; None where nothing is known.
        sizes: height and width of the images of each.
        special: whether those count that it adds around a text.

    Returns:
        The lengths; -1 where only the processor itself knows.
    """
    rule = engine.rule
    assert rule is not None
    found = np.full(len(texts), -1, np.int64)
    known, images, given = [], [], []
    rule.learn({size for text, some in zip(texts, sizes, strict=True) if text is not None for size in some})
    for row, (text, some) in enumerate(zip(texts, sizes, strict=True)):
        if text is None or text.count(rule.token) != len(some) or rule.has_other_media(text):
            continue
        try:
            images.append(rule.of(tuple(some)) if some else [])
        except (NotUnderstoodError, ValueError):
            continue
        known.append(row)
        given.append(text)
    made, wrong = engine.spliced(given, images)
    _, bos, (before, after) = engine.token_of_images()
    for at, row in enumerate(known):
        if at not in wrong:
            added = 0 if special or (bos and given[at].startswith(bos)) else len(before) + len(after)
            found[row] = len(made[at]) - added
    return found
