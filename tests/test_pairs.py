"""load_pairs: rows and batches of every format, compared with TRL's own preparation and collators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import gpuload

trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
OBJECTIVES = ("dpo", "rm", "kto")
IDS = {
    "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "rm": ("chosen_ids", "rejected_ids"),
    "kto": ("prompt_ids", "completion_ids", "KL_completion_ids", "label"),
}

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


TURNS = [
    ([user("Hi")], [assistant("Hello!")], [assistant("Go away.")]),
    ([{"role": "system", "content": "Be brief."}, user("é 你")], [assistant("👋🏽")], [assistant("")]),
    ([user("Hi"), assistant("Yes?"), user("And?")], [assistant("x")], [assistant("x y")]),
    ([user(" a ")], [assistant(" b\n")], [assistant("\tb"), user("c"), assistant("d")]),
    ([user("<|im_end|>")], [assistant("<|im_start|>assistant\n")], [assistant("<|im_start|>")]),
    ([user("same")], [assistant("same")], [assistant("same")]),
]
EXPLICIT = [dict(zip(("prompt", "chosen", "rejected"), turns, strict=True)) for turns in TURNS]
IMPLICIT = [{"chosen": prompt + chosen, "rejected": prompt + rejected} for prompt, chosen, rejected in TURNS]
TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    {"prompt": "", "chosen": "", "rejected": "é"},
    {"prompt": "The su", "chosen": "n<|im_end|>", "rejected": "n sets"},
]
IMPLICIT_TEXTS = [
    {"chosen": "Human: Hi Assistant: Hello", "rejected": "Human: Hi Assistant: Go"},
    {"chosen": "one two", "rejected": "one two three"},
    {"chosen": "one", "rejected": "one"},
    {"chosen": " x", "rejected": " y"},
]


def trainer_of(objective: str) -> tuple[Any, Any]:
    """TRL's trainer for an objective, and its configuration."""
    if objective == "dpo":
        return trl.DPOTrainer, trl.DPOConfig
    if objective == "rm":
        return trl.RewardTrainer, trl.RewardConfig
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer, KTOConfig


def prepared(rows: list[Row], tokenizer: Any, objective: str, **settings: Any) -> list[Row]:
    """The rows of TRL's own preparation."""
    from datasets import Dataset

    trainer, config = trainer_of(objective)
    args = config(output_dir="unused", report_to=[], bf16=False, **{"max_length": None} | settings)
    stand_in = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=True, undesirable_weight=1.0, desirable_weight=1.0)
    made = trainer._prepare_dataset(stand_in, Dataset.from_list(rows), tokenizer, args, "train")
    return [{name: row[name] for name in IDS[objective]} for row in made]


def rows_of(dataset: gpuload.PairDataset) -> list[Row]:
    return [{name: row[name] for name in IDS[dataset.objective]} for row in (dataset[k] for k in range(len(dataset)))]


def load(rows: list[Row], tokenizer: Any, objective: Any, **options: Any) -> gpuload.PairDataset:
    table = pa.Table.from_pylist(rows)
    return gpuload.load_pairs(table, tokenizer, objective=objective, **{"verify": "full", "strict": True} | options)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "rows",
    [EXPLICIT, IMPLICIT, TEXTS, IMPLICIT_TEXTS],
    ids=["explicit", "implicit", "texts", "implicit texts"],
)
def test_rows_are_those_of_trls_preparation(qwen: Any, rows: list[Row], objective: Any) -> None:
    found = load(rows, qwen, objective)
    assert rows_of(found) == prepared(rows, qwen, objective)
    assert found.report.check.rows == len(rows)
    by_prompt = gpuload.load_pairs(
        pa.Table.from_pylist(rows), qwen, objective=objective,
        apply_chat_template_kwargs={"tokenizer_kwargs": {"verbose": False}},
    )  # fmt: skip
    assert by_prompt.report.engine.startswith("cpu: rendered and encoded by") or rows in (TEXTS, IMPLICIT_TEXTS)
    assert rows_of(by_prompt) == rows_of(found)
