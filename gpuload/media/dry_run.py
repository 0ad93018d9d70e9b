"""What a processor makes of images of given sizes: it is called with images of these sizes in which nothing is.

The processor's tokenizer is replaced by one that notes the text that it is given. So this needs no part of a
processor but its call, whatever its class does inside it.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuload.core.backends import with_own_settings

Size = tuple[int, int]
"""Height and width of an image."""

_SMALL = 8  # pixels: the dimensions of smaller tensors may be mistaken for channels
_VALUES = {"do_rescale": False, "do_normalize": False, "resample": 0}
"""Arguments with which a processor does less with the values of pixels. The last one is `NEAREST` of Pillow."""
_PIECES = ("\u2600a", "\u2601b")  # what stands before, between and behind images of a dry run


class NotUnderstoodError(Exception):
    """The processor does something with images that no rule here describes."""


class DryRun(NamedTuple):
    """What a processor makes of a prompt with images.

    Attributes:
        replacements: the text that stands for each image in what the tokenizer is given.
        extras: name → (k, ...) int64, a row for each image: `image_grid_thw` and the like.
    """

    replacements: list[str]
    extras: dict[str, np.ndarray[Any, Any]]


class DryRunner:
    """Runs a processor on images of given sizes.

    Args:
        processor: of transformers.
        kwargs: further arguments of its calls.
        on_meta: give it tensors without memory, of which nothing but the shape is known, instead of black images.
        less: arguments with which it does less, see `without_values`. Images that `may_be_channels` are given without.

    Attributes:
        kwargs: with those of `less`.
    """

    def __init__(self, processor: Any, kwargs: Mapping[str, Any], on_meta: bool, less: Mapping[str, Any] | None = None):
        self.processor, self.kwargs, self.on_meta = copy.copy(processor), {**kwargs, **(less or {})}, on_meta
        self._given = dict(kwargs)
        self._texts: list[Any] = []
        self.processor.tokenizer = _recording(processor.tokenizer, self._texts)
        self.token = image_token_of(processor)

    def __call__(self, sizes: Sequence[Size]) -> DryRun:
        """Runs it on one prompt.

        Args:
            sizes: of its images.

        Raises:
            NotUnderstoodError: the text is not the prompt with something in the place of each image.
            Exception: whatever the processor raises for such images.
        """
        pieces = [_PIECES[k % 2] for k in range(len(sizes) + 1)]
        self._texts.clear()
        images = [self.image(*size) for size in sizes]
        made = call(self.processor, self.token.join(pieces), images, self.kwargs_for(sizes))
        if len(self._texts) != 1:
            raise NotUnderstoodError(f"its tokenizer is called {len(self._texts)} times")
        text = self._texts[0]
        text = text[0] if isinstance(text, list | tuple) and len(text) == 1 else text
        if not isinstance(text, str):
            raise NotUnderstoodError("its tokenizer is not given one text")
        return DryRun(_between(text, pieces), extras_of(made, len(sizes)))

    def kwargs_for(self, sizes: Iterable[Size]) -> dict[str, Any]:
        """The further arguments of a call with images of these sizes."""
        return self._given if any(map(may_be_channels, sizes)) else self.kwargs

    def image(self, height: int, width: int) -> Any:
        """What it is given for an image of this size."""
        if self.on_meta and not may_be_channels((height, width)):
            import torch

            return torch.empty((3, height, width), dtype=torch.uint8, device="meta")
        return black(height, width)


def may_be_channels(size: Size) -> bool:
    """Whether a processor may take a dimension of an image of this size for its channels: those of transformers 4 do
    for a height of 1, which they then reject, and of 3, where height and width of the result are those of another."""
    return min(size) < _SMALL


def image_token_of(processor: Any) -> str:
    """The text that stands for an image in rendered prompts.

    Raises:
        NotUnderstoodError: the processor names none.
    """
    # transformers 4 names there what stands for an image in ids.
    of_gemma3 = any(kind.__name__ == "Gemma3Processor" for kind in type(processor).__mro__)
    token = getattr(processor, "boi_token" if of_gemma3 else "image_token", None)
    if not isinstance(token, str) or not token:
        raise NotUnderstoodError(f"{type(processor).__name__} has no image_token")
    return token


def without_values(image_processor: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments with which it does less with the values of pixels, which decide no ids.

    Args:
        kwargs: those that are given.
    """
    return {name: value for name, value in _VALUES.items() if hasattr(image_processor, name) and name not in kwargs}


def black(height: int, width: int) -> Any:
    """A black image."""
    from PIL import Image

    return Image.new("RGB", (width, height))


def call(processor: Any, text: str, images: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a processor makes of a rendered prompt, as its `apply_chat_template(tokenize=True)` calls it."""
    more: dict[str, Any] = {}
    bos = getattr(processor.tokenizer, "bos_token", None)
    if bos is not None and text.startswith(bos):
        more["add_special_tokens"] = False
    more |= {"text": [text], "images": [list(images)] if images else None, **kwargs}
    try:
        return processor(**more)
    except AttributeError:
        # Some take no lists, which their processors of images return unless asked for tensors: those of LLaVA-NeXT and
        # LLaVA-OneVision in transformers 4, with torchvision; Ovis2's in 5, too, without.
        if not images or "return_tensors" in kwargs:
            raise
        return processor(**more, return_tensors="pt")


def apart(processor: Any) -> Any:
    """The same processor with a tokenizer `with_own_settings`: many pad by default."""
    made = copy.copy(processor)
    made.tokenizer = with_own_settings(processor.tokenizer)
    return made


def ids_of(made: Any) -> list[int]:
    """The ids of one prompt."""
    (ids,) = made["input_ids"]
    return [int(each) for each in ids]


def extras_of(made: Mapping[str, Any], count: int) -> dict[str, np.ndarray[Any, Any]]:
    """What a processor returns of its images besides pixels: a few integers for each."""
    found = {}
    for name, value in made.items():
        if name.endswith(("grid_thw", "image_sizes")) and getattr(getattr(value, "device", None), "type", "") != "meta":
            rows = np.asarray(value)
            rows = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
            if rows.ndim == 2 and len(rows) == count and rows.dtype.kind in "iu":
                found[name] = rows.astype(np.int64)
    return found


def _between(text: str, pieces: Sequence[str]) -> list[str]:
    """What stands in the places of the images."""
    found, first = [], pieces[0]
    if not text.startswith(first):
        raise NotUnderstoodError("it changes the text before an image")
    at = len(first)
    for piece in pieces[1:]:
        end = text.find(piece, at)
        if end < 0:
            raise NotUnderstoodError("it changes the text behind an image")
        found.append(text[at:end])
        at = end + len(piece)
    if at != len(text):
        raise NotUnderstoodError("it adds text at the end")
    return found


def _recording(tokenizer: Any, texts: list[Any]) -> Any:
    """A tokenizer that notes the texts that it is given."""
    kind = type(tokenizer)

    def note(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        texts.append(list(text) if isinstance(text, list) else text)
        return kind.__call__(self, text, *args, **kwargs)

    made = copy.copy(tokenizer)
    made.__class__ = type(kind.__name__, (kind,), {"__call__": note, "__module__": kind.__module__})
    return made
