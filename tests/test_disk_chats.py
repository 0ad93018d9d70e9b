"""load_chats with a store on disk: rows, batches, packs and exports are those of a load in memory."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from simulator.host_kernels import COMPILER
from test_chats import CHATS, QWEN3
from test_device_chats import PLANS, assert_same, on_device, same_batch
from tiers import core, exhaustive
from torch.utils.data import DataLoader

import gpuload
from gpuload.cache import column_file, token_store
from gpuload.cache import known_files as known


@pytest.fixture
def store(warm_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stores; files have several parts."""
    monkeypatch.setattr(column_file, "PART_BYTES", 4096)
    return warm_cache.parent / "store"


@pytest.fixture
def chats(write: Callable[..., str]) -> list[str]:
    """Two files of conversations; one row has no answer."""
    rows = [*CHATS * 9, CHATS[0][:1]]
    names = [f"row {row}" for row in range(len(rows))]
    return [write({"messages": rows[at:], "name": names[at:]}, f"{at}.parquet") for at in (0, 20)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chat_template": QWEN3},
    {"loss_on": "last"},
    {"loss_on": "all"},
    {"max_length": 40},
    {"max_length": 40, "overlong": "keep_start"},
    {"max_length": 14, "overlong": "keep_end"},
    {"max_samples": 31, "shuffle": True, "seed": 5},
    {"token_cache": False},
]


@pytest.mark.parametrize("options", core(OPTIONS, *OPTIONS[::4]), ids=str)
def test_equal_to_memory(chats: list[str], qwen: Any, store: Path, options: dict[str, Any], made: list[int]) -> None:
    expected = gpuload.load_chats(chats, qwen, store="memory", **{**options, "token_cache": False})
    for again in (False, True):
        before = len(made)
        found = gpuload.load_chats(chats, qwen, store="disk", **options)
        assert f"ids and columns are on disk, in {store}" in str(found.report)
        assert isinstance(found.token_store, token_store.DiskTokens)
        assert again <= (len(made) == before or "token_cache" in options or "max_samples" in options)
        found.report.notes, found.report.engine = expected.report.notes, expected.report.engine
        assert_same(found, expected, PLANS)
        assert (found.loss_tokens, len(found)) == (expected.loss_tokens, len(expected))


EXPORTS: list[dict[str, Any]] = [
    {}, {"columns": ["name"]}, {"columns": []}, {"trainer": "llamafactory"}, {"trainer": "areal"},
    {"packing": "bfd", "pack_length": 64}, {"packing": "wrapped", "pack_length": 33}, {"packing": "bfd_split"},
    {"packing": "trl_bfd_split", "pack_length": 21},
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    core(EXPORTS, EXPORTS[1], EXPORTS[5]),
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("options", core([{}, {"max_length": 30, "overlong": "keep_end"}], {}), ids=str)
def test_exports(
    chats: list[str], qwen: Any, store: Path, options: dict[str, Any], settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without all ids in memory."""
    expected, found = (gpuload.load_chats(chats, qwen, store=where, **options) for where in ("memory", "disk"))
    monkeypatch.setattr(token_store.DiskTokens, "to_host", lambda _: pytest.fail("all ids in memory"))
    assert found.to_arrow(**settings).read_all().equals(expected.to_arrow(**settings).read_all())


def test_packs_do_not_read_all_ids(chats: list[str], qwen: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpuload.load_chats(chats, qwen, store="disk")
    monkeypatch.setattr(token_store.DiskTokens, "to_host", lambda _: pytest.fail("all ids in memory"))
    for plan in PLANS:
        assert sum(1 for _ in found.loader(**plan))


@pytest.mark.parametrize(
    "rows",
    [
        [{"conversations": [{"from": "human", "value": f"q{k}"}, {"from": "gpt", "value": f"a{k}"}]} for k in range(9)],
        [{"instruction": f"do {k}", "output": f"done {k}", "input": "", "n": k} for k in range(9)],
        [{"prompt": f"one {k}", "completion": f" two {k}", "n": k} for k in range(9)],
        [{"text": f"text {k}"} for k in range(9)],
    ],
    ids=["sharegpt", "alpaca", "completions", "texts"],
)
@pytest.mark.parametrize("json_file", core([False, True], False))
def test_formats(
    rows: list[Any], json_file: bool, write: Callable[..., str], tmp_path: Path, qwen: Any, store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(known, "SETTLED", -1e9)
    if json_file:
        file = str(tmp_path / "rows.jsonl")
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file = write({name: [row[name] for row in rows] for name in rows[0]})
    expected = gpuload.load_chats(file, qwen, store="memory", token_cache=False)
    for _ in range(2):
        found = gpuload.load_chats(file, qwen, store="disk")
        assert [found[row] for row in range(9)] == [expected[row] for row in range(9)]
        assert found.columns.equals(expected.columns)


def test_frames(qwen: Any, store: Path) -> None:
    """Their files are removed with the dataset."""
    table = pa.table({"messages": CHATS * 3})
    found = gpuload.load_chats(table, qwen, store="disk")
    assert [found[row] for row in range(9)] == [gpuload.load_chats(table, qwen)[row] for row in range(9)]
    assert list(store.iterdir())
    del found
    assert not list(store.iterdir())


def test_other_processes(chats: list[str], qwen: Any, store: Path) -> None:
    found = gpuload.load_chats(chats, qwen, store="disk")
    again = pickle.loads(pickle.dumps(found))
    assert [again[row] for row in range(len(found))] == [found[row] for row in range(len(found))]
    loader = DataLoader(found, 7, num_workers=2, collate_fn=list, multiprocessing_context="spawn")  # type: ignore[arg-type]
    assert [row for rows in loader for row in rows] == [found[row] for row in range(len(found))]


def test_loaders_resume(chats: list[str], qwen: Any, store: Path) -> None:
    """From the state of a load in memory."""
    expected, found = (gpuload.load_chats(chats, qwen, store=where) for where in ("memory", "disk"))
    settings: dict[str, Any] = {"packing": "bfd", "pack_length": 64, "shuffle": True, "seed": 2}
    first, second = expected.loader(2, **settings), found.loader(2, **settings)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert torch.equal(next(iter(second))["labels"], next(batches)["labels"])


@exhaustive
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_on_a_device(chats: list[str], qwen: Any, store: Path) -> None:
    expected = gpuload.load_chats(chats, qwen, store="memory", token_cache=False, device="cpu")
    for cached in (False, True):
        found = on_device(chats, qwen, None if cached else 7, store="disk")
        assert isinstance(found.token_store, token_store.DiskTokens)
        for plan in PLANS:
            pairs = zip(found.loader(**plan), expected.loader(**plan), strict=True)
            assert all(same_batch(one, other) for one, other in pairs), plan
