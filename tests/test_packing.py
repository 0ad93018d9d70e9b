"""gpuload.packing: plans equal TRL's packs and a naive best fit, are bounded, complete, reproducible and divisible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.data_utils import pack_dataset

from gpuload.core.errors import OptionError
from gpuload.packing import Plan, batch_rows, pack, share
from gpuload.packing.packs import Packing
from gpuload.packing.plan import count_batches

STRATEGIES = get_args(Packing)
LENGTHS = st.one_of(
    st.lists(st.integers(0, 40), max_size=60),
    st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 16, 17, 100]), max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(0, 20), st.integers(0, 60)),
)
SIZES = st.sampled_from([1, 2, 7, 8, 16, 100])


def log_normal(count: int, mean: float = 5.5, most: int = 10_000, seed: int = 0) -> Any:
    return np.random.default_rng(seed).lognormal(mean, 1, count).astype(np.int64).clip(0, most)


def tokens_of(plan: Plan, lengths: Any) -> list[list[int]]:
    """The tokens of each pack, numbered through all rows."""
    begin = np.cumsum(lengths) - lengths
    pieces = [
        [*range(begin[row] + first, begin[row] + first + count)]
        for row, first, count in zip(plan.rows, plan.first, plan.lengths, strict=True)
    ]
    bounds = zip(plan.offsets[:-1], plan.offsets[1:], strict=True)
    return [list(itertools.chain(*pieces[low:high])) for low, high in bounds]


def same(a: Plan, b: Plan) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("rows", "first", "lengths", "offsets"))


# -- TRL -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


def trl_packs(lengths: Any, size: int, strategy: str) -> tuple[list[list[int]], list[list[int]] | None]:
    """Packs and, where TRL has them, the lengths of their pieces. Tokens are numbered through all rows."""
    end = np.cumsum(lengths).tolist()
    rows = [[*range(high - length, high)] for high, length in zip(end, lengths, strict=True)]
    packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), size, strategy)
    return packed["input_ids"][:], packed["seq_lengths"][:] if "seq_lengths" in packed.column_names else None


def check_against_trl(lengths: Any, size: int, strategy: str, ours: Packing) -> None:
    plan = pack(lengths, size, ours)
    packs, pieces = trl_packs(lengths, size, strategy)
    assert tokens_of(plan, np.array(lengths)) == packs
    if pieces is not None:
        assert [part.tolist() for part in np.split(plan.lengths, plan.offsets[1:-1])] == pieces


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@examples(60)
@given(lengths=LENGTHS.filter(any), size=SIZES)
def test_packs_of_few_rows_are_those_of_trl(strategy: Any, lengths: list[int], size: int) -> None:
    check_against_trl(lengths, size, strategy, strategy)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize(("count", "size"), [(999, 100), (1000, 100), (1001, 64), (3500, 333)])
def test_packs_of_many_rows_are_those_of_trl(strategy: str, count: int, size: int) -> None:
    lengths = log_normal(count, 3.5, 1000, seed=count)
    ours: Any = "trl" if strategy == "bfd" else f"trl_{strategy}"
    check_against_trl(lengths, size, strategy, ours)
    lengths[:990] = 0  # most rows of TRL's first batch; without any token it raises an error of Arrow
    check_against_trl(lengths, size, strategy, ours)


def test_packs_of_a_whole_epoch_fill_more_than_those_of_trl() -> None:
    lengths = log_normal(20_000)
    fills = {name: pack(lengths, 4096, name).fill(4096) for name in STRATEGIES}
    assert fills["bfd"] > 0.999
    for name in ("bfd", "bfd_split", "wrapped"):
        assert fills[name] >= fills["trl" if name == "bfd" else f"trl_{name}"]


# -- packs -----------------------------------------------------------------------------------------------------------


def naive_best_fit(lengths: Any, size: int) -> list[list[int]]:
    """The rows of each pack, one document at a time; of packs with equal room, the one that has had it for longest."""
    packs: list[list[int]] = []
    room: list[tuple[int, int, int]] = []  # room, when, pack
    for when, row in enumerate(sorted(range(len(lengths)), key=lambda row: -min(lengths[row], size))):
        length = min(lengths[row], size)
        if not length:
            continue
        best = min((entry for entry in room if entry[0] >= length), default=None)
        if best is None:
            packs.append([])
            best = (size, when, len(packs) - 1)
        else:
            room.remove(best)
        packs[best[2]].append(row)
        room.append((best[0] - length, when, best[2]))
    return packs


@examples(300)
@given(lengths=LENGTHS, size=SIZES)
def test_bfd_is_best_fit_decreasing(lengths: list[int], size: int) -> None:
    plan = pack(lengths, size)
    assert [part.tolist() for part in np.split(plan.rows, plan.offsets[1:-1])] == (
        naive_best_fit(lengths, size) or [[]]
    )


@pytest.mark.parametrize("size", [2048, 70_000])
def test_bfd_of_many_documents_is_best_fit_decreasing(size: int) -> None:
    lengths = log_normal(3000, 6, 80_000)
    plan = pack(lengths, size)
    found = [part.tolist() for part in np.split(plan.rows, plan.offsets[1:-1])]
    assert found == naive_best_fit(lengths.tolist(), size)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@examples(60)
@given(lengths=LENGTHS, size=SIZES)
def test_packs_are_bounded_and_have_each_token_once(
    strategy: Packing, shuffle: bool, lengths: list[int], size: int
) -> None:
    plan = pack(lengths, size, strategy, shuffle=shuffle)
    assert [part.dtype for part in (plan.rows, plan.first, plan.lengths, plan.offsets)] == [np.int64] * 4
    assert (plan.lengths > 0).all()
    assert (np.diff(plan.offsets) > 0).all()
    assert (plan.tokens <= size).all()
    truncated = strategy in ("bfd", "trl")
    begin = np.cumsum(lengths) - lengths
    expected = [
        token
        for row, length in enumerate(lengths)
        for token in range(begin[row], begin[row] + (min(length, size) if truncated else length))
    ]
    packs = tokens_of(plan, np.array(lengths, np.int64))
    assert sorted(itertools.chain(*packs)) == expected
    assert plan.tokens.tolist() == [len(tokens) for tokens in packs]
    if strategy == "wrapped":
        assert len(plan) == -(-sum(lengths) // size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_differ_and_are_reproducible(strategy: Packing) -> None:
    lengths = log_normal(3000, 4, 600)
    plans = [pack(lengths, 512, strategy, shuffle=True, seed=s, epoch=e) for s, e in ((3, 0), (3, 1), (4, 0), (3, 0))]
    assert same(plans[0], plans[3])
    assert not same(plans[0], plans[1])
    assert not same(plans[0], plans[2])
    in_order = pack(lengths, 512, strategy, shuffle=False, seed=3, epoch=1)
    assert same(in_order, pack(lengths, 512, strategy))
    assert len({len(plan) for plan in (*plans, in_order)}) == 1
    as_sets = [{frozenset(tokens) for tokens in tokens_of(plan, lengths)} for plan in (in_order, *plans)]
    # TRL's packs are those of TRL in another order; all others have other documents together.
    assert (as_sets[0] == as_sets[1] == as_sets[2]) == strategy.startswith("trl")


def test_large_sizes_need_no_memory() -> None:
    plan = pack([10**11, 3, 10**12], 10**12)
    assert plan.rows.tolist() == [2, 0, 1]
    assert plan.offsets.tolist() == [0, 1, 3]


def test_numbers_may_be_of_any_integer_type() -> None:
    lengths = log_normal(2000, 3, 200)
    few = [int(length) for length in lengths]
    for strategy in STRATEGIES:
        assert same(pack(lengths.astype(np.uint8), np.uint8(200), strategy), pack(few, 200, strategy))  # type: ignore[arg-type]
    small: Any = np.uint8(200)
    for options in ({"batch_size": small}, {"max_tokens": small, "padded": True}):
        wide = {name: int(value) for name, value in options.items()}
        for group in (False, True):
            made = batch_rows(lengths.astype(np.uint8), **options, group_by_length=group, world_size=small)
            assert same(made, batch_rows(few, **wide, group_by_length=group, world_size=200))
    ours = list(share(3000, small, position=small, rank=small - 1, world_size=small))
    assert [part.tolist() for part in ours] == [
        part.tolist() for part in share(3000, 200, position=200, rank=199, world_size=200)
    ]


@given(lengths=LENGTHS, data=st.data())
def test_taken_packs_are_those_of_the_plan(lengths: list[int], data: st.DataObject) -> None:
    plan = pack(lengths, 8, "bfd_split")
    packs = data.draw(st.lists(st.integers(0, len(plan) - 1))) if len(plan) else []
    every = tokens_of(plan, np.array(lengths, np.int64))
    assert tokens_of(plan.take(packs), np.array(lengths, np.int64)) == [every[number] for number in packs]


# -- batches of rows -------------------------------------------------------------------------------------------------

GROUPS = [{}, {"group_by_length": True}, {"group_by_length": True, "world_size": 3}]


def cost(plan: Plan, padded: bool) -> Any:
    """Tokens of each batch."""
    if not len(plan):
        return plan.tokens
    return np.maximum.reduceat(plan.lengths, plan.offsets[:-1]) * np.diff(plan.offsets) if padded else plan.tokens


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("padded", [False, True])
@given(lengths=LENGTHS, budget=st.sampled_from([100, 128, 300, 5000]))
def test_token_budgets_are_kept_by_whole_rows(
    lengths: list[int], budget: int, padded: bool, group: dict[str, Any], shuffle: bool
) -> None:
    plan = batch_rows(lengths, max_tokens=budget, padded=padded, shuffle=shuffle, **group)
    assert sorted(plan.rows.tolist()) == np.flatnonzero(lengths).tolist()
    assert plan.lengths.tolist() == np.array(lengths, np.int64)[plan.rows].tolist()
    assert not plan.first.any()
    assert (cost(plan, padded) <= budget).all()
    assert (np.diff(plan.offsets) > 0).all()
    if not group:  # each batch and the first row of the next one would exceed the budget
        for low, high in zip(plan.offsets[:-1], plan.offsets[1:], strict=True):
            more = plan.lengths[low : high + 1]
            total = more.max() * len(more) if padded else more.sum()
            assert high == len(plan.rows) or total > budget


def test_a_budget_for_many_short_rows() -> None:
    lengths = [1] * 1000 + [50] + [1] * 1000
    assert np.diff(batch_rows(lengths, max_tokens=500, padded=True).offsets).tolist() == [500, 500, 10, 500, 491]
    assert np.diff(batch_rows(lengths, max_tokens=500).offsets).tolist() == [500, 500, 451, 500, 50]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@given(lengths=LENGTHS, size=st.integers(1, 9))
def test_batches_of_a_number_of_rows(lengths: list[int], size: int, group: dict[str, Any], shuffle: bool) -> None:
    plan = batch_rows(lengths, batch_size=size, shuffle=shuffle, **group)
    assert sorted(plan.rows.tolist()) == np.flatnonzero(lengths).tolist()
    counts = np.diff(plan.offsets).tolist()
    assert counts[:-1] == [size] * (len(plan) - 1)
    assert all(0 < count <= size for count in counts)
    if not group and not shuffle:
        assert plan.rows.tolist() == np.flatnonzero(lengths).tolist()


@pytest.mark.parametrize("world_size", [1, 4])
def test_group_by_length_pads_as_little_as_transformers(world_size: int) -> None:
    """Compared with the sampler of transformers' Trainer, for the global batch of all ranks."""
    lengths = log_normal(10_000) + 1
    plan = batch_rows(lengths, batch_size=8, group_by_length=True, world_size=world_size, shuffle=True)
    indices = get_length_grouped_indices(lengths.tolist(), 8 * world_size, generator=torch.Generator().manual_seed(0))
    theirs = lengths[np.array(indices)].reshape(-1, 8).max(axis=1).sum() * 8
    assert cost(plan, padded=True).sum() < 1.02 * theirs
    assert cost(batch_rows(lengths, batch_size=8, shuffle=True), padded=True).sum() > 2 * theirs


def test_ranks_have_similar_lengths_in_a_step() -> None:
    lengths = log_normal(10_000) + 1

    def waited(world_size: int) -> Any:
        """The longest row of each step of four ranks, and the tokens of all steps by those of all batches."""
        plan = batch_rows(lengths, batch_size=8, group_by_length=True, world_size=world_size, shuffle=True)
        longest = np.maximum.reduceat(plan.lengths, plan.offsets[:-1])[: len(plan) // 4 * 4].reshape(-1, 4)
        return longest.max(axis=1), longest.max(axis=1).sum() * 4 / longest.sum()

    steps, ratio = waited(4)
    assert ratio < 1.25
    assert waited(1)[1] > 1.7
    assert steps.argmax() == 0
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1]) < 0.2, "steps are in no order"


def test_batches_of_rows_differ_by_epoch_and_are_reproducible() -> None:
    lengths = log_normal(2000) + 1
    for options in ({"batch_size": 8}, {"max_tokens": 20_000}, {"batch_size": 8, "group_by_length": True}):
        made: list[Plan] = [
            batch_rows(lengths, **options, shuffle=True, seed=s, epoch=e)  # type: ignore[arg-type]
            for s, e in ((1, 0), (1, 1), (2, 0), (1, 0))
        ]
        assert same(made[0], made[3])
        assert not same(made[0], made[1])
        assert not same(made[0], made[2])


# -- ranks -----------------------------------------------------------------------------------------------------------


@examples(300)
@given(
    packs=st.integers(1, 50), size=st.integers(1, 5), world_size=st.integers(1, 5), drop_last=st.booleans(),
    done=st.integers(0, 12),
)  # fmt: skip
def test_every_rank_gets_its_share_of_packs(packs: int, size: int, world_size: int, drop_last: bool, done: int) -> None:
    shares = [
        [batch.tolist() for batch in share(packs, size, rank=rank, world_size=world_size, drop_last=drop_last)]
        for rank in range(world_size)
    ]
    batches = count_batches(packs, size, world_size, drop_last)
    sizes = [[len(batch) for batch in batches] for batches in shares]
    assert sizes == [sizes[0]] * world_size
    assert [len(batches) for batches in shares] == [batches] * world_size
    # Rank by rank, these are the packs in order; then the first ones again, or the last ones are missing.
    own = [[number for batch in batches for number in batch] for batches in shares]
    dealt = [number for numbers in zip(*own, strict=True) for number in numbers]
    assert dealt == [number % packs for number in range(len(dealt))]
    assert (len(dealt) <= packs) if drop_last else (packs <= len(dealt) < packs + world_size)
    if drop_last:
        assert all(count == size for counts in sizes for count in counts)
        assert len(dealt) > packs - size * world_size
    position = min(min(done, batches) * size * world_size, packs)
    for rank, before in enumerate(shares):
        rest = share(packs, size, position=position, rank=rank, world_size=world_size, drop_last=drop_last)
        assert [batch.tolist() for batch in rest] == before[min(done, batches) :]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_number_of_ranks_continues(world_size: int) -> None:
    before = [number for rank in range(4) for number in next(share(40, 2, rank=rank, world_size=4)).tolist()]
    after = [
        number
        for rank in range(world_size)
        for batch in share(40, 3, position=8, rank=rank, world_size=world_size)
        for number in batch.tolist()
    ]
    assert sorted(before) == [*range(8)]
    assert set(after) == {*range(8, 40)} | ({0} if world_size == 3 else set())


# -- invalid values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda: pack([1], 0), "size=0: expected an integer of at least 1"),
    (lambda: pack([1], 2.0), "size=2.0: expected an integer of at least 1"),  # type: ignore[arg-type]
    (lambda: pack([1], True), "size=True: expected an integer of at least 1"),
    (lambda: pack([1], 2, "bdf"), "packing='bdf': expected one of 'bfd', 'bfd_split'"),  # type: ignore[arg-type]
    (lambda: pack([1], 2, seed=-1), "seed=-1: expected an integer of at least 0"),
    (lambda: pack([1], 2, epoch=None), "epoch=None: expected an integer of at least 0"),  # type: ignore[arg-type]
    (lambda: pack([1, -5, 2], 2), "lengths: row 1 has the length -5: expected at least 0"),
    (lambda: pack([1.5], 2), "lengths: expected a one-dimensional array of integers, got float64 (1,)"),
    (lambda: pack([[1]], 2), "lengths: expected a one-dimensional array of integers, got int64 (1, 1)"),
    (lambda: batch_rows([1]), "pass batch_size or max_tokens, and not both"),
    (lambda: batch_rows([1], batch_size=1, max_tokens=1), "pass batch_size or max_tokens, and not both"),
    (lambda: batch_rows([1], batch_size=0), "batch_size=0: expected an integer of at least 1"),
    (lambda: batch_rows([1], max_tokens=-3), "max_tokens=-3: expected an integer of at least 1"),
    (lambda: batch_rows([1], max_tokens=0), "max_tokens=0: expected an integer of at least 1"),
    (lambda: batch_rows([1], batch_size=1, world_size=0), "world_size=0: expected an integer of at least 1"),
    (lambda: batch_rows([3, 9], max_tokens=8), "max_tokens=8: row 1 alone has 9 tokens: increase it, or truncate"),
    (lambda: batch_rows([-1], max_tokens=8), "lengths: row 0 has the length -1: expected at least 0"),
    (lambda: share(5, 0), "batch_size=0: expected an integer of at least 1"),
    (lambda: share(5, 1, world_size=0), "world_size=0: expected an integer of at least 1"),
    (lambda: share(5, 1, rank=2, world_size=2), "rank=2: expected 0 to 1 for world_size=2"),
    (lambda: share(5, 1, rank=-1), "rank=-1: expected 0 to 0 for world_size=1"),
    (lambda: share(5, 1, position=6), "position=6: expected at most 5, the number of packs"),
    (lambda: share(5, 1, position=-1), "position=-1: expected an integer of at least 0"),
])  # fmt: skip
def test_invalid_values_are_clear_errors(call: Any, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        call()
    assert str(raised.value).startswith(message)
