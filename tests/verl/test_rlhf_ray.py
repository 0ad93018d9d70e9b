"""gpuload's RLHFDataset under Ray: loading where the GPUs are, a driver that is killed in the middle of an epoch."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from conftest import user
from omegaconf import OmegaConf
from same import assert_same, ours, verls
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from gpuload.errors import DataError, DeviceError

RAY_GPU = {"ray_gpu": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with a GPU in its books: the machine need not have one."""
    paths = os.pathsep.join(sys.path)  # workers import this module too
    environment = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def numbered(write: Any) -> str:
    """A file of 80 rows."""
    return write({"prompt": [user(f"question {i}") for i in range(80)], "index": list(range(80))})


def test_without_ray_the_load_is_here(numbered: str, qwen: Any, caplog: Any) -> None:
    if ray.is_initialized():
        ray.shutdown()
    found = ours(numbered, qwen, gpuload=RAY_GPU)
    assert "loading without a GPU: here torch" in caplog.text
    assert "no Ray task with one: Ray is not running" in caplog.text
    assert_same(found, verls(numbered, qwen))
    with pytest.raises(DeviceError, match="with ray_gpu: Ray is not running"):
        ours(numbered, qwen, gpuload=RAY_GPU | {"device": "cuda"})


def test_a_task_with_a_gpu_loads(cluster: None, gsm8k: str, qwen: Any, capsys: Any) -> None:
    data = {"max_prompt_length": 100, "max_samples": 300, "shuffle": True, "seed": 2}
    found = ours(gsm8k, qwen, gpuload=RAY_GPU | {"reuse_ids": True}, **data)
    assert "gpuload: loading in a Ray task with a GPU: here torch" in capsys.readouterr().out
    here = ours(gsm8k, qwen, gpuload={"reuse_ids": True}, **data)
    assert found.state_dict() == here.state_dict()
    for row, wanted in zip(found.dataframe.take(range(len(found))), here.dataframe.take(range(len(here))), strict=True):
        assert row == wanted
    assert_same(ours(gsm8k, qwen, gpuload=RAY_GPU, **data), verls(gsm8k, qwen, **data))


def test_errors_of_the_task_are_raised_here(cluster: None, numbered: str, qwen: Any) -> None:
    with pytest.raises(DataError, match="none of 80 rows is left"):
        ours(numbered, qwen, gpuload=RAY_GPU, max_prompt_length=3)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="device='cuda'"):
            ours(numbered, qwen, gpuload=RAY_GPU | {"device": "cuda"})


def test_a_gpu_that_is_taken_is_not_waited_for(
    cluster: None, numbered: str, qwen: Any, caplog: Any, monkeypatch: Any
) -> None:
    @ray.remote(num_gpus=1, num_cpus=0)
    class Trainer:
        def ready(self) -> bool:
            return True

    trainer = Trainer.remote()
    assert ray.get(trainer.ready.remote())
    monkeypatch.setattr("gpuload.integrations.verl.ray.PATIENCE", 0.5)
    assert len(ours(numbered, qwen, gpuload=RAY_GPU)) == 80
    assert "no Ray task with one: all of Ray's GPUs are taken" in caplog.text
    ray.kill(trainer)


def train(folder: str, file: str, tokenizer: Any) -> None:
    """The trainer's driver, as far as data goes: a checkpoint after each batch, and a word on what was in it."""
    state, log = Path(folder) / "data.pt", Path(folder) / "log"
    dataset = ours(file, tokenizer)
    config = OmegaConf.create({"shuffle": True, "seed": 3})
    loader = StatefulDataLoader(
        dataset, 4, num_workers=2, drop_last=True, collate_fn=collate_fn, sampler=create_rl_sampler(config, dataset)
    )
    if state.exists():
        loader.load_state_dict(torch.load(state, weights_only=False))
    for batch in loader:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()} {batch['index'].tolist()}\n")
        torch.save(loader.state_dict(), state.with_suffix(".new"))
        state.with_suffix(".new").replace(state)
        time.sleep(0.05)


def test_killed_in_mid_epoch_and_resumed(cluster: None, numbered: str, qwen: Any, tmp_path: Path) -> None:
    @ray.remote(num_cpus=1, num_gpus=0, max_retries=0)
    def driver(folder: str) -> None:
        train(folder, numbered, qwen)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    train(str(whole), numbered, qwen)
    expected = [line.split(" ", 1)[1] for line in (whole / "log").read_text().splitlines()]
    assert len(expected) == 20

    run = driver.remote(str(killed))
    log = killed / "log"
    while not log.exists() or len(log.read_text().splitlines()) < 7:
        assert not ray.wait([run], timeout=0.05)[0]
    os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(run)
    before = len(log.read_text().splitlines())
    assert before < 20
    # The kill may have come between a batch and its checkpoint: then that batch is drawn once more.
    ray.get(driver.remote(str(killed)))
    found = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert found[:before] == expected[:before]
    assert found[before:] in (expected[before:], expected[before - 1 :])
