"""One load shared by the ranks of a distributed run: each prompt is tokenized by one rank, and every rank has all rows.

    agree     all ranks were given the same files, tokenizer and options; rank 0 chooses the sample and the time of day
    share     a rank's rows: a consecutive part of the rows to read, whole files if there are enough of them
    exchange  every rank sends its ids, columns and counts to all others

With a store on disk, one rank of each machine makes it, and the others use its files.

Ranks communicate through a gloo group of their own, in host memory. If one rank fails or dies, all of them raise:
before each exchange they meet, and what has become of the others is known from their heartbeats (`heartbeat.py`).
"""

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.errors import OptionError
from gpuload.dataset.report import Report
from gpuload.engines.protocol import TokenStore
from gpuload.pipeline.heartbeat import Heartbeat

Made = TypeVar("Made")

_PATIENCE = datetime.timedelta(seconds=60)  # for one message, which all ranks have come to exchange
_NEAR = 0.25  # of a share: a cut this near to the beginning of a file is moved there
_MESSAGE = 1 << 26  # bytes sent at a time


class KeptRows(NamedTuple):
    """Rows that were kept, in the order of their files.

    Attributes:
        ids: their ids, in some parts.
        tables: their other columns, in some parts.
        numbers: (n,) int64, numbers of the rows over all sources.
        sizes: (k, n) int64, what the kind has counted of the rows, in some parts.
        report: of the rows that were read.
        shapes: of these rows, see `Verifier`.
    """

    ids: list[TokenStore]
    tables: list[pa.Table]
    numbers: RowNumbers
    sizes: list[RowNumbers]
    report: Report
    shapes: dict[int, bool]


class Ranks:
    """The ranks of a load, from the point of view of one of them.

    Attributes:
        rank: of this process.
        count: how many there are.
        exchanged: whether every rank has said what became of its share.
    """

    def __init__(self) -> None:
        from torch.distributed.distributed_c10d import _get_default_store  # which some builds of torch lack

        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._heartbeat = Heartbeat(_get_default_store(), self.rank, self.count)
        self._group: Any = None  # for tensors in host memory; made when all ranks have met
        self.exchanged = self._finished = False

    def check(self) -> None:
        """Raises an error if another rank has failed or died: what this one does is of no use then.

        Raises:
            GpuloadError: the reason.
        """
        self._heartbeat.check()

    def agree(self, given: dict[str, Any], chosen: Any) -> Any:
        """Checks that all ranks were given the same, and returns what rank 0 has chosen.

        Args:
            given: name → plain data.
            chosen: anything that can be pickled.

        Raises:
            OptionError: a rank was given something else than rank 0. Every rank raises it.
        """
        everyone = self._gather((given, chosen))
        expected = everyone[0][0]
        for rank, (found, _) in enumerate(everyone):
            for name in [name for name in expected if found.get(name) != expected[name]]:
                raise OptionError(
                    f"distributed=True: {name} is {expected[name]!r:.200} on rank 0 and {found.get(name)!r:.200} on "
                    f"rank {rank}: call load with the same arguments on every rank"
                )
        return everyone[0][1]

    def all(self, flag: bool) -> bool:
        """Whether something is true on every rank."""
        return all(self._gather(flag))

    def share(self, rows_of_sources: Sequence[int], wanted: RowNumbers | None) -> RowNumbers:
        """This rank's rows.

        Args:
            rows_of_sources: number of rows of each source.
            wanted: (n,) the rows to read, numbered over all sources, in any order; None for all.

        Returns:
            (k,) ascending row numbers. The shares of all ranks, in order, are all rows in ascending order.
        """
        starts = np.cumsum([0, *rows_of_sources])
        rows = np.arange(starts[-1]) if wanted is None else np.sort(wanted)
        begins = np.searchsorted(rows, starts)  # the position in `rows` at which each source begins
        size = len(rows) / self.count
        cuts = [0]
        for number in range(1, self.count):
            even = number * size
            nearest = int(begins[np.argmin(np.abs(begins - even))])
            # A file that is read as a whole can be cached.
            cuts.append(max(cuts[-1], nearest if abs(nearest - even) <= _NEAR * size else round(even)))
        cuts.append(len(rows))
        return rows[cuts[self.rank] : cuts[self.rank + 1]]

    def exchange(self, own: KeptRows, keep: Callable[[Ragged], TokenStore]) -> KeptRows:
        """Sends this rank's rows to the others.

        Args:
            own: this rank's rows.
            keep: puts ids of other ranks, which are in host memory, where this rank's own ids are.

        Returns:
            The rows of all ranks, in order.

        Raises:
            GpuloadError: another rank failed.
        """
        mine = Ragged.concatenate([part.to_host() for part in own.ids])
        sizes = np.concatenate(own.sizes, axis=1) if own.sizes else np.zeros((0, 0), np.int64)
        arrays = [mine.values, mine.offsets, own.numbers, sizes, *map(_to_bytes, own.tables)]
        everyone = self._gather(([(array.dtype.str, array.shape) for array in arrays], own.report, own.shapes))
        self.exchanged = True
        ids: list[TokenStore] = []
        tables, numbers, everyones_sizes = [], [], []
        for rank, (layout, _, _) in enumerate(everyone):
            self._meet()  # what was received before may have taken some ranks longer to keep
            values, offsets, theirs, counted, *some = self._broadcast(rank, layout, arrays)
            ids += own.ids if rank == self.rank else [keep(Ragged(values, offsets))]
            tables += own.tables if rank == self.rank else [_from_bytes(array) for array in some]
            numbers.append(theirs)
            everyones_sizes += [counted] * bool(len(counted))  # a rank without rows has not counted anything
        report = everyone[0][1]
        for _, other, _ in everyone[1:]:
            report.add(other)
        shapes: dict[int, bool] = {}
        for _, _, some in everyone:
            shapes |= {shape: compared or shapes.get(shape, False) for shape, compared in some.items()}
        report.check.count_shapes(shapes)
        report.notes.append(f"the work was shared by {self.count} ranks")
        self._finished = True
        return KeptRows(ids, tables, np.concatenate(numbers), everyones_sizes, report, shapes)

    def one_per_machine(self, load: Callable[[], Made]) -> Made:
        """Calls `load` on one rank of each machine, and on the others when it has returned there: they find what it has
        stored.

        Raises:
            GpuloadError: another rank failed.
        """
        machine = platform.node()
        first = self._gather(machine).index(machine) == self.rank
        made = load() if first else None
        self._meet()
        if made is None:
            made = load()
        self._meet()
        self.exchanged = self._finished = True
        return made

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks, which wait for this one's rows, why it has none."""
        if not self._finished:
            self._heartbeat.fail(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        """Ends what this rank has to do with the others."""
        self._heartbeat.end()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def again(self) -> None:
        """Prepares for another exchange: all ranks load their rows again."""
        self.exchanged = self._finished = False

    def _meet(self) -> None:
        """Waits until all ranks are here.

        Raises:
            GpuloadError: another rank failed or died.
        """
        self._heartbeat.meet()

    def _broadcast(self, rank: int, shapes: list[Any], own: list[Any]) -> list[Any]:
        """The arrays of one rank, on every rank."""
        arrays = own if rank == self.rank else [np.empty(shape, np.dtype(kind)) for kind, shape in shapes]
        source = dist.get_global_rank(self._group, rank)
        for array in arrays:
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
            for start in range(0, len(flat), _MESSAGE):
                with self._exchanging():
                    dist.broadcast(flat[start : start + _MESSAGE], source, self._group)
        return arrays

    def _gather(self, own: Any) -> list[Any]:
        """What every rank has given, in order."""
        self._meet()
        everyone: list[Any] = [None] * self.count
        with self._exchanging():
            self._group = self._group or dist.new_group(backend="gloo", timeout=_PATIENCE)
            dist.all_gather_object(everyone, own, self._group)
        return everyone

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Around a collective operation: if it fails, the error names the rank that has died."""
        try:
            yield
        except Exception as error:
            raise self._heartbeat.explain(error) from error


_JOINED: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def joined(distributed: bool) -> Iterator[Ranks | None]:
    """The ranks of the default process group, from when this one begins a load: what fails on one then fails on all.
    Inside of such a block, the same ranks.

    Args:
        distributed: the option; without it there are no ranks.

    Raises:
        OptionError: there is no process group.
    """
    if not distributed or (ranks := _JOINED.get()) is not None:
        yield ranks if distributed else None
        return
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "distributed=True: torch.distributed is not initialized: call torch.distributed.init_process_group before "
            "load, or remove the option"
        )
    ranks = Ranks()
    token = _JOINED.set(ranks)
    try:
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        _JOINED.reset(token)
        ranks.end()


def _to_bytes(table: pa.Table) -> np.ndarray[Any, Any]:
    """A table as (n,) uint8, in Arrow's stream format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _from_bytes(data: np.ndarray[Any, Any]) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()
