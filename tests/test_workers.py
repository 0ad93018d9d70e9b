"""Worker processes of a DataLoader: what they do once, and how their tensors are sent."""

import gc
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuload
from gpuload.core.workers import _MOST_BYTES, _reduce, prepare_worker

SMALL = {
    "bytes": torch.zeros((256, 1), dtype=torch.uint8),
    "one": torch.tensor(3.5),
    "none": torch.zeros((0, 4), dtype=torch.int64),
    "truth": torch.tensor([True, False]),
    "numbers": torch.arange(100, dtype=torch.int32).reshape(10, 10),
}
BY_TORCH = {
    "large": torch.zeros(_MOST_BYTES + 1, dtype=torch.uint8),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "columns": torch.arange(12).reshape(3, 4).t(),
    "gradient": torch.ones(3, requires_grad=True),
    "shared": torch.arange(5).share_memory_(),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


SENT = [*SMALL, *(BY_TORCH.keys() - {"gradient", "sparse"})]


def all_tensors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch with every kind of tensor, in place of the rows' own, and the objects that collections skip."""
    return {name: (SMALL | BY_TORCH)[name] for name in SENT} | {"rows": len(rows), "frozen": gc.get_freeze_count()}


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen: Any) -> gpuload.PromptDataset:
    return gpuload.load(gsm8k, qwen, max_samples=64, max_prompt_length=512)


@pytest.mark.parametrize(("kind", "start"), [(DataLoader, "fork"), (DataLoader, "spawn"), (StatefulDataLoader, "fork")])
def test_tensors_arrive_as_they_were(prompts: gpuload.PromptDataset, kind: Any, start: str) -> None:
    loader = kind(prompts, 16, collate_fn=all_tensors, num_workers=2, multiprocessing_context=start)
    batches = list(loader)
    assert [batch["rows"] for batch in batches] == [16] * 4
    for batch in batches:
        assert batch["frozen"] > 10_000  # what the worker inherited or imported before its first batch
        for name in SENT:
            expected, got = (SMALL | BY_TORCH)[name], batch[name]
            assert (type(got), got.dtype, got.stride()) == (torch.Tensor, expected.dtype, expected.stride()), name
            assert torch.equal(got, expected), name
            assert got.is_shared() == (name not in SMALL), name


def test_small_tensors_can_be_modified(prompts: gpuload.PromptDataset) -> None:
    (batch,) = DataLoader(prompts, 64, collate_fn=all_tensors, num_workers=1)
    batch["numbers"] += 1
    assert batch["numbers"][0, 0] == 1


@pytest.mark.parametrize("name", SMALL)
def test_small_tensors_are_sent_with_the_batch(name: str) -> None:
    make, args = _reduce(SMALL[name])
    assert make is torch.from_numpy
    assert torch.equal(make(*pickle.loads(pickle.dumps(args))), SMALL[name])


@pytest.mark.parametrize("name", BY_TORCH)
def test_other_tensors_are_sent_by_torch(name: str) -> None:
    assert _reduce(BY_TORCH[name])[0] is not torch.from_numpy


def test_nothing_is_prepared_outside_of_workers(prompts: gpuload.PromptDataset) -> None:
    before = gc.get_freeze_count()
    prepare_worker()
    list(DataLoader(prompts, 16, collate_fn=gpuload.collate_fn))
    assert gc.get_freeze_count() == before


def test_workers_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    monkeypatch.setattr("gpuload.core.workers._prepared", 0)
    monkeypatch.setattr("gpuload.core.workers.gc.freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(
        "gpuload.core.workers.ForkingPickler.register", lambda kind, reduce: calls.append(kind.__name__)
    )
    prepare_worker()
    prepare_worker()
    assert calls == ["freeze", "Tensor"]
