"""The rows of a load with images, as its engine reads them: messages, and images with their sizes."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import offsets_of
from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.protocol import ArrowPrompts
from gpuload.kinds.images.messages import images_of
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.training_reference import messages_in
from gpuload.media.arrow import values_of
from gpuload.media.headers import FileBytes, Header, ImageError, read_header, sample_of
from gpuload.media.references import Media, NoFileError, Places, as_list, image_name, media_of
from gpuload.media.spool import Spool
from gpuload.sources.batches import BATCH_BYTES, bounded
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

JOINED_BYTES = 1 << 26
"""Of rows with the bytes of their images that are worked on together: text has fixed costs for each batch."""

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

    @cached_property
    def nbytes(self) -> int:
        """Bytes of images that are in memory."""
        return sum(len(each.data) for each in self.media if each.data is not None)


_held: WeakValueDictionary[int, HeldImages] = WeakValueDictionary()


@dataclass(frozen=True)
class ImagePrompts(ArrowPrompts):
    """Prompts with images.

    Attributes:
        column: (n,) struct: `prompt` or `json`, and `images`, a list of `_IMAGE`.
        held: the images' bytes.
    """

    held: HeldImages

    @property
    def held_bytes(self) -> int:
        """Bytes of images that the batch keeps in memory."""
        return self.held.nbytes

    def take(self, rows: np.ndarray[Any, Any]) -> "ImagePrompts":
        return ImagePrompts(self.column.take(as_arrow(rows)), self.held)


def read_prompts(
    source: Source, prompt_key: str, options: ImageOptions, spool: Spool | None = None, joined: int = BATCH_BYTES
) -> Iterator[tuple[pa.Table, ImagePrompts]]:
    """The rows of a source, part by part; in the column of images, references to them.

    Args:
        spool: takes the bytes of images.
        joined: bytes up to which small parts are joined.
    """
    places = places_of(source, options)
    for table in bounded(source.batches(), source.name, joined):
        yield _prompts_of(table, prompt_key, places, source.name, options, spool)


@garbage_collection_paused()
def _prompts_of(
    table: pa.Table, prompt_key: str, places: Places, source: str, options: ImageOptions, spool: Spool | None
) -> tuple[pa.Table, ImagePrompts]:
    prompts = table.column(prompt_key).combine_chunks()
    prompts = prompts.dictionary_decode() if pa.types.is_dictionary(prompts.type) else prompts
    names = table.schema.names
    given: list[Any] = [None] * table.num_rows
    if options.image_key in names:
        given = [value for chunk in table.column(options.image_key).chunks for value in values_of(chunk)]
    images = [found_images(*row, places, options) for row in zip(_python(prompts), given, strict=True)]
    held = HeldImages([each.media for row in images for each in row], source)
    _held[held.number] = held
    name, prompts = (JSON, prompts.storage) if prompts.type == JSON_TYPE else (PROMPT, prompts)
    column = pa.StructArray.from_arrays([prompts, _arrow(images, held)], [name, "images"])
    references = _references(images, spool, source)
    if options.image_key in names:
        table = table.set_column(names.index(options.image_key), options.image_key, references)
    else:
        table = table.append_column(options.image_key, references)
    return table, ImagePrompts(column, held)


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

    def reference(self, spool: Spool | None, source: str) -> tuple[Any, ...]:
        """What a row of a source has in its place: the fields of a `REFERENCE`."""
        header, data = self.header or (None, None, None), self.media.data
        if spool is None or self.header is None or data is None:
            return (*header, self.media.path, None, self.nbytes, self.sample)
        offset, checksum = spool.add(source, data)
        return (*header, self.media.path, offset, len(data), checksum)


def found_images(prompt: Any, given: Any, places: Places, options: ImageOptions) -> list[FoundImage]:
    """The images of a row, with their sizes. A wrong number of them is the problem of the first."""
    pair = isinstance(prompt, dict) and "chosen" in prompt
    values, wrong = images_of(prompt["prompt"] if pair else messages_in(prompt), as_list(given))
    if wrong is not None:
        return [FoundImage(Media(b""), None, wrong)]
    found = []
    for number, value in enumerate(values):
        media = None
        try:
            media = media_of(value, places)
            data = media.open()
            if isinstance(data, FileBytes):
                media = replace(media, state=data.state)
            header = read_header(data, options.turns, options.max_image_pixels, options.check_media)
            again = media.data is None and options.media != "reference"
            found.append(FoundImage(media, header, None, *((len(data), sample_of(data)) if again else ())))
        except ImageError as error:
            if media is None:
                media = Media(b"", given=error.given if isinstance(error, NoFileError) else None)
            found.append(FoundImage(media, None, f"{image_name(number, media.path)}: {error}"))
    return found


def prompt_of(row: Any) -> Any:
    """The prompt of a row of the column of `ImagePrompts`, as Python objects."""
    return row[PROMPT] if PROMPT in row else None if row[JSON] is None else parse_json(row[JSON])


def problem_of_images(row: Any) -> str | None:
    """Why the images of such a row cannot be used."""
    return next((image["problem"] for image in row["images"] if image["problem"] is not None), None)


def sizes_in(rows: pa.ListArray) -> list[tuple[tuple[int, int], ...]]:
    """Height and width of the images of each row of a column with lists of them; 0 where they are not known."""
    images, ends = rows.flatten(), np.cumsum(as_numpy(fill_null(pc.list_value_length(rows), 0))).tolist()
    flat = list(
        zip(*(as_numpy(fill_null(images.field(name), 0)).tolist() for name in ("height", "width")), strict=True)
    )
    return [tuple(flat[start:end]) for start, end in itertools.pairwise([0, *ends])]


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
    found = [each for row in images for each in row]
    headers = [each.header for each in found]
    return _lists(
        images,
        _IMAGE,
        [held.number] * len(found),
        list(range(len(found))),
        [None if each is None else each.height for each in headers],
        [None if each is None else each.width for each in headers],
        [each.problem for each in found],
    )


def _references(images: list[list[FoundImage]], spool: Spool | None, source: str) -> pa.Array:
    """What rows of a source have in the place of their images."""
    found = [each.reference(spool, source) for row in images for each in row]
    return _lists(images, REFERENCE, *(zip(*found, strict=True) if found else [[]] * len(REFERENCE)))


def _lists(rows: Sequence[Sequence[Any]], kind: pa.DataType, *fields: Sequence[Any]) -> pa.Array:
    """A column of lists of structs from the fields of all of these: dicts for each would take several times as long."""
    values = pa.StructArray.from_arrays(
        [as_arrow(list(values), field.type) for values, field in zip(fields, kind, strict=True)], fields=list(kind)
    )
    offsets = offsets_of(np.fromiter(map(len, rows), np.int64, len(rows))).astype(np.int32)
    return pa.Array.from_buffers(pa.list_(kind), len(rows), [None, pa.py_buffer(offsets)], children=[values])
