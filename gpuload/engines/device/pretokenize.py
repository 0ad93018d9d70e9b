"""Splits texts into pre-tokens with kernels, on NumPy or CuPy arrays.

`gpuload.testing.encoder.cut` does the same in plain Python. The steps, and their kernels:

    1. one mark per byte says what begins there; at first, texts          (`kernels/text.cuh`)
    2. added tokens that are not normalized are found and marked          (`kernels/added.cu`)
    3. text between them is brought into NFC; some texts fall back        (`kernels/nfc.cu`)
    4. added tokens that are normalized are found and marked; then text
       is rewritten: a space is prepended, spaces are replaced            (`kernels/rewrite.cu`)
    5. text between added tokens is split, stage by stage                 (`kernels/split.cu`)
    6. the marks are turned into lists of pre-tokens                      (`kernels/split.cu`)

One thread works on one chunk of `STEP` bytes, regardless of where texts begin and end, so long and short texts need the
same time per byte. Where a kernel writes lists, it runs in two passes: the first counts the items of each chunk, a
prefix sum turns the counts into positions, and the second pass writes. So the result does not depend on the order in
which threads run.

Memory in addition to the result: two bytes per byte of text, some bytes per chunk and per added token, and, if text is
normalized or rewritten, the new text.
"""

from dataclasses import dataclass

import numpy as np

from gpuload.arrays import Array, offsets_of
from gpuload.engines.device.kernels import Kernels
from gpuload.tokenizer.added_tokens import LSTRIP, NORMALIZED, RSTRIP, trie
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.nfc import nfc_tables
from gpuload.tokenizer.splitter import restarts

STEP = 64
"""Bytes in a chunk: two sectors, the unit in which a GPU reads memory."""

_MOST_BYTES = (1 << 31) - 1  # positions are int32
_BEGINS = 1  # BEGINS of kernels/text.cuh
_UNLESS_SPACE, _FIRST_ONLY = 1, 2  # as in kernels/rewrite.cu
_KEEP = {"all": 0, "matches": 1, "gaps": 2}  # as in kernels/split.cu


@dataclass(frozen=True, eq=False)
class PreTokens:
    """The m pre-tokens of n texts, with the added tokens between them.

    Attributes:
        first: (n + 1,) int64; text i has the pre-tokens first[i] to first[i + 1] - 1.
        start: (m,) int32, where each pre-token begins in `data`.
        length: (m,) int32, its length in bytes; ~id for an added token, which is negative.
        data: uint8, the texts, or a rewritten copy of them.
        fallback: (n,) bool, texts that fall back to the tokenizer object. They have no pre-tokens.
    """

    first: Array
    start: Array
    length: Array
    data: Array
    fallback: Array


class PreTokenizer:
    """Splits texts as one tokenizer does. Its tables are copied to the device once.

    Args:
        kernels: for the device.
        tokenizer: the tokenizer's tables.
        step: bytes in a chunk; the result does not depend on it.

    Attributes:
        step: as above.
        rewrites: whether text is rewritten before it is split, so that pre-tokens refer to a longer copy.
    """

    def __init__(self, kernels: Kernels, tokenizer: CompiledTokenizer, step: int = STEP) -> None:
        spec, to_device = tokenizer.spec, kernels.xp.asarray
        self._kernels, self.step = kernels, step
        tokens = trie(spec.added)
        self._trie = [to_device(array) for array in (tokens.first, tokens.byte, tokens.token)]
        self._begins, self._ids, self._lengths, self._flags = (
            to_device(array) for array in (tokens.begins, tokens.ids, tokens.lengths, tokens.flags)
        )
        self._longest = int(tokens.lengths.max(initial=0))
        self._strips = bool((tokens.flags & (LSTRIP | RSTRIP)).any())
        self._passes = set((tokens.flags & NORMALIZED).tolist())
        self._nfc = None
        if spec.nfc:
            values, compositions = nfc_tables()
            pages, blocks, pairs = map(to_device, (values.pages, values.blocks, compositions))
            self._nfc = pages, blocks, pairs, len(compositions) - 1
        # How text is rewritten: a prefix for all sections or for some, and a replacement for every space.
        prefix, unless_space, first_only, replacement = b"", False, False, b" "
        if spec.fallback:
            prefix, replacement = spec.fallback.prefix.encode(), spec.fallback.space.encode()
            unless_space, first_only = spec.fallback.unless_space, spec.fallback.first_only
        elif spec.prefix_space:
            prefix, unless_space = b" ", True
        self.rewrites = bool(prefix) or replacement != b" "
        self._sizes = len(prefix), _UNLESS_SPACE * unless_space | _FIRST_ONLY * first_only, len(replacement)
        self._prefix, self._replacement = (to_device(np.frombuffer(text, np.uint8)) for text in (prefix, replacement))
        classes = tokenizer.splitter.classes
        self._classes = to_device(classes.pages), to_device(classes.blocks)
        self._stages = [
            (to_device(stage.table), to_device(restarts(stage)), stage.table.shape[1] - 1, _KEEP[stage.keep])
            for stage in tokenizer.splitter.stages
        ]
        tables = tokenizer.tables
        self._adjacent = to_device(tables.adjacent) if isinstance(tables, FallbackTables) else None

    def pre_tokens(self, data: Array, offsets: Array) -> PreTokens:
        """Split n texts.

        Args:
            data: uint8, UTF-8, in device memory; text i is data[offsets[i] : offsets[i + 1]].
            offsets: (n + 1,) int64, ascending, in device memory.

        Raises:
            ValueError: the texts have 2^31 bytes or more, before or after rewriting.
        """
        xp = self._kernels.xp
        low, high = int(offsets[0]), int(offsets[-1])
        data, offsets = data[low:high], offsets - low
        _check_size(high - low)
        marks = xp.zeros(high - low, np.uint8)
        marks[offsets[:-1][offsets[1:] > offsets[:-1]]] = _BEGINS
        fallback = xp.zeros(len(offsets) - 1, bool)
        self._find_added(data, offsets, marks, 0)
        if self._nfc:
            data, offsets, marks = self._normalize(data, offsets, marks, fallback)
        self._find_added(data, offsets, marks, NORMALIZED)
        if self.rewrites:
            data, offsets, marks = self._rewrite(data, offsets, marks)
        for stage in self._stages:
            marks = self._split(data, marks, *stage)
        if self._adjacent is not None:
            self._run("cut_characters", data, self._adjacent, len(self._adjacent) - 1, marks)
        first, start, length = self._list(data, offsets, marks)
        return PreTokens(first, start, length, data, fallback)

    def _run(self, name: str, data: Array, *arguments: object) -> None:
        """Run a kernel with one thread per chunk of `data`."""
        chunks = self._chunks(data)
        self._kernels.run(name, self._kernels.threads(chunks), chunks, len(data), self.step, data, *arguments)

    def _chunks(self, data: Array) -> int:
        return -(-len(data) // self.step)

    def _normalize(self, data: Array, offsets: Array, marks: Array, fallback: Array) -> tuple[Array, Array, Array]:
        """Bring all texts into NFC. Returns the new data, offsets and marks.

        Texts for which this cannot be done are set in `fallback`, and their marks are cleared.
        """
        assert self._nfc
        kernels, xp = self._kernels, self._kernels.xp
        sizes, results = xp.empty(self._chunks(data), np.int32), xp.zeros(2, bool)
        how = marks, *self._nfc, len(offsets) - 1, offsets
        self._run("nfc_sizes", data, *how, sizes, fallback, results)
        falls_back, changed = results.tolist()
        if changed:
            place = offsets_of(sizes)
            size = int(place[-1])
            _check_size(size)
            moved, out, out_marks = xp.empty_like(offsets), xp.empty(size, np.uint8), xp.zeros(size, np.uint8)
            kernels.run("nfc_offsets", kernels.threads(len(offsets)), self.step, len(data), data, *how, place, moved)
            self._run("write_nfc", data, *how, place, out, out_marks)
            data, offsets, marks = out, moved, out_marks
        if falls_back:
            self._run("skip_texts", marks, len(offsets) - 1, offsets, fallback)
        return data, offsets, marks

    def _find_added(self, data: Array, offsets: Array, marks: Array, number: int) -> None:
        """Find and mark the added tokens of one pass: 0 for those that are not normalized, 1 for the others."""
        if number not in self._passes:
            return
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
        """Rewrite all texts. Returns the new data, offsets and marks."""
        kernels, xp = self._kernels, self._kernels.xp
        how = *self._sizes, self._replacement, len(offsets) - 1, offsets
        sizes = xp.empty(self._chunks(data), np.int32)
        self._run("rewritten_sizes", data, marks, *how, sizes)
        place = offsets_of(sizes)
        size = int(place[-1])
        _check_size(size)
        moved, out, out_marks = xp.empty_like(offsets), xp.empty(size, np.uint8), xp.empty(size, np.uint8)
        kernels.run("rewritten_offsets", kernels.threads(len(offsets)), self.step, data, marks, *how, place, moved)
        self._run("rewrite", data, marks, *how, self._prefix, place, out, out_marks)
        return out, moved, out_marks

    def _split(self, data: Array, marks: Array, table: Array, restarts: Array, classes: int, keep: int) -> Array:
        """Apply one stage of the splitter. Returns the new marks."""
        found = self._kernels.xp.zeros(len(data), np.uint8)
        self._run("split", data, marks, *self._classes, classes, table, restarts, keep, found)
        return found

    def _list(self, data: Array, offsets: Array, marks: Array) -> tuple[Array, Array, Array]:
        """Turn marks into lists. Returns `first`, `start` and `length` of `PreTokens`."""
        kernels, xp = self._kernels, self._kernels.xp
        counts = xp.empty(self._chunks(marks), np.int32)
        self._run("count_pretokens", marks, counts)
        place = offsets_of(counts)
        first, count = xp.empty_like(offsets), len(offsets)
        kernels.run("first_pretokens", kernels.threads(count), count, offsets, self.step, marks, place, first)
        start, length = (xp.empty(int(place[-1]), np.int32) for _ in range(2))
        self._run("list_pretokens", data, marks, place, *self._trie, self._ids, start, length)
        return first, start, length


def _check_size(size: int) -> None:
    if size > _MOST_BYTES:
        raise ValueError(f"texts of {size:,} bytes at once exceed the limit of {_MOST_BYTES:,}: pass fewer at a time")
