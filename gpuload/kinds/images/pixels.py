"""The images of rows, decoded and given to the processor, in threads."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpuload.core.errors import DataError
from gpuload.media.dry_run import image_token_of
from gpuload.media.headers import ImageError, decode, sample_of
from gpuload.media.references import Media, image_name
from gpuload.media.spool import Spool

Place = tuple[str, int]
"""The file of a row, and its number in it."""

_MOST_THREADS = 16
_MOST_AHEAD = 4  # batches
_TRIED = (((56, 84),), ((140, 31), (56, 84)))  # heights and widths of images, of each row
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")  # how such names end


class Pixels:
    """Images of rows, by the references in their columns.

    Args:
        processor: of transformers.
        kwargs: further arguments of its calls.
        turns: whether images are turned as their orientation says.
        spool: has the bytes of those that are in the data itself.
        inputs: whether the processor will be called, by several threads.
    """

    def __init__(self, processor: Any, kwargs: Mapping[str, Any], turns: bool, spool: Spool, inputs: bool):
        self._processor, self._kwargs, self._turns, self._spool = processor, dict(kwargs), turns, spool
        self._with_text = inputs and not self._same_without_text()

    def images(self, rows: Sequence[Sequence[Any]], places: Sequence[Place]) -> list[list[Any]]:
        """The images of some rows, RGB.

        Args:
            rows: the references of each.
            places: of each.

        Raises:
            DataError: an image cannot be read any more, or has changed since the load.
        """
        given = [(each, *place, k) for row, place in zip(rows, places, strict=True) for k, each in enumerate(row)]
        count = min((os.cpu_count() or 1) // getattr(_thread, "count", 1), _MOST_THREADS, len(given))
        if count < 2:
            found = iter([self._image(*one) for one in given])
        else:
            with ThreadPoolExecutor(count, "images") as threads:
                found = iter(list(threads.map(lambda one: self._image(*one), given)))
        return [[next(found) for _ in row] for row in rows]

    def inputs(self, rows: Sequence[Sequence[Any]], places: Sequence[Place]) -> dict[str, Any]:
        """What the processor makes of the images of some rows, without what it makes of text: tensors."""
        images = [some for some in self.images(rows, places) if some]
        if not images:
            return {}
        return self._made(images, self._with_text)

    def _made(self, images: Sequence[Sequence[Any]], with_text: bool) -> dict[str, Any]:
        text = {"text": [image_token_of(self._processor) * len(some) for some in images]} if with_text else {}
        made = self._processor(**text, images=images, return_tensors="pt", padding=True, **self._kwargs)
        return {name: value for name, value in made.items() if not name.endswith(_OF_TEXT)}

    def _same_without_text(self) -> bool:
        """Whether the processor makes the same of images without text, which would take a tenth of its time."""
        noise = np.random.default_rng(0)
        images = [[Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)) for size in row] for row in _TRIED]
        try:
            wanted, found = (self._made(images, with_text) for with_text in (True, False))
        except Exception:  # whatever a processor raises that wants text
            return False
        return wanted.keys() == found.keys() and all(_is_same(value, found[name]) for name, value in wanted.items())

    def _image(self, reference: Any, source: str, row: int, number: int) -> Any:
        place = f"{source} row {row}: {image_name(number, reference['path'])}"
        try:
            if reference["offset"] is None:
                data: Any = Media(path=reference["path"]).read()
                if len(data) != reference["nbytes"] or sample_of(data) != reference["sample"]:
                    raise DataError(f"{place} has changed since the load. Load again")
            else:
                data = self._spool.read(source, *(reference[name] for name in ("offset", "nbytes", "sample")))
            return decode(data, self._turns)
        except (ImageError, OSError) as error:
            raise DataError(f"{place} cannot be read any more: {error}") from error


def _is_same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and one.dtype == other.dtype and one.equal(other)


_thread = threading.local()
"""What this thread does in `filled_ahead`: `deferring` in the one that makes batches; in the others `count`, how many
there are."""


def is_deferred() -> bool:
    """Whether the batch that this thread makes is completed later, see `filled_ahead`."""
    return bool(getattr(_thread, "deferring", False))


def filled_ahead(batches: Iterator[Any], fill: Callable[[Any], Any]) -> Iterator[Any]:
    """The same batches, of which the next few are completed in threads while the consumer works on one.

    Args:
        batches: makes them without their pixels.
        fill: adds these.
    """
    count = min(os.cpu_count() or 1, _MOST_AHEAD)
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(count, "pixels", partial(setattr, _thread, "count", count)) as threads:
        try:
            while True:
                while len(waiting) <= count and (batch := _next(batches)) is not None:
                    waiting.append(threads.submit(fill, batch))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


def _next(batches: Iterator[Any]) -> Any:
    _thread.deferring = True
    try:
        return next(batches, None)
    finally:
        _thread.deferring = False
