"""The lines that `gpuload check --for TRAINER` prints, pasted as they are: run in TRL, and read by the integrations
with the other trainers, whose own tests need environments of their own."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_check_lines import DATA, chat, in_file, lines_of
from tiers import core

import gpuload
from gpuload.cli.main import main

FORKS = [{"messages": chat(n) + chat(n + 9)} for n in range(6)]
SERVED: dict[str, tuple[list[Any], dict[str, Any]]] = {"served": (FORKS, {"turns": "served", "loss_on": "last_turn"})}
OF_TRAINERS = {
    "verl": {"path", "name", "train_files"},
    "slime": {"data_source_path", "rollout_function_path"},
    "nemo-rl": {"dataset_name", "chat_key", "input_key"},
}
"""Keys with which the trainers themselves find the integration and the files, or NeMo-RL's own classes the column."""
TRL = ("messages", "another key", "last", "sharegpt", "alpaca", "pairs", "prompts", "questions", "served", "template")


def pasted(lines: str, directory: Path) -> dict[str, Any]:
    """What a user has who runs the commands in the comments, and then the lines."""
    for line in lines.splitlines():
        if line.startswith("# gpuload "):
            assert main(shlex.split(line)[2:]) == 0
    names: dict[str, Any] = {}
    exec(compile(lines, "pasted", "exec"), names)
    return names


def in_order(rows: Any) -> list[Any]:
    return sorted(rows, key=repr)


@pytest.mark.parametrize("name", core(TRL, "messages", "another key", "alpaca", "pairs", "prompts", "served"))
def test_lines_for_trl_train_on_the_rows_that_were_checked(
    qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("trl")
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    from tests.export_cases import one_thread, small_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # as with a GPU
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    rows, options = (DATA | SERVED)[name]
    file = in_file(tmp_path / "a.jsonl", rows)
    if "chat_template" in options:
        (tmp_path / "t.jinja").write_text(options["chat_template"])
        options = options | {"chat_template": "t.jinja"}
    names = pasted(lines_of(file, qwen_folder, "trl", limit=256, **options), tmp_path)
    if "args" not in names:  # prompts, for GRPOTrainer
        key = options.get("prompt_key", "prompt")
        assert names["train_dataset"]["prompt"][:] == [row[key] for row in rows]
        return
    trainers = {key: value for key, value in names.items() if key.endswith("Trainer")}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    names["args"].bf16 = False
    args, tokenizer = names["args"], AutoTokenizer.from_pretrained(qwen_folder)
    args.max_steps, args.report_to, args.save_strategy, args.disable_tqdm = 1, [], "no", True
    more = {"ref_model": small_model(Qwen2ForCausalLM, tokenizer)} if name == "pairs" else {}
    trainer = list(trainers.values())[-1](
        small_model(Qwen2ForCausalLM, tokenizer), args=args, train_dataset=names["train_dataset"],
        processing_class=tokenizer, **more,
    )  # fmt: skip
    found = []
    for batch in trainer.get_train_dataloader():
        for row, ids in enumerate(batch["input_ids"]):
            there = batch["attention_mask"][row].bool()
            learned = batch["labels"][row] if "labels" in batch else ids.where(batch["completion_mask"][row] == 1, -100)
            found.append((ids[there].tolist(), learned[there].tolist()))
    if name == "pairs":
        pairs = gpuload.load_pairs(file, qwen_folder, max_length=256)[:]
        parts = [(row["prompt_ids"], row[f"{side}_ids"]) for row in pairs for side in ("chosen", "rejected")]
        expected = [(prompt + answer, [-100] * len(prompt) + answer) for prompt, answer in parts]
    else:
        made = gpuload.load_chats(file, qwen_folder, max_length=256, **options)[:]
        expected = [(row["input_ids"], row["labels"]) for row in made]
    assert in_order(found) == in_order(expected)
    with one_thread():
        trainer.train()


def words_of(folder: str) -> set[str]:
    """All names and strings in the source of an integration."""
    found: set[str] = set()
    for path in (Path(gpuload.__file__).parent / "integrations" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@pytest.mark.parametrize("name", ["messages", "another key", "prompts", "questions", "cut prompts", "served"])
@pytest.mark.parametrize("trainer", ["verl", "slime", "nemo-rl"])
def test_each_key_that_is_printed_is_read(qwen_folder: str, tmp_path: Path, trainer: Any, name: str) -> None:
    rows, options = (DATA | SERVED)[name]
    if name == "messages":
        rows = [row | {"tools": []} for row in rows]
    file = in_file(tmp_path / "a.jsonl", rows)
    options = dict(options)
    limit = options.pop("limit", 256)
    lines = [
        line for line in lines_of(file, qwen_folder, trainer, limit=limit, **options).splitlines() if line[0] != "#"
    ]
    assert bool(lines) == (name != "served" or trainer == "verl")
    words = words_of(trainer.replace("-", "_"))
    for line in lines:
        word, *value = shlex.split(line)
        if trainer == "slime":
            key = word.removeprefix("--").replace("-", "_")
        else:
            assert not value  # one word of a shell
            key = word.lstrip("+").partition("=")[0].rpartition(".")[2]
        assert key in words or key in OF_TRAINERS[trainer], line
