"""slime's data source and SFT rollout, stock and gpuload's, in one process.

    SLIME_REPO=<checkout> python -m bench.trainers.slime [--rows 50000] [--record]

Counted at start-up: reading, rendering, tokenizing and filtering, with the construction of the tokenizer. Not counted:
imports. Tokenizations are calls of the tokenizer by slime's own functions. ray is replaced by an empty module.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import ROOT
from bench.data import find_datasets, find_tokenizer
from bench.environment import PACKAGES, commit, machine, versions
from bench.process import run_command

STEPS, PROMPTS, SAMPLES = 4, 32, 8
CONVERSATIONS = 2_000
RECORD = ROOT / "bench" / "results" / "trainers" / "slime.json"


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


def prompts_file(folder: Path, rows: int) -> Path:
    """Write the prompts of all datasets, with labels, as one file."""
    parts = [pq.read_table(file, columns=["prompt"]).to_pylist() for file in find_datasets(None)[-1].files]
    prompts = [row["prompt"] for part in parts for row in part]
    prompts = (prompts * (rows // len(prompts) + 1))[:rows]
    path = folder / "prompts.parquet"
    pq.write_table(pa.table({"prompt": prompts, "label": [str(number) for number in range(rows)]}), path)
    return path


def conversations_file(folder: Path) -> Path:
    """Write conversations that end with an answer."""
    file = next(file for file in find_datasets(None)[-1].files if "sgd" in file)
    rows = pq.read_table(file, columns=["prompt"]).slice(0, CONVERSATIONS)["prompt"].to_pylist()
    path = folder / "conversations.parquet"
    pq.write_table(pa.table({"prompt": [[*row, {"role": "assistant", "content": "Done."}] for row in rows]}), path)
    return path


def arguments(file: Path, tokenizer: str, **changed: Any) -> Namespace:
    """slime's arguments."""
    given = {
        "rollout_global_dataset": True, "prompt_data": str(file), "hf_checkpoint": tokenizer, "dump_details": None,
        "rollout_max_prompt_len": 1024, "input_key": "prompt", "multimodal_keys": None, "label_key": None,
        "metadata_key": "metadata", "tool_key": None, "apply_chat_template": True, "apply_chat_template_kwargs": {},
        "rollout_seed": 42, "rollout_shuffle": True, "n_samples_per_prompt": SAMPLES, "buffer_filter_path": None,
        "rollout_batch_size": PROMPTS, "gpuload": {"progress": False},
    }  # fmt: skip
    return Namespace(**given | changed)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def measure_prompts(kind: Any, args: Namespace) -> dict[str, Any]:
    """Start a data source, and draw the ids of some steps with slime's function."""
    from slime.rollout.sglang_rollout import _prepare_prompt_ids
    from slime.utils.processing_utils import load_tokenizer

    seconds, source = timed(lambda: kind(args))
    counter = Counter(load_tokenizer(args.hf_checkpoint))

    def draw() -> list[list[int]]:
        groups = [group for _ in range(STEPS) for group in source.get_samples(PROMPTS)]
        return [list(_prepare_prompt_ids(sample, counter, None)) for group in groups for sample in group]

    drawn, ids = timed(draw)
    found = {"start_up_seconds": seconds, "kept": len(source), "tokenizations_in_rollout": counter.calls}
    return found | {"seconds_per_step": drawn / STEPS, "ids": hash(tuple(map(tuple, ids)))}


def measure_sft(kind: Any, args: Namespace, rollout: Any) -> dict[str, Any]:
    """Start a data source, and draw some steps for SFT."""
    from slime.rollout import sft_rollout
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator
    from slime.utils.processing_utils import load_tokenizer

    counter = Counter(load_tokenizer(args.hf_checkpoint))
    sft_rollout.TOKENIZER, sft_rollout.PROCESSOR = counter, object()
    sft_rollout.MASK_GENERATOR = MultiTurnLossMaskGenerator(counter, tokenizer_type=args.loss_mask_type)
    seconds, source = timed(lambda: kind(args))
    counter.calls = 0
    drawn, steps = timed(lambda: [rollout(args, step, source) for step in range(STEPS)])
    ids = [(tuple(sample.tokens), tuple(sample.loss_mask)) for groups in steps for (sample,) in groups]
    found = {"start_up_seconds": seconds, "kept": len(source), "tokenizations_in_rollout": counter.calls}
    return found | {"seconds_per_step": drawn / STEPS, "ids": hash(tuple(ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--tokenizer")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    given = parser.parse_args()
    repository = os.environ["SLIME_REPO"]
    sys.path.insert(0, repository)
    sys.modules.setdefault("ray", ModuleType("ray"))
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.sft_rollout import generate_rollout

    from gpuload.integrations.slime import DataSource, sft_rollout

    about, tokenizer = machine(), find_tokenizer(given.tokenizer)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULOAD_CACHE"] = folder
        args = arguments(prompts_file(Path(folder), given.rows), tokenizer, label_key="label")
        results["prompts, slime"] = measure_prompts(RolloutDataSourceWithBuffer, args)
        results["prompts, gpuload"] = measure_prompts(DataSource, args)
        args = arguments(
            conversations_file(Path(folder)), tokenizer, apply_chat_template=False, rollout_max_prompt_len=None,
            n_samples_per_prompt=1, loss_mask_type="qwen",
            rollout_function_path="gpuload.integrations.slime.sft_rollout",
        )  # fmt: skip
        results["SFT, slime"] = measure_sft(RolloutDataSourceWithBuffer, args, generate_rollout)
        results["SFT, gpuload"] = measure_sft(DataSource, args, sft_rollout)
    for what in ("prompts", "SFT"):
        same = ("kept", "ids")
        ours, theirs = ([results[f"{what}, {who}"].pop(name) for name in same] for who in ("gpuload", "slime"))
        assert ours == theirs, f"{what}: rows or ids differ"
        for who in ("gpuload", "slime"):
            results[f"{what}, {who}"]["rows_kept"] = ours[0]
    print(
        "| | start-up, s | rows kept | s per step | tokenizations in the rollout |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for name, found in results.items():
        print(
            f"| {name} | {found['start_up_seconds']:.2f} | {found['rows_kept']:,} | {found['seconds_per_step']:.4f} | "
            f"{found['tokenizations_in_rollout']:,} |"
        )
    if given.record:
        checkout = run_command(["git", "-C", repository, "rev-parse", "--short=12", "HEAD"])
        facts = {
            "machine": about, "versions": versions(PACKAGES), "commit": commit(),
            "slime": checkout.stdout.strip() or "unknown", "tokenizer": Path(tokenizer).name, "rows": given.rows,
            "conversations": CONVERSATIONS, "steps": STEPS, "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES, "results": results,
        }  # fmt: skip
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
