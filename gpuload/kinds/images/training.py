"""What conversations and preference data with images have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from gpuload.core.errors import OptionError
from gpuload.core.options import Options
from gpuload.engines.host.render import HostText
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.load import ImageKind
from gpuload.kinds.images.messages import AS_PARTS, as_parts
from gpuload.kinds.images.prompts import prompt_of
from gpuload.kinds.images.reference import ProcessorReference
from gpuload.kinds.training_engine import TrainingEngine
from gpuload.kinds.training_reference import TrainingReference, answers_in, own_arguments
from gpuload.pipeline.kind import Dataset
from gpuload.reference.template_call import TemplateCall
from gpuload.sources.read import Source

_OF_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")


class ImageTrainingReference(ProcessorReference, TrainingReference):
    """What a processor makes of data to train on."""

    @cached_property
    def parts_only(self) -> bool:
        """Whether the template prints the texts of contents that are lists of parts only: then all contents are."""
        probe, text = "\u2600", [{"role": "user", "content": "\u2600"}]
        try:
            return probe not in self.call.render(text) and probe in self.with_parts.render(text)
        except Exception:
            return False

    @property
    def with_parts(self) -> TemplateCall:
        """The template, for contents that are text."""
        return replace(self.call, template=AS_PARTS + self.call.text())

    def given(self, row: Any) -> Any:
        prompt, parts = prompt_of(row), bool(row["images"]) or self.parts_only
        if not isinstance(prompt, dict):
            return as_parts(prompt, parts)
        return {name: as_parts(each, parts) if name in _OF_MESSAGES else each for name, each in prompt.items()}

    def render(self, row: Any) -> str:
        return self.texts(self.given(row))[0]

    def texts_with_prompt(self, row: Any) -> list[str]:
        """The texts of what the template gets of a row with a prompt: with each completion, and alone."""
        own, prompt = own_arguments(row), row["prompt"]
        texts = [self.text_of(prompt + row[name], self.call_with(own)) for name in answers_in(row)]
        if self.prompts_alone:
            texts.append(self.text_of(prompt, self.call_with(own, prompt_only=True)))
        return texts


class ImageTrainingEngine(ImageEngine, TrainingEngine):
    """The `Engine` of a load of data to train on with images. For the arguments see `HostEngine`."""

    _reference: ImageTrainingReference

    def _rendered(self, rows: list[Any], rejected: dict[int, str]) -> list[tuple[Sequence[int], HostText]]:
        forms: dict[tuple[bool, bool], list[int]] = {}
        for number, row in enumerate(rows):
            if number not in rejected:
                completed = isinstance(row, dict) and "prompt" in row
                forms.setdefault((completed, bool(own_arguments(row))), []).append(number)
        made: list[tuple[Sequence[int], HostText]] = []
        for (_, alone), numbers in forms.items():
            some = [rows[number] for number in numbers]
            made.append((numbers, self._by_row(some, True) if alone else self._of_form("messages", some, True)))
        nothing = HostText(text=pa.nulls(len(rejected), pa.large_string()), rejected=dict(enumerate(rejected.values())))
        return [*made, (list(rejected), nothing)] if rejected else made


@dataclass(frozen=True)
class ImageTrainingKind(ImageKind[Dataset]):
    """What kinds of data to train on with images have in common."""

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple[Self, list[Source], Options]:
        kind, found, options = super().resolve(sources, options)
        if options.chat_template is None:
            raise OptionError(
                f"data in the format {getattr(kind, 'format', None)} is text that no template renders, which has no "
                "places for images: pass the tokenizer, or make a column messages"
            )
        return kind, found, options
