"""The kind of `gpuload.load` with a processor, and what all kinds with images have in common."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from gpuload.cache.directory import default_bound, evict, media_directory
from gpuload.core.options import IGNORED, Options
from gpuload.dataset.rows import Loaded
from gpuload.engines.protocol import Engine
from gpuload.kinds.images.dataset import ImageFacts, ImagePromptDataset
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.gate import image_ids_of
from gpuload.kinds.images.options import NAMES, ImageOptions, check_supported
from gpuload.kinds.images.pixels import Pixels
from gpuload.kinds.images.positions import merge_of
from gpuload.kinds.images.prompts import REFERENCE, sizes_in
from gpuload.kinds.images.reference import ImageReference
from gpuload.kinds.prompts import PromptDataset, PromptKind
from gpuload.media.spool import Spool
from gpuload.pipeline.kind import Dataset, Kind
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source

_ROWS = 10_000


@dataclass(frozen=True)
class ImageKind(Kind[Dataset]):
    """What kinds with images have in common. To be mixed into one without.

    Attributes:
        images: the options about images.
        others: names of the other options of its function.
        engine_type: of its loads.
    """

    images: ImageOptions = field(default_factory=ImageOptions)
    others: ClassVar[Collection[str]]
    engine_type: ClassVar[type[ImageEngine]]

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple[Self, Options]:
        images = ImageOptions.parse(given, cls.others)
        others = {name: value for name, value in given.items() if name not in NAMES}
        kind, options = super().parse(others)
        told = {"truncation": f"overlong={given['overlong']!r}"} if "overlong" in given else {}
        check_supported(options, told, turns=given.get("turns") == "served" and "served")
        return replace(kind, images=images), on_host(options)

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple[Self, list[Source], Options]:
        kind, found, options = super().resolve(sources, options)  # type: ignore[safe-super]
        self.images.check_column(sources, options.prompt_key)
        return kind, found, options

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        engine = self.engine_type(reference, exact_only)
        if self.images.media != "reference":  # the bytes of images are kept where they will be needed again
            directory = media_directory(options.cache_dir)
            engine.spool, columns = Spool(directory), engine.reference.made
            columns.spool, columns.bound = engine.spool, options.token_cache_bytes or default_bound(directory)
        return engine


@dataclass(frozen=True)
class ImagePromptKind(ImageKind[PromptDataset], PromptKind):
    """Prompts with images."""

    others = frozenset({*IGNORED, *Options.__dataclass_fields__})
    engine_type = ImageEngine

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        return ImageReference(tokenizer, self.images, **options.of_tokenizer())

    def dataset(self, loaded: Loaded) -> ImagePromptDataset:
        return ImagePromptDataset(loaded, *facts_and_pixels(loaded, self.images))


def on_host(options: Options) -> Options:
    """Options of a load on the host. What is made of images is small: it is on disk only if that is asked for."""
    return replace(options, device="cpu", store="disk" if options.store == "disk" else "memory")


def facts_and_pixels(loaded: Loaded, images: ImageOptions) -> tuple[ImageFacts, ImageOptions, Pixels | None]:
    """What batches need to know of the images of rows, how much they have of them, and what makes that."""
    engine: Any = loaded.engine
    columns, key = loaded.columns, images.image_key
    sizes, schema = set(), pa.schema([(key, pa.list_(REFERENCE))])
    for first in range(0, len(columns), _ROWS):
        rows = columns.take_table(np.arange(first, min(first + _ROWS, len(columns))), schema).column(0)
        sizes.update(sizes_in(rows.combine_chunks()))
    pixels = None
    if engine.spool is not None:
        directory = media_directory(loaded.options.cache_dir)
        bound = engine.reference.made.bound
        evict(directory, bound, engine.spool.keep(loaded.report.into_cache, bound))
        if engine.spool.unkept:
            loaded.report.notes.append(
                f"images in the data are not cached: {directory} is on a file system without hard links"
            )
        pixels = Pixels(
            engine.reference.called, images.mm_processor_kwargs, images.turns, engine.spool, images.media == "inputs"
        )
    return facts_of(engine, key, sizes), images, pixels


def facts_of(engine: ImageEngine, key: str, sizes: set[tuple[tuple[int, int], ...]]) -> ImageFacts:
    """What batches need to know of images with some sizes.

    Args:
        sizes: of the images of each row.
    """
    rule = None if engine.by_prompt else engine.rule
    if rule is None:
        return ImageFacts(key, type_ids=engine.type_ids_without_rule())
    processor = engine.reference.processor
    ids = image_ids_of(processor) or ()
    facts = ImageFacts(key, type_ids=engine.type_ids, image_ids=ids, merge=merge_of(processor) if ids else None)
    if rule.by_row:
        of_row = {some: rule.extras(some) for some in sizes if some}
        names = next((tuple(each[0]) for each in of_row.values()), ())
        return replace(facts, names=names, of_row=of_row)
    rule.learn({size for some in sizes for size in some})
    of_size = {size: rule.extras((size,))[0] for some in sizes for size in some}
    return replace(facts, names=next((tuple(each) for each in of_size.values()), ()), of_size=of_size)
