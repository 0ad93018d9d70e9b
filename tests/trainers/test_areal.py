"""Stores for AReaL: its own functions load and collate them. AREAL_REPO names a checkout of its repository."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from store_cases import CHATS, TEMPLATE, write_rows

import gpuload

REPOSITORY = os.environ.get("AREAL_REPO", "")
if not REPOSITORY:
    pytest.skip("AReaL is no package: make trainers-test AREAL_REPO=<checkout>", allow_module_level=True)

# Importing these packages needs its engines for inference and training. Their modules can be imported without them,
# except for that of its command line, of which the functions below use the names of classes.
for name in ("areal", "areal.api", "areal.infra"):
    package = ModuleType(name)
    package.__path__ = [str(Path(REPOSITORY, *name.split(".")))]
    sys.modules[name] = package
command_line: Any = ModuleType("areal.api.cli_args")
for name in ("_DatasetConfig", "MicroBatchSpec", "NormConfig", "ValidDatasetConfig"):
    setattr(command_line, name, type(name, (), {}))
sys.modules[command_line.__name__] = command_line

import torch  # noqa: E402
from areal.dataset import get_custom_dataset  # noqa: E402
from areal.utils.data import collate_samples_to_list, concat_padded_tensors  # noqa: E402


def loaded(path: Path, split: str) -> Any:
    """As its scripts for SFT load a data set."""
    settings = SimpleNamespace(path=str(path), type="sft", max_length=None, scheduling_spec=None)
    return get_custom_dataset(split=split, dataset_config=settings)


def test_batches(qwen: Any, tmp_path: Path) -> None:
    """After its rotation of masks, the tokens with loss are those that labels name."""
    chats = gpuload.load_chats(write_rows(tmp_path / "chats.jsonl", CHATS), qwen, chat_template=TEMPLATE)
    gpuload.save_to_disk({"train": chats, "test": chats}, tmp_path / "store", trainer="areal")
    for split in ("train", "test"):
        found = loaded(tmp_path / "store", split)
        assert len(found) == len(chats)
        batch = concat_padded_tensors(collate_samples_to_list(list(found)))
        rotated = torch.roll(batch["loss_mask"].bool(), shifts=-1, dims=-1)  # as its LMEngine does
        for k in range(len(chats)):
            ids, labels = chats[k]["input_ids"], chats[k]["labels"]
            assert batch["input_ids"][k, : len(ids)].tolist() == ids
            assert batch["attention_mask"][k].sum() == len(ids)
            predicted = [[position, label] for position, label in enumerate(labels[1:]) if label != -100]
            positions = rotated[k].nonzero().flatten().tolist()
            assert predicted == [[position, int(batch["input_ids"][k, position + 1])] for position in positions]


def test_unknown_split(qwen: Any, tmp_path: Path) -> None:
    """Scripts ask for `train` and `test`: a store has the splits that it was written with."""
    chats = gpuload.load_chats(write_rows(tmp_path / "chats.jsonl", CHATS), qwen)
    gpuload.save_to_disk({"train": chats}, tmp_path / "store", trainer="areal")
    with pytest.raises(ValueError, match="Requested split 'test' not found"):
        loaded(tmp_path / "store", "test")
