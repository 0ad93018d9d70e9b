"""The reference of prompts with images: the processor, on decoded images."""

from collections.abc import Mapping
from typing import Any

from gpuload.core.errors import TokenizerError
from gpuload.kinds.images.messages import as_parts, problem_of_parts
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.prompts import media_of_row, problem_of_images, prompt_of
from gpuload.media.dry_run import call, ids_of
from gpuload.media.headers import decode
from gpuload.reference.reference import Reference


class ImageReference(Reference):
    """A processor: what its `apply_chat_template` makes of messages with images.

    Args:
        processor: of transformers.
        images: the options about images.
        others: of a `Reference`.
    """

    def __init__(self, processor: Any, images: ImageOptions, **others: Any):
        self.processor, self.images = processor, images
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise TokenizerError(f"{type(processor).__name__} has no tokenizer: pass a processor of a language model")
        given = others.pop("chat_template", "default")
        super().__init__(tokenizer, chat_template=_template(processor, given), **others)
        self.name = getattr(tokenizer, "name_or_path", "") or type(processor).__name__

    def messages(self, prompt: Any, with_images: bool) -> list[dict[str, Any]]:
        """The messages of a row as its template gets them."""
        return as_parts(prompt, with_images)

    def problem(self, row: Any) -> str | None:
        prompt = prompt_of(row)
        found = super().problem(prompt) or problem_of_parts(prompt)
        if found is None and not self.uses_template and not isinstance(prompt, str):
            found = "chat_template=None expects plain strings, but this prompt is a list of messages"
        return found or problem_of_images(row)

    def render(self, row: Any) -> str:
        """The text of a row, with a placeholder for each image."""
        prompt = prompt_of(row)
        if not self.uses_template:
            return str(prompt)
        return str(
            self.processor.apply_chat_template(
                self.messages(prompt, bool(row["images"])),
                chat_template=self.call.text(),
                tools=None if self.call.tools is None else list(self.call.tools),
                add_generation_prompt=self.call.add_generation_prompt,
                tokenize=False,
                **self.call.kwargs,
            )
        )

    def ids(self, row: Any) -> list[int]:
        images = [decode(each.read(), self.images.turns) for each in media_of_row(row)]
        return ids_of(call(self.processor, self.render(row), images, self.images.mm_processor_kwargs))

    def key_of_rule(self) -> tuple[Any, ...]:
        """Identifies what stands for images of any size: code and settings of the processor and of its tokenizer."""
        parts = (self.processor, self.tokenizer, getattr(self.processor, "image_processor", None))
        own = [id(value) for part in parts for value in vars(part).values() if callable(value)] if all(parts) else []
        return (*map(type, parts), *own, self.fingerprint())

    def fingerprint(self) -> str:
        return (
            f"{super().fingerprint()} {type(self.processor).__name__} {self.processor.to_json_string()} {self.images}"
        )


def _template(processor: Any, given: Any) -> Any:
    """The template of a processor, or the one of its templates that is named."""
    if given is None:
        return None
    own = getattr(processor, "chat_template", None)
    named = own if isinstance(own, Mapping) else {} if own is None else {"default": own}
    if given in named:
        return named[given]
    if given == "default":
        raise TokenizerError(
            f"{type(processor).__name__} has no chat template: pass the text of one as chat_template=..., or "
            "chat_template=None if the prompts are rendered texts"
        )
    return given
