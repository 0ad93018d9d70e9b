"""Batches of whole rows: by number of rows or by token budget, of similar lengths or not."""

from typing import Any

import numpy as np

from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.errors import OptionError
from gpuload.packing.plan import Plan, check_counts, generator, lengths_of

_GROUP_BATCHES = 50  # batches that are sorted by length together, as in transformers' LengthGroupedSampler
_LEAST_GROUPS = 4  # with fewer, the same rows would be together in every epoch
_WINDOW = 64  # rows that are looked at first for the end of a batch


def batch_rows(
    lengths: Any,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    padded: bool = False,
    group_by_length: bool = False,
    world_size: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> Plan:
    """Plan batches of whole rows. The packs of the plan are the batches; `share` divides them among ranks.

    With `group_by_length`, rows of similar length are in a batch:

        1. the rows, shuffled or not, are divided into groups of rows for 50 batches (fewer for small data)
        2. groups are sorted by length, one descending, the next one ascending, so that a batch at the edge of two
           groups has rows of similar length too
        3. batches are cut from this order, and with `shuffle` they are shuffled as a whole
        4. the batch with the longest row becomes the first, so that a lack of memory shows at once

    The batches that all ranks have at the same time are neighbors in this order, so no rank waits for another one with
    much longer rows. Batches that are left over stay at the end.

    Args:
        lengths: (n,) integers, tokens of each row. Rows without tokens are in no batch.
        batch_size: Rows per batch; a smaller batch, if there is one, is the last.
        max_tokens: Instead of `batch_size`: as many rows as have this many tokens at most.
        padded: For `max_tokens`: count padding too, rows × longest row, instead of the sum of the lengths.
        group_by_length: See above.
        world_size: Number of ranks, for `group_by_length`. To continue with another number of ranks, pass the one the
            epoch began with.
        shuffle: Use a new order in every epoch, instead of the order of the rows.
        seed: Seed of `shuffle`.
        epoch: Number of the epoch, from 0.

    Raises:
        OptionError: A value is invalid, or a row has more than `max_tokens` tokens.

    Examples:
        >>> from gpuload.packing import batch_rows
        >>> batch_rows([3, 1, 2, 2, 5], max_tokens=6).offsets.tolist()
        [0, 3, 4, 5]
        >>> batch_rows([3, 1, 2, 2, 5], max_tokens=6, padded=True).offsets.tolist()
        [0, 2, 4, 5]
        >>> batch_rows([9, 1, 8, 2], batch_size=2, group_by_length=True).lengths.tolist()
        [9, 8, 2, 1]
    """
    counts = lengths_of(lengths)
    if batch_size is not None and max_tokens is None:
        name, given = "batch_size", batch_size
    elif max_tokens is not None and batch_size is None:
        name, given = "max_tokens", max_tokens
    else:
        raise OptionError("pass batch_size or max_tokens, and not both")
    check_counts(**{name: (given, 1), "world_size": (world_size, 1)})
    limit, ranks = int(given), int(world_size)
    if name == "max_tokens" and len(counts) and counts.max() > limit:
        row = int(counts.argmax())
        raise OptionError(
            f"max_tokens={limit}: row {row} alone has {counts[row]} tokens: increase it, or truncate or drop long rows"
        )
    chance = generator(shuffle, seed, epoch)
    rows = np.flatnonzero(counts)
    if chance:
        chance.shuffle(rows)
    if group_by_length and len(rows):
        per_batch = limit if name == "batch_size" else max(1, int(limit / counts[rows].mean()))
        rows = _grouped(rows, counts[rows], per_batch * ranks)
    sizes = counts[rows]
    if name == "batch_size":
        offsets = np.append(np.arange(0, len(rows), limit), len(rows))
        whole = len(rows) // limit
    else:
        offsets = _budget(sizes, limit, padded)
        whole = len(offsets) - 1
    plan = Plan(rows, np.zeros_like(rows), sizes, offsets)
    # A batch of fewer than `batch_size` rows, and others that do not fill a step of all ranks, stay at the end.
    return plan.take(_order(plan, whole // ranks, ranks, chance)) if group_by_length else plan


def _grouped(rows: RowNumbers, lengths: RowNumbers, step: int) -> RowNumbers:
    """Rows sorted by length within groups, of `step` rows times the number of batches that a group has."""
    size = step * max(2, min(len(rows) // (step * _LEAST_GROUPS), _GROUP_BATCHES))
    group = np.arange(len(rows)) // size
    return rows[np.lexsort((np.where(group % 2, lengths, -lengths), group))]


def _order(plan: Plan, runs: int, size: int, chance: np.random.Generator | None) -> RowNumbers:
    """The order of batches of similar length: `runs` runs of `size` batches, and the batches after them."""
    order = chance.permutation(runs) if chance else np.arange(runs)
    if runs:
        bounds = plan.offsets[: runs * size + 1 : size]
        longest = np.maximum.reduceat(plan.lengths[: bounds[-1]], bounds[:-1])
        first = int(np.flatnonzero(order == longest.argmax())[0])
        order[: first + 1] = np.roll(order[: first + 1], 1)
    batches = (order[:, None] * size + np.arange(size)).ravel()
    return np.append(batches, np.arange(runs * size, len(plan)))


def _budget(lengths: RowNumbers, most: int, padded: bool) -> RowNumbers:
    """Where batches begin, and the end of the last one: each has as many rows as its budget of `most` tokens allows.

    No row has more: `lengths`, (n,) of the rows in their order, are 1 to `most`. Padding counts if they are `padded`.
    """
    bounds = [0]
    if padded:
        while bounds[-1] < len(lengths):
            bounds.append(_padded_end(lengths, bounds[-1], most))
    else:
        places = offsets_of(lengths)
        # Of a batch that begins with row i, for each i: the last end with at most `most` tokens before it.
        end = (np.searchsorted(places, places[:-1] + most, side="right") - 1).tolist()
        while bounds[-1] < len(lengths):
            bounds.append(end[bounds[-1]])
    return np.array(bounds, np.int64)


def _padded_end(lengths: RowNumbers, start: int, most: int) -> int:
    """The end of a padded batch that begins with row `start`."""
    window = _WINDOW
    while True:
        part = lengths[start : start + window]
        over = np.maximum.accumulate(part) * np.arange(1, len(part) + 1) > most
        if over[-1]:
            return start + int(over.argmax())
        if start + window >= len(lengths):
            return len(lengths)
        window *= 4
