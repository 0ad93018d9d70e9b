"""The kind of `gpuload.load` with a processor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuload.core.errors import OptionError
from gpuload.core.files import cache_root
from gpuload.core.options import Options
from gpuload.dataset.rows import Loaded
from gpuload.engines.protocol import Engine
from gpuload.kinds.images.dataset import ImageFacts, ImagePromptDataset
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.options import NAMES, ImageOptions
from gpuload.kinds.images.pixels import Pixels
from gpuload.kinds.images.reference import ImageReference
from gpuload.kinds.prompts import PromptKind
from gpuload.media.spool import Spool
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source


@dataclass(frozen=True)
class ImagePromptKind(PromptKind):
    """Prompts with images.

    Attributes:
        images: the options about images.
    """

    images: ImageOptions = field(default_factory=ImageOptions)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple["ImagePromptKind", Options]:
        images = ImageOptions.parse(given)
        base, options = super().parse({name: value for name, value in given.items() if name not in NAMES})
        wrong = {
            "turns": base.turns != "conversation",
            "device": options.device != "auto" and options.device != "cpu",
            "distributed": options.distributed,
            "store": options.store == "disk",
            "truncation": options.truncation != "error",
        }
        if named := [name for name, is_wrong in wrong.items() if is_wrong]:
            value = base.turns if named[0] == "turns" else getattr(options, named[0])
            raise OptionError(f"{named[0]}={value!r} is not supported for prompts with images: remove it")
        return cls(images=images), replace(options, device="cpu", store="memory", token_cache=False)

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple["ImagePromptKind", list[Source], Options]:
        _, found, options = super().resolve(sources, options)
        if self.images.image_key == options.prompt_key:
            raise OptionError(f"image_key={self.images.image_key!r} is the column of prompts: pass the one with images")
        return self, found, options

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        return ImageReference(tokenizer, self.images, **options.of_tokenizer())

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        engine = ImageEngine(reference, exact_only)
        if self.images.media != "reference":
            engine.spool = Spool(cache_root(options.cache_dir) / "media")
        return engine

    def dataset(self, loaded: Loaded) -> ImagePromptDataset:
        engine: Any = loaded.engine
        columns, key = loaded.columns, self.images.image_key
        rows = columns.take(np.arange(len(columns)), [key])[key]
        sizes = {tuple((image["height"], image["width"]) for image in row or []) for row in rows}
        pixels = None
        if engine.spool is not None:
            engine.spool.finish()
            processor, kwargs = engine.reference.processor, self.images.mm_processor_kwargs
            pixels = Pixels(processor, kwargs, self.images.turns, engine.spool)
        return ImagePromptDataset(loaded, facts_of(engine, key, sizes), self.images.media, pixels)


def facts_of(engine: ImageEngine, key: str, sizes: set[tuple[tuple[int, int], ...]]) -> ImageFacts:
    """What batches need to know of images with some sizes.

    Args:
        sizes: of the images of each row.
    """
    rule = None if engine.by_prompt else engine.rule
    if rule is None:
        return ImageFacts(key)
    if rule.by_row:
        of_row = {some: [each.extras for each in rule.of(some)] for some in sizes if some}
        names = next((tuple(each[0]) for each in of_row.values()), ())
        return ImageFacts(key, names, {}, of_row, engine.type_ids)
    of_size = {size: rule.of((size,))[0].extras for some in sizes for size in some}
    return ImageFacts(key, next((tuple(each) for each in of_size.values()), ()), of_size, {}, engine.type_ids)
