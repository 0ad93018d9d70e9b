"""The integration with NeMo-RL without NeMo-RL: rows, and which of NeMo-RL's names it uses."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from gpuload.errors import DataError, OptionError
from gpuload.integrations.nemo_rl.rows import tokenized

TEXTS = ["What is 2+2?", "", "你好 é\n", "<|im_end|>", "long " * 40]


def processor(row: Any, spec: Any, tokenizer: Any, limit: int, idx: int) -> dict[str, Any]:
    """A row as NeMo-RL's processor makes it, with its keys and types."""
    system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
    problem = row["messages"][0]["content"]
    text = spec.prompt.format(problem) if spec.prompt else problem
    chat = [*system, {"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    too_long = len(ids) >= limit
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids[: min(4, limit)] if too_long else ids}],
        "length": len(ids),
        "extra_env_info": {"ground_truth": row["messages"][1]["content"]},
        "loss_multiplier": 0.0 if too_long else 1.0,
        "idx": idx,
        "task_name": row["task_name"],
    }


def other_processor(row: Any, spec: Any, tokenizer: Any, limit: int, idx: int) -> dict[str, Any]:
    return {"row": row}


class StandIn:
    """`ResponseDataset` with only what the integration uses. NeMo-RL calls the methods in this order."""

    def __init__(self, data_path: str, chosen: Any = processor, **settings: Any) -> None:
        chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": f"a{t}"}] for t in TEXTS]
        self.dataset: Any = Dataset.from_list([{"messages": chat, "task_name": "task"} for chat in chats])
        self.val_dataset: Any = self.dataset.select([1, 0])
        self.task_name, self.chosen = "task", chosen

    def set_task_spec(self, data_config: dict[str, Any]) -> None:
        self.data_config = data_config
        self.task_spec = SimpleNamespace(prompt="Solve: {}", system_prompt="Be brief.")

    def set_processor(self) -> None:
        self.processor = self.chosen


def get_tokenizer(section: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(section["name"])
    if kwargs := section.get("chat_template_kwargs"):
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **kwargs)
    return tokenizer


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the dataset, over the stand-in."""
    contents: dict[str, dict[str, Any]] = {
        "nemo_rl": {"__version__": "0.7.0+abc"},
        "nemo_rl.algorithms.utils": {"get_tokenizer": get_tokenizer},
        "nemo_rl.data.processors": {"math_hf_data_processor": processor},
        "nemo_rl.data.datasets.response_datasets.response_dataset": {"ResponseDataset": StandIn},
    }
    for name in sorted(
        {".".join(whole.split(".")[: k + 1]) for whole in contents for k in range(whole.count(".") + 1)}
    ):
        made = ModuleType(name)
        vars(made).update(contents.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, name, made)
    own = "gpuload.integrations.nemo_rl.dataset"
    monkeypatch.delitem(sys.modules, own, raising=False)
    yield importlib.import_module(own)
    sys.modules.pop(own, None)


def made(module: Any, tokenizer: Any, **config: Any) -> Any:
    dataset = module.NemoPromptDataset(data_path="x", tokenizer=tokenizer, **config)
    dataset.set_task_spec({"processor": "default"})
    dataset.set_processor()
    return dataset


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": False}])
def test_rows_are_those_of_the_processor(module: Any, qwen_folder: str, kwargs: Any) -> None:
    section = {"name": qwen_folder, "chat_template_kwargs": kwargs}
    dataset, stock = made(module, section), StandIn("x")
    tokenizer = get_tokenizer(section)
    for found, expected in ((dataset.dataset, stock.dataset), (dataset.val_dataset, stock.val_dataset)):
        assert len(found) == len(expected)
        for limit in (3, 40, 4096):
            for row in range(len(found)):
                one = dataset.processor(found[row], dataset.task_spec, tokenizer, limit, row)
                other = processor(expected[row], dataset.task_spec, tokenizer, limit, row)
                assert list(one) == list(other)
                assert module._plain(one) == module._plain(other)
    with pytest.raises(IndexError):
        _ = dataset.dataset[len(TEXTS)]


def test_long_prompts_are_dropped(module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = get_tokenizer({"name": qwen_folder})
    spec = SimpleNamespace(prompt="Solve: {}", system_prompt="Be brief.")
    rows = StandIn("x").dataset
    longest = max(processor(row, spec, tokenizer, 4096, 0)["length"] for row in rows)
    kept = made(module, {"name": qwen_folder}, max_input_seq_length=longest + 1).dataset
    assert len(kept) == len(TEXTS)
    kept = made(module, {"name": qwen_folder}, max_input_seq_length=longest).dataset
    assert [row["ground_truth"] for row in kept] == [f"a{text}" for text in TEXTS[:-1]]
    assert f"dropped 1 of 5 prompts with max_input_seq_length={longest} tokens or more" in caplog.text


def test_another_processor_or_version_falls_back(
    module: Any, qwen_folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = made(module, {"name": qwen_folder}, chosen=other_processor)
    assert dataset.processor is other_processor
    assert "falls back to NeMo-RL for task: the processor default is not supported" in caplog.text
    monkeypatch.setattr(module.nemo_rl, "__version__", "0.8.0")
    assert made(module, {"name": qwen_folder}).processor is processor
    assert "NeMo-RL 0.8.0 is installed, and 0.7 is supported" in caplog.text


def test_what_is_rejected(module: Any, qwen_folder: str, qwen: Any) -> None:
    with pytest.raises(OptionError, match="data.train.tokenizer=None: expected the section of the policy"):
        made(module, None)
    with pytest.raises(OptionError, match="data.train.max_input_seq_length=1: expected an integer > 1"):
        made(module, {"name": qwen_folder}, max_input_seq_length=1)
    with pytest.raises(OptionError, match="unknown key data.train.gpuload.x"):
        made(module, {"name": qwen_folder}, gpuload={"x": 1})
    dataset = made(module, {"name": qwen_folder})
    other = get_tokenizer({"name": qwen_folder})
    other.chat_template = "{{ messages[0].content }}"
    with pytest.raises(OptionError, match="the tokenizer of the policy is not the one of the dataset"):
        dataset.processor(dataset.dataset[0], dataset.task_spec, other, 99, 0)
    with pytest.raises(DataError, match="1 of 2 prompts cannot be tokenized"):
        tokenized([[{"role": "user", "content": "a"}], []], ["", ""], "task", qwen, {}, None, {})


def test_importing_the_package_does_not_import_nemo_rl() -> None:
    code = "import sys, gpuload.integrations.nemo_rl.rows; print('nemo_rl' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
