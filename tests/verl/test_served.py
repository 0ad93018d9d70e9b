"""Rows as served for verl's SFT trainer, compared with `load_chats` and with a naive explosion of the conversations."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl.trainer.sft_trainer")

from omegaconf import OmegaConf
from processor_cases import qwen_vl
from sft_cases import LONG, PRINTS_ARGUMENTS, REMOVES_THINKING, TOOLS, conversation
from test_sft_training import losses, model  # noqa: F401
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

import gpuload
from gpuload.core.errors import DataError, OptionError, PromptTooLongError
from gpuload.integrations.verl import ServedSFTDataset

CLASS = {"path": "pkg://gpuload.integrations.verl", "name": "ServedSFTDataset"}
THOUGHT = [
    conversation(f"q{n}", "<think>\nhm\n</think>\n\nb" * (n % 2) + "x", "c", "<think>\nok\n</think>\n\nd" + " e" * n)
    for n in range(10)
]
# One row for each answer, by the tokenizer: a class that verl can train with, and that knows nothing of gpuload.
NAIVE = """
import numpy as np, pandas as pd, torch
from torch.utils.data import Dataset


class Naive(Dataset):
    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = []
        files = [parquet_files] if isinstance(parquet_files, str) else parquet_files
        for messages in pd.concat(map(pd.read_parquet, files))["messages"]:
            made = []
            for end in range(1, len(messages), 2):
                prompt = tokenizer.apply_chat_template(list(messages[:end]), add_generation_prompt=True, tokenize=False)
                whole = tokenizer.apply_chat_template(list(messages[: end + 1]), tokenize=False)
                assert whole.startswith(prompt) and whole.endswith("<|im_end|>\\n")
                ids, begin = tokenizer(whole[:-1])["input_ids"], len(tokenizer(prompt)["input_ids"])
                made.append((ids, [begin]))
            while made:  # a row that another one begins with is learned there
                ids, begins = made.pop(0)
                if made and made[0][0][: len(ids)] == ids:
                    made[0][1].extend(begins)
                else:
                    self.rows.append((ids, begins))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        ids, begins = self.rows[item]
        mask, end = torch.zeros(len(ids), dtype=torch.int64), torch.tensor(ids) == END
        for begin in begins:
            mask[begin : begin + int(end[begin:].nonzero()[0]) + 1] = 1
        return {"input_ids": torch.tensor(ids), "position_ids": torch.arange(len(ids)), "loss_mask": mask}
"""


@pytest.fixture
def tokenizer(qwen_folder: str) -> Any:
    made = AutoTokenizer.from_pretrained(qwen_folder)
    made.chat_template = REMOVES_THINKING
    return made


def loaded(table: Any, tokenizer: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    chats = gpuload.load_chats(table, tokenizer, turns="served", format="messages", **options)
    return [(row["input_ids"], [int(label != -100) for label in row["labels"]]) for row in chats[:]]


def rows_of(dataset: Any) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in dataset]


def test_rows_are_those_of_load_chats(write: Any, tokenizer: Any) -> None:
    file = write({"messages": THOUGHT})
    config = OmegaConf.create({**LONG, "custom_cls": CLASS})
    dataset = create_sft_dataset([file], config, tokenizer, None)
    assert type(dataset) is ServedSFTDataset
    assert rows_of(dataset) == loaded(file, tokenizer)
    assert len(dataset) == 15 > len(THOUGHT)
    assert rows_of(pickle.loads(pickle.dumps(dataset))) == rows_of(dataset)
    batch = next(iter(DataLoader(dataset, 4, collate_fn=SFTTensorCollator("no_padding"))))
    assert batch["input_ids"].unbind()[3].tolist() == dataset[3]["input_ids"].tolist()


def test_rows_have_the_shape_of_verl_s(write: Any, tokenizer: Any) -> None:
    file = write({"messages": [conversation("q", "a")]})
    for pad_mode in ("right", "no_padding"):
        config = {"max_length": 64, "pad_mode": pad_mode, "ignore_input_ids_mismatch": True}
        row, expected = ServedSFTDataset(file, tokenizer, config)[0], MultiTurnSFTDataset([file], tokenizer, config)[0]
        assert list(row) == list(expected)
        assert [value.dtype for value in row.values()] == [value.dtype for value in expected.values()]
        # verl also learns the line break behind the stop token.
        count = int(row.get("attention_mask", torch.ones(len(row["input_ids"]))).sum())
        assert row["input_ids"][:count].tolist() == expected["input_ids"][:count].tolist()
        assert pad_mode == "no_padding" or [len(value) for value in row.values()] == [64] * 4


def test_settings_of_verl(write: Any, tokenizer: Any) -> None:
    """Columns by other names, tools, thinking of each row, and a number of conversations."""
    rows, tools = [m for m in THOUGHT for _ in range(2)], [TOOLS[:1], None] * len(THOUGHT)
    thinking = [True, False, None, True] * 5
    file = write({"chat": rows, "functions": tools, "think": thinking})
    config = {**LONG, "messages_key": "chat", "tools_key": "functions", "enable_thinking_key": "think"}
    kwargs = [None if value is None else {"enable_thinking": value} for value in thinking]
    plain = write({"messages": rows, "tools": tools, "chat_template_kwargs": kwargs}, name="plain.parquet")
    assert rows_of(ServedSFTDataset(file, tokenizer, config)) == loaded(plain, tokenizer)
    some = {**config, "shuffle": True, "seed": 3}
    expected = loaded(plain, tokenizer, max_samples=4, shuffle=True, seed=3)
    assert rows_of(ServedSFTDataset(file, tokenizer, some, max_samples=4)) == expected


def test_thinking_of_all_rows(write: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = PRINTS_ARGUMENTS
    file, style = write({"messages": [conversation("q", "a")]}), {"style": "plain"}
    for default, own in ((None, {}), ("none", {}), (False, {"enable_thinking": False})):
        config = {**LONG, "enable_thinking_default": default, "apply_chat_template_kwargs": style}
        found = rows_of(ServedSFTDataset(file, tokenizer, config))
        assert found == loaded(file, tokenizer, apply_chat_template_kwargs=style | own)
        assert ("[False|plain]" in tokenizer.decode(found[0][0])) == bool(own)


def test_thinking_of_all_rows_and_of_some(write: Any, tokenizer: Any) -> None:
    """As verl reads it, the default takes precedence over the arguments of all rows; here it is also for nulls, and for
    files without the column, for which verl raises an error."""
    tokenizer.chat_template = PRINTS_ARGUMENTS
    chats = [conversation(f"q{n}", "a") for n in range(3)]
    flags = {"messages": chats, "enable_thinking": [True, None, False]}
    files = [
        write(flags, name="0.parquet"),
        write({"messages": chats}, name="1.parquet"),
        write({"messages": chats, "enable_thinking": [None] * 3}, name="2.parquet"),
    ]
    config = {
        **LONG,
        "enable_thinking_default": False,
        "apply_chat_template_kwargs": {"style": "plain", "enable_thinking": True},
    }
    found = rows_of(ServedSFTDataset(files, tokenizer, config))
    assert ["[True|plain]" in tokenizer.decode(ids) for ids, _ in found] == [True] + [False] * 8
    assert all("[False|plain]" in tokenizer.decode(ids) for ids, _ in found[1:])
    own = write({"messages": chats[:2], "chat_template_kwargs": [{"enable_thinking": True}, None]}, name="3.parquet")
    (one, _), (other, _) = rows_of(ServedSFTDataset(own, tokenizer, config))
    assert "[True|plain]" in tokenizer.decode(one)
    assert "[False|plain]" in tokenizer.decode(other)


def test_a_column_of_tools_by_another_name(write: Any, tokenizer: Any) -> None:
    """As in verl, a column `tools` is nothing special then, also in files without the other one."""
    chats = [conversation("q", "a")]
    one = write({"messages": chats, "tools": [TOOLS[:1]]}, name="0.parquet")
    both = write({"messages": chats, "tools": [TOOLS[:1]], "functions": [TOOLS[1:]]}, name="1.parquet")
    expected = [
        loaded(write({"messages": chats}, name="2.parquet"), tokenizer),
        loaded(write({"messages": chats, "tools": [TOOLS[1:]]}, name="3.parquet"), tokenizer),
    ]
    config = {**LONG, "tools_key": "functions"}
    assert [rows_of(ServedSFTDataset(file, tokenizer, config)) for file in (one, both)] == expected
    assert rows_of(ServedSFTDataset([one, both], tokenizer, config)) == [*expected[0], *expected[1]]


def test_a_tokenizer_by_its_path_and_no_limit_of_rows(write: Any, qwen_folder: str) -> None:
    file, config = write({"messages": [conversation("q", "a"), conversation("r", "b")]}), {"max_length": 64}
    expected = loaded(file, qwen_folder)
    dataset = ServedSFTDataset(file, qwen_folder, config, max_samples=0)
    assert [int(row["attention_mask"].sum()) for row in dataset] == [len(ids) for ids, _ in expected]


def test_longer_rows(write: Any, tokenizer: Any) -> None:
    file = write({"messages": THOUGHT})
    config = {"max_length": 30, "pad_mode": "no_padding"}
    with pytest.raises(PromptTooLongError, match=r"of 15 rows as served, such as row 0 of .* more than max_length=30"):
        ServedSFTDataset(file, tokenizer, config)
    cut = ServedSFTDataset(file, tokenizer, config | {"truncation": "right"})
    assert rows_of(cut) == loaded(file, tokenizer, max_length=30, overlong="keep_start")
    assert all(row["input_ids"][-1] == tokenizer.eos_token_id for row in cut)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"truncation": "left"}, "no answer would be behind its whole prompt"),
        ({"truncation": "middle"}, "expected error or right"),
        ({"pad_mode": "left"}, "expected right or no_padding"),
        ({"gpuload": {"histroy": "sampled"}}, "unknown key data.gpuload.histroy: did you mean history"),
        ({"gpuload": {"missing_reasoning": "no"}}, "missing_reasoning='no'"),
    ],
)
def test_wrong_settings(write: Any, tokenizer: Any, config: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServedSFTDataset(write({"messages": THOUGHT}), tokenizer, {**LONG, **config})


def test_wrong_data(write: Any, tokenizer: Any) -> None:
    with pytest.raises(OptionError, match="'images' has images or videos"):
        ServedSFTDataset(write({"messages": THOUGHT, "images": [None] * 10}), tokenizer, LONG)
    with pytest.raises(DataError, match="column 'enable_thinking' holds string: convert it to booleans"):
        ServedSFTDataset(write({"messages": THOUGHT, "enable_thinking": ["no"] * 10}), tokenizer, LONG)
    both = {"messages": THOUGHT, "enable_thinking": [True] * 10, "chat_template_kwargs": [{"style": "a"}] * 10}
    with pytest.raises(DataError, match="columns 'enable_thinking' and 'chat_template_kwargs' both say how"):
        ServedSFTDataset(write(both), tokenizer, LONG)
    flags = {"messages": THOUGHT, "enable_thinking": [True] * 10}
    with pytest.raises(PromptTooLongError, match=r"such as row 0 of \S*flags.parquet"):
        ServedSFTDataset(write(flags, name="flags.parquet"), tokenizer, LONG | {"max_length": 3})
    with pytest.raises(DataError, match="messages"):
        ServedSFTDataset(write({"text": ["a"]}), tokenizer, LONG)


def test_processor(write: Any, qwen: Any) -> None:
    """Text with a processor: its tokenizer with its template, and four rows of positions."""
    processor = qwen_vl(qwen)
    file = write({"messages": [conversation("q", "a", "b", "c")]})
    (row,) = ServedSFTDataset(file, processor.tokenizer, LONG, processor)
    texts = conversation("q", "a", "b", "c")
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in texts]
    (ids,) = processor.apply_chat_template([parts], tokenize=True, return_dict=True)["input_ids"]
    assert [*row["input_ids"].tolist(), *processor.tokenizer.encode("\n")] == list(ids)
    assert row["position_ids"].shape == (4, len(row["input_ids"]))


def test_training(model: str, write: Any, tmp_path: Path) -> None:  # noqa: F811
    """Losses of verl's trainer are those of a naive explosion, and an epoch has all rows."""
    model = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = REMOVES_THINKING
    tokenizer.save_pretrained(model)
    file = write({"messages": THOUGHT})
    (tmp_path / "naive.py").write_text(NAIVE.replace("END", str(tokenizer.eos_token_id)))
    common = ["trainer.total_training_steps=null", "trainer.total_epochs=1"]
    own = [f"data.custom_cls.{name}={value}" for name, value in CLASS.items()]
    found = losses(model, file, tmp_path / "gpuload", *common, *own)
    naive = [f"data.custom_cls.path={tmp_path / 'naive.py'}", "data.custom_cls.name=Naive"]
    assert found == losses(model, file, tmp_path / "naive", *common, *naive)
    assert len(found) == 15 // 4 > len(THOUGHT) // 4
