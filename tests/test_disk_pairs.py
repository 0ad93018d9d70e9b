"""load_pairs with a store on disk: rows, batches and exports are those of a load in memory."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulator import load_pairs_with
from simulator.host_kernels import COMPILER, HostKernels
from test_pairs import EXPLICIT
from tiers import core

import gpuload
from gpuload.cache import column_file, token_store
from gpuload.dataset.pieces import Sequences, stored


@pytest.fixture
def store(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stores; files have several parts."""
    monkeypatch.setattr(column_file, "PART_BYTES", 4096)
    return warm_cache.parent / "store"


@pytest.fixture
def pairs(write: Callable[..., str]) -> list[str]:
    """Two files of pairs, some of which are equal."""
    rows = [*EXPLICIT * 3, EXPLICIT[0] | {"rejected": EXPLICIT[0]["chosen"]}]
    made = []
    for at, some in ((0, rows[:7]), (7, rows[7:])):
        columns = {name: [row[name] for row in some] for name in EXPLICIT[0]}
        made.append(write(columns | {"name": [f"row {at + k}" for k in range(len(some))]}, f"{at}.parquet"))
    return made


def assert_same(found: gpuload.PairDataset, expected: gpuload.PairDataset) -> None:
    assert found.fingerprint == expected.fingerprint
    assert (found.parts.values.tolist(), found.lengths.tolist()) == (
        expected.parts.values.tolist(),
        expected.lengths.tolist(),
    )
    assert found[:] == expected[:]
    assert found.to_arrow().read_all().equals(expected.to_arrow().read_all())
    for one, other in zip(found.loader(3, shuffle=True), expected.loader(3, shuffle=True), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert np.array_equal(np.asarray(one[key]), np.asarray(other[key])), key


OPTIONS: list[dict[str, Any]] = [
    {},
    {"objective": "rm"},
    {"objective": "kto"},
    {"max_length": 30},
    {"max_length": 30, "overlong": "keep_start"},
    {"objective": "kto", "max_length": 30, "overlong": "keep_end", "kl_batch_size": 3},
    {"max_samples": 9, "shuffle": True, "seed": 5},
    {"token_cache": False},
]


@pytest.mark.parametrize("options", core(OPTIONS, *OPTIONS[:3], OPTIONS[4]), ids=str)
def test_equal_to_memory(pairs: list[str], qwen: Any, store: Path, options: dict[str, Any]) -> None:
    expected = gpuload.load_pairs(pairs, qwen, store="memory", **{**options, "token_cache": False})
    for _ in range(2):  # the second load finds what the first one has stored
        found = gpuload.load_pairs(pairs, qwen, store="disk", **options)
        assert f"ids and columns are on disk, in {store}" in str(found.report)
        assert found.report.counts == expected.report.counts
        assert (found.report.tokens, found.report.longest) == (expected.report.tokens, expected.report.longest)
        assert isinstance(stored(found.token_store), token_store.DiskTokens)
        assert isinstance(found.token_store, Sequences) == (options.get("objective") == "kto")
        assert_same(found, expected)
        assert_same(pickle.loads(pickle.dumps(found)), expected)


def test_loaders_resume(pairs: list[str], qwen: Any, store: Path) -> None:
    expected, found = (gpuload.load_pairs(pairs, qwen, store=where) for where in ("memory", "disk"))
    loader = expected.loader(2, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    other = found.loader(2, shuffle=True, seed=1)
    other.load_state_dict(loader.state_dict())
    assert [batch["name"].tolist() for batch in other] == [batch["name"].tolist() for batch in batches]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_on_a_device(pairs: list[str], qwen: Any, store: Path, objective: Any) -> None:
    expected = gpuload.load_pairs(pairs, qwen, store="memory", objective=objective, token_cache=False)
    found = load_pairs_with(HostKernels(), pairs, qwen, store="disk", objective=objective)
    batch, other = found.batch([3, 0, 1]), expected.batch([3, 0, 1])
    for key, value in batch.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, other[key]), key
