"""Tokens of images against those of text, and how many rows smaller images would keep."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import NO_LIMIT, Options
from gpuload.core.words import counted
from gpuload.inspect.data import KindName, kind_of
from gpuload.kinds.load import load
from gpuload.kinds.load_chats import load_chats
from gpuload.kinds.load_pairs import load_pairs
from gpuload.media.dry_run import Size
from gpuload.media.rule import ImageRule
from gpuload.sources.open import open_all

_LIMITS = (1024, 2048, 4096, 8192, 16384)
_TOKENS = (64, 256, 512, 1024, 2048, 4096)  # of an image at most, for which `max_pixels` is tried
Counts = np.ndarray[Any, np.dtype[np.int64]]


def load_with_images(files: Sequence[str], processor: Any, key: str, kind: KindName | None, **options: Any) -> Any:
    """The rows of files, of any length.

    `processor` is its directory or id, or itself; `key` the column with images; `kind` is None if the columns say what
    the files hold.

    Raises:
        GpuloadError: as a load; or there is no processor.
    """
    if isinstance(processor, str):
        from transformers import AutoProcessor

        try:
            opened = AutoProcessor.from_pretrained(processor)
            _ = opened.image_processor  # a tokenizer has none
        except Exception as error:
            raise OptionError(f"--images: {processor!r} has no processor of images ({error!s:.200})") from error
        processor = opened
    sources = [source for source in open_all(list(files), Options()) if source.num_rows]
    if not sources:
        raise DataError(f"no rows in {', '.join(files)}")
    kind = kind or kind_of(sources[0], options.get("prompt_key", "prompt"), options.get("messages_key"))
    given = {name: value for name, value in options.items() if value not in (None, False)}
    if kind == "prompts":
        return load(list(files), processor, image_key=key, max_prompt_length=NO_LIMIT, **given)
    given.pop("prompt_key", None)
    load_rows: Callable[..., Any] = load_chats if kind == "chats" else load_pairs
    return load_rows(list(files), processor, image_key=key, max_length=NO_LIMIT, **given)


def images_text(dataset: Any, limit: int | None = None) -> str:
    """What `gpuload inspect --images` prints of `ImageRows`; `limit` is a further limit of lengths."""
    reference = dataset._reference
    processor, kwargs = reference.processor, reference.images.mm_processor_kwargs
    key = reference.images.image_key
    rows = [[(one["height"], one["width"]) for one in row or []] for row in dataset.passed_through.take(
        np.arange(len(dataset)), [key])[key]]  # fmt: skip
    lines = [str(dataset.report), ""]
    try:
        now = _tokens(processor, kwargs, rows)
    except Exception as error:  # then the processor was run row by row
        return "\n".join([*lines, f"tokens of images are unknown: {error!s:.200}"])
    total, images = int(dataset.lengths.sum()), sum(map(len, rows))
    share = 100 * int(now.sum()) / max(1, total)
    lines += [
        f"{counted(images, 'images')} in {sum(map(bool, rows)):,} of {len(rows):,} rows: "
        f"{int(now.sum()):,} of {total:,} tokens ({share:.0f} %), {int(now.sum()) / max(1, images):,.0f} of each image",
        "",
    ]
    limits = sorted({*_LIMITS, *([limit] if limit else [])})
    title = f"{'max_pixels':>12} {'of an image':>12} {'longest row':>12}  rows kept with"
    lines.append(title + "".join(f"{each:>9,}" for each in limits))
    for name, pixels in (("as it is", None), *((f"{each:,}", each) for each in _candidates(processor))):
        count = now if pixels is None else _tokens(_limited(processor, pixels), kwargs, rows)
        lengths = dataset.lengths - now + count
        kept = "".join(f"{100 * float((lengths <= each).mean()):>8.1f}%" for each in limits)
        of_image = int(count.sum()) / max(1, images)
        lines.append(f"{name:>12} {of_image:>12,.0f} {int(lengths.max()):>12,}  {'':14}{kept}")
    if not _candidates(processor):
        lines.append(f"{type(processor).__name__} has no limit of pixels that could be another one")
    return "\n".join(lines)


def _tokens(processor: Any, kwargs: Any, rows: Sequence[Sequence[Size]]) -> Counts:
    """How many tokens the images of each row have."""
    rule = ImageRule(processor, kwargs)
    rule.learn({size for row in rows for size in row})
    return np.array([sum(len(each.core) for each in rule.of(tuple(row))) if row else 0 for row in rows], np.int64)


def _candidates(processor: Any) -> list[int]:
    """Numbers of pixels that may be the limit of images; none if the processor has no such limit."""
    images = processor.image_processor
    size = getattr(images, "size", None)
    try:
        most, side = int(size["longest_edge"]), int(images.patch_size) * int(images.merge_size)  # type: ignore[index]
        least = int(size["shortest_edge"])  # type: ignore[index]
    except Exception:
        return []
    return [each for tokens in _TOKENS if least < (each := tokens * side**2) < most]


def _limited(processor: Any, pixels: int) -> Any:
    """The same processor for images of at most so many pixels."""
    made = copy.copy(processor)
    made.image_processor = images = copy.copy(processor.image_processor)
    size = {"shortest_edge": images.size["shortest_edge"], "longest_edge": pixels}
    images.size = size if isinstance(images.size, dict) else type(images.size)(**size)
    if hasattr(images, "max_pixels"):  # of transformers 4, which goes by that
        images.max_pixels = pixels
    return made
