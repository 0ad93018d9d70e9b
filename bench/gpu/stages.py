"""Batches of every form, and the filter."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.gpu.rig import Rig, by_kernel, copy_bandwidth, open_rig
from bench.gpu.section import Facts, Task
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.engine import take
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.store import Segments
from gpuload.kinds.chats.dataset import LAYOUT as WITH_LABELS
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing import pack
from gpuload.packing.plan import whole_rows

_CHUNK = 256 << 20
_AT_ONCE = 8  # batches kept alive, so that consecutive ones are not written to the same memory
_IN_A_ROW = 32
_PACKS = 8  # of a batch


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
