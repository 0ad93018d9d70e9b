"""Cost of tokenizing a rollout's prompts in verl's agent loop, with and without reuse of the loader's ids.

The worker is verl's own. The server answers immediately with two tokens, so the difference is the prompts alone.
Runs in verl's environment.
"""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl.experimental.agent_loop import agent_loop, single_turn_agent_loop  # noqa: F401  the second registers itself
from verl.protocol import DataProto
from verl.utils.tokenizer import continuous_token
from verl.workers.rollout.replica import TokenOutput

import gpuload
from bench.contenders.common import answer, task_given
from bench.contenders.load_verl import config
from gpuload.integrations.verl import RLHFDataset

OURS = Path(gpuload.__file__).parent / "integrations" / "verl" / "agent_loop.yaml"


class Server:
    """Server that answers every prompt with the same two tokens."""

    async def generate(self, **rest: Any) -> TokenOutput:
        return TokenOutput(token_ids=[9707, 151645], log_probs=[-0.5, -0.25])


def model_directory(tokenizer: str, scratch: Path) -> str:
    """Create what verl's worker reads of a model: tokenizer and configuration, no weights."""
    shutil.copytree(tokenizer, scratch, dirs_exist_ok=True)
    (scratch / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    return str(scratch)


def step(settings: list[str], data: DataProto) -> dict[str, float]:
    """Return the CPU seconds of one rollout step and the number of prompts that were tokenized."""
    verls = dict(agent_loop._agent_loop_registry)  # restored below: configurations rename agent loops
    with initialize_config_module("verl.trainer.config", version_base=None):
        worker = agent_loop.AgentLoopWorker(compose("ppo_trainer", overrides=settings), Server())
    own, calls = continuous_token.apply_chat_template, 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        return own(*arguments, **more)

    continuous_token.apply_chat_template = counted
    asyncio.run(worker.generate_sequences(data[:8]))  # initialization, not counted
    calls, started = 0, time.process_time()
    asyncio.run(worker.generate_sequences(data))
    seconds = time.process_time() - started
    continuous_token.apply_chat_template = own
    agent_loop._agent_loop_registry.clear()
    agent_loop._agent_loop_registry.update(verls)
    return {"seconds": seconds, "tokenized": calls}


def main() -> None:
    """Run steps with and without reuse, in turns."""
    task = task_given()
    settings = config(task, filter_overlong_prompts=True, gpuload={"reuse_ids": True, "device": "cpu"})
    dataset = RLHFDataset(task["files"], AutoTokenizer.from_pretrained(task["tokenizer"]), settings)
    rows = dataset.__getitems__(range(task["prompts"]))
    columns = {key: np.fromiter((row[key] for row in rows), object, len(rows)) for key in rows[0]}
    del columns["dummy_tensor"]
    data = DataProto.from_dict({"dummy_tensor": torch.zeros(len(rows), 1)}, non_tensors=columns)
    data = data.repeat(task["samples"], interleave=True)
    rollout = "actor_rollout_ref.rollout"
    common = [
        f"actor_rollout_ref.model.path={model_directory(task['tokenizer'], Path(task['model']))}",
        f"{rollout}.name=vllm",
        f"{rollout}.calculate_log_probs=true",
        f"{rollout}.prompt_length={task['limit']}",
        f"{rollout}.response_length=16",
    ]
    variants = {"verl's agent loop": common, "gpuload's": [*common, f"{rollout}.agent.agent_loop_config_path={OURS}"]}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(task["repeats"]):
        for name, overrides in variants.items():
            runs[name].append(step(overrides, data))
    answer(prompts=len(rows), samples=task["samples"], rollouts=runs)


if __name__ == "__main__":
    main()
