"""Stages of the device engine: reading, rendering, filter, batches."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.gpu.data import generated_file
from bench.gpu.exact import brief
from bench.gpu.rig import Rig, by_kernel, copy_bandwidth, cudf_missing, name_of, open_rig, program_of
from bench.gpu.section import Facts, MissingError, Task
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.engines.conversations import Conversations, from_arrow
from gpuload.engines.device.batches import DeviceBatches, pad, prepare_pad
from gpuload.engines.device.cudf import chunks
from gpuload.engines.device.engine import take
from gpuload.engines.device.render import render
from gpuload.engines.device.store import Segments
from gpuload.engines.device.texts import DeviceTexts
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing.plan import whole_rows

_CHUNK = 256 << 20
AT_ONCE = 8  # batches kept alive, so that consecutive ones are not written to the same memory
IN_A_ROW = 32


def read(task: Task, facts: Facts) -> None:
    """Read the prompt column of the largest generated file into device memory."""
    rig, path = open_rig(task), generated_file(task, max(task.rows))
    column = _prompts(path)
    size, rows = _characters(column), len(column)

    def copied_over() -> None:
        with rig.kernels.current():
            for part in column.chunks:
                from_arrow(DeviceTexts(rig.kernels), part)

    facts("copied over from Arrow", **rig.timed(copied_over, size, rows))
    if not rig.cudf:
        why = "a rehearsal has no cuDF" if rig.rehearsal else cudf_missing() or "disabled by --no-cudf"
        raise MissingError(f"reading with cuDF: {why}")
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    parts = [group.column(i) for group in groups for i in range(group.num_columns)]
    compressed = sum(part.total_compressed_size for part in parts if part.path_in_schema.startswith("prompt."))

    def by_cudf() -> int:
        with rig.kernels.loading(), rig.kernels.current():
            return sum(len(chunk) for chunk in chunks(rig.kernels, path, "prompt", column.type, _CHUNK))

    if by_cudf() != rows:
        raise ValueError("cuDF and Arrow see different numbers of rows")
    facts("cuDF, chunk by chunk", **rig.timed(by_cudf, size, rows), file_bytes=compressed)


def rendering(task: Task, facts: Facts) -> None:
    """Render one chunk of conversations with each tokenizer's chat template, kernel by kernel."""
    rig, path = open_rig(task), generated_file(task, min(task.rows))
    with rig.kernels.loading(), rig.kernels.current():
        column = _chunk(rig, path)
        for directory in task.tokenizers:
            if facts.seconds_left < 10:
                break
            _render(rig, directory, column, facts)


def _render(rig: Rig, directory: str, column: Conversations, facts: Facts) -> None:
    name = name_of(directory)
    try:
        program = program_of(directory)
        text = render(rig.kernels, program, column)
    except Exception as error:
        facts(name, why=brief(error))
        return
    size = len(text.data)
    by_reference = len(column) - text.compiled_rows
    del text
    cells = rig.timed(lambda: render(rig.kernels, program, column), size, len(column))
    facts(name, **cells, not_compiled=by_reference)
    with rig.launches() as recorded:
        render(rig.kernels, program, column)
    for kernel, about in by_kernel(recorded).items():
        facts(f"{name}: {kernel}", **about)


def batches(task: Task, facts: Facts) -> None:
    """Measure the filter and batches, compared with the bandwidth of device memory."""
    rig = open_rig(task)
    facts("a large copy, read and written", **(copy := copy_bandwidth(rig)))
    count, width = task.batch
    lengths = _lengths(generated_file(task, min(task.rows)))
    with rig.kernels.current():
        xp = rig.kernels.xp
        offsets = offsets_of(xp.asarray(lengths))
        store = Ragged(xp.arange(int(offsets[-1]), dtype=np.int32), offsets)
        limit = int(np.percentile(lengths, 90))

        def kept() -> Ragged:
            return take(rig.kernels, store, xp.flatnonzero(store.lengths <= limit))

        with rig.in_a_pool():
            facts("filter that drops one row in ten", **rig.timed(kept, store.nbytes + kept().nbytes, len(store)))
        order = np.random.default_rng(0).permutation(max(len(store), count)) % len(store)
        on_device = Segments(rig.kernels).add(store)
        assert on_device is not None
        batch_of = DeviceBatches(rig.kernels, on_device, LAYOUT, 0)
        launch = prepare_pad(rig.kernels, on_device.index, LAYOUT, 0)
        written = 3 * count * width * 8
        held: deque[Any] = deque(maxlen=AT_ONCE)
        plans = [whole_rows(some, lengths[some]).truncated(width, "left") for some in (order[:count], order[-count:])]
        with rig.launches() as recorded:
            for _ in range(IN_A_ROW):
                held.append(pad(rig.kernels, launch, plans[0], width, LAYOUT))
        alone = by_kernel(recorded)["pad"]
        facts(f"pad, {count} × {width}", **each_of(alone, copy))

        draw: Callable[[int], Any] = lambda i: batch_of(plans[i], store.to_host, width)  # noqa: E731
        cells = rig.timed(partial(in_a_row, draw, held), IN_A_ROW * written)
        facts("a batch", **each_of({"launches": IN_A_ROW} | cells, copy))


def in_a_row(draw: Callable[[int], Any], held: deque[Any]) -> None:
    for number in range(IN_A_ROW):
        held.append(draw(number % 2))


def each_of(cells: dict[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
    """Turn cells about several batches into cells about one, compared with writing at the speed of the copy."""
    count = cells["launches"]
    each = cells | {"bytes": cells["bytes"] // count}
    if "seconds" in cells:
        each["seconds"] = cells["seconds"] / count
        each["times_the_copy"] = each["seconds"] / (each["bytes"] / copy["gb_per_s"] / 1e9)
    return each


def _chunk(rig: Rig, path: str) -> Conversations:
    column = _prompts(path)
    if rig.cudf:
        return next(chunks(rig.kernels, path, "prompt", column.type, _CHUNK))
    return from_arrow(DeviceTexts(rig.kernels), column.chunk(0))


def _prompts(path: str) -> pa.ChunkedArray:
    return pq.read_table(path, columns=["prompt"])["prompt"]


def _characters(column: pa.ChunkedArray) -> int:
    structs = (part.flatten() for part in column.chunks)
    return sum(int(pc.sum(pc.binary_length(struct.field(name))).as_py()) for struct in structs for name in (0, 1))


def _lengths(path: str) -> np.ndarray[Any, Any]:
    """A quarter of the bytes of each row, about its number of tokens, (n,) int64."""
    found = []
    for part in _prompts(path).chunks:
        sizes = np.cumsum(np.append(0, np.asarray(pc.binary_length(part.flatten().field("content")), np.int64)))
        found.append(np.diff(sizes[np.asarray(part.offsets) - part.offsets[0].as_py()]) // 4)
    return np.concatenate(found)
