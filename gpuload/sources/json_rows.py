"""JSON arrays and JSON lines, parsed piece by piece: the rows as Python objects, never those of a whole file."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, BinaryIO

from msgspec import Raw

from gpuload.core.errors import SourceError
from gpuload.sources.json_values import parse_json, parse_members
from gpuload.sources.types import json_text

PIECE_BYTES, _FIRST_BYTES = 1 << 22, 1 << 16
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zX": "xz"}  # by first bytes

Row = dict[str, Any]


@dataclass(frozen=True)
class JsonPiece:
    """Some consecutive rows."""

    rows: list[Row]  # whose values may be `msgspec.Raw` if `as_texts` was true: see `value_of` and `text_of`
    with_texts: Callable[[], list[Row]]  # makes the same rows with values that are texts, as far as they are known
    start: int = 0  # where their lines begin in the file
    nbytes: int = 0  # of their lines; 0 for a piece of an array
    numbers: Callable[[], list[int]] = list[int]  # finds the numbers of their lines


class UnclearError(Exception):
    """An array that must be parsed as a whole: it is not valid, or not in UTF-8."""


def pieces_of(name: str, blocks: Iterator[bytes], whole: bool, as_texts: Callable[[], bool]) -> Iterator[JsonPiece]:
    """The rows of a file, in order.

    Args:
        name: of the file, for messages.
        blocks: its bytes.
        whole: parse an array as a whole.
        as_texts: whether the values of the next piece are needed as texts, so that they need not be parsed.

    Raises:
        SourceError: it is not JSON, or not UTF-8; or, after the last piece, a row is not an object.
        RecursionError: it is nested too deeply.
        UnclearError: it is an array for which `whole` is needed.
    """
    head = next(blocks, b"")
    while (len(head) < 4 or not head.strip()) and (block := next(blocks, b"")):  # what the first bytes are decides
        head += block
    for beginning, program in _COMPRESSED.items():
        if head.startswith(beginning):
            raise SourceError(f"{name}: the file is compressed with {program}: decompress it")
    start = len(head) - len(head := head.removeprefix(codecs.BOM_UTF8))
    is_array = head.lstrip()[:1] == b"["
    if not is_array and not (encoding := json.detect_encoding(head[:4])[:6].upper()).startswith("UTF-8"):
        raise SourceError(
            f"{name}: the file is {encoding} text, and JSON is read as UTF-8: convert it with "
            f"iconv -f {encoding} -t UTF-8"
        )
    found = _arrays(name, head, blocks, whole) if is_array else _lines(name, chain([head], blocks), start, as_texts)
    odd, count = "", 0
    for piece in found:
        number = next((at for at, row in enumerate(piece.rows) if type(row) is not dict), None)
        if number is not None and not odd:
            place = f"item {count + number}" if is_array else f"line {piece.numbers()[number]}"
            odd = f"{name}, {place}: expected an object with the row's columns, not {piece.rows[number]!r:.60}"
        count += len(piece.rows)
        if not odd:
            yield piece
    if odd:
        raise SourceError(odd)


def _lines(name: str, blocks: Iterable[bytes], start: int, as_texts: Callable[[], bool]) -> Iterator[JsonPiece]:
    number, waiting = 1, list[bytes]()
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        waiting.append(block[:cut])
        if cut:
            lines, waiting = b"".join(waiting), []
            yield _piece(name, lines, start, number, as_texts())
            start, number = start + len(lines), number + lines.count(b"\n")
        waiting.append(block[cut:])
    yield _piece(name, b"".join(waiting), start, number, as_texts())


def _piece(name: str, lines: bytes, start: int, number: int, as_texts: bool) -> JsonPiece:
    def numbers() -> list[int]:
        return [at for at, line in enumerate(lines.split(b"\n"), number) if line.strip()]

    with_texts = cache(partial(rows_of, name, lines, number, as_texts=True))
    rows = with_texts() if as_texts else rows_of(name, lines, number)
    return JsonPiece(rows, with_texts, start, len(lines), numbers)


def rows_of(name: str, lines: bytes, number: int, as_texts: bool = False) -> list[Row]:
    """The values of all lines (UTF-8) that are not blank; a `SourceError` if one is not valid JSON. `name` and `number`
    are those of the file and of the first line, for messages; values of rows may be `msgspec.Raw` if `as_texts` is
    true."""
    parse: Callable[[bytes], Any] = parse_json
    if as_texts:
        parse = parse_members if _is_utf8(lines) and not _has_long_number(lines) else json.loads
    rows = []
    for at, line in enumerate(lines.split(b"\n"), number):
        if line and not line.isspace():
            try:
                rows.append(parse(line))
            except ValueError as error:
                raise SourceError(f"{name}, line {at}: not valid JSON: {error}") from error
            except RecursionError as error:
                raise SourceError(f"{name}, line {at}: JSON that is nested too deeply: flatten it") from error
    return rows


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _has_long_number(text: bytes) -> bool:
    """Whether there may be an integer that Python does not convert: of 640 digits, the lowest limit that can be set. It
    would fill one of these windows."""
    return any(text[at : at + 320].isdigit() for at in range(0, len(text), 320))


def value_of(value: Any) -> Any:
    """A value of a row, parsed."""
    return parse_json(bytes(value)) if type(value) is Raw else value


def text_of(value: Any) -> str | None:
    """A value of a row as JSON text, as it is in the file if that is known; None for null."""
    if type(value) is Raw:
        text = bytes(value).decode()
        return None if text == "null" else text
    return None if value is None else json_text(value)


def _arrays(name: str, head: bytes, blocks: Iterator[bytes], whole: bool) -> Iterator[JsonPiece]:
    if whole:
        try:
            parts: Iterable[list[Any]] = [json.loads(b"".join([head, *blocks]))]
        except ValueError as error:
            raise SourceError(f"{name}: not valid JSON: {error}") from error
    else:
        parts = _items(head, blocks)
    for items in parts:
        yield JsonPiece(items, partial(list[Row], items))


def _items(head: bytes, blocks: Iterator[bytes]) -> Iterator[list[Any]]:
    """The items of an array, those of some blocks at a time; an `UnclearError` if it is not valid, or not in UTF-8."""
    if json.detect_encoding(head) != "utf-8":
        raise UnclearError
    text, waiting, found = "", [head.lstrip()[1:]], 0
    try:
        for block in blocks:
            waiting.append(block)
            if sum(map(len, waiting)) < len(text):  # an item of many blocks is not begun again with each of them
                continue
            known = b"".join(waiting)
            cut = known.rfind(b",") + 1  # not inside of a character
            text, waiting = text + known[:cut].decode("utf-8", "surrogatepass"), [known[cut:]]
            items, at = _whole_items(text)
            text, found = text[at:], found + len(items)
            yield items
        rest = json.loads("[" + text + b"".join(waiting).decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise UnclearError from error
    if found and not rest:  # a comma in front of the end
        raise UnclearError
    yield rest


def _whole_items(text: str) -> tuple[list[Any], int]:
    """The items at the beginning of a text that have a comma behind them, and the place behind the last comma."""
    items, at = [], 0
    try:
        while True:
            value, end = _scan(text, _behind(text, at))
            end = _behind(text, end)
            if text[end : end + 1] != ",":
                break
            items.append(value)
            at = end + 1
    except (ValueError, StopIteration):  # the item goes on in the next block, or is not valid
        pass
    return items, at


# As `json.loads` is built of them: text and the place of a value → the value, and the place behind it.
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
_space = re.compile(r"[ \t\n\r]*").match


def _behind(text: str, at: int) -> int:
    """The next place without white space."""
    if text[at : at + 1] > " ":
        return at
    found = _space(text, at)
    assert found is not None
    return found.end()


def read_blocks(raw: BinaryIO, digest: Any) -> Iterator[bytes]:
    """The bytes of a file, which a digest gets, too. The first block is small: of which types columns are is not known
    there, so its rows may be parsed twice."""
    size = min(_FIRST_BYTES, PIECE_BYTES)
    while block := raw.read(size):
        digest.update(block)
        yield block
        size = PIECE_BYTES
