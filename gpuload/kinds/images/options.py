"""The options of a load with images."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuload.core.errors import OptionError
from gpuload.core.options import COLUMN, POSITIVE, Must, check_fields, plain
from gpuload.media import MOST_PIXELS, CheckMedia

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
    def parse(cls, given: Mapping[str, Any]) -> "ImageOptions":
        """The options among the keyword arguments of a load.

        Raises:
            OptionError: a value is invalid.
        """
        values = {name: plain(given[name]) for name in NAMES if name in given}
        if values.get("mm_processor_kwargs", {}) is None:
            del values["mm_processor_kwargs"]
        roots = values.get("media_roots")
        if isinstance(roots, str | os.PathLike):
            values["media_roots"] = [roots]
        options = cls(**values)
        check_fields(options, _CHECKS)
        return options

    @property
    def turns(self) -> bool:
        """Whether images are turned as their EXIF orientation says."""
        return self.image_loader == "transpose"


NAMES = tuple(ImageOptions.__dataclass_fields__)

_OF_VERL = ("image_key", "mm_processor_kwargs")  # keys of verl's `data:` section, which may be given for any data


def check_no_processor(given: Mapping[str, Any]) -> None:
    """Checks the options of a load without a processor.

    Raises:
        OptionError: one of them is for prompts with images.
    """
    if wrong := [name for name in NAMES if name in given and name not in _OF_VERL]:
        raise OptionError(
            f"{wrong[0]} is for prompts with images: pass a processor (AutoProcessor.from_pretrained) in the place of "
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
