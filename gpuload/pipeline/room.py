"""How much room the rows of a load take, and whether they are kept in memory or on disk."""

from collections.abc import Collection, Sequence

from gpuload.cache.directory import has_room, store_directory
from gpuload.core.arrays import RowNumbers
from gpuload.core.memory import free_memory
from gpuload.core.options import Options
from gpuload.sources.read import Source


def choose_disk(options: Options, sources: Sequence[Source], wanted: RowNumbers | None) -> bool:
    """Whether a load keeps its rows on disk: "auto" does if they would take more than half of the free memory.

    Args:
        wanted: the rows to read, numbered over all sources; None for all.
    """
    if options.store != "auto":
        return options.store == "disk"
    free = free_memory()
    return free is not None and row_bytes(sources, wanted) > free / 2


def fits_on_disk(options: Options, sources: Sequence[Source], wanted: RowNumbers | None) -> bool:
    """Whether the disk has space for a store. For the arguments see `choose_disk`."""
    return has_room(store_directory(options.cache_dir), row_bytes(sources, wanted))


def row_bytes(sources: Sequence[Source], wanted: RowNumbers | None, names: Collection[str] | None = None) -> int:
    """About how many bytes the rows take, in some columns or in all. Ids take about as many as their text."""
    return int(share(sources, wanted) * sum(source.decoded_bytes(names) for source in sources))


def share(sources: Sequence[Source], wanted: RowNumbers | None) -> float:
    """Which part of the rows is read."""
    return 1.0 if wanted is None else len(wanted) / max(1, sum(source.num_rows for source in sources))
