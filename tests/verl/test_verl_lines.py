"""The lines that `gpuload check --for verl` prints, given to verl's own configuration and its factories of datasets."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl.trainer.sft_trainer")

from hydra import compose, initialize_config_module
from same import create_rl_dataset
from test_check_lines import DATA, in_file, lines_of
from test_pasted_lines import FORKS
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset

import gpuload
from gpuload.cli.main import main
from gpuload.integrations.verl import RLHFDataset, ServedSFTDataset, SFTDataset

CHATS: dict[str, tuple[list[Any], dict[str, Any], type]] = {
    "messages": (*DATA["messages"], SFTDataset),
    "another key": (*DATA["another key"], SFTDataset),
    "served": (FORKS, {"turns": "served"}, ServedSFTDataset),
}


def configured(lines: str, name: str) -> Any:
    """The configuration of a trainer that is started with these words, after the commands in comments."""
    words = []
    for line in lines.splitlines():
        if line.startswith("# gpuload "):
            assert main(shlex.split(line)[2:]) == 0
        words += shlex.split(line, comments=True)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=[word for word in words if word != "\\"])


@pytest.mark.parametrize("name", CHATS)
def test_lines_for_conversations(qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows, options, kind = CHATS[name]
    file = in_file(tmp_path / "a.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    data = configured(lines_of(file, qwen_folder, "verl", limit=256, **options), "sft_trainer_engine").data
    data.pad_mode = "no_padding"
    found = create_sft_dataset(data.train_files, data, tokenizer, None, max_samples=-1)
    assert type(found) is kind
    expected = gpuload.load_chats(file, tokenizer, max_length=256, **options)
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"] for row in expected[:]]
    if kind is ServedSFTDataset:
        learned = [torch.where(row["loss_mask"] == 1, row["input_ids"], -100).tolist() for row in found]
        assert learned == [row["labels"] for row in expected[:]]


@pytest.mark.parametrize("name", ["prompts", "questions", "cut prompts"])
def test_lines_for_prompts(qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    rows, options = DATA[name]
    options = {"limit": 256, **options}
    file = in_file(tmp_path / "a.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    data = configured(lines_of(file, qwen_folder, "verl", **options), "ppo_trainer").data
    found = create_rl_dataset(data.train_files, data, tokenizer, None, max_samples=-1)
    assert type(found) is RLHFDataset
    key = options.get("prompt_key", "prompt")
    shown = [row["raw_prompt"] for row in found]
    assert [list(prompt)[-1]["content"] for prompt in shown] == [
        row[key] if isinstance(row[key], str) else row[key][-1]["content"] for row in rows
    ]
