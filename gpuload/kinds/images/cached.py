"""What the token cache and stores on disk keep of images: references to them, and the state of files of their own.

A second load opens no image. Images in the data itself are part of the digest of its file. A file of its own has to be
where the data's path led, and to have the size and the times of last change that it had when its header was read.
"""

import copy
import inspect
import os
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa

from gpuload.cache import known_files
from gpuload.cache.column_file import ColumnFile
from gpuload.cache.entry import HIDDEN
from gpuload.cache.key import is_plain
from gpuload.core.arrow import as_arrow
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.prompts import ImagePrompts, places_of
from gpuload.media.headers import formats, state_of
from gpuload.media.references import Media, NoFileError, Places
from gpuload.media.spool import Spool
from gpuload.sources.read import Source

_FILE = pa.struct(
    {"given": pa.string(), "path": pa.string()}
    | {"size": pa.int64(), "inode": pa.uint64(), "mtime": pa.int64(), "ctime": pa.int64()}
)
"""A file of an image: as the data names it, where that is, and its `state_of`; all but the first are null if the data
names no file. If the images' bytes are in the data: null, the name of the spool's file, and its bytes so far."""

_PACKAGES = ("numpy", "pillow", "torch", "torchvision")


class ImageColumns:
    """The column of images of a load, as a `MadeColumns`.

    Args:
        processor: of transformers.
        images: the options about images.

    Attributes:
        spool: has the bytes of images that are in the data itself, if they will be read again.
        bound: how many of them later loads may find.
    """

    def __init__(self, processor: Any, images: ImageOptions):
        self._processor, self._images = processor, images
        self.spool: Spool | None = None
        self.bound = 0

    def problem(self) -> str | None:
        for part in self._parts():
            kind = type(part)
            if kind.__module__.partition(".")[0] != "transformers":
                return f"{kind.__name__} has code from outside transformers"
            if own := [name for name, value in vars(part).items() if inspect.isroutine(value)]:
                return f"{own[0]} was replaced on this {kind.__name__}"
        return None if is_plain(_as_dict(self._images.mm_processor_kwargs)) else "mm_processor_kwargs is not plain data"

    def _parts(self) -> list[Any]:
        image_processor = getattr(self._processor, "image_processor", None)
        return [self._processor, *([] if image_processor is None else [image_processor])]

    def decides(self) -> list[Any]:
        from PIL import Image, ImageFile

        own = [
            [str(type(part)), *sorted((name, value) for name, value in vars(part).items() if is_plain(value))]
            for part in self._parts()
        ]
        limits = [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, formats()]
        return [self._images, as_json(self._processor), own, limits, *map(_version, _PACKAGES)]

    def reads(self, source: Source) -> list[str]:
        return [name for name in source.schema.names if name == self._images.image_key]

    def of(self, table: pa.Table, prompts: Any) -> tuple[pa.Table, str | None]:
        assert isinstance(prompts, ImagePrompts)
        held, key, why = prompts.held, self._images.image_key, None
        rows = [[image["at"] for image in row] for row in prompts.column.field("images").to_pylist()]
        media = [[held.media[at] for at in row] for row in rows]
        files = [[_file(each) for each in row if each.given is not None] for row in media]
        latest = max((max(each.state[-2:]) for row in media for each in row if each.state is not None), default=0)
        if any(each.data is None and each.state is None for row in media for each in row):
            why = "a file of an image cannot be read"
        elif latest / 1e9 + known_files.SETTLED > time.time():
            why = "files of images have been written in the last seconds"
        written = None if self.spool is None else self.spool.written(held.source)
        if self.spool is not None and written is not None and files:
            files[0].append({"given": None, "path": written[0], "size": written[1]})
            if self.spool.nbytes > self.bound:
                why = f"the images in the data have more bytes than token_cache_bytes={self.bound:,}"
        return pa.table({key: table.column(key), HIDDEN: as_arrow(files, pa.list_(_FILE))}), why

    def holds(self, source: Source, columns: ColumnFile) -> bool:
        places, known = places_of(source, self._images), set()
        for number in range(len(columns.parts)):
            for chunk in columns.table(number).column(HIDDEN).chunks:
                known |= {tuple(file.values()) for file in chunk.flatten().to_pylist()}
        copied = [(size, path) for given, path, size, *_ in known if given is None]
        if copied:
            size, name = max(copied)
            if self.spool is None or not self.spool.find(source.name, name, size):
                return False
        return all(_is_same(places, *file) for file in known if file[0] is not None)


def _file(media: Media) -> dict[str, Any]:
    values = (media.given, media.path, *(media.state or (None,) * 4))
    return dict(zip((field.name for field in _FILE), values, strict=True))


def _is_same(places: Places, given: str, path: str | None, *state: int | None) -> bool:
    """Whether a path leads where it has led, to the same file or to none."""
    try:
        found = places.find(given)
        about = os.lstat(found)
        return found == path and state_of(about) == state
    except (NoFileError, ValueError):  # the latter: of paths that are none
        return path is None
    except OSError:
        return False


def as_json(processor: Any) -> str:
    """The configuration of a processor and of its processor of images.

    Raises:
        TypeError: it is not plain data.
    """
    method = processor.to_json_string
    if "legacy_serialization" not in inspect.signature(method).parameters:
        return str(method())
    # transformers 4 leaves the processor of images out unless asked for it, and copies the tokenizer for nothing, which
    # takes half a second.
    from transformers import PreTrainedTokenizerBase

    bare = copy.copy(processor)
    for name, part in list(vars(bare).items()):
        if isinstance(part, PreTrainedTokenizerBase):
            delattr(bare, name)
    return str(bare.to_json_string(legacy_serialization=False))


def _as_dict(given: Any) -> Any:
    return {name: _as_dict(value) for name, value in given.items()} if isinstance(given, Mapping) else given


@cache
def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
