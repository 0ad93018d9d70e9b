"""Loss masks on a device: the tokens of answers get the bit of `gpuload.core.marks`, as `host/spans.py` finds them.

Where the tokens of a text lie end to end in it, the token of a character is a search in sums of token lengths:

    1. look the length of each id up in the table of the tokenizer's tokens; a prefix sum gives each token its place
    2. a kernel compares the bytes of each token with the text at its place
    3. a kernel marks the tokens of answers in the texts in which all tokens match and cover the whole text

All other texts with answers go to `TokenSpans` on the host: those that the tokenizer normalizes or drops parts of, and
all texts of a tokenizer that is not known to lay its tokens end to end.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Array, Ragged, offsets_of, on_host, ranges
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.host.spans import TokenSpans
from gpuload.tokenizer.token_bytes import TokenBytes


class SpansTable(NamedTuple):
    """A `TokenBytes` in device memory."""

    lengths: Array  # (m,) int32, bytes of each id as they are in a text; 0 for an id that no text is compared with
    offsets: Array  # (m + 1,) int64, where they begin in `data`
    data: Array  # uint8
    leading: Array  # (m,) int32, as in `TokenBytes`
    trailing: Array  # likewise
    keeps_first: bool  # as in `TokenBytes`


class DeviceTokenSpans:
    """Marks answers for one tokenizer, as `host` does. The table is that of `host` in device memory, if it has one."""

    def __init__(self, kernels: Kernels, host: TokenSpans, table: SpansTable | None) -> None:
        self._kernels, self._host, self._table = kernels, host, table

    def mark(self, text: DeviceText, ids: Ragged, low: int, high: int) -> None:
        """Mark the tokens of answers in some texts.

        It needs 12 bytes per token in device memory.

        Args:
            text: n texts with answers.
            ids: n rows, the tokenizer's ids of these texts in device memory. Those with loss get the bit, in place.
            low, high: the texts low to high - 1.

        Raises:
            MemoryError: there is too little memory; nothing is marked.
        """
        answers, kernels, xp = text.answers, self._kernels, self._kernels.xp
        assert answers is not None
        rows, of_rows = high - low, slice(low, high + 1)
        first, ids_offsets, offsets = answers.first[of_rows], ids.offsets[of_rows], text.offsets[of_rows]
        marked = first[1:] > first[:-1]
        if self._table is None:
            self._by_host(text, ids, xp.flatnonzero(marked) + low)
            return
        begin, end = 0, len(ids.values)
        if rows < len(ids):
            begin, end = xp.concatenate([ids_offsets[:1], ids_offsets[-1:]]).tolist()
        table, exact = self._table, xp.ones(rows, bool)
        places = offsets_of(table.lengths[ids.values[begin:end]])
        tokens = kernels.threads(end - begin)
        kernels.run(
            "match_tokens", tokens, end - begin, begin, ids.values, rows, ids_offsets, places, offsets, text.data,
            table.offsets, table.data, exact,
        )  # fmt: skip
        self._by_host(text, ids, xp.flatnonzero(marked & ~exact) + low)
        kernels.run(
            "mark_answers", kernels.warps(rows), rows, first, answers.start, answers.end, answers.bits, begin,
            ids_offsets, places, offsets, text.data, table.leading, table.trailing, table.keeps_first,
            self._host.overlapping, exact, ids.values,
        )  # fmt: skip

    def _by_host(self, text: DeviceText, ids: Ragged, rows: Array) -> None:
        """Marks some texts by the tokenizer's own offsets. Texts and ids are copied to the host, and the places of
        tokens with loss back."""
        if not len(rows):
            return
        answers, xp, at = text.answers, self._kernels.xp, on_host(rows)
        assert answers is not None
        texts = DeviceTexts(self._kernels).bytes_at(text.column, at.tolist())
        first, start, end, bits = map(on_host, (answers.first, answers.start, answers.end, answers.bits))
        offsets = on_host(ids.offsets)
        counts, lengths = (bounds[at + 1] - bounds[at] for bounds in (first, offsets))
        own_offsets = offsets_of(lengths)
        answer, token = ranges(first[at], counts, offsets_of(counts)), ranges(offsets[at], lengths, own_offsets)
        own = Ragged(on_host(ids.values[xp.asarray(token)]), own_offsets)
        column = pa.array([raw.decode() for raw in texts], pa.large_string())
        rows = np.repeat(np.arange(len(at)), counts)
        found, values = self._host.bits(column, own, rows, start[answer], end[answer], bits[answer]), ids.values
        values[xp.asarray(token[found != 0])] |= xp.asarray(found[found != 0])


def spans_table(kernels: Kernels, table: TokenBytes) -> SpansTable:
    """Copies a table to the device."""
    xp, data, offsets = kernels.xp, table.data, table.offsets
    if table.space != " ":
        # A text has a space where its token has another character. A text that has this character itself differs from
        # its token then, and so does every text from a token with a space, which is made empty: the host does those.
        tokens = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
        empty = pa.scalar(b"", pa.large_binary())
        tokens = pc.if_else(pc.match_substring(tokens, " "), empty, tokens)
        tokens = pc.replace_substring(tokens, table.space, " ")
        data, offsets = np.frombuffer(tokens.buffers()[2], np.uint8), np.frombuffer(tokens.buffers()[1], np.int64)
    lengths = np.diff(offsets).astype(np.int32)
    arrays = lengths, offsets, data, table.leading, table.trailing
    lengths, offsets, data, leading, trailing = map(xp.asarray, arrays)
    return SpansTable(lengths, offsets, data, leading, trailing, table.keeps_first)
