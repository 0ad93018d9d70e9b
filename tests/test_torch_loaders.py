"""torch's own loaders over a PromptDataset: in this process, in forked and in spawned workers."""

import multiprocessing
from typing import Any

import pytest
import torch
from tiers import core
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import gpuload
from gpuload.dataset.pieces import tokens_of


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen: Any) -> gpuload.PromptDataset:
    return gpuload.load(gsm8k, qwen, max_samples=300, max_prompt_length=256, return_raw_chat=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, values in one.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(values, other[key])
        else:
            assert values.tolist() == other[key].tolist()


@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("workers", "start"), core([(0, None), (2, "fork"), (2, "spawn")], (0, None), (2, "fork")))
def test_stock_loaders(prompts: gpuload.PromptDataset, loader_class: Any, workers: int, start: str | None) -> None:
    loader = loader_class(
        prompts, batch_size=64, collate_fn=gpuload.collate_fn, num_workers=workers, multiprocessing_context=start
    )
    batches = list(loader)
    assert [len(batch["index"]) for batch in batches] == [64, 64, 64, 64, 44]
    for batch, expected in zip(batches, prompts.loader(64), strict=True):
        same(batch, expected)


def test_resume_of_a_stateful_loader_with_workers(prompts: gpuload.PromptDataset) -> None:
    def make() -> Any:
        return StatefulDataLoader(
            prompts, batch_size=16, shuffle=True, collate_fn=gpuload.collate_fn, num_workers=2,
            generator=torch.Generator().manual_seed(7),
        )  # fmt: skip

    loader = make()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    expected = next(iterator)
    resumed = make()
    resumed.load_state_dict(state)
    same(next(iter(resumed)), expected)


def test_a_batch_is_one_gather(prompts: gpuload.PromptDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for a whole batch at once, and that is one gather from the store."""
    calls: list[int] = []

    def counting(store: Any, plan: Any) -> Any:
        calls.append(len(plan))
        return tokens_of(store, plan)

    monkeypatch.setattr("gpuload.dataset.rows.tokens_of", counting)
    next(iter(DataLoader(prompts, batch_size=100, collate_fn=gpuload.collate_fn)))
    assert calls == [100]


def test_collation_keeps_equal_length_lists_apart() -> None:
    batch = gpuload.collate_fn([{"t": torch.tensor([i]), "l": [i, i], "n": None, "s": "x"} for i in range(3)])
    assert batch["t"].tolist() == [[0], [1], [2]]
    assert batch["l"].shape == (3,)
    assert batch["l"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["l"].dtype == batch["n"].dtype == batch["s"].dtype == object


def _load_in_worker(file: str, folder: str, answer: Any) -> None:
    prompts = gpuload.load(file, folder, max_samples=50)
    answer.put(prompts.tokens.values.tolist())


@pytest.mark.parametrize("parallelism", [None, "true"])
def test_load_in_a_forked_process(
    gsm8k: str,
    qwen: Any,
    qwen_folder: str,
    prompts: gpuload.PromptDataset,
    parallelism: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After this process has used every thread pool there is, a forked child can still load."""
    if parallelism is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    qwen(["some", "texts"] * 100)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_load_in_worker, args=(gsm8k, qwen_folder, answer))
    child.start()
    values = answer.get(timeout=60)
    child.join(10)
    assert values == prompts.tokens.take(range(50)).values.tolist()
