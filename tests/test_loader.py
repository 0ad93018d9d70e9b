"""PromptLoader: order, ranks, state; resuming, also after a training loop was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import user
from hypothesis import given
from hypothesis import strategies as st

import gpuload
from gpuload.errors import OptionError, ResumeError
from gpuload.options import nearest


@pytest.fixture(scope="module")
def prompts(gsm8k: str, qwen: Any) -> gpuload.PromptDataset:
    return gpuload.load(gsm8k, qwen, max_samples=103, max_prompt_length=256)


def rows(batch: dict[str, Any]) -> list[int]:
    return [extra["index"] for extra in batch["extra_info"]]


def test_an_epoch_in_order(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(10)
    batches = list(loader)
    assert len(loader) == len(batches) == 11
    assert [row for batch in batches for row in rows(batch)] == list(range(103))
    assert batches[0]["input_ids"].shape == (10, 256)
    assert batches[-1]["input_ids"].shape == (3, 256)
    assert len(list(prompts.loader(10, drop_last=True))) == len(prompts.loader(10, drop_last=True)) == 10


def test_a_batch_equals_its_rows(prompts: gpuload.PromptDataset) -> None:
    batch = next(iter(prompts.loader(7, shuffle=True, seed=3)))
    numbers = rows(batch)
    expected = gpuload.collate_fn([prompts[number] for number in numbers])
    assert batch.keys() == expected.keys()
    for key, values in expected.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(batch[key], values)
        else:
            assert batch[key].dtype == object
            assert batch[key].shape == values.shape == (7,)
            assert batch[key].tolist() == values.tolist()


def test_shuffling_by_seed_and_epoch(prompts: gpuload.PromptDataset) -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = prompts.loader(16, shuffle=True, seed=seed)
        return [[row for batch in loader for row in rows(batch)] for _ in range(2)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1)[0] != first


def test_shuffle_and_seed_of_the_load_are_the_loaders_defaults(gsm8k: str, qwen: Any) -> None:
    shuffled = gpuload.load(gsm8k, qwen, max_samples=-1, shuffle=True, seed=4)
    first = rows(next(iter(shuffled.loader(50))))
    assert first == rows(next(iter(shuffled.loader(50, shuffle=True, seed=4)))) != list(range(50))
    assert rows(next(iter(shuffled.loader(50, shuffle=False)))) == list(range(50))


@given(world_size=st.integers(1, 9), batch_size=st.integers(1, 40), shuffle=st.booleans(), drop_last=st.booleans())
def test_ranks_share_an_epoch(
    prompts: gpuload.PromptDataset, world_size: int, batch_size: int, shuffle: bool, drop_last: bool
) -> None:
    if drop_last and 103 // world_size < batch_size:
        with pytest.raises(OptionError, match="drop_last leaves no batch"):
            prompts.loader(batch_size, world_size=world_size, drop_last=True)
        return
    per_rank = []
    for rank in range(world_size):
        loader = prompts.loader(
            batch_size, shuffle=shuffle, rank=rank, world_size=world_size, drop_last=drop_last, padding="longest"
        )
        batches = [rows(batch) for batch in loader]
        assert len(batches) == len(loader)
        per_rank.append(batches)
    shapes = [[len(batch) for batch in batches] for batches in per_rank]
    assert all(shape == shapes[0] for shape in shapes)  # equal counts and sizes: no rank waits for another for ever
    seen = [row for batches in per_rank for batch in batches for row in batch]
    if drop_last:
        assert len(set(seen)) == len(seen)
        assert all(size == batch_size for size in shapes[0])
    else:
        assert set(seen) == set(range(103))
        assert len(seen) - 103 < world_size


def test_padding_to_the_longest(prompts: gpuload.PromptDataset) -> None:
    batch = prompts.batch([0, 1, 2], padding="longest")
    lengths = [len(ids) for ids in batch["raw_prompt_ids"]]
    assert batch["input_ids"].shape == (3, max(lengths))
    wide = prompts.batch([0, 1, 2])
    for key in ("input_ids", "attention_mask", "position_ids"):
        assert torch.equal(batch[key], wide[key][:, -max(lengths) :])


def test_resume_gives_the_identical_next_batches(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True, seed=5)
    list(loader)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))  # plain data
    expected = [rows(batch) for batch in iterator]
    resumed = prompts.loader(8, shuffle=True, seed=5)
    resumed.load_state_dict(state)
    assert [rows(batch) for batch in resumed] == expected
    assert [rows(batch) for batch in resumed] == [rows(batch) for batch in loader]  # and the epoch after it


def test_a_state_at_the_end_of_an_epoch_begins_the_next(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True)
    list(loader)
    resumed = prompts.loader(8, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert rows(next(iter(resumed))) == rows(next(iter(loader)))


def test_an_epoch_that_was_broken_off_is_followed_by_the_next(prompts: gpuload.PromptDataset) -> None:
    loader = prompts.loader(8, shuffle=True)
    for _ in loader:
        break
    second = rows(next(iter(loader)))
    loader.set_epoch(1)
    assert rows(next(iter(loader))) == second
    loader.set_epoch(0)
    assert rows(next(iter(loader))) != second


def test_a_state_of_other_data_is_rejected_by_name(
    gsm8k: str, qwen: Any, qwen_folder: str, write: Callable[..., str]
) -> None:
    from transformers import AutoTokenizer

    other_tokenizer = AutoTokenizer.from_pretrained(qwen_folder)
    other_tokenizer.chat_template = "{{ messages[0].content }}"
    state = gpuload.load(gsm8k, qwen, max_samples=40).loader(4).state_dict()

    def rejected(prompts: gpuload.PromptDataset, message: str, **settings: Any) -> None:
        with pytest.raises(ResumeError, match=message):
            prompts.loader(**({"batch_size": 4} | settings)).load_state_dict(state)

    rejected(gpuload.load(gsm8k, qwen, max_samples=41), "options: max_samples was 40, is 41")
    rejected(gpuload.load(gsm8k, qwen, max_samples=40, max_prompt_length=99), "max_prompt_length was 1024, is 99")
    rejected(gpuload.load(gsm8k, other_tokenizer, max_samples=40), "tokenizer: another one")
    changed = write([user(f"question {i}") for i in range(50)], "gsm8k.parquet")
    rejected(gpuload.load(changed, qwen, max_samples=40), "files: 0: gsm8k.parquet was")
    rejected(gpuload.load(gsm8k, qwen, max_samples=40), "batch_size was 4, is 5", batch_size=5)
    rejected(gpuload.load(gsm8k, qwen, max_samples=40), "world_size was 1, is 2", world_size=2)
    same = gpuload.load(gsm8k, qwen, max_samples=40, verify="off", strict=True)
    same.loader(4).load_state_dict(state)  # what makes no difference to the batches is not held against it
    with pytest.raises(ResumeError, match="version 99"):
        same.loader(4).load_state_dict(state | {"version": 99})


def test_the_same_files_elsewhere_resume(gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.parquet"
    copy.write_bytes(Path(gsm8k).read_bytes())
    state = gpuload.load(gsm8k, qwen, max_samples=40).loader(4).state_dict()
    gpuload.load(copy, qwen, max_samples=40).loader(4).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank=2: expected 0 to 1"),
        ({"batch_size": 4, "seed": -1}, "seed=-1"),
        ({"batch_size": 4, "padding": "widest"}, "padding='widest': expected one of 'max_length', 'longest'"),
        ({"batch_size": 4, "world_size": 0}, "world_size=0"),
    ],
)
def test_nonsense_settings(prompts: gpuload.PromptDataset, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prompts.loader(**settings)


def test_rows_outside(prompts: gpuload.PromptDataset) -> None:
    assert rows(prompts.batch([-1, 0])) == [102, 0]
    for row in (103, -104):
        with pytest.raises(IndexError, match=f"index {row} is out of range for a dataset with 103 rows"):
            prompts[row]
    assert len([prompts[i] for i in np.arange(3)]) == 3


def test_nearest_name() -> None:
    assert nearest("promtp", {"prompt", "answer"}) == ": did you mean prompt?"
    assert nearest("zzz", {"prompt", "answer"}) == "; expected one of answer, prompt"


TRAINING = """
import json, sys, time
import gpuload
file, tokenizer, checkpoint, log, steps = sys.argv[1:]
prompts = gpuload.load(file, tokenizer, max_samples=2000, max_prompt_length=256)
loader = prompts.loader(batch_size=32, shuffle=True, seed=1)
try:
    state = json.load(open(checkpoint))
except FileNotFoundError:
    state = None
if state:
    loader.load_state_dict(state)
done = 0
while done < int(steps):
    for batch in loader:
        with open(log, "a") as out:
            print(json.dumps([e["index"] for e in batch["extra_info"]]), file=out, flush=True)
        with open(checkpoint + ".new", "w") as out:
            json.dump(loader.state_dict(), out)
        import os
        os.replace(checkpoint + ".new", checkpoint)
        done += 1
        time.sleep(0.01)
        if done >= int(steps):
            break
"""


def test_resume_after_kill_9(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    """A training loop killed at a random moment goes on with the batch after its last checkpoint."""

    def train(name: str, steps: int) -> subprocess.Popen[bytes]:
        arguments = [gsm8k, qwen_folder, str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name}.log"), str(steps)]
        return subprocess.Popen([sys.executable, "-c", TRAINING, *arguments])

    assert train("whole", 100).wait(120) == 0
    killed = train("killed", 10_000)
    log = tmp_path / "killed.log"
    deadline = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < 20:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(10)
    given_out = log.read_text().splitlines()
    state = json.loads((tmp_path / "killed.ckpt").read_text())
    step = state["epoch"] * 63 + state["batch"]
    assert len(given_out) - 1 <= step <= len(given_out)  # killed between a batch and its checkpoint, or after it
    assert train("killed", 100 - step).wait(120) == 0
    resumed = log.read_text().splitlines()[len(given_out) :]
    whole = (tmp_path / "whole.log").read_text().splitlines()
    assert given_out == whole[: len(given_out)]
    assert resumed == whole[step:100]
