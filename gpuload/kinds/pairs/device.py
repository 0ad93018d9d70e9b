"""The stages of a load of preference data on a device.

Columns of messages are rendered by kernels: each prompt with its completions, and alone. What these texts of a row
share is encoded once, up to a token in front of which they may be cut (`prefixes.py`), and so is the rest of each; a
kernel makes rows of their ids. Everything else (texts, rows with tools of their own) goes through the stages of the
host, and its ids are copied over. All batches are made on the device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array, Ragged, offsets_of, on_host
from gpuload.core.errors import DeviceError
from gpuload.engines.conversations import from_arrow, joined
from gpuload.engines.device.engine import out_of_memory
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.render import DeviceText
from gpuload.engines.device.store import Index
from gpuload.engines.device.texts import gather
from gpuload.engines.device.training import DeviceTrainingEngine
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import Prompts, TextColumn, Tokenized
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.reference import PairReference
from gpuload.kinds.training_engine import SAMPLE, add_by_reference, problems_in, rejected_in
from gpuload.kinds.training_reference import answers_in
from gpuload.sources.types import is_messages


@dataclass(kw_only=True, eq=False)
class DevicePairText(DeviceText):
    """n pairs, or prompts with one completion, as text in device memory: the prompts with the first completions.

    Attributes:
        more: the prompts with the second completions if there are any, then the prompts alone if the objective has
            prompts. The texts of a rejected row need not be empty.
    """

    more: list[DeviceText]

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


class DevicePairEngine(DeviceTrainingEngine):
    """The `Engine` of a load of preference data on a device. For the arguments see `DeviceEngine`."""

    host_engine = PairEngine
    host: PairEngine
    _reference: PairReference

    def render(self, prompts: Prompts) -> HostText | DeviceText:
        column: pa.Array = prompts.column  # type: ignore[attr-defined]
        if self._by_kernels and pa.types.is_struct(column.type) and is_messages(column.field("prompt").type):
            prompt = column.field("prompt")
            answers = [column.field(name) for name in answers_in([each.name for each in column.type])]
            if all(is_messages(each.type) for each in answers):
                whole = [joined(prompt, each) for each in answers]
                return self._counted(self._render_pairs(column, prompt, whole))
        return super().render(prompts)

    def _render_pairs(self, column: pa.Array, prompt: pa.Array, whole: list[pa.Array]) -> DevicePairText:
        """Renders prompts with their completions, and alone if the objective has prompts."""
        columns = [(each, self.host.program) for each in whole]
        if self._reference.objective != "rm":
            columns.append((prompt, self.host.prompting))
        with self._kernels.current():
            first, *more = (self._render(from_arrow(self._ops, each), program) for each, program in columns)
        text = DevicePairText(kernels=self._kernels, offsets=first.offsets, data=first.data, more=more, **first.fates())
        add_by_reference(text, more)
        text.reject(rejected_in(more))
        text.reject(problems_in(column))
        return text

    def encode(self, text: HostText | DeviceText) -> Tokenized:
        if not isinstance(text, DevicePairText):
            return super().encode(text)
        with self._kernels.current():
            try:
                parts = self._cut(text)
                ids, at = self._ids(parts)
                fell_back = int(self._kernels.xp.unique(at % max(len(text), 1)).size)
                return text.tokenized(self._rows_of(ids, len(text)), fell_back)
            except MemoryError as error:
                raise DeviceError(out_of_memory("joining sequences")) from error

    def _cut(self, text: DevicePairText) -> DeviceText:
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
        """Rows of tokens.

        Args:
            ids: of what `_cut` returns.
            count: number of rows.
        """
        kernels, xp = self._kernels, self._kernels.xp
        address, length = kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths
        start, *columns = (Index(address[k : k + count], length[k : k + count]) for k in range(0, len(ids), count or 1))
        if self._reference.objective == "rm":
            first, second = columns
            shared = common_ids(kernels, first, second)
            begins = [first.length, second.length]  # nothing is marked as a completion
        else:
            *whole, alone = columns
            begins = [common_ids(kernels, each, alone) for each in whole]
            first, second = whole[0], whole[-1]
            shared = xp.minimum(begins[0], begins[-1])
            self.host.diverging += int((shared < alone.length).sum())
            if len(whole) == 1:
                shared = first.length
            elif self._reference.objective == "dpo":
                begins = [shared, shared]
        offsets = offsets_of(start.length + first.length + second.length - shared)
        values = xp.empty(int(offsets[-1]), np.int32)
        kernels.run(
            "lay_pairs", kernels.warps(count), count, offsets, start.address, start.length, shared, first.address,
            first.length, begins[0], second.address, begins[-1], values,
        )  # fmt: skip
        return Ragged(values, offsets)


def common_ids(kernels: Kernels, rows: Index, others: Index) -> Array:
    """(n,) int64 in device memory: how many leading ids the rows of two columns have in common, whatever their bits."""
    common, count = kernels.xp.minimum(rows.length, others.length), len(rows.length)
    kernels.run(
        "common_ids", kernels.warps(count), count, rows.address, rows.length, others.address, others.length, common
    )
    return common
