"""The stages of a load of data to train on, on a device.

Columns of messages are rendered by kernels: all that a row consists of, and its prompt alone. What these texts of a row
share is encoded once, up to a token in front of which they may be cut (`prefixes.py`), and so is the rest of each; a
kernel makes rows of their ids. Everything else (texts, rows with tools of their own) goes through the stages of the
host, and its ids are copied over. All batches are made on the device.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, offsets_of, on_host
from gpuload.core.errors import DeviceError
from gpuload.core.marks import LOSS
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.store import Index
from gpuload.engines.device.texts import gather
from gpuload.engines.failures import out_of_memory
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import ArrowPrompts, Prompts, TextColumn, Tokenized
from gpuload.kinds.training_engine import SAMPLE, TrainingEngine, add_texts, problems_in, rejected_in


@dataclass(kw_only=True, eq=False)
class DevicePieces(DeviceText):
    """n rows of several texts in device memory: a prompt with each of its completions, and alone."""

    # The second texts of the rows, and so on. The texts of a rejected row need not be empty.
    more: list[DeviceText] = field(default_factory=list)

    @cached_property
    def sizes(self) -> np.ndarray[Any, Any]:
        """(n,) int64 in host memory, bytes of a row's texts, -1 where a row was rejected."""
        with self.kernels.current():
            sizes = on_host(sum((each.lengths for each in self.more), start=self.lengths)).copy()
        sizes[list(self.rejected)] = -1
        return sizes

    def tokenized(self, ids: Ragged, fallback_rows: int = 0) -> Tokenized:
        sizes = np.maximum(self.sizes, 0)
        return Tokenized(
            ids=ids,
            text_sizes=self.kernels.xp.asarray(sizes),
            text_nbytes=int(sizes.sum()),
            fallback_rows=fallback_rows,
            **self.counts(),
        )


class DeviceTrainingEngine(DeviceEngine):
    """The `Engine` of a load of data to train on, on a device. For the arguments see `DeviceEngine`; `host_engine` says
    what becomes of the ids of a row's texts."""

    host: TrainingEngine

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._rows: Counter[type] = Counter()  # by where they were rendered

    def describe(self, compiled: bool = True) -> str:
        if self._rows[HostText] and not self._rows[DeviceText]:
            return f"{self.host.describe(compiled)}; batches on {self.device}"
        return super().describe(compiled)

    @property
    def counts(self) -> dict[str, int]:
        if not self._rows[HostText] or self.host.by_prompt:
            return super().counts
        what = "rows rendered and encoded on the host: kernels take columns of messages only"
        return {what: self._rows[HostText], **super().counts}

    def render(self, prompts: Prompts) -> HostText | DeviceText:
        text = self._pieces(prompts) or super().render(prompts)
        self._rows[DeviceText if isinstance(text, DeviceText) else HostText] += len(text)
        return text

    def _pieces(self, prompts: Prompts) -> "DevicePieces | None":
        """Several texts of each row, if kernels can render and mark them."""
        by_host = not self._by_kernels or self._reference.sanitizes or not self.host.marks_completions
        if by_host or not isinstance(prompts, ArrowPrompts) or len(pieces := self.host.pieces(prompts.column)) < 2:
            return None
        with self._kernels.current():
            first, *more = (self._render(from_arrow(self._ops, each), program) for each, program in pieces)
        text = DevicePieces(kernels=self._kernels, offsets=first.offsets, data=first.data, more=more, **first.fates())
        add_texts(text, more)
        text.reject(rejected_in(more))
        text.reject(problems_in(prompts.column))
        return text

    def encode(self, text: HostText | DeviceText) -> Tokenized:
        if isinstance(text, DevicePieces):
            with self._kernels.current():
                try:
                    parts = self._cut(text)
                    ids, at = self._ids(parts)
                    fell_back = int(self._kernels.xp.unique(at % max(len(text), 1)).size)
                    return text.tokenized(self._rows_of(ids, len(text)), fell_back)
                except MemoryError as error:
                    raise DeviceError(out_of_memory("joining sequences")) from error
        made = super().encode(text)
        if isinstance(text, DeviceText) and text.answers is None:
            with self._kernels.current():
                values = made.ids.values
                values |= LOSS  # the loss is on all tokens
        return made

    def _cut(self, text: DevicePieces) -> DeviceText:
        """The texts of each row without what they share, as `kinds.prefixes.cut` returns them: n beginnings that the
        rows' texts share, then the rest of each column's texts. Those of rejected rows are empty."""
        kernels, xp = self._kernels, self._kernels.xp
        first, *others = columns = [text.column, *(each.column for each in text.more)]
        count, size = len(text), xp.zeros(len(text), np.int64)  # bytes before each row's cut

        def sample() -> list[str]:
            return [raw.decode() for raw in self._ops.bytes_at(first, range(min(count, SAMPLE)))]

        if tokens := self.host.cutting_tokens(sample) if count else ():
            common = first.length
            for other in others:
                common = xp.minimum(common, other.length)
                kernels.run(
                    "common_bytes", kernels.warps(count), count, first.data, first.start, other.data, other.start,
                    common,
                )  # fmt: skip
            beginning = TextColumn(first.data, first.start, common)
            for token in tokens:
                found, place = self._ops.find(beginning, token, last=True)
                size = xp.maximum(size, xp.where(found, place - first.start, 0))
        at = [kernels.address(each.data) + each.start for each in columns]
        address = xp.concatenate([at[0], *(each + size for each in at)])
        length = xp.concatenate([size, *(each.length - size for each in columns)])
        if text.rejected:
            rows = xp.asarray(np.array(list(text.rejected), np.int64))
            length.reshape(-1, count)[:, rows] = 0
        offsets, data = gather(kernels, address, length)
        return DeviceText(kernels=kernels, offsets=offsets, data=data)

    def _rows_of(self, ids: Ragged, count: int) -> Ragged:
        """So many rows of tokens, made of the ids of what `_cut` returns."""
        kernels, xp = self._kernels, self._kernels.xp
        address, length = kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths
        start, *texts = (Index(address[k : k + count], length[k : k + count]) for k in range(0, len(ids), count or 1))
        made = self.host.sequences(
            [each.length for each in texts], lambda one, other: common_ids(kernels, texts[one], texts[other])
        )
        first, second = texts[0], texts[len(made.begins) - 1]  # of one sequence, nothing is written twice
        offsets = offsets_of(start.length + first.length + second.length - made.shared)
        values = xp.empty(int(offsets[-1]), np.int32)
        kernels.run(
            "lay_pairs", kernels.warps(count), count, offsets, start.address, start.length, made.shared, first.address,
            first.length, made.begins[0], second.address, made.begins[-1], values,
        )  # fmt: skip
        return Ragged(values, offsets)


def common_ids(kernels: Kernels, rows: Index, others: Index) -> Array:
    """(n,) int64 in device memory: how many leading ids the rows of two columns have in common, whatever their bits."""
    common, count = kernels.xp.minimum(rows.length, others.length), len(rows.length)
    kernels.run(
        "common_ids", kernels.warps(count), count, rows.address, rows.length, others.address, others.length, common
    )
    return common
