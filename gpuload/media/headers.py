"""The size of an image from its header, as Pillow finds it: nothing is decoded.

Pillow's own parsers are used, because the processor decodes with them: other libraries disagree about rotated, broken
and unusual files. Traps that this module knows: Pillow decodes a PNG to look for its orientation, only warns of images
that would take gigabytes, and reads the header of a file that ends in the middle.
"""

import io
import os
import struct
import warnings
import zlib
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from gpuload.media import MOST_PIXELS, CheckMedia
from gpuload.media.jpeg import known_size, learn

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO", "DIB")
# Pillow's modules that read them.
_PLUGINS = ("Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff", "Ppm", "Jpeg2K", "Avif", "Tga", "Ico")
_BEGINNING = 1 << 13  # bytes that most headers fit into
_BY_BEGINNING = ("JPEG", "PNG", "BMP", "GIF")  # whose header is at the beginning
_BLOCK = 1 << 12
_MOST_BYTES_OF_A_PIXEL, _MOST_METADATA = 8, 1 << 26  # of a file: nothing is read of one that is larger
_ORIENTATION = 0x0112
_TEXT_CHUNKS = (b"iTXt", b"zTXt", b"tEXt")  # of a PNG: a name, a zero, and a text
_TURNING = (b"Raw profile type exif", b"XML:com.adobe.xmp", b"exif", b"xmp")  # of texts that may have an orientation
_SIZED = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # whose decoded size is that of the header, but for an orientation


class ImageError(ValueError):
    """Why an image cannot be used."""


class Header(NamedTuple):
    """What the header of an image says.

    Attributes:
        height, width: in pixels, of the image as it is decoded.
        format: as Pillow names it.
    """

    height: int
    width: int
    format: str


def read_header(
    data: Any, transpose: bool = True, most_pixels: int = MOST_PIXELS, check: CheckMedia = "tail"
) -> Header:
    """The size of an encoded image.

    Args:
        data: the bytes of its file, a view of them, or `FileBytes`, of which as few are read as possible.
        transpose: whether it will be turned as its EXIF orientation says.
        most_pixels: of an image that is not refused.
        check: "header" for its header only; "tail" to look for the mark at the end of the file, too, and decode images
            without it; "decode" to decode all.

    Raises:
        ImageError: it is no image, of a format that is not read, too large or damaged.
    """
    view = data if isinstance(data, FileBytes) else memoryview(data).cast("B")  # Arrow's are of signed bytes
    if not len(view):
        raise ImageError("it is empty")
    if len(view) > most_pixels * _MOST_BYTES_OF_A_PIXEL + _MOST_METADATA:
        raise ImageError(f"it has {len(view):,} bytes, more than an image of max_image_pixels={most_pixels:,} can have")
    beginning = view[:_BEGINNING]
    known = _known_jpeg(beginning, most_pixels)
    if known is not None:
        found, turned = known
        turned &= transpose
    else:
        found, turned = _read(view, beginning, transpose, most_pixels)
    if check == "decode" or found.format not in _SIZED or (check == "tail" and not _has_end(found.format, view)):
        try:
            decoded = decode(view, transpose)
        except ImageError as error:
            raise ImageError(f"{found.format} of {found.height} x {found.width} pixels: {error}") from error
        return Header(decoded.height, decoded.width, found.format)
    return Header(found.width, found.height, found.format) if turned else found


class FileBytes:
    """The bytes of a file, which are read when they are asked for.

    Args:
        path: of the file.

    Attributes:
        state: see `state_of`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str):
        # What was looked up is no link and no pipe; if it is one now, somebody has replaced it.
        more = os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | more))  # noqa: SIM115
        about = os.fstat(self._file.fileno())
        self._size, self.state = about.st_size, state_of(about)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        try:
            return os.pread(self._file.fileno(), max(0, stop - start), start)
        except OSError as error:
            raise ImageError(f"the file cannot be read ({error.strerror})") from error


def state_of(about: os.stat_result) -> tuple[int, int, int, int]:
    """The bytes of a file, its inode, and when its content and anything else of it was last changed, in ns.

    Files that were written one after the other may have the same times: the clock of a file system ticks some hundred
    times a second.
    """
    return about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns


def sample_of(view: Any) -> int:
    """A checksum of the beginning, the middle and the end of a file."""
    middle = len(view) // 2
    blocks = (view[:_BLOCK], view[middle : middle + _BLOCK], view[max(0, len(view) - _BLOCK) :])
    return zlib.crc32(b"".join(map(bytes, blocks)), len(view) & 0xFFFFFFFF)


def decode(data: Any, transpose: bool = True) -> Any:
    """An image as the processor gets it: a `PIL.Image.Image`, RGB.

    Args:
        data, transpose: as for `read_header`.

    Raises:
        ImageError: it cannot be decoded.
    """
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _parsed(data)
            if transpose:
                ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")  # a copy in any case, which is independent of the file
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"it cannot be decoded ({error!s:.120})") from error


def _known_jpeg(beginning: Any, most_pixels: int) -> tuple[Header, bool] | None:
    """What Pillow would find in a header, and whether height and width are to be exchanged, if that is known without
    it; not of what may be refused."""
    from PIL import Image

    known = known_size(beginning)
    if known is None:
        return None
    height, width, turned = known
    most = most_pixels if Image.MAX_IMAGE_PIXELS is None else min(most_pixels, Image.MAX_IMAGE_PIXELS)
    return (Header(height, width, "JPEG"), turned) if 0 < height * width <= most else None


def _read(view: Any, beginning: Any, transpose: bool, most_pixels: int) -> tuple[Header, bool]:
    """What Pillow finds in a header, and whether height and width are to be exchanged."""
    image, whole = _open(view, beginning, most_pixels)
    found = Header(image.height, image.width, str(image.format))
    if found.format == "JPEG":
        turned = transpose and _is_turned(image)
        if transpose:
            learn(beginning, found[:2], turned)
        return found, turned
    if not transpose or found.format in ("GIF", "BMP"):
        return found, False
    return found, _is_png_turned(view) if found.format == "PNG" else _is_turned(image if whole else _parsed(view))


def _open(view: Any, beginning: Any, most_pixels: int) -> tuple[Any, bool]:
    """The image with its header read, and whether it has all of the file. Refuses what is too large."""
    image, whole = None, len(view) <= _BEGINNING
    if not whole:
        try:
            image = _parsed(beginning)
        except ImageError:
            image = None
        if image is not None and image.format not in _BY_BEGINNING:
            image = None
    if image is None:
        image, whole = _parsed(view), True
    width, height = image.size
    if width * height > most_pixels:
        raise ImageError(
            f"it has {width:,} x {height:,} pixels, more than max_image_pixels={most_pixels:,}: a decompression bomb?"
        )
    if not width * height:
        raise ImageError(f"it has {width} x {height} pixels")
    return image, whole


def _parsed(view: Any) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images: there is a limit of our own
            return Image.open(io.BytesIO(view[:]), formats=formats())
    except Image.DecompressionBombError as error:
        raise ImageError(f"Pillow refuses it: {error!s:.160}") from None
    except UnidentifiedImageError:
        known = ", ".join(formats())
        raise ImageError(f"it is no image of a known format, {known} (it begins with {bytes(view[:8])!r})") from None
    except Exception as error:
        raise ImageError(f"its header cannot be read ({error!s:.120})") from error


@cache
def formats() -> tuple[str, ...]:
    """The raster formats that this Pillow reads. Others, such as EPS, would start programs."""
    from PIL import Image

    for name in _PLUGINS:  # not all others, which take longer to import
        with suppress(ImportError):
            import_module(f"PIL.{name}ImagePlugin")
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _is_png_turned(view: Any) -> bool:
    """Whether height and width of a PNG are exchanged. Pillow decodes it to find that out, because it may say so behind
    its pixels; here only such a file is decoded."""
    pixels, last = None, None
    for kind, at, size in _png_chunks(view):
        if kind == b"IDAT" and pixels is None:
            pixels = at
        name = bytes(view[at + 8 : at + 8 + min(32, size)]).partition(b"\0")[0] if kind in _TEXT_CHUNKS else b""
        if kind == b"eXIf" or name in _TURNING:
            last = at
    if last is None:
        return False
    if pixels is None or last > pixels:
        return _is_turned(_parsed(view), whole=True)
    return _is_turned(_parsed(view[: pixels + 8]), whole=False)


def _is_turned(image: Any, whole: bool | None = None) -> bool:
    """Whether height and width are exchanged.

    Args:
        whole: of a PNG: whether to decode it first.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if whole:
                image.load()
            found = image.getexif() if whole is None else Image.Image.getexif(image)
            return found.get(_ORIENTATION) in (5, 6, 7, 8)
    except Exception as error:
        raise ImageError(f"its orientation cannot be read ({error!s:.120})") from error


def _png_chunks(view: Any) -> list[tuple[bytes, int, int]]:
    """The types of all chunks of a PNG, as far as it is one, where they begin, and how many bytes their data has."""
    found, at = [], 8
    while at + 8 <= len(view):
        size, kind = struct.unpack(">I4s", view[at : at + 8])
        found.append((kind, at, size))
        at += 12 + size
    return found


def _has_end(name: str, view: Any) -> bool:
    """Whether a file ends as its format does."""
    if name == "JPEG":
        return bytes(view[-2:]) == b"\xff\xd9"
    if name == "PNG":
        return bytes(view[-8:-4]) == b"IEND"
    if name == "WEBP":
        return int.from_bytes(view[4:8], "little") + 8 == len(view)
    if name == "GIF":
        return bytes(view[-1:]) == b";"
    return False
