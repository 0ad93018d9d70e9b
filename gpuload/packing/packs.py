"""Packs: pieces of documents that together have at most `size` tokens, and as few packs as possible.

Best-fit decreasing takes the pieces from the longest to the shortest, and puts each into the pack with the least room
that is still enough. A loop over pieces would take microseconds for each. Here pieces of the same length are placed at
once, in runs of packs that have the same room:

    1. sort the pieces by length, and count those of each length
    2. for each length L, from the longest: of the runs with room for L, take those with the least room first
    3. room // L pieces go into each pack of the run: after the first one, the same pack is still the best fit, as no
       other pack had less room and enough of it. The last pack may get fewer pieces
    4. from (run, pieces per pack) compute the place of every piece at once

The packs of a run were opened one after the other and have had the same number of pieces ever since, so a run is a
first pack and a count. A full step leaves less than half of the room that a run had, and only the last step of a length
divides a run. So there are at most O(D log size) steps for D different lengths, however many documents there are.
"""

from bisect import bisect_left, insort
from collections import deque
from typing import Any, Literal, get_args

import numpy as np

from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.options import check_choice
from gpuload.packing.plan import Plan, check_counts, generator, lengths_of

Packing = Literal["bfd", "bfd_split", "wrapped", "trl", "trl_bfd_split", "trl_wrapped"]

_TRL_ROWS = 1000  # `pack_dataset` packs so many rows at a time: the batch size of `datasets.Dataset.map`
_TRL = {"trl": "bfd", "trl_bfd_split": "bfd_split", "trl_wrapped": "wrapped"}
_Pieces = tuple[RowNumbers, RowNumbers, RowNumbers]  # rows, first tokens and lengths, as in `Plan`


def pack(
    lengths: Any, size: int, strategy: Packing = "bfd", *, shuffle: bool = False, seed: int = 0, epoch: int = 0
) -> Plan:
    """Plan the packs of an epoch.

    Strategies:

    - `"bfd"`: Best-fit decreasing over all documents. Longer documents are truncated to their first `size` tokens.
    - `"bfd_split"`: The same, with longer documents split into pieces of `size` tokens and a shorter one.
    - `"wrapped"`: Documents end to end, cut every `size` tokens. All packs but the last are full.
    - `"trl"`: The packs of `pack_dataset` of TRL 1.16 (strategy `"bfd"`, the default), which packs each 1,000 rows on
      their own. `"trl_bfd_split"` and `"trl_wrapped"` are those of its other strategies.

    Without `shuffle`, and for up to 1,000 rows, `"bfd"`, `"bfd_split"` and `"wrapped"` equal TRL's strategies of the
    same name; for more rows they fill packs better. If TRL runs with `num_proc`, each of its processes packs a part of
    the rows on its own, so its packs differ from these. TRL does not record where documents begin in wrapped packs; a
    plan does.

    Args:
        lengths: (n,) integers, tokens of each document. Documents without tokens are in no pack.
        size: Maximum number of tokens of a pack.
        strategy: See above.
        shuffle: Use another order of the packs in every epoch, and except for TRL's strategies, other documents
            together: the documents are shuffled first, which decides between documents of equal length. Otherwise the
            order is that of the documents, and best-fit packs begin with the longest.
        seed: Seed of `shuffle`.
        epoch: Number of the epoch, from 0.

    Raises:
        OptionError: A value is invalid.

    Examples:
        >>> from gpuload.packing import pack
        >>> plan = pack([5, 2, 3, 1], 4)
        >>> plan.rows.tolist(), plan.lengths.tolist(), plan.offsets.tolist()
        ([0, 2, 3, 1], [4, 3, 1, 2], [0, 1, 3, 4])
        >>> plan.fill(4)
        0.8333333333333334
    """
    counts = lengths_of(lengths)
    check_counts(size=(size, 1))
    check_choice("packing", strategy, get_args(Packing))
    chance = generator(shuffle, seed, epoch)
    if strategy in _TRL:
        parts = range(0, max(1, len(counts)), _TRL_ROWS)
        rows = [low + np.flatnonzero(counts[low : low + _TRL_ROWS]) for low in parts]
        plan = Plan.concatenate([_packed(_TRL[strategy], part, counts[part], int(size)) for part in rows])
    else:
        documents = np.flatnonzero(counts)
        if chance:
            chance.shuffle(documents)
        plan = _packed(strategy, documents, counts[documents], int(size))
    return plan.take(chance.permutation(len(plan))) if chance else plan


def _packed(strategy: str, rows: RowNumbers, lengths: RowNumbers, size: int) -> Plan:
    """The packs of some documents, all with tokens, in their order."""
    if strategy == "wrapped":
        return _wrapped(rows, lengths, size)
    if strategy == "bfd":
        pieces: _Pieces = rows, np.zeros_like(rows), np.minimum(lengths, size)
    else:
        pieces = _split(rows, lengths, size)
    order, offsets = _best_fit(pieces[2], size)
    ordered_rows, first, counts = (part[order] for part in pieces)
    return Plan(ordered_rows, first, counts, offsets)


def _split(rows: RowNumbers, lengths: RowNumbers, size: int) -> _Pieces:
    """Pieces of `size` tokens, and of each document's rest."""
    count = -(-lengths // size)
    # Piece j is number j - (first piece of its document) of its document.
    first = (np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)) * size
    return np.repeat(rows, count), first, np.minimum(np.repeat(lengths, count) - first, size)


def _wrapped(rows: RowNumbers, lengths: RowNumbers, size: int) -> Plan:
    """Documents end to end: a piece begins with a document or a pack."""
    places = offsets_of(lengths)  # where documents begin, and the end of all
    total = int(places[-1])
    bounds = np.sort(np.concatenate([places, np.arange(0, total, size)]), kind="stable")  # merges the two
    bounds = bounds[np.diff(bounds, prepend=-1) > 0]
    document = np.searchsorted(places, bounds[:-1], side="right") - 1
    packs = np.append(np.arange(0, total, size), total)
    pieces = rows[document], bounds[:-1] - places[document], np.diff(bounds)
    return Plan(*pieces, np.searchsorted(bounds, packs))


def _best_fit(lengths: RowNumbers, size: int) -> tuple[RowNumbers, RowNumbers]:
    """Best-fit decreasing; pieces of equal length keep their order, and so do packs with equal room.

    `lengths` are (p,) int64, 1 to `size`, which is the room of a new pack. Returns piece numbers pack by pack, (p,),
    and where each pack begins, (k + 1,).
    """
    # NumPy's stable sort of 16-bit keys is a radix sort.
    order = np.argsort((size - lengths).astype(np.uint16 if size < 1 << 16 else np.int64), kind="stable")
    ordered = lengths[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=0))  # of each length
    counts = np.diff(begins, append=len(ordered))
    waiting: dict[int, deque[tuple[int, int, int]]] = {}  # room → runs: first pack, packs, pieces of each so far
    rooms: list[int] = []  # keys of `waiting`, ascending
    opened = 0
    placed: list[tuple[int, int, int, int]] = []  # first pack, packs, pieces of each before, and those added to each

    def put(first: int, packs: int, held: int, added: int, room: int) -> None:
        placed.append((first, packs, held, added))
        if room in waiting:
            waiting[room].append((first, packs, held + added))
        elif room:
            waiting[room] = deque([(first, packs, held + added)])
            insort(rooms, room)

    for length, count in zip(ordered[begins].tolist(), counts.tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                runs = waiting[room]
                first, packs, held = runs.popleft()
            else:
                room = size
                first, packs, held = opened, -(-count // (size // length)), 0
                opened += packs
                runs = deque()
            each = room // length
            full, more = divmod(min(count, packs * each), each)
            count -= full * each + more
            used = full + (more > 0)
            if used < packs:
                runs.appendleft((first + used, packs - used, held))
            elif not runs and room < size:
                del waiting[room], rooms[at]
            if full:
                put(first, full, held, each, room - each * length)
            if more:
                put(first + full, 1, held, more, room - more * length)
    return _places(order, np.array(placed, np.int64).reshape(-1, 4), opened)


def _places(order: RowNumbers, placed: RowNumbers, packs: int) -> tuple[RowNumbers, RowNumbers]:
    """The result of `_best_fit` for k packs, of `order` (p,), piece numbers in the order in which they were placed, and
    of `placed` (m, 4), where: first pack, number of packs, pieces of each before, and pieces added to each."""
    first, count, held, added = placed.T
    pieces = count * added
    step = np.repeat(np.arange(len(placed)), pieces)
    number = np.arange(len(order)) - (np.cumsum(pieces) - pieces)[step]  # of the piece among those of its step
    pack_of, slot = np.divmod(number, added[step])
    pack_of += first[step]
    offsets = offsets_of(np.bincount(pack_of, minlength=packs))
    result = np.empty_like(order)
    result[offsets[pack_of] + held[step] + slot] = order
    return result, offsets
