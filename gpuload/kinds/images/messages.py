"""Messages of prompts with images, as a processor's template takes them: contents are lists of parts.

Images are at parts of the content, or at `<image>` in its text. They come from the part itself, or one after the other
from the column of images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "<image>"
"""What stands for an image in contents that are text."""

_REFERENCES = ("image", "image_url", "url", "path", "base64", "bytes")
_IMAGE_TYPES = ("image", "image_url", "input_image")


AS_PARTS = (
    "{%- set parts_ = namespace(of=[]) -%}{%- for message_ in messages -%}"
    "{%- if message_.content is string -%}{%- set parts_.of = parts_.of + "
    "[dict(message_, content=[{'type': 'text', 'text': message_.content}])] -%}"
    "{%- else -%}{%- set parts_.of = parts_.of + [message_] -%}{%- endif -%}"
    "{%- endfor -%}{%- set messages = parts_.of %}\n"  # transformers renders without the newline after a block
)
"""The beginning of a template that makes one part of each content that is text."""


def images_of(prompt: Any, column: Sequence[Any]) -> tuple[list[Any], str | None]:
    """The images of a row in the order of their places, and what is wrong with their number.

    Args:
        prompt: messages or a text.
        column: the row's values in the column of images.
    """
    places = list(_places(prompt))
    left = iter(column)
    found = [next(left, None) if place is None else place for place in places]
    free = sum(place is None for place in places)
    if free == len(column) or isinstance(prompt, str):
        return (list(column) if isinstance(prompt, str) else found), None
    things = f"{len(column)} image{'s' * (len(column) != 1)} in its column"
    return [], f"the row has {things}, but its messages have {free} places for them ({MARK}, or parts of type image)"


def as_parts(prompt: Any, with_images: bool) -> list[dict[str, Any]]:
    """The messages of a row as its template gets them; without fields that are null.

    Args:
        prompt: messages or a text.
        with_images: whether the row has any; then texts become lists of parts, as trainers make them.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return [_message(message, with_images) for message in prompt]


def _places(prompt: Any) -> Any:
    """The places for images in order: the reference that a part has, None for the next one of the column."""
    for message in prompt if isinstance(prompt, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield from [None] * content.count(MARK)
        for part in content if isinstance(content, list) else []:
            if _is_image(part):
                given = {name: part[name] for name in _REFERENCES if part.get(name) is not None}
                yield given or None


def _is_image(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _IMAGE_TYPES or (kind is None and any(part.get(name) is not None for name in ("image", "image_url")))


def _message(message: Any, with_images: bool) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    content = made.get("content")
    if isinstance(content, str) and with_images:
        parts = [part for text in content.split(MARK) for part in ({"type": "image"}, {"type": "text", "text": text})]
        made["content"] = [part for part in parts[1:] if part.get("text") != ""]
    elif isinstance(content, list):
        made["content"] = [_part(part) for part in content]
    return made


def _part(part: Any) -> Any:
    if _is_image(part):
        return {"type": "image"}
    return {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part


def problem_of_parts(prompt: Any) -> str | None:
    """Why a row is not for this load: other media than images."""
    for number, message in enumerate(prompt if isinstance(prompt, list) else []):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("video", "video_url", "audio", "audio_url", "input_audio"):
                return f"message {number} has a part of type {kind}, and only images are loaded"
    return None
