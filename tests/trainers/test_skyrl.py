"""Stores for SkyRL: its own loader opens them. SKYRL_REPO names a checkout of its repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from store_cases import CHATS, TEMPLATE, write_rows

import gpuload

REPOSITORY = os.environ.get("SKYRL_REPO", "")
if not REPOSITORY:
    pytest.skip("SkyRL is no package: make trainers-test SKYRL_REPO=<checkout>", allow_module_level=True)
sys.path.append(REPOSITORY)
from skyrl.train.dataset.pretokenized import load_from_pretokenized  # noqa: E402


@pytest.mark.parametrize("most", [None, 80])
def test_rows(qwen: Any, tmp_path: Path, most: int | None) -> None:
    """Its rows are ours. Of a mask it keeps what follows the first token with loss."""
    chats = gpuload.load_chats(write_rows(tmp_path / "chats.jsonl", CHATS), qwen, chat_template=TEMPLATE)
    gpuload.save_to_disk({"train": chats}, tmp_path / "store", trainer="skyrl")
    found = load_from_pretokenized(str(tmp_path / "store" / "train"), max_length=most)
    rows = [{name: values[:most] for name, values in chats[k].items()} for k in range(len(chats))]
    rows = [row for row in rows if any(label != -100 for label in row["labels"])]
    assert len(found) == len(rows) > 0
    assert list(found.sequence_lengths) == [len(row["input_ids"]) for row in rows]
    for k, row in enumerate(rows):
        loss = [int(label != -100) for label in row["labels"]]
        assert found[k] == {
            "input_ids": row["input_ids"],
            "attention_mask": [1] * len(loss),
            "num_actions": len(loss) - loss.index(1),
            "loss_mask": loss[loss.index(1) :],
        }


def test_texts_train_all_tokens_but_the_first(qwen: Any, tmp_path: Path) -> None:
    """A first token with loss would be an action that no token predicts."""
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"one two {row}"} for row in range(5)])
    gpuload.save_to_disk({"train": gpuload.load_chats(texts, qwen)}, tmp_path / "store", trainer="skyrl")
    found = load_from_pretokenized(str(tmp_path / "store" / "train"))
    assert [row["num_actions"] for row in found] == [len(row["input_ids"]) - 1 for row in found]
    assert all(row["loss_mask"] == [1] * row["num_actions"] for row in found)
