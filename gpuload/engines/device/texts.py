"""Columns of text as kernels see them: bytes, starts and lengths, on NumPy or CuPy alike.

The operations and questions of a compiled template (`template/program.py`) that only move a text's bounds. The others
(`replace`, a change of case) make new bytes by Python's own rules: rows that need them take the reference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuload.arrays import Array, offsets_of, on_host
from gpuload.engines.device.kernels import Kernels
from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate

BOUNDS_ONLY = frozenset(
    "strip lstrip rstrip removeprefix removesuffix before after before_last after_last".split(),
)
"""The operations that `operate` knows."""


@dataclass(frozen=True, eq=False)
class TextColumn:
    """n texts: text i is `data[start[i] : start[i] + length[i]]`.

    Attributes:
        data: uint8, the bytes of all texts and maybe others.
        start, length: (n,) int64.
    """

    data: Array
    start: Array
    length: Array

    def __len__(self) -> int:
        return len(self.start)


def texts_at(kernels: Kernels, texts: TextColumn, numbers: Sequence[int]) -> list[bytes]:
    """Some texts, copied to the host in one piece."""
    xp = kernels.xp
    at = xp.asarray(np.asarray(numbers, np.int64))
    length = texts.length[at]
    offsets, data = copied(kernels, kernels.address(texts.data) + texts.start[at], length)
    bounds, joined = on_host(offsets).tolist(), on_host(data).tobytes()
    return [joined[bounds[i] : bounds[i + 1]] for i in range(len(numbers))]


def copied(kernels: Kernels, address: Array, length: Array) -> tuple[Array, Array]:
    """Pieces from anywhere in the machine's memory, one after the other.

    Args:
        address: (n,) int64, where each piece begins; the caller keeps what lies there alive.
        length: (n,) int64, bytes.

    Returns:
        offsets (n + 1,) int64, and the bytes, uint8.
    """
    offsets = offsets_of(length)
    size = int(offsets[-1])
    data = kernels.xp.empty(size, np.uint8)
    kernels.run("copy_pieces", kernels.threads(-(-size // 16)), len(length), address, offsets, 0, size, data)
    return offsets, data


def laid_out(kernels: Kernels, texts: Iterable[bytes]) -> TextColumn:
    """Texts of the host in a buffer of their own, copied over in one piece."""
    pieces = list(texts)
    length = np.array([len(piece) for piece in pieces], np.int64)
    data = np.frombuffer(b"".join(pieces), np.uint8)
    xp = kernels.xp
    return TextColumn(xp.asarray(data), xp.asarray(np.cumsum(length) - length), xp.asarray(length))


def operate(kernels: Kernels, texts: TextColumn, operation: Operation) -> TextColumn:
    """Every text after one of the operations in `BOUNDS_ONLY`; no bytes are copied."""
    xp, name, arguments = kernels.xp, operation.name, operation.arguments
    if name in ("strip", "lstrip", "rstrip"):
        start, length = texts.start.copy(), texts.length.copy()
        single, codes = _characters(arguments[0] if arguments else WHITE_SPACE)
        kernels.run(
            "strip", kernels.threads(len(texts)), len(texts), texts.data, start, length, xp.asarray(single),
            len(codes), xp.asarray(codes), name != "rstrip", name != "lstrip",
        )  # fmt: skip
        return TextColumn(texts.data, start, length)

    mark = arguments[0].encode()
    start, end = texts.start, texts.start + texts.length
    if name in ("removeprefix", "removesuffix"):
        hit = _has_affix(kernels, texts, mark, at_end=name == "removesuffix")
        at = start if name == "removeprefix" else end - len(mark)
    elif name in BOUNDS_ONLY:
        hit, at = _find(kernels, texts, mark, last=name.endswith("_last"))
    else:
        raise ValueError(f"unknown operation {name!r}")
    if name in ("before", "before_last", "removesuffix"):
        end = xp.where(hit, at, end)
    else:
        start = xp.where(hit, at + len(mark), start)
    return TextColumn(texts.data, start, end - start)


def answer(kernels: Kernels, texts: TextColumn, predicate: Predicate) -> Array:
    """(n,) bool, the answer to `predicate`'s test for every text (its operations are already applied)."""
    value, test = predicate.value.encode("utf-8", "surrogatepass"), predicate.test
    if test == "empty" or not value:
        return texts.length == 0 if test in ("empty", "equals") else kernels.xp.ones(len(texts), bool)
    if test == "contains":
        return _find(kernels, texts, value)[0]
    if test in ("startswith", "endswith", "equals"):
        return _has_affix(kernels, texts, value, at_end=test == "endswith", whole=test == "equals")
    raise ValueError(f"unknown test {test!r}")


def not_utf8(kernels: Kernels, texts: TextColumn) -> Array:
    """(n,) bool, true where a text is not UTF-8."""
    bad = kernels.xp.zeros(len(texts), bool)
    kernels.run("not_utf8", kernels.warps(len(texts)), len(texts), texts.data, texts.start, texts.length, bad)
    return bad


def not_ascii(kernels: Kernels, texts: TextColumn) -> Array:
    """(n,) bool, true where a text has a character beyond ASCII."""
    wide = kernels.xp.zeros(len(texts), bool)
    kernels.run("not_ascii", kernels.warps(len(texts)), len(texts), texts.data, texts.start, texts.length, wide)
    return wide


def distinct(kernels: Kernels, texts: TextColumn) -> tuple[Array, Array, Array]:
    """Groups of equal texts, for columns of few and short ones.

    Returns:
        example: (g,) int64, the number of one text of each group.
        group: (n,) int64, the group of each text.
        strays: (n,) bool, true for texts that are in the wrong group, because two that differ have one hash.
    """
    xp, n = kernels.xp, len(texts)
    hash_, same = xp.empty(n, np.int64), xp.empty(n, bool)
    kernels.run("hash_texts", kernels.threads(n), n, texts.data, texts.start, texts.length, hash_)
    _, example, group = xp.unique(hash_, return_index=True, return_inverse=True)
    example, group = example.astype(np.int64, copy=False), group.astype(np.int64, copy=False)
    kernels.run(
        "same_texts", kernels.threads(n), n, texts.data, texts.start, texts.length, example[group], same
    )  # fmt: skip
    return example, group, ~same


def _find(kernels: Kernels, texts: TextColumn, needle: bytes, last: bool = False) -> tuple[Array, Array]:
    """Which texts contain `needle`, and the position of its first (or last) occurrence in those."""
    xp = kernels.xp
    missing = -1 if last else np.iinfo(np.int64).max
    place = xp.full(len(texts), missing, np.int64)
    kernels.run(
        "find", kernels.warps(len(texts)), len(texts), texts.data, texts.start, texts.length, _bytes(kernels, needle),
        len(needle), last, place,
    )  # fmt: skip
    return place != missing, place


def _has_affix(kernels: Kernels, texts: TextColumn, affix: bytes, at_end: bool, whole: bool = False) -> Array:
    answers = kernels.xp.empty(len(texts), bool)
    kernels.run(
        "has_affix", kernels.threads(len(texts)), len(texts), texts.data, texts.start, texts.length,
        _bytes(kernels, affix), len(affix), at_end, whole, answers,
    )  # fmt: skip
    return answers


def _bytes(kernels: Kernels, text: bytes) -> Array:
    return kernels.xp.asarray(np.frombuffer(text, np.uint8))


def _characters(characters: str) -> tuple[Array, Array]:
    """A table of the characters of one byte, and those of more bytes as ascending big-endian numbers."""
    single, codes = np.zeros(128, bool), set()
    for character in characters:
        code = character.encode("utf-8", "surrogatepass")
        if len(code) == 1:
            single[code[0]] = True
        else:
            codes.add(int.from_bytes(code, "big"))
    return single, np.array(sorted(codes), np.int64)
