"""Ids of first prompts with images: made by verl once for all samples of a prompt.

Rows of prompts with images carry no ids, because the rollout resizes images otherwise than the dataset. But the n
samples of a prompt have the same text, the same pixels and the same processor, so they have the same ids: the first of
them runs verl's own code, which resizes and normalizes the images to count their tokens, and the others take its ids.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from PIL import Image

from gpuload.integrations.core import imported, release_of
from gpuload.integrations.known_code import Table, change

BUILDER: Table = {
    "verl.utils.tokenizer.continuous_token:VLContinuousTokenMixin.build_initial_tokens": {"99df261c3f7c6607": "0.9.1"},
    "verl.utils.tokenizer.continuous_token:VLContinuousTokenMixin.render_tokens_with_mm": {"7cd123451946183c": "0.9.1"},
}
"""The code of verl that makes these ids, of the releases for which `key_of` has all that they depend on."""

_MODULE, _MIXIN = "verl.utils.tokenizer.continuous_token", "VLContinuousTokenMixin"
_MOST_PROMPTS = 512

_made: dict[Any, tuple[int, ...]] = {}  # of the last prompts
_making: dict[Any, asyncio.Future[list[int]]] = {}


@cache
def problem(kind: Any) -> str | None:
    """Why `key_of` may not have all that the ids of a type of verl's prompt builders depend on; None if it does."""
    found, missing = imported({_MODULE: (_MIXIN, "apply_chat_template")})
    if missing:
        return missing
    methods = [place.rpartition(".")[2] for place in BUILDER]
    for method in methods:
        if getattr(kind, method, None) is not getattr(found[_MIXIN], method, None):
            return f"{kind.__name__} overrides {method}"
    return change(release_of("verl", "verl"), BUILDER, *(getattr(found[_MIXIN], method) for method in methods))


def key_of(builder: Any, messages: Sequence[Any], tools: Any, images: Sequence[Any]) -> tuple[Any, ...] | str:
    """What the ids of a prompt depend on: text, pixels and settings; or a text, why that is not known.

    The prompt builder has no `problem`; the images are as the processor gets them.
    """
    if not all(isinstance(each, Image.Image) and each.mode == "RGB" for each in images):
        return "images that are not RGB"
    arguments = dict(builder.chat_template_kwargs) | ({"tools": tools} if tools else {})
    render = imported({_MODULE: ("apply_chat_template",)})[0]["apply_chat_template"]
    text = render(builder.processor, messages, tokenize=False, add_generation_prompt=True, **arguments)
    pixels = tuple((each.size, hashlib.blake2b(each.tobytes()).digest()) for each in images)
    return builder.processor, repr(_sorted(builder.mm_processor_kwargs)), text, pixels


async def made_once(key: tuple[Any, ...], make: Callable[[], Awaitable[list[int]]]) -> list[int]:
    """The ids of a prompt: those that were made before, or are being made, for the same key in this process."""
    if key in _made:
        _made[key] = _made.pop(key)  # the last one
        return list(_made[key])
    here = (asyncio.get_running_loop(), key)
    if here not in _making:
        _making[here] = asyncio.ensure_future(make())
        _making[here].add_done_callback(lambda _: _making.pop(here))
    ids = await asyncio.shield(_making[here])  # a sample that is cancelled does not cancel the others
    _made[key] = tuple(ids)
    while len(_made) > _MOST_PROMPTS:
        del _made[next(iter(_made))]
    return list(ids)


def _sorted(given: Any) -> Any:
    return sorted((name, _sorted(value)) for name, value in given.items()) if isinstance(given, Mapping) else given
