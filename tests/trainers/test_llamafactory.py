"""Stores for LLaMA-Factory: its own code loads them, has the same rows when it prepares them, and trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpuload
from gpuload.cli.main import main

pytest.importorskip("llamafactory", reason="it has an environment of its own: make trainers-test")
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from llamafactory.train.tuner import run_exp
from store_cases import CHATS, PAIRS, TEMPLATE, words, write_model, write_rows

ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ROLES |= {"system_tag": "system"}


@pytest.fixture(scope="module")
def folder(qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data for SFT and pairs, and the file in which LLaMA-Factory finds its data sets."""
    folder = tmp_path_factory.mktemp("llamafactory")
    write_model(qwen, folder / "model")
    write_rows(folder / "chats.jsonl", CHATS)
    write_rows(folder / "pairs.jsonl", PAIRS)
    theirs = [{"messages": row["prompt"]} | {part: row[part][0] for part in ("chosen", "rejected")} for row in PAIRS]
    write_rows(folder / "ranked.jsonl", theirs)
    chats = {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": ROLES}
    ranked = {"file_name": "ranked.jsonl", "ranking": True, "formatting": "sharegpt", "tags": ROLES}
    ranked |= {"columns": {name: name for name in ("messages", "chosen", "rejected")}}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": chats, "pairs": ranked}))
    return folder


def settings(folder: Path, output: Path, stage: str, **more: Any) -> dict[str, Any]:
    """A configuration for three steps on the CPU."""
    return {
        "model_name_or_path": str(folder / "model"), "stage": stage, "do_train": True, "finetuning_type": "full",
        "template": "qwen", "dataset": "chats" if stage == "sft" else "pairs", "dataset_dir": str(folder),
        "cutoff_len": 4096, "output_dir": str(output), "overwrite_cache": True, "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 3, "logging_steps": 1, "learning_rate": 0.01, "use_cpu": True, "report_to": "none", "seed": 0,
        "disable_tqdm": True,
    } | more  # fmt: skip


def loaded(folder: Path, output: Path, stage: str, **more: Any) -> dict[str, Any]:
    """What LLaMA-Factory's workflows get as data sets."""
    model, data, training, *_ = get_train_args(settings(folder, output, stage, **more))
    tokenizer = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(tokenizer["tokenizer"], data)
    kind = "sft" if stage == "sft" else "rm"  # that of data for DPO too
    return get_dataset(template, model, data, training, stage=kind, **tokenizer)


def same_rows(ours: Any, theirs: Any, columns: list[str]) -> None:
    assert len(ours) == len(theirs) > 0
    for found, row in zip(ours, theirs, strict=True):
        assert {name: found[name] for name in columns} == {name: row[name] for name in columns}


def test_rows_for_sft(folder: Path, tmp_path: Path) -> None:
    chats = gpuload.load_chats(str(folder / "chats.jsonl"), str(folder / "model"), chat_template=TEMPLATE)
    gpuload.save_to_disk({"train": chats, "validation": chats}, tmp_path / "sft", trainer="llamafactory")
    theirs = loaded(folder, tmp_path, "sft")["train_dataset"]
    ours = loaded(folder, tmp_path, "sft", tokenized_path=str(tmp_path / "sft"))
    columns = ["input_ids", "attention_mask", "labels"]
    same_rows(ours["train_dataset"], theirs, columns)
    same_rows(ours["eval_dataset"], theirs, columns)
    assert ours["train_dataset"].column_names == columns


def test_rows_with_the_tokenizers_own_template(folder: Path, tmp_path: Path) -> None:
    """Equal ids. Qwen2.5's header of an answer is one token shorter than that of LLaMA-Factory."""
    command = ["prepare", str(folder / "chats.jsonl"), "--tokenizer", str(folder / "model")]
    assert main([*command, "--export", "sft", str(tmp_path / "sft"), "--for", "llamafactory"]) == 0
    theirs = loaded(folder, tmp_path, "sft")["train_dataset"]
    ours = loaded(folder, tmp_path, "sft", tokenized_path=str(tmp_path / "sft"))["train_dataset"]
    same_rows(ours, theirs, ["input_ids", "attention_mask"])
    for found, row in zip(ours, theirs, strict=True):
        begins = [k for k, label in enumerate(row["labels"]) if label != -100 and row["labels"][k - 1] == -100]
        expected = list(row["labels"])
        for begin in begins:
            expected[begin - 1] = row["input_ids"][begin - 1]
        assert found["labels"] == expected


def test_answers_that_begin_with_a_line_break(qwen: Any, folder: Path, tmp_path: Path) -> None:
    """LLaMA-Factory encodes header and answer apart, and the tokenizer's chat template as one text."""
    chat = [{"role": "user", "content": words(0, 2)}, {"role": "assistant", "content": "\n\nso"}]
    write_rows(tmp_path / "chats.jsonl", [{"messages": chat}])
    (tmp_path / "dataset_info.json").write_text((folder / "dataset_info.json").read_text())
    theirs = loaded(folder, tmp_path, "sft", dataset_dir=str(tmp_path))["train_dataset"][0]["input_ids"]
    ours = gpuload.load_chats(str(tmp_path / "chats.jsonl"), qwen)[0]["input_ids"]
    assert qwen.decode(ours) == qwen.decode(theirs)
    assert ours == qwen.apply_chat_template(chat, return_dict=False)
    assert len(ours) < len(theirs)


def test_rows_for_pairs(folder: Path, tmp_path: Path) -> None:
    command = ["prepare", str(folder / "pairs.jsonl"), "--tokenizer", str(folder / "model")]
    assert main([*command, "--export", "dpo", str(tmp_path / "dpo"), "--for", "llamafactory"]) == 0
    theirs = loaded(folder, tmp_path, "dpo")["train_dataset"]
    ours = loaded(folder, tmp_path, "dpo", tokenized_path=str(tmp_path / "dpo"))["train_dataset"]
    assert ours.column_names == theirs.column_names
    same_rows(ours, theirs, ours.column_names)


@pytest.mark.parametrize("stage", ["sft", "dpo", "rm"])
def test_training(folder: Path, tmp_path: Path, stage: str) -> None:
    """Three steps and an evaluation have the losses that they have with LLaMA-Factory's own preparation."""
    model = str(folder / "model")
    if stage == "sft":
        data: Any = gpuload.load_chats(str(folder / "chats.jsonl"), model, chat_template=TEMPLATE)
    else:
        data = gpuload.load_pairs(str(folder / "pairs.jsonl"), model, objective="dpo")
    gpuload.save_to_disk({"train": data, "validation": data}, tmp_path / "store", trainer="llamafactory")
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": "chats" if stage == "sft" else "pairs"}
    losses = []
    for name, more in {"stock": {}, "prepared": {"tokenized_path": str(tmp_path / "store")}}.items():
        run_exp(settings(folder, tmp_path / name, stage, **evaluation, **more))
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses.append([entry[key] for key in ("loss", "eval_loss") for entry in history if key in entry])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
