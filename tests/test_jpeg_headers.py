"""Headers of JPEGs that are known from others: what Pillow finds in them, and nothing that it would refuse."""

import io
from typing import Any

import pyarrow as pa
import pytest
from image_cases import XMP, encoded, exif, picture
from PIL import Image, ImageOps

from gpuload.media import headers, jpeg
from gpuload.media.headers import ImageError, read_header

FORMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "turned": {"exif": exif(6)},
    "turned by XMP": {"xmp": XMP},
    "profile": {"icc_profile": bytes(range(256)) * 8},
    "comment": {"comment": b"\xff\xda\xff\xc0" * 9},
    "restarts": {"restart_marker_blocks": 4},
}


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_known", {})


def arrow(data: bytes) -> memoryview:
    """A view as columns have it: of signed bytes."""
    return memoryview(pa.py_buffer(data))


def decoded(data: bytes, transpose: bool) -> tuple[int, int, str]:
    image: Image.Image = Image.open(io.BytesIO(data))
    image = ImageOps.exif_transpose(image) if transpose else image
    return image.height, image.width, "JPEG"


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("form", FORMS)
def test_a_known_header_is_not_parsed_again(form: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [encoded(picture(width, 90, mode), "JPEG", **FORMS[form]) for width in (61, 300, 90)]
    assert read_header(arrow(files[0])) == decoded(files[0], True)
    monkeypatch.setattr(headers, "_parsed", None)
    for data in files:
        for transpose in (True, False):
            assert read_header(arrow(data), transpose) == decoded(data, transpose)


def outcome(data: bytes, **options: Any) -> Any:
    try:
        return read_header(data, check="header", **options)
    except ImageError as error:
        return str(error)


@pytest.mark.parametrize("form", ["baseline", "turned"])
def test_any_other_byte_of_a_header_makes_it_another(form: str) -> None:
    data = encoded(picture(61, 90), "JPEG", **FORMS[form])
    read_header(data)
    (known,) = jpeg._known
    for at in range(known[1]):
        changed = bytearray(data)
        changed[at] ^= 0x13
        found = outcome(bytes(changed))
        jpeg._known.clear()
        assert found == outcome(bytes(changed)), at
        jpeg._known.clear()
        read_header(data)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (65500, 65500), (12000, 12000), (7, 65500)])
def test_sizes_that_are_refused_are_refused_with_a_known_header(size: tuple[int, int]) -> None:
    data = bytearray(encoded(picture(61, 90), "JPEG"))
    wanted = outcome(bytes(data))
    ((at, *_),) = jpeg._known
    data[at : at + 4] = size[0].to_bytes(2) + size[1].to_bytes(2)
    for options in ({}, {"most_pixels": 1 << 40}, {"most_pixels": 100}):
        found = outcome(bytes(data), **options)
        jpeg._known.clear()
        assert found == outcome(bytes(data), **options)
        assert outcome(encoded(picture(61, 90), "JPEG")) == wanted


def test_truncated_files_with_a_known_header_are_found() -> None:
    data = encoded(picture(300, 200), "JPEG")
    read_header(data)
    for end in (4, 100, 300, 700, len(data) // 2, len(data) - 1):
        with pytest.raises(ImageError):
            read_header(data[:end])


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_MOST_FORMS", 2)
    monkeypatch.setattr(jpeg, "_MOST_HEADERS", 3)
    files = [encoded(picture(20, 30), "JPEG", comment=b"x" * size, quality=q) for size in range(4) for q in (5, 50, 95)]
    files += [encoded(picture(20, 30), "JPEG", quality=q) for q in range(60, 70)]
    for data in files * 2:
        assert read_header(data) == (30, 20, "JPEG")
    assert len(jpeg._known) == 2
    assert max(map(len, jpeg._known.values())) == 3


def test_new_headers_take_the_places_of_the_oldest() -> None:
    for size in range(1, 12):
        read_header(encoded(picture(20, 30), "JPEG", comment=b"x" * size))
    read_header(encoded(picture(20, 30), "JPEG"))
    assert jpeg.known_size(encoded(picture(50, 40), "JPEG")) == (40, 50, False)
    assert jpeg.known_size(encoded(picture(50, 40), "JPEG", comment=b"x" * 11)) == (40, 50, False)
    assert jpeg.known_size(encoded(picture(50, 40), "JPEG", comment=b"x")) is None


def test_headers_with_the_size_of_a_whole_of_several_frames_are_not_remembered() -> None:
    """Pillow takes it for the size of the image."""
    data = encoded(picture(40, 30), "JPEG")
    scan, whole = data.index(b"\xff\xda"), b"\xff\xde\0\x11\x08\0\x1e\0\x28\3\1\x11\0\2\x11\1\3\x11\1"
    first = data[:scan] + whole + data[scan:]
    assert read_header(first, check="header")[:2] == (30, 40)
    at = first.index(b"\xff\xc0") + 5
    other = first[:at] + b"\0\x32\0\x3c" + first[at + 4 :]
    assert read_header(other, check="header")[:2] == Image.open(io.BytesIO(other)).size[::-1] == (30, 40)


def test_files_with_several_images_are_not_remembered() -> None:
    data = encoded(picture(90, 61), "MPO", save_all=True, append_images=[picture(90, 61)])
    assert read_header(data) == (61, 90, "MPO")
    assert not jpeg._known
