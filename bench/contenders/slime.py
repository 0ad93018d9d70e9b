"""slime's data source, for prompts or for SFT, or gpuload's: the start, and some steps of a rollout without generation.

Runs in the environment of `make slime-test`; `SLIME_REPO` names a checkout. ray is replaced by an empty module.
"""

import os
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

sys.path.insert(0, os.environ["SLIME_REPO"])
if "ray" not in sys.modules:
    sys.modules["ray"] = ModuleType("ray")

from slime.rollout import sft_rollout as slimes_sft
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import _prepare_prompt_ids
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer

from bench.contenders.common import Clock, answer, numbers_digest, task_given
from bench.contenders.imported import import_ahead
from bench.process import run_command
from gpuload.integrations.slime import DataSource, sft_rollout

STEPS, PROMPTS, SAMPLES = 4, 32, 8


class Counter:
    """A tokenizer whose calls are counted."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.calls = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name in ("encode", "apply_chat_template")
        return getattr(self._tokenizer, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return self._tokenizer(*given, **named)


def arguments(task: dict[str, Any]) -> Namespace:
    """slime's arguments."""
    given = {
        "rollout_global_dataset": True, "prompt_data": task["file"], "hf_checkpoint": task["tokenizer"],
        "dump_details": None, "rollout_max_prompt_len": 1024, "input_key": "prompt", "multimodal_keys": None,
        "label_key": "label", "metadata_key": "metadata", "tool_key": None, "apply_chat_template": True,
        "apply_chat_template_kwargs": {}, "rollout_seed": 42, "rollout_shuffle": True,
        "n_samples_per_prompt": SAMPLES, "buffer_filter_path": None, "rollout_batch_size": PROMPTS,
        "gpuload": {"progress": False},
    }  # fmt: skip
    of_sft = {
        "apply_chat_template": False, "rollout_max_prompt_len": None, "n_samples_per_prompt": 1, "label_key": None,
        "loss_mask_type": "qwen", "rollout_function_path": "gpuload.integrations.slime.sft_rollout",
    }  # fmt: skip
    return Namespace(**given | (of_sft if task["sft"] else {}))


def main() -> None:
    """Measure one of the two."""
    task, clock = task_given(), Clock()
    os.environ["GPULOAD_CACHE"] = task["cache"]
    args, ours = arguments(task), task["library"] == "gpuload"
    counter = Counter(load_tokenizer(args.hf_checkpoint))
    if task["sft"]:
        slimes_sft.TOKENIZER, slimes_sft.PROCESSOR = counter, object()
        slimes_sft.MASK_GENERATOR = MultiTurnLossMaskGenerator(counter, tokenizer_type=args.loss_mask_type)
    import_ahead(ours=task["library"] == "gpuload")
    with clock("start"):
        source = (DataSource if ours else RolloutDataSourceWithBuffer)(args)
    counter.calls = 0
    with clock(f"{STEPS} steps"):
        if task["sft"]:
            rollout = sft_rollout if ours else slimes_sft.generate_rollout
            steps = [rollout(args, step, source) for step in range(STEPS)]
            rows = [[sample.tokens, sample.loss_mask] for groups in steps for (sample,) in groups]
        else:
            groups = [group for _ in range(STEPS) for group in source.get_samples(PROMPTS)]
            rows = [[_prepare_prompt_ids(sample, counter, None)] for group in groups for sample in group]
    checkout = run_command(["git", "-C", os.environ["SLIME_REPO"], "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    answer(
        seconds=clock.seconds, cpu_seconds=clock.cpu_seconds, kept=len(source), slime=checkout or "unknown",
        counts={f"calls of the tokenizer in {STEPS} steps": counter.calls},
        digest=f"{len(source)} {numbers_digest(rows)}" if task["compared"] else "",
    )  # fmt: skip


if __name__ == "__main__":
    main()
