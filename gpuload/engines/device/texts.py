"""Operations on columns of text by kernels: `protocol.TextOperations` of a device.

Only operations that move the bounds of a text run here. `replace` and changes of case make new bytes by Python's own
rules: rows that need them are rendered by transformers.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, offsets_of, on_host
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.protocol import TextColumn
from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate

BOUNDS_ONLY = frozenset("strip lstrip rstrip removeprefix removesuffix before after before_last after_last".split())
"""The operations that `DeviceTexts.operate` supports."""

_PART = 1 << 16  # bytes of a text that one warp searches


class DeviceTexts:
    """Operations on texts in device memory."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.xp = kernels, kernels.xp

    def current(self) -> AbstractContextManager[Any]:
        return self.kernels.current()

    def bytes_at(self, texts: TextColumn, numbers: Sequence[int]) -> list[bytes]:
        """Some of the texts, copied to the host in one transfer."""
        at = self.xp.asarray(np.asarray(numbers, np.int64))
        length = texts.length[at]
        offsets, data = gather(self.kernels, self.kernels.address(texts.data) + texts.start[at], length)
        bounds, joined = on_host(offsets).tolist(), on_host(data).tobytes()
        return [joined[bounds[i] : bounds[i + 1]] for i in range(len(numbers))]

    @staticmethod
    def unsupported(operation: Operation) -> str | None:
        return None if operation.name in BOUNDS_ONLY else f"{operation.name} is not supported on the device"

    def operate(self, texts: TextColumn, operation: Operation) -> TextColumn:
        xp, name, arguments = self.xp, operation.name, operation.arguments
        if name in ("strip", "lstrip", "rstrip"):
            start, length = texts.start.copy(), texts.length.copy()
            single, codes = _characters(arguments[0] if arguments else WHITE_SPACE)
            self._run(
                "strip", len(texts), texts.data, start, length, xp.asarray(single), len(codes), xp.asarray(codes),
                name != "rstrip", name != "lstrip",
            )  # fmt: skip
            return TextColumn(texts.data, start, length)

        mark = arguments[0].encode()
        start, end = texts.start, texts.start + texts.length
        if name in ("removeprefix", "removesuffix"):
            hit = self._has_affix(texts, mark, at_end=name == "removesuffix")
            at = start if name == "removeprefix" else end - len(mark)
        else:  # a cut
            hit, at = self.find(texts, mark, last=name.endswith("_last"))
        if name in ("before", "before_last", "removesuffix"):
            end = xp.where(hit, at, end)
        else:
            start = xp.where(hit, at + len(mark), start)
        return TextColumn(texts.data, start, end - start)

    def answer(self, texts: TextColumn, predicate: Predicate) -> Array:
        value, test = predicate.value.encode("utf-8", "surrogatepass"), predicate.test
        if test == "empty" or not value:
            return texts.length == 0 if test in ("empty", "equals") else self.xp.ones(len(texts), bool)
        if test == "contains":
            return self.find(texts, value)[0]
        return self._has_affix(texts, value, at_end=test == "endswith", whole=test == "equals")

    def contains_any(self, texts: TextColumn, needles: Sequence[str]) -> Array:
        found = self.xp.zeros(len(texts), bool)
        if raw := [needle.encode() for needle in needles]:
            begins, bounds = np.zeros(256, bool), offsets_of(np.array([len(one) for one in raw]))
            begins[[one[0] for one in raw]] = True
            given = self.xp.asarray(begins), len(raw), self.xp.asarray(bounds), self._bytes(b"".join(raw))
            self._run_parts("contains_any", texts, *given, found)
        return found

    def not_utf8(self, texts: TextColumn) -> Array:
        """(n,) bool from a kernel that sets a flag and never clears one."""
        flags = self.xp.zeros(len(texts), bool)
        self._run_parts("not_utf8", texts, flags)
        return flags

    def distinct(self, texts: TextColumn) -> tuple[Array, Array, Array]:
        xp, n = self.xp, len(texts)
        hashes, same = xp.empty(n, np.int64), xp.empty(n, bool)
        self._run("hash_texts", n, texts.data, texts.start, texts.length, hashes)
        _, example, group = xp.unique(hashes, return_index=True, return_inverse=True)
        example, group = example.astype(np.int64, copy=False), group.astype(np.int64, copy=False)
        self._run("same_texts", n, texts.data, texts.start, texts.length, example[group], same)
        return example, group, ~same

    def shape_hashes(self, first: Array, count: Array, code: Array) -> Array:
        hashes = self.xp.empty(len(first), np.int64)
        self._run("hash_shapes", len(first), first, count, code, hashes)
        return hashes

    def same_shapes(self, first: Array, count: Array, code: Array, example: Array) -> Array:
        same = self.xp.empty(len(first), bool)
        self._run("same_shapes", len(first), first, count, code, example, same)
        return same

    def _run(self, name: str, items: int, *arguments: Any) -> None:
        """A kernel with one thread per item."""
        self.kernels.run(name, self.kernels.threads(items), items, *arguments)

    def _run_parts(self, name: str, texts: TextColumn, *arguments: Any) -> None:
        """A kernel with one warp for each part of each text, see strings.cu."""
        first = offsets_of(self.xp.maximum(1, -(-texts.length // _PART)))
        parts = int(first[-1])
        self.kernels.run(
            name, self.kernels.warps(parts), parts, _PART, first, len(texts), texts.data, texts.start, texts.length,
            *arguments,
        )  # fmt: skip

    def find(self, texts: TextColumn, literal: bytes, last: bool = False) -> tuple[Array, Array]:
        """Which texts contain a literal, and where in `texts.data` its first (or last) occurrence in those is."""
        # Lanes and parts race with atomicMin or atomicMax: the initial value is the identity of that operation.
        missing = -1 if last else np.iinfo(np.int64).max
        place = self.xp.full(len(texts), missing, np.int64)
        self._run_parts("find", texts, self._bytes(literal), len(literal), last, place)
        return place != missing, place

    def _has_affix(self, texts: TextColumn, affix: bytes, at_end: bool, whole: bool = False) -> Array:
        answers = self.xp.empty(len(texts), bool)
        self._run(
            "has_affix", len(texts), texts.data, texts.start, texts.length, self._bytes(affix), len(affix), at_end,
            whole, answers,
        )  # fmt: skip
        return answers

    def _bytes(self, text: bytes) -> Array:
        return self.xp.asarray(np.frombuffer(text, np.uint8))


def gather(kernels: Kernels, address: Array, length: Array) -> tuple[Array, Array]:
    """Copies slices from anywhere in memory that the device can read, one after the other.

    Each begins at an address, (n,) int64, and has a length in bytes, (n,) int64. The caller keeps that memory alive.
    Returns where each is in the result, (n + 1,) int64, and that, uint8.
    """
    offsets = offsets_of(length)
    data = kernels.xp.empty(int(offsets[-1]), np.uint8)
    copy_slices(kernels, address, offsets, data)
    return offsets, data


def gather_rows(kernels: Kernels, address: Array, length: Array) -> Ragged:
    """Rows of int32 ids from anywhere in device memory, given by address and number of ids."""
    offsets, data = gather(kernels, address, 4 * length)
    offsets //= 4
    return Ragged(data.view(np.int32), offsets)


def replaced(kernels: Kernels, ids: Ragged, at: Array, others: Ragged) -> Ragged:
    """Rows of int32 ids, with `others` in place of the rows `at`, (m,) int64: copied by address, 4 bytes per id."""
    address, length = kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths
    address[at], length[at] = kernels.address(others.values) + 4 * others.offsets[:-1], others.lengths
    return gather_rows(kernels, address, length)


def copy_slices(kernels: Kernels, address: Array, offsets: Array, out: Array) -> None:
    """`gather` into memory that there is already: `out` is contiguous, and offsets (n + 1,) are in bytes of it."""
    data = out.view(np.uint8)
    # A thread writes 16 bytes of the result, so that long and short slices keep all threads equally busy.
    threads = kernels.threads(-(-len(data) // 16))
    kernels.run("copy_pieces", threads, len(address), address, offsets, 0, len(data), data)


def texts_to_device(kernels: Kernels, texts: Iterable[bytes]) -> TextColumn:
    """Texts of the host in one new buffer, copied over in one transfer."""
    pieces = list(texts)
    length = np.array([len(piece) for piece in pieces], np.int64)
    data = np.frombuffer(b"".join(pieces), np.uint8)
    xp = kernels.xp
    return TextColumn(xp.asarray(data), xp.asarray(np.cumsum(length) - length), xp.asarray(length))


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
