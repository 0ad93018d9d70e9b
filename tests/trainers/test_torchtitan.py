"""torchtitan's dataloaders and checkpoints, with packs of gpuload. PYTHONPATH may name a checkout of torchtitan."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from store_cases import CHATS, TEMPLATE, write_rows

import gpuload
from gpuload.core.errors import OptionError, ResumeError

pytest.importorskip("torchtitan", reason="make torchtitan-test")
from gpuload.integrations.torchtitan import DataLoader

try:
    from torchtitan.components.data.loader import BaseDataLoader

    FLAT = True
except ImportError:
    from torchtitan.components.dataloader import BaseDataLoader

    FLAT = False

LONG = 128
LOSS = {"chat_template": TEMPLATE}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_rows(tmp_path / "chats.jsonl", CHATS)


def made(file: str, qwen_folder: str, rank: int = 0, ranks: int = 1, packs: int = 2, **settings: Any) -> Any:
    """As the trainer makes it."""
    config = DataLoader.Config(files=[file], **({"options": LOSS} | settings))
    sizes = {"max_context_length": LONG, "num_tokens_per_batch": LONG} if FLAT else {"seq_len": LONG}
    more = {} if FLAT else {"local_batch_size": packs, "snapshot_every_n_steps": 5}
    tokenizer = SimpleNamespace(tokenizer_path=qwen_folder)
    loader = config.build(dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, **sizes, **more)
    assert isinstance(loader, BaseDataLoader)
    return loader


def rows(batches: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rows in packs: ids and their labels, moved back. The first label is -100 wherever it is."""
    found = []
    for given, labels in batches:
        kind = (LONG,) if FLAT else (len(labels), LONG)
        for tensor in (given["input"], given["positions"], labels):
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, kind)
        for ids, positions, targets in zip(
            *(each.reshape(-1, LONG) for each in (*given.values(), labels)), strict=True
        ):
            bounds = [*(positions == 0).nonzero()[:, 0].tolist(), LONG]
            for low, high in pairwise(bounds):
                assert positions[low:high].tolist() == list(range(high - low))
                assert targets[high - 1] == -100
                found.append((tuple(ids[low:high].tolist()), (-100, *targets[low : high - 1].tolist())))
    return [(ids, labels) for ids, labels in found if set(labels) != {-100}]


def expected(file: str, qwen: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    chats = gpuload.load_chats(file, qwen, max_length=LONG, **LOSS)
    made = [(tuple(row["input_ids"]), tuple(row["labels"])) for row in chats]
    return [(ids, labels) for ids, labels in made if set(labels) != {-100}]


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs(file: str, qwen: Any, qwen_folder: str, shuffle: bool) -> None:
    """Each epoch has every row once, with all answers of its conversation."""
    wanted = sorted(expected(file, qwen))
    finite = made(file, qwen_folder, infinite=False, shuffle=shuffle)
    batches = list(finite)
    assert sorted(rows(batches)) == wanted
    assert any(sum(a == -100 and b != -100 for a, b in pairwise(row)) > 1 for _, row in wanted)
    packs = len(batches) if FLAT else sum(len(labels) for _, labels in batches)
    endless = made(file, qwen_folder, packs=1, shuffle=shuffle)
    three = list(islice(endless, 3 * packs))
    for epoch in range(3):
        assert sorted(rows(three[epoch * packs : (epoch + 1) * packs])) == wanted
    assert (rows(three[:packs]) == rows(three[packs : 2 * packs])) == (not shuffle)


def test_another_number_of_ranks(file: str, qwen: Any, qwen_folder: str, tmp_path: Path) -> None:
    """A checkpoint of two ranks is continued by three, and by one, with the rest of the epoch."""
    before = [made(file, qwen_folder, rank, 2, packs=1) for rank in range(2)]
    seen = [row for loader in before for row in rows(islice(loader, 2))]
    states = [loader.state_dict() for loader in before]
    assert states[0] == states[1]
    dcp.save({"dataloader": states[0]}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    packs = len(list(made(file, qwen_folder, packs=1, infinite=False)))
    for ranks in (1, 3):
        rest = []
        for rank in range(ranks):
            loader = made(file, qwen_folder, rank, ranks, packs=1, infinite=False)
            state = {"dataloader": loader.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
            loader.load_state_dict(state["dataloader"])
            rest += rows(loader)
        # With three ranks, the last step may repeat packs.
        assert set(seen) | set(rest) == set(expected(file, qwen))
        if (packs - 4) % ranks == 0:
            assert len(seen) + len(rest) == len(expected(file, qwen))
            assert packs > 4


def test_resume_anywhere(file: str, qwen_folder: str) -> None:
    full = list(islice(made(file, qwen_folder), 12))
    for step in random.Random(0).sample(range(12), 4):
        first = made(file, qwen_folder)
        list(islice(first, step))
        second = made(file, qwen_folder)
        second.load_state_dict(first.state_dict())
        assert rows(islice(second, 12 - step)) == rows(full[step:])


def test_what_cannot_be_used(file: str, qwen_folder: str) -> None:
    with pytest.raises(OptionError, match="files is empty"):
        DataLoader.Config().build(dp_world_size=1, dp_rank=0, tokenizer=None)
    with pytest.raises(OptionError, match="gives a dataloader size, and neither"):
        DataLoader.Config(files=[file]).build(dp_world_size=1, dp_rank=0, tokenizer=None, size=1)
    with pytest.raises(OptionError, match="max_length=129 is more than the 128 tokens"):
        made(file, qwen_folder, options={"max_length": LONG + 1})
    loader = made(file, qwen_folder)
    loader.load_state_dict({})
    with pytest.raises(ResumeError, match="another dataloader.*exclude_from_loading"):
        loader.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    with pytest.raises(ResumeError, match="other settings: seed was 42, is 1"):
        made(file, qwen_folder, seed=1).load_state_dict(loader.state_dict())
