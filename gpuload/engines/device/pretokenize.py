"""Splits texts into pre-tokens with kernels, and looks them up, on NumPy or CuPy arrays.

`cut` of `tests/simulator/encoder.py` does the same in plain Python. For most tokenizers one kernel reads the text once
(`kernels/tiles.cu`). Its tiles find texts and added tokens, split text by a regex, and look up pre-tokens. It also says
which texts may not be in Unicode normal form C (NFC).

Other tokenizers need passes over all text before that kernel, and so do texts that may not be in NFC:

    1. one mark per byte says what begins there; at first, texts          (`kernels/text.cuh`)
    2. added tokens that are not normalized are found and marked          (`kernels/added.cu`)
    3. text between them is brought into NFC; some texts fall back        (`kernels/normal_form.cu`)
    4. added tokens that are normalized are found and marked; then text
       is rewritten: a space is prepended, spaces are replaced            (`kernels/rewrite.cu`)
    5. text between added tokens is split by all stages but the last,
       and by that one as well if it leaves gaps between matches          (`kernels/split.cu`)

In these, one thread works on one chunk of `STEP` bytes, regardless of where texts begin and end, so long and short
texts need the same time per byte. Where a kernel writes lists, it runs in two passes: the first counts the items of
each chunk, a prefix sum turns the counts into positions, and the second pass writes.

The host waits once, for the numbers of pre-tokens. It waits once more for each search for added tokens in steps 2 and
4, for what step 3 found, for the size of rewritten text, and where there are so many pre-tokens that they must be
listed again.
"""

from dataclasses import dataclass

import numpy as np

from gpuload.core.arrays import Array, offsets_of
from gpuload.engines.device.kernels import BLOCK, Kernels
from gpuload.engines.device.shared import OnDevice
from gpuload.tokenizer.added_tokens import LSTRIP, NORMALIZED, RSTRIP, can_overlap, trie
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.nfc import nfc_tables
from gpuload.tokenizer.splitter import leaves_gaps, restarts

STEP = 64  # bytes in a chunk: two sectors, the unit in which a GPU reads memory
ROOM, ROOM_TO_MERGE = 2, 6
"""Bytes of text for which there is room for one pre-token, and for one to merge, when they are listed. If there are
more, they are listed again."""

_MOST_BYTES = (1 << 31) - (1 << 16)  # positions are int32, also those behind the last tile
_MOST_TOKEN = 64  # MOST_TOKEN of kernels/tiles.cu
_UNLESS_SPACE, _FIRST_ONLY = 1, 2  # as in kernels/rewrite.cu
_KEEP = {"all": 0, "matches": 1, "gaps": 2}  # as in kernels/split.cu
_NOT_NFC, _TOO_LONG = 1, 2  # as in kernels/tiles.cu

Words = tuple[Array | int, ...]  # arguments of kernels for whole-word look-ups: tables of `MergeTables`


@dataclass(frozen=True, eq=False)
class PreTokens:
    """The m pre-tokens of n texts, with the added tokens between them. k of them are to be merged."""

    known: Array  # (m,) int32, the id of each pre-token and added token; ~i for number i of those to merge
    first: Array  # (n + 1,) int64; text t has the pre-tokens first[t] to first[t + 1] - 1
    start: Array  # (k,) int32, where each pre-token to merge begins in `data`, in no particular order
    length: Array  # (k,) int32, its length in bytes
    merge_bytes: int  # their lengths together
    too_long: bool  # whether some of them have more than 4,096 bytes, so that their texts must fall back
    data: Array  # uint8, the texts, or a rewritten copy of them
    offsets: Array  # (n + 1,) int64; text t begins at data[offsets[t] - base]
    base: int  # as above
    normal: bool = True  # False: tiles have found texts that may not be in NFC


class PreTokenizer(OnDevice):
    """Splits texts as one tokenizer does, with `words` as its vocabulary. Its tables are copied to the device once. The
    result does not depend on `step`, the bytes in a chunk."""

    def __init__(self, kernels: Kernels, tokenizer: CompiledTokenizer, words: Words, step: int = STEP) -> None:
        spec, to_device = tokenizer.spec, kernels.xp.asarray
        self._kernels, self._words, self.step = kernels, words, step
        tokens = trie(spec.added)
        self._trie = [to_device(array) for array in (tokens.first, tokens.byte, tokens.token)]
        self._begins, self._ids, self._lengths, self._flags = (
            to_device(array) for array in (tokens.begins, tokens.ids, tokens.lengths, tokens.flags)
        )
        self._longest = int(tokens.lengths.max(initial=0))
        self._strips = bool((tokens.flags & (LSTRIP | RSTRIP)).any())
        self._passes = set((tokens.flags & NORMALIZED).tolist())
        self._nfc = None
        self._no_nfc = (*(to_device(np.zeros(0, kind)) for kind in (np.uint16, np.uint8, np.uint64)), 0)
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
        # Whether text is rewritten before it is split, so that pre-tokens refer to a longer copy.
        self.rewrites = bool(prefix) or replacement != b" "
        self._sizes = len(prefix), _UNLESS_SPACE * unless_space | _FIRST_ONLY * first_only, len(replacement)
        self._prefix, self._replacement = (to_device(np.frombuffer(text, np.uint8)) for text in (prefix, replacement))
        classes, stages = tokenizer.splitter.classes, list(tokenizer.splitter.stages)
        self._classes = to_device(classes.pages), to_device(classes.blocks)
        # The stage that tiles apply, if any; the others are applied before.
        last = stages.pop() if stages and stages[-1].keep != "gaps" and not leaves_gaps(stages[-1], classes) else None
        self._stages = [
            (stage.table.shape[1] - 1, to_device(stage.table), to_device(restarts(stage)), _KEEP[stage.keep])
            for stage in stages
        ]
        self._last: tuple[Array | int, ...] = 0, to_device(np.zeros(0, np.uint16)), to_device(np.zeros(0, np.uint8))
        if last:
            self._last = last.table.shape[1] - 1, to_device(last.table), to_device(restarts(last))
        tables = tokenizer.tables
        self._adjacent = to_device(tables.adjacent) if isinstance(tables, FallbackTables) else None
        # Tiles find tokens in text as it is, and check for NFC what is between them. A normalized token has to be found
        # in the normal form, in which a mark after it can make it another character. Otherwise, a single pass over the
        # text suffices if it is in NFC.
        self.by_tiles = (
            last is not None
            and not (stages or self.rewrites or self._strips or len(self._passes) > 1)
            and not (spec.nfc and NORMALIZED in self._passes)
            and self._longest <= _MOST_TOKEN
            and not can_overlap(spec.added)
        )

    def pre_tokens(self, data: Array, offsets: Array, base: int, fallback: Array) -> PreTokens:
        """Split n texts, and look up their pre-tokens.

        Args:
            data: uint8, UTF-8, in device memory; text t is data[offsets[t] - base : offsets[t + 1] - base].
            offsets: (n + 1,) int64, ascending, in device memory.
            base: as above.
            fallback: (n,) bool, set for texts that fall back to the tokenizer object. They have no pre-tokens. If the
                result is not `normal`, it is set instead for the texts that may not be in NFC: `by_passes` has to split
                these, and what is here of them is to be ignored.

        Raises:
            ValueError: the texts have 2^31 - 2^16 bytes or more, before or after rewriting.
        """
        _check_size(len(data))
        if self.by_tiles:
            return self.listed(data, offsets, base, None, fallback)
        return self.by_passes(data, offsets, base, fallback)

    def by_passes(self, data: Array, offsets: Array, base: int, fallback: Array) -> PreTokens:
        """`pre_tokens` of any texts, which are brought into NFC if the tokenizer does that."""
        if base:
            offsets = offsets - base
        kernels, xp = self._kernels, self._kernels.xp
        marks, texts = xp.zeros(len(data), np.uint8), len(offsets) - 1
        kernels.run("mark_texts", kernels.threads(max(texts, 1)), texts, len(data), offsets, marks)
        self._find_added(data, offsets, marks, 0)
        if self._nfc:
            data, offsets, marks = self._normalize(data, offsets, marks, fallback)
        self._find_added(data, offsets, marks, NORMALIZED)
        if self.rewrites:
            data, offsets, marks = self._rewrite(data, offsets, marks)
        for stage in self._stages:
            found = xp.zeros(len(data), np.uint8)
            self._run("split", data, marks, *self._classes, *stage, found)
            marks = found
        if self._adjacent is not None:
            self._run("cut_characters", data, self._adjacent, len(self._adjacent) - 1, marks)
        return self.listed(data, offsets, 0, marks, fallback)

    def listed(self, data: Array, offsets: Array, base: int, marks: Array | None, suspect: Array) -> PreTokens:
        """List and look up all pre-tokens, with marks or without. Texts without marks that may not be in NFC are set in
        `suspect`, (n,) bool."""
        kernels, xp, texts = self._kernels, self._kernels.xp, len(offsets) - 1
        # The first tile may begin up to 15 bytes before the text.
        tiles = -(-(len(data) + 15) // (kernels.segment * BLOCK))
        nothing = self._trie[1]
        room, room_to_merge = len(data) // ROOM + BLOCK, len(data) // ROOM_TO_MERGE + BLOCK
        first = xp.empty(texts + 1, np.int64)
        while True:
            known, lists = xp.empty(room, np.int32), [xp.empty(room_to_merge, np.int32) for _ in range(2)]
            state = xp.zeros(4 + 2 * tiles, np.uint64)
            kernels.run(
                "list_pretokens", kernels.blocks(tiles), tiles, len(data), data, texts, offsets, base,
                marks is not None, nothing if marks is None else marks, self._begins, *self._trie, self._ids,
                self._last[0] > 0, *self._classes, *self._last, marks is None and self._nfc is not None,
                *(self._nfc or self._no_nfc), *self._words, room, known, first, room_to_merge, *lists,
                suspect, state[4 : 4 + tiles], state[4 + tiles :], state[:4],
            )  # fmt: skip
            _, count, rest, flags = state[:4].tolist()
            if count <= room and rest >> 32 <= room_to_merge:
                break
            room, room_to_merge = count, rest >> 32
            del known, lists  # before larger ones are allocated
        start, length = (one[: rest >> 32] for one in lists)
        too_long, normal = bool(flags & _TOO_LONG), not flags & _NOT_NFC
        return PreTokens(known[:count], first, start, length, rest & 0xFFFF_FFFF, too_long, data, offsets, base, normal)

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
        place = offsets_of(sizes)
        falls_back, changed, size = xp.concatenate([results, place[-1:]]).tolist()
        if changed:
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


def _check_size(size: int) -> None:
    if size > _MOST_BYTES:
        raise ValueError(f"texts of {size:,} bytes at once exceed the limit of {_MOST_BYTES:,}: pass fewer at a time")
