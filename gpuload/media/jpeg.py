"""Headers of JPEGs that are those of one that Pillow has read, but for height and width.

Images of a dataset are often written by the same program with the same settings. Pillow reads a header up to the first
scan, and the bytes of height and width decide nothing else in it. So it need not read the same bytes again.
"""

from collections.abc import Iterator
from typing import Any

_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # segments that have height and width
_SEGMENTS = frozenset({*range(0xC0, 0xF0), 0xFE} - {0xC8, *range(0xD0, 0xDA), 0xDE})  # that have a length; not DHP
_SCAN = 0xDA
_DIRECTORY = b"MPF\0"  # of files with several images
_MOST_FORMS, _MOST_HEADERS = 8, 1 << 8  # 16 MiB at most

_Form = tuple[int, int, bytes]
"""Where height and width begin, where the header ends, and the five bytes of the segment before height and width."""

_known: dict[_Form, dict[bytes, bool]] = {}  # → headers without height and width → whether such images are turned


def known_size(beginning: Any) -> tuple[int, int, bool] | None:
    """Height and width of a JPEG, and whether it is turned, if another one with this header was learned.

    Args:
        beginning: the first bytes of its file.
    """
    for (at, end, segment), headers in list(_known.items()):
        if beginning[at - 5 : at] == segment:
            turned = headers.get(bytes(beginning[:at]) + bytes(beginning[at + 4 : end]))
            if turned is not None:
                return int.from_bytes(beginning[at : at + 2]), int.from_bytes(beginning[at + 2 : at + 4]), turned
    return None


def learn(beginning: Any, size: tuple[int, int], turned: bool) -> None:
    """Remembers a header that Pillow has read, if it is of the usual form.

    Args:
        beginning: the first bytes of the file.
        size: height and width that Pillow has found in it.
        turned: whether it says that they are to be exchanged.
    """
    header = bytes(beginning)
    frames, end = [], 0
    for kind, at, after in _segments(header):
        frames += [at + 5] if kind in _FRAMES else []
        end = after if kind == _SCAN else 0
    if len(frames) != 1 or not end or _DIRECTORY in header[:end]:
        return
    (at,) = frames
    if (int.from_bytes(header[at : at + 2]), int.from_bytes(header[at + 2 : at + 4])) != size:
        return
    headers = _kept(_known, (at, end, header[at - 5 : at]), {}, _MOST_FORMS)
    _kept(headers, header[:at] + header[at + 4 : end], turned, _MOST_HEADERS)


def _kept(known: dict[Any, Any], key: Any, value: Any, most: int) -> Any:
    """What is known of a key: this value, if it is new, in the place of the oldest one if there are too many."""
    if key not in known:
        for oldest in list(known)[: len(known) + 1 - most]:
            known.pop(oldest, None)  # another thread may have done so
    return known.setdefault(key, value)


def _segments(header: bytes) -> Iterator[tuple[int, int, int]]:
    """The segments of a header up to the first scan, as far as it has nothing else: their types, where they begin and
    where they end."""
    at = 2
    while at + 4 <= len(header) and header[at] == 0xFF and header[at + 1] in _SEGMENTS:
        kind, after = header[at + 1], at + 2 + int.from_bytes(header[at + 2 : at + 4])
        if after > len(header) or (kind in _FRAMES and after < at + 9):
            return
        yield kind, at, after
        if kind == _SCAN:
            return
        at = after
