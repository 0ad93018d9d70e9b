"""gpuload's RLHFDataset with Ray: loading in a task with a GPU, resuming after the driver was killed."""

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
from same import assert_same, create_rl_sampler, gpuload_dataset, verl_dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn

from gpuload.core.errors import DataError, DeviceError
from gpuload.engines.device.cuda import unavailable_reason

RAY_GPU = {"ray_gpu": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster that claims to have a GPU; the machine need not have one.

    With the address "local", it is a new one even if another cluster runs on this machine.
    """
    paths = os.pathsep.join(sys.path)  # workers import this module too
    environment = {"env_vars": {"PYTHONPATH": paths}}
    resources = {"num_cpus": 2, "num_gpus": 1}
    ray.init("local", include_dashboard=False, log_to_driver=False, runtime_env=environment, **resources)
    yield
    ray.shutdown()


@pytest.fixture
def numbered(write: Any) -> str:
    """A file of 80 rows."""
    return write({"prompt": [user(f"question {i}") for i in range(80)], "index": list(range(80))})


def test_without_ray_loads_in_this_process(numbered: str, qwen: Any, caplog: Any) -> None:
    if ray.is_initialized():
        ray.shutdown()
    found = gpuload_dataset(numbered, qwen, gpuload=RAY_GPU)
    assert f"loading without a GPU. In this process: {unavailable_reason('auto')}" in caplog.text
    assert "In a Ray task: Ray is not running" in caplog.text
    assert_same(found, verl_dataset(numbered, qwen))
    with pytest.raises(DeviceError, match=r"In a Ray task \(ray_gpu=true\): Ray is not running"):
        gpuload_dataset(numbered, qwen, gpuload=RAY_GPU | {"device": "cuda"})


def test_loads_in_a_task_with_a_gpu(cluster: None, gsm8k: str, qwen: Any, capsys: Any) -> None:
    data = {"max_prompt_length": 100, "max_samples": 300, "shuffle": True, "seed": 2}
    found = gpuload_dataset(gsm8k, qwen, gpuload=RAY_GPU | {"reuse_ids": True}, **data)
    because = f"gpuload: loading in a Ray task with a GPU. In this process: {unavailable_reason('auto')}"
    assert because in capsys.readouterr().out
    local = gpuload_dataset(gsm8k, qwen, gpuload={"reuse_ids": True}, **data)
    assert found.state_dict() == local.state_dict()
    assert len(found) == len(local)
    assert found.dataframe.take(range(len(found))) == local.dataframe.take(range(len(local)))
    assert_same(gpuload_dataset(gsm8k, qwen, gpuload=RAY_GPU, **data), verl_dataset(gsm8k, qwen, **data))


def test_errors_in_the_task_are_raised(cluster: None, numbered: str, qwen: Any) -> None:
    with pytest.raises(DataError, match="all 80 rows were dropped"):
        gpuload_dataset(numbered, qwen, gpuload=RAY_GPU, max_prompt_length=3)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="device='cuda'"):
            gpuload_dataset(numbered, qwen, gpuload=RAY_GPU | {"device": "cuda"})


def test_does_not_wait_for_a_gpu_in_use(cluster: None, numbered: str, qwen: Any, caplog: Any, monkeypatch: Any) -> None:
    @ray.remote(num_gpus=1, num_cpus=0)
    class Trainer:
        def ready(self) -> bool:
            return True

    trainer = Trainer.remote()
    assert ray.get(trainer.ready.remote())
    monkeypatch.setattr("gpuload.integrations.verl.ray.GPU_WAIT_SECONDS", 0.5)
    assert len(gpuload_dataset(numbered, qwen, gpuload=RAY_GPU)) == 80
    assert "In a Ray task: all GPUs of the Ray cluster are in use" in caplog.text
    ray.kill(trainer)


def train(directory: str, file: str, tokenizer: Any) -> None:
    """The part of a trainer that concerns data: writes a checkpoint and a line of log after each batch."""
    state, log = Path(directory) / "data.pt", Path(directory) / "log"
    dataset = gpuload_dataset(file, tokenizer)
    config = OmegaConf.create({"shuffle": True, "seed": 3, "sampler": None})
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


def test_resumes_after_being_killed_mid_epoch(cluster: None, numbered: str, qwen: Any, tmp_path: Path) -> None:
    @ray.remote(num_cpus=1, num_gpus=0, max_retries=0)
    def driver(directory: str) -> None:
        train(directory, numbered, qwen)

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
    # If the driver was killed between a batch and its checkpoint, that batch is repeated.
    ray.get(driver.remote(str(killed)))
    found = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert found[:before] == expected[:before]
    assert found[before:] in (expected[before:], expected[before - 1 :])
