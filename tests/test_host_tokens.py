"""Ids in the arrays in which they were made, read as rows of one array."""

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.dataset.pieces import tokens_of
from gpuload.demo_data import demo_files
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.host.store import HostTokens
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows

PARTS = st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=5)


def made(parts: list[list[int]], unaligned: bool = False) -> tuple[list[Ragged], list[list[int]]]:
    """Rows of so many ids each, in parts, with ids from 0 on."""
    found: list[Ragged] = []
    rows: list[list[int]] = []
    for lengths in parts:
        some = [list(range(10 * len(rows) + k, 10 * len(rows) + k + size)) for k, size in enumerate(lengths)]
        part = Ragged.from_lists(some)
        if unaligned:
            raw = np.empty(part.values.nbytes + 1, np.uint8)[1:].view(np.int32)
            raw[:] = part.values
            part = Ragged(raw, part.offsets)
        found.append(part)
        rows += some
    return found, rows


@given(parts=PARTS, unaligned=st.booleans(), data=st.data())
def test_rows_in_parts_are_those_of_one_array(parts: list[list[int]], unaligned: bool, data: Any) -> None:
    some, rows = made(parts, unaligned)
    order = None
    if data.draw(st.booleans()):
        order = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)[: data.draw(st.integers(0, len(rows)))]
        rows = [rows[number] for number in order]
    store, whole = HostTokens(some, order), Ragged.from_lists(rows)
    numbers = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else [], np.int64)
    for _ in range(2):  # apart, and joined
        assert len(store) == len(rows)
        assert store.lengths.tolist() == whole.lengths.tolist()
        assert store.take(numbers).to_lists() == [rows[number] for number in numbers]
        assert np.concatenate([np.zeros(0, np.int32), *store.chunks()]).tolist() == whole.values.tolist()
        plan = Plan.joined(whole_rows(numbers, whole.lengths[numbers]), whole_rows(numbers, 0 * numbers))
        cut = plan.cut(plan.tokens // 3, plan.tokens - plan.tokens // 4)
        for each in (plan, cut):
            assert tokens_of(store, each).to_lists() == tokens_of(whole, each).to_lists()
        assert pickle.loads(pickle.dumps(store)).take(numbers).to_lists() == [rows[number] for number in numbers]
        assert store.to_host().to_lists() == rows
    if whole.values.size:
        assert np.shares_memory(store.to_host().values, store.to_host().values)  # joined once


def test_ids_can_be_written_to_whatever_the_parts() -> None:
    for parts in ([[3, 2]], [[3, 2], [1]], [[], [2]], []):
        values = HostTokens(made(parts)[0]).to_host().values
        assert values.flags.writeable


def test_chunks_are_views_where_rows_follow_each_other() -> None:
    parts, rows = made([[2] * 100, [], [3] * 200])
    store = HostTokens(parts)
    chunks = [*store.chunks()]
    assert [chunk.tolist() for chunk in chunks if len(chunk)] == [part.values.tolist() for part in parts if len(part)]
    assert np.shares_memory(chunks[0], parts[0].values)
    backwards = np.arange(len(rows))[::-1]
    assert np.concatenate([*HostTokens(parts, backwards).chunks()]).tolist() == [
        one for row in rows[::-1] for one in row
    ]


def test_an_empty_part_may_be_at_any_address() -> None:
    empty = Ragged(np.ndarray((0,), np.int32, np.empty(4096, np.uint8), offset=1), np.zeros(2, np.int64))
    rows = Ragged.from_lists([[1, 2, 3], [4, 5]])
    for parts in ([empty, rows], [rows, empty, rows], [empty]):
        assert HostTokens(parts).to_host().to_lists() == [row for part in parts for row in part.to_lists()]


def test_arrays_are_not_copied() -> None:
    parts, _ = made([[3, 2], [4], [1, 5]])
    store = HostTokens(parts)
    for part, row in zip(parts, (0, 2, 3), strict=True):
        part.values[0] = 77
        assert store.take(np.array([row])).values[0] == 77


def test_arrays_live_as_long_as_their_store() -> None:
    parts, rows = made([[5] * 1000 for _ in range(200)])
    store = HostTokens(parts)
    del parts
    gc.collect()
    noise = [np.full(5000, -1, np.int32) for _ in range(400)]
    assert store.take(np.arange(len(rows))).to_lists() == rows
    assert noise


SHUFFLED = {"shuffle": True, "seed": 1}


@pytest.mark.parametrize("options", [{}, SHUFFLED, SHUFFLED | {"max_samples": 150}])
def test_a_load_in_many_parts(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Batches, rows and fingerprints are those of a load in one part."""
    file, tokenizer = demo_files()
    whole = gpuload.load(file, tokenizer, token_cache=False, max_prompt_length=120, **options)

    def in_pieces(parts: list[Ragged], order: Any) -> HostTokens:
        pieces = [part.take(np.array([row])) for part in parts for row in range(len(part))]
        return HostTokens(pieces, order)

    monkeypatch.setattr(HostEngine, "store", staticmethod(in_pieces))
    apart = gpuload.load(file, tokenizer, token_cache=False, max_prompt_length=120, **options)
    assert apart.fingerprint == whole.fingerprint
    for one, other in zip(whole.loader(32, shuffle=True), apart.loader(32, shuffle=True), strict=True):
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert (one[name] == other[name]).all()
    copy = pickle.loads(pickle.dumps(apart))
    assert copy[5]["input_ids"].tolist() == whole[5]["input_ids"].tolist()
    assert apart.tokens.to_lists() == whole.tokens.to_lists()


def test_ids_of_the_cache_are_copied(warm_cache: Path) -> None:
    """A load in memory does not depend on files that are deleted or cut off later. The directory may be a `Path`."""
    file, tokenizer = demo_files()
    found = [gpuload.load(file, tokenizer, cache_dir=warm_cache.parent) for _ in range(2)]
    assert found[1].report.from_cache
    for entry in warm_cache.rglob("*"):
        if entry.is_file():
            entry.write_bytes(b"")
    assert found[1].tokens.to_lists() == found[0].tokens.to_lists()
