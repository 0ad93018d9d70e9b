"""Preference data with images: `gpuload.load_pairs` with a processor. Images are in prompts only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.keywords import LoadPairsKeywords
from gpuload.core.options import Options
from gpuload.dataset.rows import Loaded, Numbers
from gpuload.kinds.images.dataset import ImageFacts, ImageRows
from gpuload.kinds.images.engine import ImageText
from gpuload.kinds.images.load import facts_and_pixels
from gpuload.kinds.images.messages import images_of, problem_of_parts
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.pixels import Pixels, Place
from gpuload.kinds.images.prompts import problem_of_images, prompt_of
from gpuload.kinds.images.training import ImageTrainingEngine, ImageTrainingKind, ImageTrainingReference
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.pairs.reference import PairReference
from gpuload.kinds.training_reference import answers_in
from gpuload.reference.reference import Reference


class ImagePairReference(ImageTrainingReference, PairReference):
    """What a processor makes of preference data with images; ids have bits (`gpuload.core.marks`)."""

    def problem(self, row: Any) -> str | None:
        prompt = prompt_of(row)
        found = PairReference.problem(self, prompt)
        if found is not None:
            return found
        if isinstance(prompt["prompt"], str):
            return "the row is text, and images need messages"
        for name in answers_in(prompt):
            places, _ = images_of(prompt[name], [])
            if places or (row["images"] and _marks(prompt[name])):
                return f"{name} has a place for an image: only prompts may have images"
        return problem_of_parts(prompt["prompt"]) or problem_of_images(row)

    def texts(self, row: Any) -> list[str]:
        return self.texts_with_prompt(row)

    def encoded(self, prompt: Any) -> tuple[list[list[int]], list[int] | None]:
        images, count = self.images_of(prompt), len(answers_in(prompt_of(prompt)))
        ids = [self.ids_of_text(text, images) for text in self.texts(self.given(prompt))]
        return ids[:count], ids[count] if len(ids) > count else None


def _marks(messages: Any) -> bool:
    return images_of(messages, [])[1] is not None


class ImagePairEngine(ImageTrainingEngine, PairEngine):
    """The `Engine` of a load of preference data with images. For the arguments see `HostEngine`."""

    _reference: ImagePairReference

    def tokens_of(self, text: ImageText) -> tuple[list[Any], list[int]]:
        columns, unclear = [], set()
        for texts, images in zip((text.text, *text.more), text.images, strict=True):
            made, wrong = self.spliced([one or "" for one in texts.to_pylist()], images)
            lengths = np.fromiter(map(len, made), np.int64, len(made))
            columns.append(Ragged(np.concatenate([np.zeros(0, np.int32), *made]), offsets_of(lengths)))
            unclear |= {*wrong}
        rows = self.rows_of(columns)
        return [rows[number] for number in range(len(rows))], sorted(unclear)


class ImagePairDataset(ImageRows, PairDataset):
    """Tokenized preference data with images: see `ImageRows`. Made by `gpuload.load_pairs` with a processor.

    For `"dpo"` and `"rm"`, batches have the images of all rows twice, for the chosen and for the rejected sequences.
    """

    def __init__(
        self,
        loaded: Loaded,
        objective: Any,
        kl_batch_size: int,
        labels: Any,
        facts: ImageFacts,
        images: ImageOptions,
        pixels: Pixels | None,
    ):
        PairDataset.__init__(self, loaded, objective, kl_batch_size, labels)
        self._facts, self._media, self._pixels = facts, images.media, pixels

    def _with_images(self, batch: Any, numbers: Numbers) -> Any:
        return super()._with_images(batch, numbers if self.objective == "kto" else np.tile(numbers, 2))

    def _inputs(self, rows: Sequence[Sequence[Any]], places: Sequence[Place]) -> dict[str, Any]:
        half = len(rows) // 2
        if self.objective == "kto" or len(rows) % 2 or list(places[:half]) != list(places[half:]):
            return super()._inputs(rows, places)
        made = super()._inputs(rows[:half], places[:half])  # images are decoded once
        return {name: torch.cat([each, each]) for name, each in made.items()}


@dataclass(frozen=True)
class ImagePairKind(ImageTrainingKind[PairDataset], PairKind):
    """Preference data with images."""

    others = LoadPairsKeywords.__optional_keys__
    engine_type = ImagePairEngine

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        own: dict[str, Any] = {"objective": self._objective, **self.of_messages()}
        return ImagePairReference(tokenizer, self.images, **own, **options.of_tokenizer())

    def rows(self, loaded: Loaded, labels: Any) -> ImagePairDataset:
        given = facts_and_pixels(loaded, self.images)
        return ImagePairDataset(loaded, self._objective, self.kl_batch_size, labels, *given)
