"""verl's SFT trainer on the CPU: with gpuload's dataset class, the losses are those of verl's class."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.trainer.sft_trainer")

from sft_cases import conversation

STEPS = 3
MODEL = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 32},
    **{"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 512, "tie_word_embeddings": True},
}
# In a process of its own: verl's trainer starts a process group, and sets variables of the environment.
TRAIN = """
import sys

import torch
from hydra import compose, initialize_config_module
from verl.trainer import sft_trainer

losses = []


class Tracking:
    def __init__(self, **settings):
        pass

    def log(self, data, step):
        losses.append(data["train/loss"])


sft_trainer.Tracking = Tracking
# verl has no engine for the CPU: the one of CUDA, with tensors on the CPU, and no memory to report.
try:
    from verl.plugin.platform import get_platform
except ImportError:  # before verl 0.9
    from verl.workers.engine.base import EngineRegistry

    for engines in EngineRegistry._engines["language_model"].values():
        engines["cpu"] = engines.get("cuda")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        setattr(torch.cpu, name, lambda *device: 0)
else:
    type(get_platform()).device_name = "cpu"
torch.cuda.mem_get_info = lambda *device: (0, 0)
torch.cuda.get_device_name = lambda *device: "cpu"
torch.cuda.current_device = lambda: torch.device("cpu")
torch.manual_seed(0)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("sft_trainer_engine", overrides=sys.argv[1:])
# As verl's `run_sft`, which requires NCCL.
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
sft_trainer.SFTTrainer(config).fit()
torch.distributed.destroy_process_group()
print("losses", *losses)
"""


@pytest.fixture(scope="module")
def model(qwen_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model of two layers with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("model")
    shutil.copytree(qwen_folder, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    return str(directory)


def losses(model: str, file: str, directory: Path, *overrides: str) -> list[float]:
    """Train for a few steps, and return the loss of each."""
    settings = [
        f"model.path={model}",
        "model.use_remove_padding=false",
        "+model.override_config.attn_implementation=eager",
        f"data.train_files={file}",
        "data.train_batch_size=4",
        "data.use_dynamic_bsz=false",
        "data.micro_batch_size_per_gpu=2",
        "data.pad_mode=no_padding",
        "data.num_workers=0",
        "data.max_length=256",
        "engine.use_torch_compile=false",
        "engine.strategy=fsdp2",
        "engine.param_offload=false",
        "optim.lr=0.01",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"trainer.total_training_steps={STEPS}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={directory}",
        "checkpoint.save_contents=[]",
        *overrides,
    ]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *settings],
        env=os.environ | variables | {"MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "", "VERL_ENGINE_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return [float(loss) for loss in line.split()[1:]]


def test_losses_are_those_of_verl_s_class(model: str, write: Any, tmp_path: Path) -> None:
    rows = [conversation(f"question {row} " * (row % 5 + 1), f"answer {row}", "more?", "no") for row in range(16)]
    file = write({"messages": rows})
    expected = losses(model, file, tmp_path / "verl")
    found = losses(
        model,
        file,
        tmp_path / "gpuload",
        "data.custom_cls.path=pkg://gpuload.integrations.verl",
        "data.custom_cls.name=SFTDataset",
    )
    assert found == expected
    assert len(set(found)) == STEPS
