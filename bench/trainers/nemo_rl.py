"""NeMo-RL's datasets for GRPO and for SFT, stock and gpuload's.

    NEMO_RL_REPO=<checkout> python -m bench.trainers.nemo_rl

The start is NeMo-RL's own setup of a dataset, from the file to a dataset whose rows can be read; for gpuload also
rendering, tokenizing and the sample that NeMo-RL prepares. In an epoch all rows are read, by one thread. Rows of both
are compared. `make nemo-rl-test` makes the environment.
"""

import json
from pathlib import Path
from typing import Any

from bench.trainers import common


def write(case: str, rows: list[Any], folder: Path) -> Path:
    """Write conversations as JSON lines, or their last questions with answers."""
    if case == "SFT":
        return common.write_messages(case, rows, folder)
    with (folder / "train.jsonl").open("w") as out:
        for chat in rows:
            question = next(each["content"] for each in reversed(chat) if each["role"] == "user")
            out.write(json.dumps({"input": question, "output": chat[-1]["content"]}) + "\n")
    return folder / "train.jsonl"


def main() -> None:
    """Measure, print the table, and write a record."""
    given = common.arguments(__doc__ or "", "nemo_rl", rows=20_000)
    cases = {
        "prompts": {"processor": "math_hf_data_processor", "NeMo-RL": "ResponseDataset", "gpuload": "PromptDataset"},
        "SFT": {"processor": "sft_processor", "NeMo-RL": "openai_format", "gpuload": "ChatDataset"},
    }
    with_question = lambda chat: any(each["role"] == "user" for each in chat)  # noqa: E731
    common.compare(given, "nemo_rl", cases, {common.OURS: {}, "NeMo-RL": {}}, write, with_question)


if __name__ == "__main__":
    main()
