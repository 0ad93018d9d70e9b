"""The reference of prompts with images: the processor, on decoded images."""

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

from gpuload.core.errors import OptionError, TokenizerError
from gpuload.kinds.images.cached import ImageColumns, as_json
from gpuload.kinds.images.messages import as_parts, problem_of_parts
from gpuload.kinds.images.options import ImageOptions
from gpuload.kinds.images.prompts import media_of_row, problem_of_images, prompt_of
from gpuload.media.dry_run import apart, call, ids_of
from gpuload.media.headers import ImageError, decode
from gpuload.media.references import image_name
from gpuload.media.rule import ImageRule
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import TemplateCall

_SHARE = 0.25  # of the seconds of a sample: rows without the values of pixels take a third as long, or less


class ProcessorReference(Reference):
    """A processor in the place of a tokenizer.

    Args:
        processor: of transformers.
        images: the options about images.
        others: of the `Reference` that this class is mixed into.
    """

    made: ImageColumns
    _rule: ImageRule | None = None
    _runs_dry = False  # whether the processor is called as dry runs of the rule call it

    def __init__(self, processor: Any, images: ImageOptions, **others: Any):
        self.processor, self.images, self.made = processor, images, ImageColumns(processor, images)
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise TokenizerError(f"{type(processor).__name__} has no tokenizer: pass a processor of a language model")
        given = others.pop("chat_template", "default")
        super().__init__(tokenizer, chat_template=_template(processor, given), **others)
        self.name = getattr(tokenizer, "name_or_path", "") or type(processor).__name__
        self._check_kwargs()

    def _check_kwargs(self) -> None:
        """Checks that no argument of the template is one for the images, as which transformers would use it."""
        given = self.call.kwargs
        if self.sanitizes:
            raise OptionError(
                "apply_chat_template_kwargs.sanitize_control_tokens is not supported for data with images: remove it"
            )
        if "processor_kwargs" in given:
            raise OptionError(
                "apply_chat_template_kwargs.processor_kwargs: pass its values as mm_processor_kwargs={...} instead"
            )
        image_processor, template = getattr(self.processor, "image_processor", None), self.template_text
        known = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {})
        for name in given:
            if (name in known or hasattr(image_processor, name)) and name not in template:
                raise OptionError(
                    f"apply_chat_template_kwargs.{name} is for the images: pass "
                    f"mm_processor_kwargs={{{name!r}: {given[name]!r}}} instead"
                )

    @cached_property
    def called(self) -> Any:
        """The processor whose calls make ids: those of the given one set what counts for calls on other threads."""
        return apart(self.processor)

    def given(self, row: Any) -> Any:
        """What the template gets of a row of the column of `ImagePrompts`."""
        raise NotImplementedError

    def text_of(self, messages: Any, call: TemplateCall) -> str:
        """Rendered messages, with a placeholder for each image."""
        return str(
            self.processor.apply_chat_template(
                messages,
                chat_template=call.text(),
                tools=None if call.tools is None else list(call.tools),
                add_generation_prompt=call.add_generation_prompt,
                tokenize=False,
                **call.kwargs,
            )
        )

    def images_of(self, row: Any) -> list[Any]:
        """The decoded images of a row.

        Raises:
            ImageError: one cannot be read or decoded.
        """
        found = []
        for number, each in enumerate(media_of_row(row)):
            try:
                found.append(decode(each.read(), self.images.turns))
            except ImageError as error:
                raise ImageError(f"{image_name(number, each.path)}: {error}") from error
        return found

    def is_unreadable(self, error: Exception) -> bool:
        return isinstance(error, ImageError)

    def ids_of_text(self, text: str, images: list[Any]) -> list[int]:
        """What the processor makes of a rendered text."""
        if self._runs_dry and self._rule is not None:
            return self._rule.ids(text, images)
        return ids_of(call(self.called, text, images, self.images.mm_processor_kwargs))

    @cached_property
    def _dry(self) -> Self | None:
        """The same, but as dry runs of the rule call the processor. None if these do nothing less, or for a processor
        that is not one of transformers: its ids may depend on the values of pixels."""
        parts = (self.processor, getattr(self.processor, "image_processor", None))
        if (
            self._rule is None
            or self._rule.runs_whole
            or any(type(part).__module__.partition(".")[0] != "transformers" for part in parts)
        ):
            return None
        made = copy.copy(self)
        made._runs_dry = True
        return made

    def follow(self, rule: ImageRule | None) -> None:
        """Notes by which rule rows are made; None for no rule."""
        self._rule = rule

    @property
    def sample_share(self) -> float:  # type: ignore[override]
        return 1.0 if self._rule is None or not self._rule.confirmed else _SHARE

    def compared_in_part(
        self, prompt: Any, found: list[int], below: Callable[[int], int]
    ) -> tuple[list[int], list[int]]:
        """In full until a row with images was equal by this rule, in this load or an earlier one. Then equal ids are
        equal ids; all else is for the processor as it is."""
        if self._rule is None or self._dry is None:
            return self.compared(prompt, found)
        if self._rule.confirmed:
            with suppress(Exception):
                expected, own = self._dry.compared(prompt, found)
                if expected == own:
                    return expected, own
        expected, own = self.compared(prompt, found)
        self._rule.confirmed |= expected == own and bool(media_of_row(prompt))
        return expected, own

    def key_of_rule(self) -> tuple[Any, ...]:
        """Identifies what stands for images of any size: the objects, as long as they live, and what can be changed of
        them. The vocabulary, which takes a tenth of a second to compare, is that of the same object."""
        tokenizer, backend = self.tokenizer, self.backend
        if backend is None:
            made: tuple[Any, ...] = (self.fingerprint(),)
        else:
            parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
            added = {number: repr(each) for number, each in tokenizer.added_tokens_decoder.items()}
            made = (len(tokenizer), str(added), *(None if part is None else part.__getstate__() for part in parts))
        objects = (self.processor, tokenizer, getattr(self.processor, "image_processor", None))
        own = [
            id(each) if callable(each) else (name, each)
            for part in objects if part is not None for name, each in vars(part).items()
            if callable(each) or isinstance(each, str | int | float)
        ]  # fmt: skip
        return (*map(_Same, objects), *own, configuration_of(self.processor), str(self.images), *made)

    def fingerprint(self) -> str:
        return (
            f"{super().fingerprint()} {type(self.processor).__name__} {configuration_of(self.processor)} {self.images}"
        )


class ImageReference(ProcessorReference):
    """What the `apply_chat_template` of a processor makes of messages with images."""

    def given(self, row: Any) -> Any:
        prompt = prompt_of(row)
        return as_parts(prompt, bool(row["images"])) if self.uses_template else prompt

    def problem(self, row: Any) -> str | None:
        prompt = prompt_of(row)
        found = super().problem(prompt) or problem_of_parts(prompt)
        if found is None and not self.uses_template and not isinstance(prompt, str):
            found = "chat_template=None expects plain strings, but this prompt is a list of messages"
        return found or problem_of_images(row)

    def render(self, row: Any) -> str:
        """The text of a row, with a placeholder for each image."""
        given = self.given(row)
        return self.text_of(given, self.call) if self.uses_template else str(given)

    def ids(self, row: Any) -> list[int]:
        return self.ids_of_text(self.render(row), self.images_of(row))


_unknown = itertools.count()


def configuration_of(processor: Any) -> str:
    """The configuration of a processor; another text each time if it is not plain data, as where a method was
    replaced."""
    try:
        return as_json(processor)
    except TypeError:
        return f"unknown {next(_unknown)}"


class _Same:
    """Equal to what is made of the same object, which it does not keep alive."""

    def __init__(self, given: Any):
        self._hash, self._given = id(given), weakref.ref(given) if given is not None else lambda: None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._hash == other._hash and self._given() is other._given()


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
