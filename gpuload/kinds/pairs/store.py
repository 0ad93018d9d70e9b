"""What the rows of a store are made of, in host or in device memory: the ids of a device stay there."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpuload.core.arrays import Array, Ragged, array_module, on_host
from gpuload.dataset.arrow import parts as row_parts
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.store import DeviceStore, Index, index_of
from gpuload.engines.protocol import TokenStore
from gpuload.kinds.pairs import parts


@dataclass(frozen=True, eq=False)
class PartSizes:
    """How n rows are divided, see `gpuload.kinds.pairs.parts`; (n,) int64 arrays.

    Attributes:
        all: the ids of each row.
        chosen, rejected: those that only one of the two sequences has.
        completion: those of completions.
    """

    all: Array
    chosen: Array
    rejected: Array
    completion: Array

    @property
    def longer(self) -> Array:
        """Tokens of the longer of the two sequences of each row; those of the row itself if it is not a pair."""
        return self.all - array_module(self.all).minimum(self.chosen, self.rejected)

    @property
    def shorter(self) -> Array:
        """The same of the shorter one."""
        return self.all - array_module(self.all).maximum(self.chosen, self.rejected)


def part_sizes(ids: TokenStore) -> PartSizes:
    """The sizes of the parts of rows.

    Args:
        ids: rows with bits, in host or device memory, or a store of them.

    Returns:
        Arrays in the memory of the rows; in host memory for a store on a device or on disk.
    """
    if isinstance(ids, Ragged):
        return PartSizes(ids.lengths, *parts.counts(ids))
    if not isinstance(ids, DeviceStore):
        found = [np.zeros((3, 0), np.int64), *(np.stack(parts.counts(some)) for some in _in_memory(ids))]
        return PartSizes(ids.lengths, *np.concatenate(found, axis=1))
    with ids.kernels.current():
        index, rows = ids.index, len(ids)
        count = ids.kernels.xp.empty((3, rows), np.int64)
        ids.kernels.run("count_parts", ids.kernels.threads(rows), rows, index.address, index.length, count)
        return PartSizes(ids.lengths, *on_host(count))


def equal_pairs(ids: TokenStore) -> int:
    """The number of pairs whose two sequences are equal.

    Args:
        ids: n pairs.
    """
    if isinstance(ids, Ragged):
        return parts.equal_pairs(ids)
    if not isinstance(ids, DeviceStore):
        return sum(map(parts.equal_pairs, _in_memory(ids)))
    kernels, sizes = ids.kernels, part_sizes(ids)
    same = np.flatnonzero(sizes.chosen == sizes.rejected)
    size, end = sizes.chosen[same], (ids.address + 4 * ids.lengths)[same]
    chosen, rejected = index_of(kernels, end - 8 * size, size), index_of(kernels, end - 4 * size, size)
    with kernels.current():
        return int((common_ids(kernels, chosen, rejected) == chosen.length).sum())


def _in_memory(ids: TokenStore) -> Iterator[Ragged]:
    """The rows of a store on disk, some at a time."""
    return map(ids.take, row_parts(ids.lengths))


def common_ids(kernels: Kernels, rows: Index, others: Index) -> Array:
    """(n,) int64 in device memory: how many leading ids the rows of two columns have in common, whatever their bits."""
    common, count = kernels.xp.minimum(rows.length, others.length), len(rows.length)
    kernels.run(
        "common_ids", kernels.warps(count), count, rows.address, rows.length, others.address, others.length, common
    )
    return common
