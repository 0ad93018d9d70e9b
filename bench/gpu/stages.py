"""Stages of the device engine that have a clock of their own: reading, and batches of every form."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.gpu.data import generated_file
from bench.gpu.rig import Rig, by_kernel, copy_bandwidth, open_rig
from bench.gpu.section import Facts, MissingError, Task
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.engines.conversations import from_arrow
from gpuload.engines.device import cuda
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.cudf import chunks
from gpuload.engines.device.engine import take
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.store import Segments
from gpuload.engines.device.texts import DeviceTexts
from gpuload.kinds.chats.dataset import LAYOUT as WITH_LABELS
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing import pack
from gpuload.packing.plan import whole_rows

_CHUNK = 256 << 20
_AT_ONCE = 8  # batches kept alive, so that consecutive ones are not written to the same memory
_IN_A_ROW = 32
_PACKS = 8  # of a batch


def read(task: Task, facts: Facts) -> None:
    """Read the prompt column of the largest generated file into device memory."""
    rig, path = open_rig(task), generated_file(task, max(task.rows))
    column = pq.read_table(path, columns=["prompt"])["prompt"]
    structs = [part.flatten() for part in column.chunks]
    size = sum(int(pc.sum(pc.binary_length(one.field(name))).as_py()) for one in structs for name in (0, 1))

    def copied_over() -> None:
        with rig.kernels.current():
            for part in column.chunks:
                from_arrow(DeviceTexts(rig.kernels), part)

    facts("copied over from Arrow", **rig.timed(copied_over, size, len(column)))
    if not rig.cudf:
        raise MissingError(f"reading with cuDF: {cuda.without_cudf() or 'a rehearsal has none'}")
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    parts = [group.column(i) for group in groups for i in range(group.num_columns)]
    compressed = sum(part.total_compressed_size for part in parts if part.path_in_schema.startswith("prompt."))

    def by_cudf() -> int:
        with rig.kernels.loading(), rig.kernels.current():
            return sum(len(chunk) for chunk in chunks(rig.kernels, path, "prompt", column.type, _CHUNK))

    if by_cudf() != len(column):
        raise ValueError("cuDF and Arrow see different numbers of rows")
    facts("cuDF, chunk by chunk", **rig.timed(by_cudf, size, len(column)), file_bytes=compressed)


def batches(task: Task, facts: Facts) -> None:
    """Measure the filter and batches: of prompts, with labels, and packed; compared with a copy of as many bytes."""
    rig = open_rig(task)
    facts("a large copy, read and written", **(copy := copy_bandwidth(rig)))
    count, width = task.batch
    chance, rows = np.random.default_rng(0), 10 * count
    lengths = np.minimum(chance.geometric(8 / width, rows), width)
    marked = Ragged(chance.integers(0, np.iinfo(np.int32).max, lengths.sum(), np.int32), offsets_of(lengths))
    with rig.kernels.current():
        xp = rig.kernels.xp
        store = Ragged(xp.asarray(marked.values), xp.asarray(marked.offsets))
        limit = int(np.percentile(lengths, 90))

        def kept() -> Ragged:
            return take(rig.kernels, store, xp.flatnonzero(store.lengths <= limit))

        with rig.kernels.loading():
            facts("filter that drops one row in ten", **rig.timed(kept, store.nbytes + kept().nbytes, rows))
        on_device = Segments(rig.kernels).add(store)
        assert on_device is not None
        some = [chance.integers(0, rows, count) for _ in range(2)]
        plans = [whole_rows(one, lengths[one]) for one in some]
        for name, layout, planes in (("a batch of prompts", LAYOUT, 3), ("a batch with labels", WITH_LABELS, 4)):
            made = partial(_padded, DeviceBatches(rig.kernels, on_device, layout, 0), plans, marked, width)
            _measure(rig, facts, name, made, 8 * planes * count * width, copy)
        plan = pack(lengths, width, "bfd", shuffle=True)
        launch = prepare_pack(rig.kernels, on_device.index)
        packs = [plan.take(np.arange(_PACKS)), plan.take(np.arange(len(plan) - _PACKS, len(plan)))]
        written = 32 * int(packs[0].lengths.sum())
        _measure(rig, facts, "a packed batch", lambda i: packed(rig.kernels, launch, packs[i]), written, copy)


def _padded(make: DeviceBatches, plans: list[Any], rows: Ragged, width: int, number: int) -> Any:
    return make(plans[number], lambda: rows, width)


def _measure(rig: Rig, facts: Facts, name: str, draw: Callable[[int], Any], written: int, copy: dict[str, Any]) -> None:
    """Add two rows about one batch of several: with its host code, and its kernel alone."""
    held: deque[Any] = deque(maxlen=_AT_ONCE)
    with rig.launches() as recorded:
        _in_a_row(draw, held)
    for kernel, cells in by_kernel(recorded).items():
        facts(f"{name}: {kernel}", **_each_of(cells, copy))
    cells = rig.timed(partial(_in_a_row, draw, held), _IN_A_ROW * written)
    facts(name, **_each_of({"launches": _IN_A_ROW} | cells, copy))


def _in_a_row(draw: Callable[[int], Any], held: deque[Any]) -> None:
    for number in range(_IN_A_ROW):
        held.append(draw(number % 2))


def _each_of(cells: dict[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
    """Turn cells about several batches into cells about one, compared with writing at the speed of the copy."""
    count = cells["launches"]
    each = cells | {"bytes": cells["bytes"] // count}
    if "seconds" in cells:
        each["seconds"] = cells["seconds"] / count
        each["times_the_copy"] = each["seconds"] / (each["bytes"] / copy["gb_per_s"] / 1e9)
    return each
