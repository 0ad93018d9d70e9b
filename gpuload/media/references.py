"""Where an image is: in the data itself, or in a file next to it.

Datasets have images as `{"bytes": ..., "path": ...}` (Hugging Face), as paths, as `{"image": path}` or
`{"image_url": {"url": "data:..."}}`. A path that data names is read only below the directory of the data, or below one
of `media_roots`, after links are resolved: data must not read other files. Nothing is fetched from a network.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from gpuload.media.headers import FileBytes, ImageError
from gpuload.sources.urls import without_secrets

_LONGEST_PATH = 4096  # characters; that of Linux, which takes seconds to refuse a path of megabytes
_MOST_SHOWN = 80

_NESTED = ("image", "image_url", "url", "path", "base64")


class NoFileError(ImageError):
    """A path names no file that may be read.

    Attributes:
        given: the path.
    """

    def __init__(self, given: str, why: str):
        super().__init__(why)
        self.given = given


@dataclass(frozen=True)
class Places:
    """Where files of images may be.

    Attributes:
        folder: the directory of the data; None for frames in memory.
        roots: further directories.
    """

    folder: str | None = None
    roots: tuple[str, ...] = ()

    def find(self, path: str) -> str:
        """The file that a path names.

        Raises:
            NoFileError: there is none, or it is elsewhere.
        """
        allowed, shown = self._allowed, repr(_shortened(path))
        if len(path) > _LONGEST_PATH:
            raise ImageError(f"{shown} is too long for a path: write base64 as {{'base64': ...}}, or as a data: URL")
        if not allowed:
            raise NoFileError(path, f"{shown}: data in memory has no directory: pass media_roots=[...]")
        for root in allowed:
            found = os.path.realpath(os.path.join(root, path))
            inside = any(os.path.commonpath([found, each]) == each for each in allowed)
            if inside and os.path.isfile(found):
                return found
        outside = os.path.realpath(os.path.join(allowed[0], path))
        if not any(os.path.commonpath([outside, each]) == each for each in allowed):
            why = f"{shown} is not below the directory of the data: pass media_roots=[...] to allow it"
            raise NoFileError(path, why)
        raise NoFileError(path, f"{shown}: there is no such file")

    @cached_property
    def _allowed(self) -> list[str]:
        return [os.path.realpath(each) for each in (self.folder, *self.roots) if each is not None]


@dataclass(frozen=True)
class Media:
    """One image of a row.

    Attributes:
        data: its bytes; None if they are in a file.
        path: that file, or the name that the data has for the bytes.
        given: how the data names the file; None if the bytes are in the data.
        state: of the file when it was opened, see `FileBytes`; None if it was not.
    """

    data: bytes | memoryview | None = None
    path: str | None = None
    given: str | None = None
    state: tuple[int, int, int, int] | None = None

    def open(self) -> memoryview | bytes | FileBytes:
        """Its bytes, which are not read yet if they are in a file.

        Raises:
            ImageError: the file cannot be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            return FileBytes(self.path)
        except OSError as error:
            raise ImageError(f"the file cannot be read ({error.strerror})") from error

    def read(self) -> memoryview | bytes:
        """Its bytes.

        Raises:
            ImageError: the file cannot be read.
        """
        return self.open()[:]


def media_of(value: Any, places: Places) -> Media:
    """The image that a value of the data means.

    Args:
        value: bytes, a path, a `data:` URL, or an object that has one of them.
        places: where files may be.

    Raises:
        ImageError: it means no image that can be read here.
    """
    try:
        return _media_of(value, places)
    except ImageError:
        raise
    except (RecursionError, TypeError, ValueError) as error:  # nested without end; of paths and URLs that are none
        raise ImageError(f"it is no reference to an image ({error!s:.80})") from None


def _media_of(value: Any, places: Places) -> Media:
    if isinstance(value, bytes | bytearray | memoryview):
        return Media(data=memoryview(value))
    if isinstance(value, str):
        return _of_text(value, places)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            if isinstance(value["bytes"], str):
                raise ImageError("its bytes are a text: write base64 as {'base64': ...}, or as a data: URL")
            return Media(data=memoryview(value["bytes"]), path=value.get("path"))
        for name in _NESTED:
            if value.get(name) is not None:
                given = f"data:;base64,{value[name]}" if name == "base64" else value[name]
                return _media_of(given, places)
        raise ImageError(f"it has neither bytes nor a path, but the fields {', '.join(map(str, value)) or 'none'}")
    if value is None:
        raise ImageError("it is null")
    raise ImageError(f"it is of type {type(value).__name__}, not bytes or a path")


def _of_text(text: str, places: Places) -> Media:
    scheme = urlsplit(text[:64]).scheme.lower() if ":" in text[:64] else ""
    if scheme == "data":
        head, comma, body = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageError("its data: URL is not base64")
        try:
            # Many encoders break lines, which `validate` rejects.
            return Media(data=memoryview(base64.b64decode("".join(body.split()), validate=True)))
        except binascii.Error as error:
            raise ImageError(f"the base64 of its data: URL is wrong ({error})") from None
    if scheme == "file":
        url = urlsplit(text)
        if url.netloc.lower() not in ("", "localhost"):
            raise ImageError(
                f"{_shown(text)!r} names the host {url.hostname!r}: write file:///path, or a path without file:"
            )
        text = url2pathname(url.path)  # which decodes %20, once
        return Media(path=places.find(text), given=text)
    if len(scheme) > 1 and "://" in text[:64]:
        raise ImageError(f"{_shown(text)!r} is a URL: URLs of images are not fetched, download them before")
    return Media(path=places.find(text), given=text)


def _shown(url: str) -> str:
    """A URL as messages show it, which may end in logs."""
    return _shortened(without_secrets(url[:_LONGEST_PATH]))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def image_name(number: int, path: str | None) -> str:
    """An image of a row in messages."""
    return f"image {number}" if path is None else f"image {number} ({path!r})"


def as_list(value: Any) -> Sequence[Any]:
    """The images of a row, of which a column may have one or several."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]
