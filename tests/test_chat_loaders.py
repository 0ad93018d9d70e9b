"""Loaders of ChatDataset: packs, token budgets, groups of similar lengths; and training on them as on TRL's batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizer_cases import small_tokenizer

import gpuload
from gpuload.core.errors import OptionError, ResumeError

ROWS = 57


@pytest.fixture(scope="module")
def chats(qwen: Any) -> gpuload.ChatDataset:
    rng = np.random.default_rng(0)
    rows = [
        [
            {"role": "user", "content": f"question {row} " * int(rng.integers(1, 6))},
            {"role": "assistant", "content": "answer " * int(rng.integers(1, 40))},
        ]
        for row in range(ROWS)
    ]
    return gpuload.load_chats(pa.table({"messages": rows, "n": list(range(ROWS))}), qwen, max_length=128)


def documents(batch: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each row in a flat batch."""
    bounds = batch["cu_seq_lens_q"].tolist()
    flat = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    return [(flat[0][a:b], flat[1][a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("packing", ["bfd", "bfd_split", "trl"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_row_is_in_one_pack(chats: gpuload.ChatDataset, packing: Any, world_size: int) -> None:
    expected = sorted((row["input_ids"], [-100, *row["labels"][1:]]) for row in (chats[k] for k in range(len(chats))))
    found, sizes = [], []
    for rank in range(world_size):
        loader = chats.loader(
            2, packing=packing, shuffle=True, seed=3, rank=rank, world_size=world_size, drop_last=False
        )
        batches = list(loader)
        assert len(batches) == len(chats.loader(2, packing=packing, shuffle=True, seed=3, world_size=world_size))
        found += [document for batch in batches for document in documents(batch)]
        sizes += [batch["input_ids"].shape[1] for batch in batches]
    assert max(sizes) <= 2 * 128
    unique = {str(document): document for document in found}
    assert sorted(unique.values()) == expected  # packs may be repeated at the end, for ranks with fewer of them


def test_epochs_differ_and_resume_in_the_middle(chats: gpuload.ChatDataset) -> None:
    settings: dict[str, Any] = {"packing": "bfd", "pack_length": 100, "shuffle": True, "seed": 1}
    loader = chats.loader(2, **settings)
    epochs = [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]
    loader = chats.loader(2, **settings)
    list(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = chats.loader(2, **settings)
    other.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in other] == epochs[1][1:]
    # On two ranks, all packs that are left are divided.
    ranks = [chats.loader(1, **settings, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    left = [batch["input_ids"].tolist() for pair in zip(*ranks, strict=True) for batch in pair]
    single = chats.loader(1, **settings)
    single.load_state_dict(state)
    assert left[: len(list(single))] == [batch["input_ids"].tolist() for batch in _again(chats, settings, state)]
    with pytest.raises(ResumeError, match="packing was 'bfd', is 'wrapped'"):
        chats.loader(2, **settings | {"packing": "wrapped"}).load_state_dict(state)


def _again(chats: gpuload.ChatDataset, settings: dict[str, Any], state: Any) -> Any:
    loader = chats.loader(1, **settings)
    loader.load_state_dict(state)
    return loader


def test_groups_of_similar_lengths_resume_with_the_same_number_of_ranks(chats: gpuload.ChatDataset) -> None:
    """Their plan depends on it."""
    settings: dict[str, Any] = {"group_by_length": True, "shuffle": True, "seed": 0}
    loader = chats.loader(4, **settings)
    next(iter(loader))
    chats.loader(4, **settings).load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="planned_ranks was 1, is 2"):
        chats.loader(4, **settings, world_size=2).load_state_dict(loader.state_dict())
    for budget in ({"max_tokens": 300}, {"max_tokens": 300, "padded": False}):
        loader = chats.loader(**budget, shuffle=True, seed=0)
        next(iter(loader))
        chats.loader(**budget, shuffle=True, seed=0, world_size=2).load_state_dict(loader.state_dict())


def test_a_state_fits_loaders_of_its_own_mode_only(chats: gpuload.ChatDataset) -> None:
    """Positions in packs are none in rows. All settings of a padded loader are also those of the others."""
    modes: list[dict[str, Any]] = [
        {"batch_size": 2},
        {"batch_size": 2, "packing": "bfd", "pack_length": 256},
        {"batch_size": 2, "packing": "wrapped", "pack_length": 256},
        {"max_tokens": 300},
        {"max_tokens": 300, "padded": False},
        {"batch_size": 2, "group_by_length": True},
    ]
    for saved, other in itertools.product(modes, modes):
        state = chats.loader(**saved, shuffle=True, seed=0).state_dict()
        loader = chats.loader(**other, shuffle=True, seed=0)
        if saved is other:
            loader.load_state_dict(state)
        else:
            with pytest.raises(ResumeError, match=r"other settings: .*Make the loader with those"):
                loader.load_state_dict(state)


def test_a_loader_of_nothing(chats: gpuload.ChatDataset) -> None:
    with pytest.raises(OptionError, match="there is no batch: the dataset has no rows"):
        chats.select([]).loader(batch_size=2)


def test_batches_by_token_budget(chats: gpuload.ChatDataset) -> None:
    seen: list[int] = []
    for batch in chats.loader(max_tokens=300, shuffle=True, seed=0):
        assert batch["input_ids"].numel() <= 300
        seen += batch["n"].tolist()
    assert sorted(seen) == list(range(ROWS))
    flat = list(chats.loader(max_tokens=300, padded=False))
    assert all(batch["input_ids"].shape[1] <= 300 for batch in flat)
    assert sum(len(documents(batch)) for batch in flat) == ROWS


def test_groups_of_similar_lengths_have_less_padding(chats: gpuload.ChatDataset) -> None:
    def padding(**settings: Any) -> int:
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in chats.loader(4, **settings))

    assert 0 < padding(group_by_length=True, shuffle=True, seed=0) < padding(shuffle=True, seed=0) / 2


def test_wrapped_packs_are_full(chats: gpuload.ChatDataset) -> None:
    batches = list(chats.loader(1, packing="wrapped", pack_length=64))
    assert all(batch["input_ids"].shape == (1, 64) for batch in batches[:-1])
    assert sum(batch["input_ids"].numel() for batch in batches) == len(chats.tokens.values)


def test_rows_truncated_at_their_start_are_packed_from_their_end(qwen: Any) -> None:
    rows = [[{"role": "user", "content": "q " * 50}, {"role": "assistant", "content": "a " * 10}]]
    chats = gpuload.load_chats(pa.table({"messages": rows}), qwen, max_length=20, overlong="keep_end")
    (batch,) = chats.loader(1, packing="bfd")
    assert batch["input_ids"][0].tolist() == chats[0]["input_ids"]
    assert batch["labels"][0, 1:].tolist() == chats[0]["labels"][1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "pass batch_size, or max_tokens"),
        ({"packing": "bfd"}, "packing takes batch_size"),
        ({"batch_size": 2, "packing": "best"}, "packing='best'|strategy='best'"),
        ({"batch_size": 2, "packing": "bfd", "pack_length": 0}, "0"),
        ({"batch_size": 2, "packing": "bfd", "max_tokens": 9}, "neither max_tokens"),
        ({"max_tokens": 5}, "row .* alone has"),
        ({"batch_size": 2, "pack_length": 64}, "pack_length is for packs: pass packing too"),
        ({"max_tokens": 500, "pack_length": 64}, "pack_length is for packs: pass packing too"),
        ({"max_tokens": 500, "padding": "longest"}, "padding: not an option of planned batches"),
        ({"batch_size": 2, "packing": "bfd", "rank": 2, "world_size": 2}, "rank=2"),
        ({"batch_size": 10**6, "packing": "bfd", "drop_last": True}, "leaves no batch"),
    ],
)
def test_invalid_settings(chats: gpuload.ChatDataset, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        list(chats.loader(**settings))


# -- training --------------------------------------------------------------------------------------------------------


def losses(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def test_training_has_the_losses_of_trls_collator(qwen: Any) -> None:
    pytest.importorskip("trl", reason="TRL is the reference of this test")
    from export_cases import one_thread, small_model
    from transformers import Qwen2ForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokenizer = small_tokenizer(qwen.chat_template)
    rows_of_text = [
        [{"role": "user", "content": f"question {row}"}, {"role": "assistant", "content": "answer " * (row % 7 + 1)}]
        for row in range(20)
    ]
    chats = gpuload.load_chats(pa.table({"messages": rows_of_text}), tokenizer)
    collate = DataCollatorForLanguageModeling(pad_token_id=chats.pad_token_id)
    rows = [[chats[4 * k + j] for j in range(4)] for k in range(5)]
    theirs = [collate([{name: row[name] for name in ("input_ids", "labels")} for row in some]) for some in rows]
    keys = list(theirs[0])
    ours = [{name: batch[name] for name in keys} for batch, _ in zip(chats.loader(4), range(5), strict=False)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in keys)
    with one_thread():
        found, expected = (losses(small_model(Qwen2ForCausalLM, tokenizer), some) for some in (ours, theirs))
    assert len(set(expected)) == 5
    assert found == expected
