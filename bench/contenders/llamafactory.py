"""Data for SFT in LLaMA-Factory: its own preparation, or a store that gpuload writes and LLaMA-Factory opens.

Runs in the environment of `bench/trainers/llamafactory-requirements.txt`.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

import gpuload
from bench.contenders.common import Clock, answer, numbers_digest, task_given
from bench.contenders.imported import import_ahead

_ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_ROLES |= {"system_tag": "system"}


def opened(task: dict[str, Any], scratch: Path, **more: Any) -> Any:
    """Return what LLaMA-Factory's workflow for SFT trains on, and the clock, after its arguments are parsed."""
    given = {
        "model_name_or_path": task["tokenizer"], "stage": "sft", "do_train": True, "template": "qwen",
        "dataset": "rows", "dataset_dir": str(scratch), "cutoff_len": task["limit"], "output_dir": str(scratch / "out"),
        "overwrite_cache": True, "preprocessing_num_workers": task["processes"], "use_cpu": True, "report_to": "none",
    }  # fmt: skip
    model, data, training, *_ = get_train_args(given | more)
    tokenizer = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(tokenizer["tokenizer"], data)
    clock = Clock()
    import_ahead(ours="tokenized_path" in more)
    with clock("start"):
        if "tokenized_path" in more:
            chats = gpuload.load_chats(
                task["file"], task["tokenizer"], max_length=task["limit"], token_cache=False, progress=False
            )
            gpuload.save_to_disk({"train": chats}, more["tokenized_path"], trainer="llamafactory", progress=False)
        found = get_dataset(template, model, data, training, stage="sft", **tokenizer)["train_dataset"]
    return found, clock


def main() -> None:
    """Measure one preparation."""
    task = task_given()
    scratch = Path(task["cache"])
    about = {"file_name": task["file"], "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": _ROLES}
    (scratch / "dataset_info.json").write_text(json.dumps({"rows": about}))
    store = {"tokenized_path": str(scratch / "store")} if task["library"] == "gpuload" else {}
    with contextlib.redirect_stdout(sys.stderr):  # it prints an example
        found, clock = opened(task, scratch, **store)
    digest = numbers_digest([row["input_ids"]] for row in found) if task["compared"] else ""
    answer(seconds=clock.seconds, cpu_seconds=clock.cpu_seconds, kept=len(found), digest=digest)


if __name__ == "__main__":
    main()
