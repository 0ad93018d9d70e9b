"""SeedRLHFDataset compared with the row-by-row baseline, as early and as later versions of verl create it."""

import pickle
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import pytest
import torch
from conftest import user
from oracle import RowWise, assert_same_row
from tiers import shared, shared_files
from torch.utils.data import DataLoader

import gpuload
from gpuload.core.errors import OptionError, ResumeError
from gpuload.integrations.verl import SeedRLHFDataset

# Arguments as in verl 0.1, and a data section as in verl 0.6, with keys that are ignored here.
OLD = {"prompt_key": "prompt", "max_prompt_length": 100, "filter_prompts": True, "chat_template_func": None}
NEW = {
    "tokenizer": None,
    "train_files": "~/data/rlhf/gsm8k/train.parquet",
    "prompt_key": "prompt",
    "reward_fn_key": "data_source",
    "max_prompt_length": 100,
    "train_batch_size": 1024,
    "return_raw_chat": True,
    "return_full_prompt": True,
    "filter_overlong_prompts": True,
    "filter_overlong_prompts_workers": 1,
    "truncation": "error",
    "custom_cls": {"path": None, "name": None},
    "a_users_own_key": 3,
    "gpuload": {"device": "cpu", "verify": "full"},
}


def test_arguments_of_verl_0_1(gsm8k: str, qwen: Any) -> None:
    dataset = SeedRLHFDataset(parquet_files=[gsm8k], tokenizer=qwen, return_raw_chat=True, truncation="error", **OLD)
    expected = RowWise([gsm8k], qwen, max_prompt_length=100, return_raw_chat=True)
    assert len(dataset) == len(expected) < 8792
    for row in range(0, len(dataset), 97):
        assert_same_row(dataset[row], expected[row], row)


def test_arguments_of_verl_0_6(write: Any, qwen: Any) -> None:
    extra = [{"index": 7, "tools_kwargs": {"a": 1}}, {"index": 8, "tools_kwargs": None}, None]
    file = write({"prompt": [user("one"), user("two " * 200), user("three")], "extra_info": extra})
    dataset = SeedRLHFDataset(data_files=[file], tokenizer=qwen, config=MappingProxyType(NEW), processor=None)
    expected = RowWise([file], qwen, max_prompt_length=100, return_raw_chat=True)
    assert len(dataset) == len(expected) == 2
    assert dataset.prompts.report.check.rows == 3
    for row, text in enumerate(("one", "three")):
        found = dataset[row]
        assert text in found.pop("full_prompts")
        extras = {"tools_kwargs": [{"a": 1}, {}][row], "interaction_kwargs": {}}
        extras["extra_info"] = extra[0] if row == 0 else {}
        assert_same_row(found, expected[row] | extras, row)


def test_samples_and_truncation(gsm8k: str, qwen: Any) -> None:
    config = NEW | {"max_prompt_length": 60, "filter_overlong_prompts": False, "truncation": "middle"}
    dataset = SeedRLHFDataset(gsm8k, qwen, config, None, 50)
    expected = RowWise([gsm8k], qwen, max_prompt_length=60, filter_overlong_prompts=False, truncation="middle")
    assert len(dataset) == 50
    for row in range(50):
        assert torch.equal(dataset[row]["input_ids"], expected[row]["input_ids"])
    config |= {"shuffle": True, "seed": 5}
    shuffled = SeedRLHFDataset(gsm8k, qwen, config, None, 50)
    assert [shuffled.prompts.origin(row) for row in range(50)] != [dataset.prompts.origin(row) for row in range(50)]


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_data_loader(gsm8k: str, qwen: Any, workers: int) -> None:
    dataset = SeedRLHFDataset(gsm8k, qwen, NEW, max_samples=64)
    loader = DataLoader(dataset, 16, collate_fn=gpuload.collate_fn, num_workers=workers, drop_last=True)
    seen = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(seen, torch.stack([dataset[row]["input_ids"] for row in range(len(dataset) // 16 * 16)]))


def test_pickle_leaves_out_the_data_and_loads_it_again(write: Any, qwen: Any) -> None:
    file = write([user(f"question {number} " * 20) for number in range(500)])
    dataset = SeedRLHFDataset(parquet_files=file, tokenizer=qwen, max_prompt_length=200)
    state = pickle.dumps(dataset)
    assert len(state) < len(pickle.dumps(qwen)) + 20_000
    again = pickle.loads(state)
    again.resume_dataset_state()
    lazily = pickle.loads(state)
    for row in (0, 499, -1):
        assert torch.equal(again[row]["input_ids"], dataset[row]["input_ids"])
        assert torch.equal(lazily[row]["input_ids"], dataset[row]["input_ids"])
    write([user("other data")])
    with pytest.raises(ResumeError, match=r"data.parquet was .*, is "):
        pickle.loads(state).resume_dataset_state()


def test_invalid_arguments(gsm8k: str, qwen: Any) -> None:
    for settings, message in (
        ({}, "data_files .* or as parquet_files"),
        ({"data_files": gsm8k, "parquet_files": gsm8k}, "data_files .* or as parquet_files"),
        ({"data_files": gsm8k, "processor": object()}, "with a processor, use verl's own class"),
        ({"data_files": gsm8k, "config": "prompt"}, "expected verl's data section"),
        (
            {"data_files": gsm8k, "config": {"gpuload": {"devise": "cpu"}}},
            "data.gpuload.devise: did you mean device",
        ),
        ({"parquet_files": gsm8k, "max_promt_length": 3}, "did you mean max_prompt_length"),
    ):
        with pytest.raises(OptionError, match=message):
            SeedRLHFDataset(tokenizer=qwen, **settings)


def test_verl_is_not_imported() -> None:
    code = "import sys; from gpuload.integrations.verl import SeedRLHFDataset; sys.exit('verl.protocol' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@shared
@pytest.mark.parametrize(
    "pattern", ["bfcl_tools.parquet", "math_eval_suites.parquet", "wild/eshoyuan*gsm8k*test.parquet"]
)
def test_real_prompts(pattern: str, qwen: Any) -> None:
    files = [str(file) for file in shared_files(pattern)]
    config = NEW | {"max_prompt_length": 300, "return_full_prompt": False}
    dataset = SeedRLHFDataset(files, qwen, config, max_samples=200)
    expected = RowWise(files, qwen, max_prompt_length=300, filter_overlong_prompts=False, return_raw_chat=True)
    kept = [row for row in range(200) if len(expected.ids(expected.rows[row]["prompt"])) <= 300]
    assert [dataset.prompts.origin(row)[1] for row in range(len(dataset))] == kept
    for row, origin in enumerate(kept):
        found = {key: value for key, value in dataset[row].items() if not key.endswith("_kwargs")}
        assert_same_row(found, expected[origin], origin)
