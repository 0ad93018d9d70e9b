"""Texts cut into the pieces that are tokens or are merged to tokens, by kernels, on NumPy or CuPy arrays.

The counterpart of `tokenizer/twin.py` up to the merges, step by step:

    1. one mark per byte; texts begin                                         (`kernels/text.cuh`)
    2. texts that are not surely in normal form C are left to the reference   (`kernels/nfc.cu`)
    3. added tokens are found, in two passes                                  (`kernels/added.cu`)
    4. a space is put in front, blanks are replaced                           (`kernels/rewrite.cu`)
    5. what is left between added tokens is split, stage by stage             (`kernels/split.cu`)
    6. what the marks say is listed

A thread's work is a chunk of bytes, however long the texts are. All counts are added up in order, so the result does
not depend on which thread came first. Beside its result this needs two bytes per byte of text, a little for each chunk
and for each added token, and, where text is rewritten, the new text.
"""

from dataclasses import dataclass

import numpy as np

from gpuload.arrays import Array, offsets_of
from gpuload.engines.device.kernels import Kernels
from gpuload.tokenizer.added_tokens import LSTRIP, NORMALIZED, RSTRIP, trie
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.nfc import nfc_tables
from gpuload.tokenizer.restarts import restarts

STEP = 64
"""Bytes in a chunk: two of a GPU's sectors."""

_MOST_BYTES = (1 << 31) - 1
_BEGINS = 1  # as in kernels/text.cuh
_KEEP = {"all": 0, "matches": 1, "gaps": 2}


@dataclass(frozen=True, eq=False)
class Pieces:
    """m pieces of n texts. Piece j is `data[start[j] : start[j] + length[j]]`; where length is negative it is the added
    token with id ~length.

    Attributes:
        first: (n + 1,) int64, the pieces of text i are first[i] .. first[i + 1].
        start, length: (m,) int32.
        data: uint8, the texts themselves, or a rewritten copy of them.
        left: (n,) bool, texts that are for the reference; they have no pieces.
    """

    first: Array
    start: Array
    length: Array
    data: Array
    left: Array


class PieceMaker:
    """Cuts texts as one tokenizer does. Its tables are copied to the device once.

    Args:
        kernels: for the device.
        twin: the tokenizer's tables.
        step: bytes in a chunk; the result does not depend on it.

    Attributes:
        step: the same.
        rewrites: whether a space is put in front of texts or something else stands for blanks, so that pieces are of a
            longer copy of the text.
    """

    def __init__(self, kernels: Kernels, twin: CompiledTokenizer, step: int = STEP) -> None:
        spec, put = twin.spec, kernels.xp.asarray
        self._kernels, self.step = kernels, step
        tokens = trie(spec.added)
        self._trie = [put(array) for array in (tokens.first, tokens.byte, tokens.token)]
        self._begins, self._ids, self._lengths, self._flags = (
            put(array) for array in (tokens.begins, tokens.ids, tokens.lengths, tokens.flags)
        )
        self._longest = int(tokens.lengths.max(initial=0))
        self._strips = bool((tokens.flags & (LSTRIP | RSTRIP)).any())
        self._passes = sorted(set((tokens.flags & NORMALIZED).tolist()))
        self._nfc = None
        if spec.nfc:
            values, melting = nfc_tables()
            self._nfc = put(values.pages), put(values.blocks), put(melting), len(melting) - 1
        front, once, blank = b"", 0, b" "
        if spec.fallback:
            front, blank = spec.fallback.prefix.encode(), spec.fallback.space.encode()
        elif spec.prefix_space:
            front, once = b" ", 1
        self.rewrites = bool(front) or blank != b" "
        self._sizes = len(front), once, len(blank)
        self._texts = [put(np.frombuffer(text, np.uint8)) for text in (front, blank)]
        self._classes = put(twin.splitter.classes.pages), put(twin.splitter.classes.blocks)
        self._stages = [
            (put(stage.table), put(restarts(stage)), stage.table.shape[1] - 1, _KEEP[stage.keep])
            for stage in twin.splitter.stages
        ]
        self._adjacent = put(twin.tables.adjacent) if isinstance(twin.tables, FallbackTables) else None

    def pieces(self, data: Array, offsets: Array) -> Pieces:
        """The pieces of n texts.

        Args:
            data: uint8, UTF-8; text i is data[offsets[i] : offsets[i + 1]].
            offsets: (n + 1,) int64.

        Raises:
            ValueError: the texts have 2^31 bytes or more, rewritten ones included.
        """
        xp = self._kernels.xp
        low, high = int(offsets[0]), int(offsets[-1])
        data, offsets = data[low:high], offsets - low
        _check_size(high - low)
        marks = xp.zeros(high - low, np.uint8)
        marks[offsets[:-1][offsets[1:] > offsets[:-1]]] = _BEGINS
        left = self._left(data, offsets, marks)
        for number in self._passes:
            self._find_added(data, offsets, marks, number)
        if self.rewrites:
            data, offsets, marks = self._rewrite(data, offsets, marks)
        for stage in self._stages:
            marks = self._split(data, marks, *stage)
        if self._adjacent is not None:
            self._run("cut_characters", data, self._adjacent, len(self._adjacent) - 1, marks)
        first, start, length = self._list(data, offsets, marks)
        return Pieces(first, start, length, data, left)

    def _run(self, name: str, data: Array, *arguments: object) -> None:
        """A kernel with a thread per chunk."""
        chunks = self._chunks(data)
        self._kernels.run(name, self._kernels.threads(chunks), chunks, len(data), self.step, data, *arguments)

    def _chunks(self, data: Array) -> int:
        return -(-len(data) // self.step)

    def _left(self, data: Array, offsets: Array, marks: Array) -> Array:
        texts = len(offsets) - 1
        left = self._kernels.xp.zeros(texts, bool)
        if self._nfc:
            self._run("not_nfc", data, marks, texts, offsets, *self._nfc, left)
            if left.any():
                self._run("leave", marks, texts, offsets, left)
        return left

    def _find_added(self, data: Array, offsets: Array, marks: Array, number: int) -> None:
        kernels, xp = self._kernels, self._kernels.xp
        counts = xp.empty(self._chunks(data), np.int32)
        search = data, marks, number, self._begins, *self._trie, self._flags
        self._run("count_added", *search, counts)
        place = offsets_of(counts)
        count = int(place[-1])
        start, token = xp.empty(count, np.int32), xp.empty(count, np.int32)
        if count:
            self._run("list_added", *search, place, start, token)
        found, threads = (count, start, token, self._lengths), kernels.threads(count)
        kernels.run("take_added", threads, *found, self._longest, len(data), marks)
        if self._strips:
            kernels.run("strip_added", threads, *found, self._flags, len(offsets) - 1, offsets, data, marks)

    def _rewrite(self, data: Array, offsets: Array, marks: Array) -> tuple[Array, Array, Array]:
        kernels, xp = self._kernels, self._kernels.xp
        sizes = xp.empty(self._chunks(data), np.int32)
        self._run("rewritten_sizes", data, marks, *self._sizes, sizes)
        place = offsets_of(sizes)
        size = int(place[-1])
        _check_size(size)
        moved, out, out_marks = xp.empty_like(offsets), xp.empty(size, np.uint8), xp.empty(size, np.uint8)
        count = len(offsets)
        kernels.run(
            "rewritten_offsets", kernels.threads(count), count, offsets, self.step, data, marks, *self._sizes, place,
            moved,
        )  # fmt: skip
        self._run("rewrite", data, marks, *self._sizes, *self._texts, place, out, out_marks)
        return out, moved, out_marks

    def _split(self, data: Array, marks: Array, table: Array, ways: Array, classes: int, keep: int) -> Array:
        found = self._kernels.xp.zeros(len(data), np.uint8)
        self._run("split", data, marks, *self._classes, classes, table, ways, keep, found)
        return found

    def _list(self, data: Array, offsets: Array, marks: Array) -> tuple[Array, Array, Array]:
        kernels, xp = self._kernels, self._kernels.xp
        counts = xp.empty(self._chunks(marks), np.int32)
        self._run("count_pieces", marks, counts)
        place = offsets_of(counts)
        first, count = xp.empty_like(offsets), len(offsets)
        kernels.run("first_pieces", kernels.threads(count), count, offsets, self.step, marks, place, first)
        start, length = (xp.empty(int(place[-1]), np.int32) for _ in range(2))
        self._run("list_pieces", data, marks, place, *self._trie, self._ids, start, length)
        return first, start, length


def _check_size(size: int) -> None:
    if size > _MOST_BYTES:
        raise ValueError(f"texts of {size:,} bytes at once, and at most {_MOST_BYTES:,} are taken: give fewer")
