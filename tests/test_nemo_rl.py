"""PromptDataset for NeMo-RL, compared with NeMo-RL's own classes: the way from a configuration to batches."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.extend(filter(None, [os.environ.get("NEMO_RL_REPO")]))
pytest.importorskip("nemo_rl", reason="NEMO_RL_REPO must name a checkout of NeMo-RL 0.7.0")

from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.utils import setup_response_data
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from gpuload.errors import OptionError

OURS = "gpuload.integrations.nemo_rl.PromptDataset"
TEXTS = ["What is 2+2?", "", "你好 é\n", "<|im_end|>", " spaces ", "{braces}", "long " * 60]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "problems" / "train.jsonl"
    path.parent.mkdir()
    rows = [{"input": f"{TEXTS[row % 7]} {row}", "output": f"answer {row}"} for row in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "prompt.txt").write_text("Solve step by step:\n{}\n")
    (tmp_path / "system.txt").write_text("Be brief.")
    return {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}


def setup(dataset_name: str, file: str, tokenizer: dict[str, Any], limit: int, **train: Any) -> Any:
    """Train and validation data, as NeMo-RL's scripts make them of a configuration."""
    config = {"dataset_name": dataset_name, "data_path": file, "processor": "math_hf_data_processor", **train}
    data = {"train": config, "max_input_seq_length": limit, "default": None, "validation": None}
    if dataset_name == OURS:
        config |= {"tokenizer": tokenizer}
    return setup_response_data(get_tokenizer(copy.deepcopy(tokenizer)), data)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def rows_of(dataset: AllTaskProcessedDataset) -> list[Any]:
    return [plain(dataset[row]) for row in range(len(dataset))]


@pytest.mark.parametrize("chat_template_kwargs", [None, {"enable_thinking": False}])
@pytest.mark.parametrize("with_prompts", [False, True])
def test_rows_are_those_of_nemo_rl(
    file: str, prompts: dict[str, str], qwen_folder: str, with_prompts: bool, chat_template_kwargs: Any
) -> None:
    section = {"name": qwen_folder, "chat_template_kwargs": chat_template_kwargs}
    train = prompts if with_prompts else {}
    # With a small limit and no filter, rows are truncated by both.
    for limit in (4096, 60, 3):
        stock, _ = setup("ResponseDataset", file, section, limit, **train)
        ours, _ = setup(OURS, file, section, limit, **train)
        assert type(ours.dataset).__name__ == "TokenizedPrompts"
        assert rows_of(ours) == rows_of(stock)


@pytest.mark.parametrize("limit", [34, 35, 60])
def test_prompts_that_are_too_long_are_dropped_exactly(file: str, qwen_folder: str, limit: int) -> None:
    section = {"name": qwen_folder}
    stock, _ = setup("ResponseDataset", file, section, limit)
    ours, _ = setup(OURS, file, section, limit, max_input_seq_length=limit)
    kept = [row for row in rows_of(stock) if row["loss_multiplier"]]
    assert [row | {"idx": 0} for row in rows_of(ours)] == [row | {"idx": 0} for row in kept]
    assert 0 < len(kept) < len(stock)


def test_validation_rows_are_split_off_by_nemo_rl(file: str, qwen_folder: str) -> None:
    section = {"name": qwen_folder}
    train = {"split_validation_size": 0.2, "seed": 3}
    stock = setup("ResponseDataset", file, section, 4096, **train)
    ours = setup(OURS, file, section, 4096, **train)
    assert [rows_of(part) for part in ours] == [rows_of(part) for part in stock]
    assert [len(part) for part in ours] == [40, 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_without_tokenizing(file: str, qwen_folder: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"name": qwen_folder}

    def batches(dataset: Any) -> list[Any]:
        made = DataLoader(dataset, batch_size=8, collate_fn=rl_collate_fn, num_workers=workers)
        return [plain(dict(batch)) for batch in made]

    expected = batches(setup("ResponseDataset", file, section, 4096)[0])
    ours, _ = setup(OURS, file, section, 4096)
    for name in ("apply_chat_template", "__call__"):
        monkeypatch.setattr(PreTrainedTokenizerBase, name, lambda *given, **named: pytest.fail("tokenized"))
    assert batches(ours) == expected


def test_several_datasets(file: str, qwen_folder: str) -> None:
    section = {"name": qwen_folder}
    tokenizer = get_tokenizer(section)
    ours = {"dataset_name": OURS, "data_path": file, "tokenizer": section}
    stock = {"dataset_name": "ResponseDataset", "data_path": file}
    both = {"train": [ours, stock], "max_input_seq_length": 4096, "default": None}
    alone = {"train": [stock, stock], "max_input_seq_length": 4096, "default": None}
    # Both have the task name of the file, so NeMo-RL would use one processor for both.
    both["train"][1] = ours
    assert rows_of(setup_response_data(tokenizer, both)[0]) == rows_of(setup_response_data(tokenizer, alone)[0])


def test_other_processors_fall_back(file: str, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    section = {"name": qwen_folder}
    more = {"processor": "sft_processor"}
    stock, _ = setup("ResponseDataset", file, section, 4096, **more)
    ours, _ = setup(OURS, file, section, 4096, **more)
    assert rows_of(ours) == rows_of(stock)
    assert "falls back to NeMo-RL for problems-train: the processor sft_processor is not supported" in caplog.text


def test_another_tokenizer_is_an_error(file: str, qwen_folder: str) -> None:
    section = {"name": qwen_folder}
    ours, _ = setup(OURS, file, section, 4096)
    ours.tokenizer = get_tokenizer({"name": qwen_folder, "chat_template": "{{ messages[0].content }}"})
    with pytest.raises(OptionError, match="the tokenizer of the policy is not the one of the dataset"):
        _ = ours[0]
