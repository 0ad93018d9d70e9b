"""Stores for axolotl: its own code loads them, drops and packs rows, and stores the result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from store_cases import CHATS, TEMPLATE, write_rows

import gpuload

pytest.importorskip("axolotl", reason="it has an environment of its own: make trainers-test")
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
from axolotl.utils.data.sft import prepare_datasets
from axolotl.utils.dict import DictDefault


def prepared(tokenizer: Any, store: Path, **more: Any) -> tuple[Any, Any]:
    """The data sets that its trainer gets for training and evaluation."""
    given = {"path": str(store), "type": ""}
    configuration = DictDefault({
        "datasets": [given], "test_datasets": [given | {"split": "test"}], "sequence_len": 4096, "seed": 0,
        "dataset_prepared_path": str(store.parent / "prepared"), "shuffle_merged_datasets": False, "val_set_size": 0,
        "num_epochs": 1, "micro_batch_size": 1, "batch_size": 1, "gradient_accumulation_steps": 1, "world_size": 1,
        "dataset_num_proc": 1, "sample_packing_bin_size": 200, "sample_packing_group_size": 100_000,
    } | more)  # fmt: skip
    train, test, *_ = prepare_datasets(configuration, tokenizer)
    return train, test


def written(tokenizer: Any, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A store with all conversations for training, and one of three for evaluation, and the rows of the former."""
    train, test = (
        gpuload.load_chats(write_rows(folder / name, rows), tokenizer, chat_template=TEMPLATE)
        for name, rows in (("train.jsonl", CHATS), ("test.jsonl", CHATS[::3]))
    )
    gpuload.save_to_disk({"train": train, "test": test}, folder / "store", trainer="axolotl", overwrite=True)
    return folder / "store", [train[k] for k in range(len(train))]


@pytest.mark.parametrize("packing", [False, True])
def test_rows(qwen: Any, tmp_path: Path, packing: bool) -> None:
    store, rows = written(qwen, tmp_path)
    train, test = prepared(qwen, store, sample_packing=packing, eval_sample_packing=False)
    for found, expected in ((train, rows), (test, rows[::3])):
        assert found["input_ids"][:] == [row["input_ids"] for row in expected]
        assert found["labels"][:] == [row["labels"] for row in expected]
        assert found["attention_mask"][:] == [[1] * len(row["labels"]) for row in expected]


def test_long_rows_are_dropped_by_axolotl(qwen: Any, tmp_path: Path) -> None:
    store, rows = written(qwen, tmp_path)
    short = [row["input_ids"] for row in rows if len(row["input_ids"]) <= 80]
    assert 0 < len(short) < len(rows)
    assert prepared(qwen, store, sequence_len=80)[0]["input_ids"][:] == short


def test_what_axolotl_has_prepared_is_found_by_its_configuration(qwen: Any, tmp_path: Path) -> None:
    """So the split for evaluation has to be named, and new rows need another `dataset_prepared_path`."""
    store, rows = written(qwen, tmp_path)
    unnamed = [{"path": str(store), "type": ""}]
    assert [len(found) for found in prepared(qwen, store, test_datasets=unnamed)] == [len(rows)] * 2
    fewer = gpuload.load_chats(write_rows(tmp_path / "fewer.jsonl", CHATS[:7]), qwen, chat_template=TEMPLATE)
    gpuload.save_to_disk({"train": fewer, "test": fewer}, store, trainer="axolotl", overwrite=True)
    assert len(prepared(qwen, store)[0]) == len(rows)
    assert len(prepared(qwen, store, dataset_prepared_path=str(tmp_path / "other"))[0]) == 7
