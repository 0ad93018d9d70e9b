"""The options of a load with images."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

import pyarrow as pa

from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import COLUMN, POSITIVE, Must, Options, check_fields, nearest, plain
from gpuload.media import MOST_PIXELS, CheckMedia
from gpuload.sources.read import Source

ImageLoader = Literal["transpose", "pil"]
Deliver = Literal["reference", "pil", "inputs"]


@dataclass(frozen=True)
class ImageOptions:
    """Those of `load` that are about images; for their meaning see `gpuload.core.keywords`."""

    image_key: str = "images"
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_loader: ImageLoader = "transpose"
    media: Deliver = "reference"
    check_media: CheckMedia = "tail"
    media_roots: Sequence[str] = ()
    max_image_pixels: int = MOST_PIXELS

    @classmethod
    def parse(cls, given: Mapping[str, Any], others: Collection[str]) -> "ImageOptions":
        """The options among the keyword arguments of a load.

        Args:
            others: names of its other options.

        Raises:
            OptionError: a value is invalid, or an unknown name is like one of these.
        """
        for name in sorted(given.keys() - {*NAMES, *others}):
            if get_close_matches(name, NAMES, 1, 0.65):  # of others, the other options say what is near
                raise OptionError(f"unknown option {name}{nearest(name, set(NAMES))}")
        values = {name: plain(given[name]) for name in NAMES if name in given}
        if values.get("mm_processor_kwargs", {}) is None:
            del values["mm_processor_kwargs"]
        roots = values.get("media_roots")
        if isinstance(roots, str | os.PathLike):
            values["media_roots"] = [roots]
        options = cls(**values)
        check_fields(options, _CHECKS)
        if own := sorted(_OWN & options.mm_processor_kwargs.keys()):
            raise OptionError(f"mm_processor_kwargs.{own[0]} is set by gpuload: remove it")
        return options

    @property
    def turns(self) -> bool:
        """Whether images are turned as their EXIF orientation says."""
        return self.image_loader == "transpose"

    def check_column(self, sources: Sequence[Source], prompt_key: str) -> None:
        """Checks that there is a column of images, if the user has named one.

        Raises:
            OptionError: it is the column of prompts.
            DataError: there is none; or `datasets` would convert its images to another mode than RGB, and so give a
                processor other pixels.
        """
        for source in sources:
            mode = _mode_of(source.schema, self.image_key)
            if mode not in (None, "RGB"):
                raise DataError(
                    f"{source.name}: column {self.image_key!r} has datasets.Image(mode={mode!r}): processors are given "
                    "RGB images here. Cast the column to datasets.Image(), with images converted before if need be"
                )
        if self.image_key == prompt_key:
            raise OptionError(f"image_key={self.image_key!r} is the column of prompts: pass the one with images")
        if self.image_key == ImageOptions.image_key:  # by default, images may be in messages
            return
        names = {name for source in sources for name in source.schema.names}
        if self.image_key not in names:
            near = nearest(self.image_key, names)
            raise DataError(f"{sources[0].name}: no column {self.image_key!r} with images{near}")


def _mode_of(schema: pa.Schema, name: str) -> str | None:
    """The mode to which `datasets` converts the images of a column."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][name]
        while "feature" in found:  # lists
            found = found["feature"]
        mode = found.get("mode") if found.get("_type") == "Image" else None
    except (KeyError, TypeError, ValueError, AttributeError):  # not written by `datasets`
        return None
    return mode if isinstance(mode, str) else None


def is_processor(given: Any) -> bool:
    """Whether what was given in the place of a tokenizer is a processor of transformers, which is not imported here."""
    return any(each.__name__ == "ProcessorMixin" for each in type(given).__mro__)


def check_supported(options: Options, names: Mapping[str, str], **own: Any) -> None:
    """Checks that a load with images has none of the options that it does not support.

    Args:
        names: option of the pipeline → how the user calls it, where that differs.
        own: name → value of further options that are not supported.

    Raises:
        OptionError: it has one.
    """
    wrong = {
        **own,
        "device": options.device not in ("auto", "cpu") and options.device,
        "distributed": options.distributed,
        "truncation": options.truncation != "error" and options.truncation,
    }
    for name, value in wrong.items():
        if value:
            told = names.get(name, f"{name}={value!r}")
            raise OptionError(f"{told} is not supported for data with images: remove it")


NAMES = tuple(ImageOptions.__dataclass_fields__)

_OWN = frozenset("text images return_tensors return_dict padding padding_side truncation max_length".split())
"""Arguments of a processor's calls that say how its result is to look."""

_OF_VERL = ("image_key", "mm_processor_kwargs")


def check_no_processor(given: Mapping[str, Any], ignored: Sequence[str] = _OF_VERL) -> None:
    """Checks the options of a load without a processor.

    Args:
        ignored: names that may be given for any data; by default keys of verl's `data:` section.

    Raises:
        OptionError: one of them is for prompts with images.
    """
    if wrong := [name for name in NAMES if name in given and name not in ignored]:
        raise OptionError(
            f"{wrong[0]} is for data with images: pass a processor (AutoProcessor.from_pretrained) in the place of "
            "the tokenizer, or remove it"
        )


_CHECKS = {
    "image_key": COLUMN,
    "max_image_pixels": POSITIVE,
    "mm_processor_kwargs": Must("a mapping", lambda value: isinstance(value, Mapping)),
    "media_roots": Must(
        "a list of directories",
        lambda value: isinstance(value, Sequence) and all(isinstance(each, str | os.PathLike) for each in value),
    ),
}
