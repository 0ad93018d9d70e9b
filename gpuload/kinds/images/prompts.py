"""The rows of a load with images, as its engine reads them: messages, and images with their sizes."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from gpuload.core.arrow import as_arrow
from gpuload.core.records import dataclass
from gpuload.engines.protocol import ArrowPrompts
from gpuload.kinds.images.messages import images_of
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.training_reference import messages_in
from gpuload.media.arrow import values_of
from gpuload.media.headers import FileBytes, Header, ImageError, read_header, sample_of
from gpuload.media.references import Media, NoFileError, Places, as_list, media_of
from gpuload.media.spool import Spool
from gpuload.sources.columns import to_python
from gpuload.sources.json_values import parse_json
from gpuload.sources.read import Source
from gpuload.sources.types import JSON_TYPE, is_text

REFERENCE = pa.struct(
    {
        "height": pa.int32(),
        "width": pa.int32(),
        "format": pa.string(),
        "path": pa.string(),
        "offset": pa.int64(),
        "nbytes": pa.int64(),
        "sample": pa.int64(),
    }
)
"""What rows have in the place of an image. The last three are of its bytes, if they will be read again: where they are
in the spool's file of their source, null for a file of its own; how many; and a checksum: of all in the spool's file,
of some in a file of its own."""

_IMAGE = pa.struct(
    {"batch": pa.int64(), "at": pa.int64(), "height": pa.int32(), "width": pa.int32(), "problem": pa.string()}
)
PROMPT, JSON = "prompt", "json"
"""The field of a row with its prompt: as it is, or as JSON text."""

_numbers = itertools.count()


@dataclass(eq=False)
class HeldImages:
    """The images of a batch, while it is worked on.

    Attributes:
        media: all of them, row after row.
        source: the name of their source.
    """

    media: list[Media]
    source: str
    number: int = field(default_factory=lambda: next(_numbers))


_held: WeakValueDictionary[int, HeldImages] = WeakValueDictionary()


@dataclass(frozen=True)
class ImagePrompts(ArrowPrompts):
    """Prompts with images.

    Attributes:
        column: (n,) struct: `prompt` or `json`, and `images`, a list of `_IMAGE`.
        held: the images' bytes.
    """

    held: HeldImages

    def take(self, rows: np.ndarray[Any, Any]) -> "ImagePrompts":
        return ImagePrompts(self.column.take(as_arrow(rows)), self.held)


def read_prompts(
    source: Source, prompt_key: str, options: ImageOptions, spool: Spool | None = None
) -> Iterator[tuple[pa.Table, ImagePrompts]]:
    """The rows of a source, part by part; in the column of images, references to them.

    Args:
        spool: takes the bytes of images.
    """
    places = places_of(source, options)
    for table in source.batches():
        prompts = table.column(prompt_key).combine_chunks()
        prompts = prompts.dictionary_decode() if pa.types.is_dictionary(prompts.type) else prompts
        names = table.schema.names
        given: list[Any] = [None] * table.num_rows
        if options.image_key in names:
            given = [value for chunk in table.column(options.image_key).chunks for value in values_of(chunk)]
        images = [found_images(*row, places, options) for row in zip(_python(prompts), given, strict=True)]
        held = HeldImages([each.media for row in images for each in row], source.name)
        _held[held.number] = held
        name, prompts = (JSON, prompts.storage) if prompts.type == JSON_TYPE else (PROMPT, prompts)
        column = pa.StructArray.from_arrays([prompts, _arrow(images, held)], [name, "images"])
        references = as_arrow(
            [[each.reference(spool, source.name) for each in row] for row in images], pa.list_(REFERENCE)
        )
        if options.image_key in names:
            table = table.set_column(names.index(options.image_key), options.image_key, references)
        else:
            table = table.append_column(options.image_key, references)
        yield table, ImagePrompts(column, held)


def places_of(source: Source, options: ImageOptions) -> Places:
    """Where the files that a source names may be."""
    return Places(folder_of(source), tuple(map(os.fspath, options.media_roots)))


def folder_of(source: Source) -> str | None:
    """The directory that paths in a file are relative to."""
    path = getattr(source.file, "path", None) if source.file is not None else None
    path = path or (source.name if os.path.isfile(source.name) else None)
    return None if path is None else os.path.dirname(os.path.abspath(path))


@dataclass
class FoundImage:
    """An image of a row.

    Attributes:
        header: None if it cannot be used.
        problem: why.
        nbytes, sample: of a file that will be read again, see `REFERENCE`.
    """

    media: Media
    header: Header | None
    problem: str | None
    nbytes: int | None = None
    sample: int | None = None

    def reference(self, spool: Spool | None, source: str) -> dict[str, Any]:
        """What a row of a source has in its place."""
        height, width, kind = self.header or (None, None, None)
        found = {"height": height, "width": width, "format": kind, "path": self.media.path}
        found |= {"nbytes": self.nbytes, "sample": self.sample}
        if spool is not None and self.header is not None and self.media.data is not None:
            found["offset"], found["sample"] = spool.add(source, self.media.data)
            found["nbytes"] = len(self.media.data)
        return found


def found_images(prompt: Any, given: Any, places: Places, options: ImageOptions) -> list[FoundImage]:
    """The images of a row, with their sizes. A wrong number of them is the problem of the first."""
    pair = isinstance(prompt, dict) and "chosen" in prompt
    values, wrong = images_of(prompt["prompt"] if pair else messages_in(prompt), as_list(given))
    if wrong is not None:
        return [FoundImage(Media(b""), None, wrong)]
    found = []
    for number, value in enumerate(values):
        media = Media(b"")
        try:
            media = media_of(value, places)
            data = media.open()
            if isinstance(data, FileBytes):
                media = replace(media, state=data.state)
            header = read_header(data, options.turns, options.max_image_pixels, options.check_media)
            again = media.data is None and options.media != "reference"
            found.append(FoundImage(media, header, None, *((len(data), sample_of(data)) if again else ())))
        except ImageError as error:
            if isinstance(error, NoFileError):
                media = Media(b"", given=error.given)
            name = "" if media.path is None else f" ({media.path!r})"
            found.append(FoundImage(media, None, f"image {number}{name}: {error}"))
    return found


def prompt_of(row: Any) -> Any:
    """The prompt of a row of the column of `ImagePrompts`, as Python objects."""
    return row[PROMPT] if PROMPT in row else None if row[JSON] is None else parse_json(row[JSON])


def problem_of_images(row: Any) -> str | None:
    """Why the images of such a row cannot be used."""
    return next((image["problem"] for image in row["images"] if image["problem"] is not None), None)


def sizes_of(row: Any) -> tuple[tuple[int, int], ...]:
    """Height and width of the images of such a row."""
    return tuple((image["height"], image["width"]) for image in row["images"])


def media_of_row(row: Any) -> list[Media]:
    """The images of a row of the column of `ImagePrompts`, as Python objects."""
    return [_held[image["batch"]].media[image["at"]] for image in row["images"]]


def _python(prompts: pa.Array) -> Sequence[Any]:
    """Prompts in which images may have their places; texts are not looked at."""
    if is_text(prompts.type):
        return [""] * len(prompts)
    try:
        return to_python(prompts)
    except ValueError:  # the reason is found when the row is rendered
        return [_or_none(prompts.slice(row, 1)) for row in range(len(prompts))]


def _or_none(one: pa.Array) -> Any:
    try:
        return to_python(one)[0]
    except ValueError:
        return None


def _arrow(images: list[list[FoundImage]], held: HeldImages) -> pa.Array:
    at = itertools.count()
    rows = [
        [
            {
                "batch": held.number,
                "at": next(at),
                "height": None if each.header is None else each.header.height,
                "width": None if each.header is None else each.header.width,
                "problem": each.problem,
            }
            for each in row
        ]
        for row in images
    ]
    return as_arrow(rows, pa.list_(_IMAGE))
