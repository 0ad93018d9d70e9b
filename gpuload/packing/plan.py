"""`Plan`: the packs of an epoch as flat arrays, and how ranks divide them.

A plan is a pure function of lengths, seed and epoch, so a position in it is one number: how many of its packs all ranks
together have had. Any number of ranks can continue from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuload.core.arrays import RowNumbers, offsets_of, ranges
from gpuload.core.errors import OptionError
from gpuload.core.options import Truncation


@dataclass(frozen=True, eq=False)
class Plan:
    """p pieces of rows in k packs. A pack becomes a flat row of tokens, or a batch of whole rows, or a row of a batch.

    Attributes:
        rows: (p,) int64, the row of each piece.
        first: (p,) int64, the piece's first token in its row.
        lengths: (p,) int64, number of tokens of the piece.
        offsets: (k + 1,) int64; pack i has the pieces `offsets[i]` to `offsets[i + 1] - 1`.

    Examples:
        >>> from gpuload.packing import pack
        >>> plan = pack([5, 2, 3, 1], 4, "bfd_split")
        >>> len(plan), plan.tokens.tolist()
        (3, [4, 4, 3])
        >>> last = plan.take([2])
        >>> last.rows.tolist(), last.first.tolist(), last.lengths.tolist()
        ([1, 3], [0, 0], [2, 1])
    """

    rows: RowNumbers
    first: RowNumbers
    lengths: RowNumbers
    offsets: RowNumbers

    def __len__(self) -> int:
        """Number of packs."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> RowNumbers:
        """(k,) int64, number of tokens of each pack."""
        tokens: RowNumbers = np.diff(offsets_of(self.lengths)[self.offsets])
        return tokens

    def fill(self, size: int) -> float:
        """Share of the tokens of packs of `size` tokens that are used, 0 to 1."""
        return int(self.lengths.sum()) / (len(self) * size) if len(self) else 1.0

    def take(self, packs: Any) -> "Plan":
        """Some of the packs: (m,) numbers, in the order of the result."""
        chosen = np.asarray(packs, np.int64)
        start = self.offsets[chosen]
        count = self.offsets[chosen + 1] - start
        offsets = offsets_of(count)
        pieces = ranges(start, count, offsets)  # no step takes time for packs that are not taken
        return Plan(self.rows[pieces], self.first[pieces], self.lengths[pieces], offsets)

    def cut(self, start: RowNumbers, stop: RowNumbers) -> "Plan":
        """Of each pack, its tokens from `start` to `stop`, (k,) each."""
        count, begin = np.diff(self.offsets), offsets_of(self.lengths)
        before = begin[:-1] - np.repeat(begin[self.offsets[:-1]], count)  # tokens of its pack before each piece
        low = np.clip(np.repeat(start, count) - before, 0, self.lengths)
        high = np.clip(np.repeat(stop, count) - before, 0, self.lengths)
        return Plan(self.rows, self.first + low, np.maximum(high - low, 0), self.offsets)

    def truncated(self, limit: int, side: Truncation) -> "Plan":
        """The packs with at most `limit` tokens each, see `Ragged.truncate`."""
        tokens = self.tokens
        if not len(tokens) or int(tokens.max()) <= limit:
            return self
        kept = np.minimum(tokens, limit)
        if side == "middle":
            head = np.minimum(kept, limit // 2)
            return Plan.joined(self.cut(0 * kept, head), self.cut(tokens - (kept - head), tokens))
        return self.cut(tokens - kept, tokens) if side == "left" else self.cut(0 * kept, kept)

    def within(self, rows: "Plan") -> "Plan":
        """The same packs of other rows: each row of this plan is made of pieces of those, a pack of `rows`."""
        pieces = rows.take(self.rows).cut(self.first, self.first + self.lengths)
        return Plan(pieces.rows, pieces.first, pieces.lengths, pieces.offsets[self.offsets])

    @staticmethod
    def joined(*plans: "Plan") -> "Plan":
        """Plans of k packs each: pack i has the pieces of all packs i, one after the other."""
        number = np.concatenate([np.repeat(np.arange(len(plan)), np.diff(plan.offsets)) for plan in plans])
        order = np.argsort(number, kind="stable")
        rows, first, lengths = (
            np.concatenate([getattr(plan, name) for plan in plans])[order] for name in ("rows", "first", "lengths")
        )
        return Plan(rows, first, lengths, sum((plan.offsets for plan in plans), start=np.zeros(1, np.int64)))

    @staticmethod
    def concatenate(plans: "Sequence[Plan]") -> "Plan":
        """The packs of all plans, one after the other."""
        rows, first, lengths = (
            np.concatenate([getattr(plan, name) for plan in plans]) for name in ("rows", "first", "lengths")
        )
        return Plan(rows, first, lengths, offsets_of(np.concatenate([np.diff(plan.offsets) for plan in plans])))


def whole_rows(rows: RowNumbers, lengths: RowNumbers, first: RowNumbers | None = None) -> Plan:
    """A plan in which each pack is one piece of one row, with numbers, lengths and first tokens (k,) each; None: from
    the beginning of the row."""
    return Plan(rows, 0 * rows if first is None else first, lengths, np.arange(len(rows) + 1))


def share(
    packs: int, batch_size: int, *, position: int = 0, rank: int = 0, world_size: int = 1, drop_last: bool = False
) -> Iterator[RowNumbers]:
    """Divide the packs of a plan, or the rows of an order, among ranks, and those of a rank into batches.

    Rank r takes the packs r, r + world_size, ... from `position` on. All ranks get the same number of batches, of the
    same numbers of packs: if the packs are not divisible, the last ones are dropped with `drop_last`; otherwise the
    first packs of the plan are repeated at its end.

    Args:
        packs: Number of packs of the plan.
        batch_size: Packs per batch, on each rank; 1 for a plan of `batch_rows`, whose packs are batches.
        position: Where to continue: how many packs all ranks together have had. After b batches these are
            min(b * batch_size * world_size, packs).
        rank: This process's rank.
        world_size: Number of ranks. It and `batch_size` may differ from those before `position`.
        drop_last: Drop the last batch if it is incomplete.

    Returns:
        The numbers of the packs of each batch.

    Raises:
        OptionError: A value is invalid.

    Examples:
        >>> from gpuload.packing import share
        >>> [batch.tolist() for batch in share(7, 2, rank=1, world_size=2)]
        [[1, 3], [5, 0]]
        >>> [batch.tolist() for batch in share(7, 2, rank=1, world_size=2, position=4)]
        [[5, 0]]
    """
    check_counts(packs=(packs, 0), position=(position, 0))
    check_ranks(batch_size, rank, world_size)
    if position > packs:
        raise OptionError(f"position={position}: expected at most {packs}, the number of packs")
    size, start, ranks = int(batch_size), int(position), int(world_size)
    own = _divided(packs - start, ranks, drop_last)
    order = np.resize(np.arange(packs), start + own * ranks)[start + int(rank) :: ranks]
    return (order[k * size : (k + 1) * size] for k in range(_divided(own, size, drop_last)))


def count_batches(packs: int, batch_size: int, world_size: int, drop_last: bool) -> int:
    """How many batches `share` gives each rank, from the first pack on."""
    return _divided(_divided(packs, world_size, drop_last), batch_size, drop_last)


def check_ranks(batch_size: Any, rank: Any, world_size: Any) -> None:
    """Checks how packs are divided; an `OptionError` if a value is invalid."""
    check_counts(batch_size=(batch_size, 1), world_size=(world_size, 1))
    if not is_count(rank, 0) or rank >= world_size:
        raise OptionError(f"rank={rank!r}: expected 0 to {world_size - 1} for world_size={world_size}")


def _divided(count: int, size: int, drop_last: bool) -> int:
    return count // size if drop_last else -(-count // size)


def lengths_of(lengths: Any) -> RowNumbers:
    """Lengths of rows as (n,) int64; an `OptionError` if they are something else."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise OptionError(f"lengths: expected a one-dimensional array of integers, got {given.dtype} {given.shape}")
    if given.size and given.min() < 0:
        row = int(given.argmin())
        raise OptionError(f"lengths: row {row} has the length {given[row]}: expected at least 0")
    return given.astype(np.int64, copy=False)


def generator(shuffle: bool, seed: int, epoch: int) -> np.random.Generator | None:
    """The source of random numbers of an epoch; None for the order of the rows. An `OptionError` if seed or epoch is
    invalid."""
    check_counts(seed=(seed, 0), epoch=(epoch, 0))
    return np.random.default_rng([seed, epoch]) if shuffle else None


def check_counts(**values: tuple[Any, int]) -> None:
    """Checks integers: name → the value, and what it is at least. An `OptionError` if a value is something else."""
    for name, (value, least) in values.items():
        if not is_count(value, least):
            raise OptionError(f"{name}={value!r}: expected an integer of at least {least}")


def check_flags(**values: Any) -> None:
    """Checks that what is on or off is no text, such as "false", which would mean on: that is an `OptionError`."""
    for name, value in values.items():
        if isinstance(value, str):
            raise OptionError(f"{name}={value!r}: expected True or False")


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
