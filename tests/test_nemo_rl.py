"""Datasets for NeMo-RL, compared with its own classes: the way from a configuration to batches."""

from __future__ import annotations

import copy
import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(filter(None, [os.environ.get("NEMO_RL_REPO")]))
pytest.importorskip("nemo_rl", reason="NEMO_RL_REPO must name a checkout of NeMo-RL 0.7.0")

from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.datasets import AllTaskProcessedDataset, load_response_dataset
from nemo_rl.data.utils import setup_response_data
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from gpuload.core.errors import OptionError
from gpuload.integrations.comparison import comparable

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


def rows_of(dataset: AllTaskProcessedDataset) -> list[Any]:
    return [comparable(dataset[row]) for row in range(len(dataset))]


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
        return [comparable(dict(batch)) for batch in made]

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
    more = {"processor": "multichoice_qa_processor"}
    setup(OURS, file, section, 4096, **more)
    reason = "the processor multichoice_qa_processor is not supported"
    assert f"falls back to NeMo-RL for problems-train: {reason}" in caplog.text


def test_another_tokenizer_is_an_error(file: str, qwen_folder: str) -> None:
    section = {"name": qwen_folder}
    ours, _ = setup(OURS, file, section, 4096)
    ours.tokenizer = get_tokenizer({"name": qwen_folder, "chat_template": "{{ messages[0].content }}"})
    with pytest.raises(OptionError, match="the tokenizer of the policy is not the one of the dataset"):
        _ = ours[0]


# -- SFT -------------------------------------------------------------------------------------------------------------


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS = [
    [turn("user", "Hi"), turn("assistant", "你好 é")],
    [turn("system", "Be brief."), turn("user", "{braces}"), turn("assistant", ""), turn("assistant", " again\n")],
    [turn("assistant", "first"), turn("user", "é"), turn("assistant", "è<|im_end|>")],
    [turn("user", "long " * 80), turn("assistant", "x"), turn("user", "\n"), turn("assistant", "👋🏽")],
    [turn("assistant", "alone")],
]
SWITCHES = ("add_bos", "add_eos", "add_generation_prompt")


@pytest.fixture
def chats_file(tmp_path: Path) -> str:
    path = tmp_path / "chats" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS * 8))
    return str(path)


def setup_sft(
    name: str, file: str, section: dict[str, Any], switches: tuple[bool, ...], limit: int, **more: Any
) -> Any:
    """Train data, as examples/run_sft.py makes it of a configuration."""
    config = {"dataset_name": name, "data_path": file, "processor": "sft_processor", **more}
    settings = dict(zip(SWITCHES, switches, strict=True))
    if name.startswith("gpuload."):
        config |= {"tokenizer": section, **settings}
    data = load_response_dataset(config)
    processors = {data.task_name: (data.task_spec, partial(data.processor, **settings))}
    tokenizer = get_tokenizer(copy.deepcopy(section))
    return AllTaskProcessedDataset(data.dataset, tokenizer, None, processors, max_seq_length=limit)


@pytest.mark.parametrize("switches", [(True, True, False), (False, False, True), (True, True, True)])
@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m.role }}] {{ m.content|trim }}{% endfor %}"])
def test_rows_for_sft_are_those_of_nemo_rl(
    chats_file: str, file: str, prompts: dict[str, str], qwen_folder: str, switches: tuple[bool, ...], template: Any
) -> None:
    section = {"name": qwen_folder} | ({"chat_template": template} if template else {})
    prompt = {"prompt_file": prompts["prompt_file"]}
    cases = [("ChatDataset", "openai_format", chats_file, {}), ("ChatDataset", "openai_format", chats_file, prompt)]
    cases.append(("PromptDataset", "ResponseDataset", file, {}))
    for ours, stock, data, more in cases:
        for limit in (4096, 40):
            expected = setup_sft(stock, data, section, switches, limit, **more)
            found = setup_sft(f"gpuload.integrations.nemo_rl.{ours}", data, section, switches, limit, **more)
            assert type(found.dataset).__name__ == "NemoConversations"
            assert rows_of(found) == rows_of(expected)


def test_options_without_effect(chats_file: str, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    section, switches = {"name": qwen_folder}, (True, True, False)
    setup_sft("gpuload.integrations.nemo_rl.ChatDataset", chats_file, section, switches, 99, gpuload={"device": "cuda"})
    assert "gpuload: data.train.gpuload.device='cuda' has no effect: messages for SFT are tokenized on" in caplog.text


def test_long_conversations_are_dropped_exactly(chats_file: str, qwen_folder: str) -> None:
    section, switches = {"name": qwen_folder}, (True, True, False)
    stock = rows_of(setup_sft("openai_format", chats_file, section, switches, 40))
    ours = setup_sft(
        "gpuload.integrations.nemo_rl.ChatDataset", chats_file, section, switches, 40, max_input_seq_length=40
    )
    kept = [row | {"idx": 0} for row in stock if row["loss_multiplier"]]
    assert [row | {"idx": 0} for row in rows_of(ours)] == kept
    assert 0 < len(kept) < len(stock)


def test_other_settings_than_those_of_the_ids_are_an_error(chats_file: str, qwen_folder: str) -> None:
    made = setup_sft(
        "gpuload.integrations.nemo_rl.ChatDataset", chats_file, {"name": qwen_folder}, (True, True, False), 99
    )
    (name, (spec, process)), *_ = made.task_data_processors.items()
    made.task_data_processors[name] = (spec, partial(process.func, add_bos=True, add_eos=False))
    with pytest.raises(OptionError, match=r"data.add_eos=False, but .* with True: set \+data.train.add_eos=\$"):
        _ = made[0]


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
ANSWERED = [turn("user", "q"), turn("assistant", "", tool_calls=[CALL]), turn("tool", "1"), turn("assistant", "1.")]


@pytest.mark.parametrize("preserving", [False, True])
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_single_rows_that_nemo_rl_tokenizes(
    preserving: bool, store: str, tmp_path: Path, qwen_folder: str, warm_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tools of single rows are rendered with the others; rows that cannot be, and parts, are NeMo-RL's: only they."""
    parts = [turn("user", [{"type": "text", "text": "Hi"}]), turn("assistant", [{"type": "text", "text": "a"}])]
    rows: list[dict[str, Any]] = [{"messages": chat} for chat in CHATS * 8]
    rows[5]["tools"] = TOOLS
    rows[11] = {"messages": ANSWERED, "tools": TOOLS[:1]}
    rows[17]["messages"] = [turn("raise", "x"), turn("assistant", "y")]
    others = {17: "no"}
    if preserving:  # JSON of Hugging Face's dataset has one type for all contents
        rows[23]["messages"] = parts
        others[23] = "the content of a message is not text"
    path = tmp_path / "mixed" / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = get_tokenizer({"name": qwen_folder}).chat_template
    reject = "{% for m in messages if m.role == 'raise' %}{{ raise_exception('no') }}{% endfor %}"
    section = {"name": qwen_folder, "chat_template": reject + template}
    switches, more = (True, True, False), {"use_preserving_dataset": preserving}
    stock = setup_sft("openai_format", str(path), section, switches, 4096, **more)
    usable = [row for row in range(len(rows)) if row not in others]
    for _ in range(2):
        caplog.clear()
        caplog.set_level("INFO")
        ours = setup_sft(
            "gpuload.integrations.nemo_rl.ChatDataset",
            str(path),
            section,
            switches,
            4096,
            gpuload={"store": store},
            **more,
        )
        assert ours.dataset.fallback == others
        assert [comparable(ours[row]) for row in usable] == [comparable(stock[row]) for row in usable]
        for dataset in (stock, ours):
            for row, error in {17: "no", 23: "can only concatenate str"}.items():
                with pytest.raises(Exception, match=error) if row in others else nullcontext():
                    _ = dataset[row]
    assert "gpuload: rows are from the cache" in caplog.messages


def test_rows_that_nemo_rl_tokenizes_all(tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = [turn("user", [{"type": "text", "text": "Hi"}]), turn("assistant", [{"type": "text", "text": "a"}])]
    path = tmp_path / "parts.jsonl"
    path.write_text(json.dumps({"messages": parts}) + "\n")
    name = "gpuload.integrations.nemo_rl.ChatDataset"
    made = setup_sft(name, str(path), {"name": qwen_folder}, (True, True, False), 99)
    assert type(made.dataset).__name__ != "NemoConversations"
    assert "falls back to NeMo-RL for" in caplog.text
    assert "is not text" in caplog.text


def test_long_rows_are_dropped_if_nemo_rl_tokenizes_all_others(
    tmp_path: Path, qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [turn("user", [{"type": "text", "text": "Hi"}]), turn("assistant", [{"type": "text", "text": "a"}])]
    path = tmp_path / "parts.jsonl"
    long = [turn("user", "long " * 80), turn("assistant", "x")]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (parts, long)))
    name = "gpuload.integrations.nemo_rl.ChatDataset"
    more = {"max_input_seq_length": 40, "use_preserving_dataset": True}
    made = setup_sft(name, str(path), {"name": qwen_folder}, (True, True, False), 40, **more)
    assert len(made.dataset) == 1
    assert made.dataset.fallback == {0: "the content of a message is not text"}
    assert "gpuload: dropped 1 of 2 rows with max_input_seq_length=40 tokens or more" in caplog.text
