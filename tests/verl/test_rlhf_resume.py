"""Checkpoints of gpuload's RLHFDataset: resuming mid-epoch, rejecting different data, pickling, splitting."""

import copy
import io
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from same import NUMBERED, assert_same, create_rl_sampler, gpuload_dataset, verl_dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn

from gpuload.core.errors import ResumeError, SourceError
from gpuload.integrations.verl import RLHFDataset, reading
from gpuload.sources.columns import Columns


@pytest.fixture
def numbered(write: Any) -> str:
    """A file of 60 rows."""
    return write(NUMBERED)


def loader(dataset: Any, workers: int = 0, seed: int = 1) -> StatefulDataLoader:
    """A data loader as the trainer creates it."""
    config = OmegaConf.create({"shuffle": True, "seed": seed, "sampler": None})
    return StatefulDataLoader(
        dataset, 4, num_workers=workers, drop_last=True, collate_fn=collate_fn,
        sampler=create_rl_sampler(config, dataset),
    )  # fmt: skip


def prompts(batches: Iterator[Any]) -> list[Any]:
    return [batch["raw_prompt"].tolist() for batch in batches]


def saved_after(dataset: Any, batches: int, workers: int = 0) -> Any:
    """A checkpoint taken in the middle of an epoch, saved and loaded."""
    stateful = loader(dataset, workers)
    iterator = iter(stateful)
    for _ in range(batches):
        next(iterator)
    file = io.BytesIO()
    torch.save(stateful.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("workers", [0, 8])
def test_resume_mid_epoch(numbered: str, qwen: Any, workers: int) -> None:
    whole = prompts(iter(loader(verl_dataset(numbered, qwen), workers)))  # torchdata's order depends on workers
    assert len(whole) == 15
    state = saved_after(gpuload_dataset(numbered, qwen), 6, workers)
    resumed = loader(gpuload_dataset(numbered, qwen), workers, seed=2)
    resumed.load_state_dict(state)
    assert prompts(iter(resumed)) == whole[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_with_different_data(numbered: str, write: Any, qwen: Any, workers: int, caplog: Any) -> None:
    state = saved_after(gpuload_dataset(numbered, qwen), 3, workers)
    write(NUMBERED | {"data_source": ["a"] * 59 + ["b"]})
    resumed = loader(gpuload_dataset(numbered, qwen), workers)
    resumed.load_state_dict(state)
    with pytest.raises(
        ResumeError, match=r"the checkpoint was made with different data: files: 0: data.parquet was .*, is .*"
    ):
        next(iter(resumed))
    resumed = loader(gpuload_dataset(numbered, qwen, gpuload={"strict_resume": False}), workers)
    resumed.load_state_dict(state)
    assert len(prompts(iter(resumed))) == 12
    if not workers:
        message = "the checkpoint was made with different data (strict_resume is off): files: 0: data.parquet was"
        assert message in caplog.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_prompt_length": 37}, "max_prompt_length was 1024, is 37"),
        ({"filter_overlong_prompts": False}, "filter_overlong_prompts was True, is False"),
        ({"apply_chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"}}, "chat_template was 'default'"),
    ],
)
def test_resume_with_a_different_configuration(numbered: str, qwen: Any, data: dict[str, Any], message: str) -> None:
    state = gpuload_dataset(numbered, qwen).state_dict()
    with pytest.raises(ResumeError, match=message):
        gpuload_dataset(numbered, qwen, **data).load_state_dict(state)


def test_resume_with_other_samples(numbered: str, qwen: Any) -> None:
    for more in ({}, {"filter_overlong_prompts": False}):
        load = partial(gpuload_dataset, numbered, qwen, max_samples=10, shuffle=True, **more)
        state = load().state_dict()
        with pytest.raises(ResumeError, match="another random sample of rows: .* needs the same data.seed"):
            load().load_state_dict(state)
        load(seed=1).load_state_dict(load(seed=1).state_dict())


def test_resume_with_settings_that_do_not_change_the_data(numbered: str, qwen: Any) -> None:
    state = gpuload_dataset(numbered, qwen).state_dict()
    settings = {"device": "cpu", "verify": "off", "gpu_memory_limit": 7, "strict_resume": True}
    gpuload_dataset(numbered, qwen, gpuload=settings, cache_dir="/tmp").load_state_dict(state)


@pytest.mark.parametrize("config", [{}, {"filter_overlong_prompts": False}])
def test_resume_with_values_changed_in_place(tmp_path: Path, qwen: Any, config: dict[str, Any]) -> None:
    """Size, footer and tokens are the same."""
    path = tmp_path / "data.parquet"
    table = pa.table(NUMBERED | {"reward_model": [{"ground_truth": f"AAA{i}"} for i in range(60)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    state = gpuload_dataset(path, qwen, **config).state_dict()
    gpuload_dataset(path, qwen, **config).load_state_dict(state)
    earlier = {"version": state["version"], "fingerprint": {**state["fingerprint"]}}
    del earlier["fingerprint"]["columns"]
    path.write_bytes(path.read_bytes().replace(b"AAA33", b"BBB33"))
    with pytest.raises(ResumeError, match="columns: reward_model has other values\\. Set data"):
        gpuload_dataset(path, qwen, **config).load_state_dict(state)
    gpuload_dataset(path, qwen, **config).load_state_dict(earlier)  # saved before there were digests of columns


def test_a_file_that_changes_while_it_is_read(
    numbered: str, qwen: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any) -> Columns:
        columns = Columns(*arguments)
        write(NUMBERED)
        return columns

    monkeypatch.setattr(reading, "Columns", changing)
    with pytest.raises(SourceError, match="the file was changed while it was loaded"):
        gpuload_dataset(numbered, qwen, filter_overlong_prompts=False)


def test_resume_after_fallback_to_verl(write: Any, qwen: Any) -> None:
    path = write({"prompt": ["a", "b"]})
    config = {"filter_overlong_prompts": True, "max_prompt_length": 10_000}
    found = gpuload_dataset(path, qwen, **config)
    assert not found.report
    found.load_state_dict(pickle.loads(pickle.dumps(found.state_dict())))
    state = found.state_dict()
    write({"prompt": ["a", "c", "d"]})
    with pytest.raises(ResumeError, match="files: 0: data.parquet was"):
        gpuload_dataset(path, qwen, **config).load_state_dict(state)


def test_resume_from_a_checkpoint_of_verl(numbered: str, qwen: Any) -> None:
    for workers in (0, 2):
        whole = prompts(iter(loader(verl_dataset(numbered, qwen), workers)))
        resumed = loader(gpuload_dataset(numbered, qwen), workers)
        resumed.load_state_dict(saved_after(verl_dataset(numbered, qwen), 5, workers))
        assert prompts(iter(resumed)) == whole[5:]


def test_pickle_leaves_out_the_data(numbered: str, qwen: Any) -> None:
    found = gpuload_dataset(numbered, qwen)
    again = pickle.loads(pickle.dumps(found))
    assert not hasattr(again, "dataframe")
    again.resume_dataset_state()
    assert_same(again, verl_dataset(numbered, qwen))
    found.serialize_dataset = True
    assert_same(pickle.loads(pickle.dumps(found)), verl_dataset(numbered, qwen))


def test_split(numbered: str, qwen: Any) -> None:
    found, expected = gpuload_dataset(numbered, qwen).split(7), verl_dataset(numbered, qwen).split(7)
    assert len(found) == 7
    for part, wanted in zip(found, expected, strict=True):
        assert isinstance(part, RLHFDataset)
        assert_same(part, wanted, spread=3)
    nothing = copy.copy(found[0])
    assert not hasattr(nothing, "dataframe")
    with pytest.raises(AttributeError, match="dataframe"):
        nothing.split(2)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="positive integer"):
            found[0].split(wrong)  # type: ignore[arg-type]
    nothing.dataframe = None
    with pytest.raises(ValueError, match="no rows"):
        nothing.split(2)
