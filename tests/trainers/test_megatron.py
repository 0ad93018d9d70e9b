"""Indexed datasets, opened by Megatron-core. MEGATRON_REPO names a checkout of Megatron-LM, for its SFTDataset."""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import CHATS, TEMPLATE, write_rows

import gpuload
from gpuload.core.errors import DataError, OptionError

pytest.importorskip("megatron.core", reason="make megatron-test")
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from gpuload.integrations.megatron import PreparedDataset

LONG = 96
PAD = 151_643


@pytest.fixture
def chats(qwen: Any, tmp_path: Path) -> Any:
    rows = write_rows(tmp_path / "chats.jsonl", CHATS)
    return gpuload.load_chats(rows, qwen, chat_template=TEMPLATE, max_length=LONG, overlong="keep_start")


class Tokenizer:
    """What the datasets ask of a tokenizer."""

    pad, eod, vocab_size, unique_identifiers = PAD, 1, 1 << 18, "a tokenizer"

    def __init__(self, conversation: Any = None):
        self.tokenize_conversation = conversation


def config(**more: Any) -> Any:
    given = {"sequence_length": LONG, "random_seed": 3, "split": "1,0,0", "tokenizer": Tokenizer()}
    given |= dict.fromkeys(
        ["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"], False
    )
    return GPTDatasetConfig(**given | more)


def dataset(prefix: Path, samples: int | None = None, **more: Any) -> Any:
    """As a provider makes it."""
    settings = config(blend=([str(prefix)], None), **more)
    return BlendedMegatronDatasetBuilder(PreparedDataset, [samples, 0, 0], lambda: True, settings).build()[0]


@pytest.mark.parametrize("mmap", [True, False])
def test_rows(chats: Any, tmp_path: Path, mmap: bool) -> None:
    gpuload.save_to_disk({"train": chats}, tmp_path / "out", trainer="megatron")
    assert IndexedDataset.exists(str(tmp_path / "out" / "train"))
    ids, loss = (IndexedDataset(str(tmp_path / "out" / name), mmap=mmap) for name in ("train", "train-loss-mask"))
    assert len(ids) == len(loss) == len(chats)
    assert ids.document_indices.tolist() == list(range(len(chats) + 1))
    for k in range(len(chats)):
        assert ids[k].tolist() == chats[k]["input_ids"]
        assert loss[k].tolist() == [0, *(int(label != -100) for label in chats[k]["labels"][1:])]
    assert [each.tolist() for each in ids[2:5]] == [chats[k]["input_ids"] for k in range(2, 5)]


@pytest.mark.parametrize("packing", ["bfd", "bfd_split", "wrapped"])
def test_packs(chats: Any, tmp_path: Path, packing: Any) -> None:
    """An index of packs gives the tokens of the loader's packs, without a copy of them."""
    gpuload.save_to_disk({"train": chats}, tmp_path / "out", trainer="megatron", packing=packing)
    found = IndexedDataset(str(tmp_path / "out" / "train-packs"))
    bounds = found.document_indices.tolist()
    packs = [[id for k in range(low, high) for id in found.get(k).tolist()] for low, high in pairwise(bounds)]
    expected = [batch["input_ids"][0].tolist() for batch in chats.loader(1, packing=packing)]
    assert packs == expected
    samples = dataset(tmp_path / "out" / "train-packs", 3 * len(packs))
    assert len(samples) == 3 * len(packs)
    for epoch in range(3):
        numbers = range(epoch * len(packs), (epoch + 1) * len(packs))
        shown = [samples[k]["tokens"].tolist() for k in numbers]
        assert sorted(shown) == sorted(ids + [PAD] * (LONG - len(ids)) for ids in packs)
        assert samples[numbers[1]]["tokens"].tolist() == shown[1]


def test_samples_are_those_of_megatron(chats: Any, tmp_path: Path) -> None:
    repository = os.environ.get("MEGATRON_REPO")
    if not repository:
        pytest.skip("SFTDataset is in Megatron-LM's repository: make megatron-test MEGATRON_REPO=<checkout>")
    spec = importlib.util.spec_from_file_location("sft", f"{repository}/megatron/training/datasets/sft_dataset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gpuload.save_to_disk({"train": chats}, tmp_path / "out", trainer="megatron", packing="bfd")
    made = dataset(tmp_path / "out" / "train-packs")
    bounds = made.dataset.ids.document_indices.tolist()
    ids, loss = ([part.get(k) for k in range(bounds[-1])] for part in made.dataset)

    def tokenize(conversation: Any, **_: Any) -> tuple[np.ndarray, np.ndarray]:
        k = conversation[0]["content"]
        return ids[k], np.where(loss[k], ids[k], -100)

    packs = [[{"role": "system", "content": k} for k in range(*bound)] for bound in pairwise(bounds)]
    settings = config(tokenizer=Tokenizer(tokenize), context_parallel_size=1)
    theirs = module.SFTDataset(packs, "", np.arange(len(packs)), len(packs), Split.train, settings)
    numbers = [
        next(n for n in range(len(packs)) if torch.equal(theirs[n]["tokens"], made[k]["tokens"]))
        for k in range(len(packs))
    ]
    assert sorted(numbers) == list(range(len(packs)))
    for k, number in enumerate(numbers):
        expected, found = theirs[number], made[k]
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            assert values.dtype == found[name].dtype, name
            assert torch.equal(values, found[name]), name


def test_what_cannot_be_read(chats: Any, tmp_path: Path) -> None:
    gpuload.save_to_disk({"train": chats}, tmp_path / "out", trainer="megatron")
    with pytest.raises(DataError, match="the sequence length is 20: .*--max-length"):
        dataset(tmp_path / "out" / "train", sequence_length=20)
    with pytest.raises(OptionError, match="context_parallel_size"):
        dataset(tmp_path / "out" / "train", context_parallel_size=2)
    masks = tmp_path / "out" / "train-loss-mask.idx"
    gpuload.save_to_disk({"train": chats}, tmp_path / "packs", trainer="megatron", packing="wrapped", pack_length=9)
    (tmp_path / "packs" / "train-packs-loss-mask.idx").replace(masks)
    with pytest.raises(DataError, match="other sequences: write the directory again"):
        dataset(tmp_path / "out" / "train")
