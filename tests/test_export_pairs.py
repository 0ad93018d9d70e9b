"""save_to_disk and `gpuload prepare --export` of preference data, compared with what TRL's trainers prepare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tiers import exhaustive
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import OptionError
from gpuload.dataset import arrow as row_reader

datasets = pytest.importorskip("datasets", reason="the format is that of datasets")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from export_cases import five_steps, opened, small_model  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl.trainer import reward_trainer  # noqa: E402

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"question {row} " * (row % 5 + 1)}],
        "chosen": [{"role": "assistant", "content": f"good {row} " * (row % 7 + 1)}],
        "rejected": [{"role": "assistant", "content": f"bad {row} " * (row % 3 + 1)}],
        "margin": row / 4,
        "source": ["wiki", "code"][row % 2],
    }
    for row in range(23)
]


class PreparedDPOTrainer(trl.DPOTrainer):  # type: ignore[misc,name-defined]
    """As in docs/preference.md: TRL 1.16 has no setting for data that is prepared."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


def load(tokenizer: Any, objective: Any) -> gpuload.PairDataset:
    return gpuload.load_pairs(pa.Table.from_pylist(ROWS), tokenizer, objective=objective)


@pytest.mark.parametrize("objective", ["dpo", "rm", "kto"])
@pytest.mark.parametrize("columns", [None, [], ["source"]])
def test_rows_are_those_of_the_dataset(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: Any, columns: Any
) -> None:
    monkeypatch.setattr(row_reader, "_ROWS", 5)
    pairs = load(qwen, objective)
    gpuload.save_to_disk({"train": pairs}, tmp_path / "pairs", columns=columns)
    store = opened(tmp_path / "pairs")["train"]
    rows = [pairs[k] for k in range(len(pairs))]
    others = {name for name in ("source", "margin") if columns is None or name in columns}
    others |= {"margin"} if objective == "rm" else set()
    names = {name for name in rows[0] if name.endswith("_ids")} | others | ({"label"} if objective == "kto" else set())
    assert set(store.column_names) == names
    assert list(store) == [{name: row[name] for name in store.column_names} for row in rows]
    assert {feature.feature.dtype for name, feature in store.features.items() if name.endswith("_ids")} == {"int32"}


def test_margins_with_and_without_fractions(qwen: Any, tmp_path: Path) -> None:
    """JSON that has both has no type of Arrow, and the collator wants numbers."""
    margins = [1, 2.5, 2**70, -3]
    rows = [json.dumps(row | {"margin": margin}) for row, margin in zip(ROWS, margins, strict=False)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    pairs = gpuload.load_pairs(str(tmp_path / "rows.jsonl"), qwen, objective="rm")
    assert [pairs[k]["margin"] for k in range(4)] == margins
    for columns in (None, [], ["margin"]):
        gpuload.save_to_disk({"train": pairs}, tmp_path / "rm", columns=columns, overwrite=True)
        store = opened(tmp_path / "rm")["train"]
        assert store.features["margin"].dtype == "float64"
        collated = reward_trainer.DataCollatorForPreference(pad_token_id=0)(list(store))
        assert collated["margin"].tolist() == margins


def test_columns_that_do_not_exist(qwen: Any) -> None:
    with pytest.raises(OptionError, match="'chosen_ids' is not a column that can be passed through"):
        load(qwen, "dpo").to_arrow(columns=["chosen_ids"])


@pytest.fixture(scope="module")
def small(qwen: Any) -> Any:
    return small_tokenizer(qwen.chat_template)


@exhaustive
def test_training_a_reward_model_as_on_what_trl_prepares(small: Any, tmp_path: Path) -> None:
    gpuload.save_to_disk({"train": load(small, "rm")}, tmp_path / "rm")
    own = opened(tmp_path / "rm")["train"]
    theirs, ours = (
        five_steps(
            trl.RewardTrainer, trl.RewardConfig, small_model(Qwen2ForSequenceClassification, small), rows, small,
            tmp_path,
        )
        for rows in (datasets.Dataset.from_list(ROWS), own)
    )  # fmt: skip
    for name in ("chosen_ids", "rejected_ids", "margin"):
        assert list(ours[0][name]) == list(theirs[0][name])
    assert ours[1] == theirs[1]


def test_training_by_dpo_as_on_what_trl_prepares(small: Any, tmp_path: Path) -> None:
    gpuload.save_to_disk({"train": load(small, "dpo")}, tmp_path / "dpo")
    own = opened(tmp_path / "dpo")["train"]
    theirs, ours = (
        five_steps(
            kind, trl.DPOConfig, small_model(Qwen2ForCausalLM, small), rows, small, tmp_path,
            more={"ref_model": small_model(Qwen2ForCausalLM, small)},
        )
        for kind, rows in ((trl.DPOTrainer, datasets.Dataset.from_list(ROWS)), (PreparedDPOTrainer, own))
    )  # fmt: skip
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert list(ours[0][name]) == list(theirs[0][name])
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("kind", ["dpo", "rm"])
def test_the_command(qwen: Any, qwen_folder: str, tmp_path: Path, kind: Any) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    place = tmp_path / "out"
    command = ["prepare", "--split", f"test={file}", "--tokenizer", qwen_folder, "--export", kind, str(place)]
    assert main([*command, "--max-length", "60", "--columns", ""]) == 0
    pairs = gpuload.load_pairs(str(file), qwen, objective=kind, max_length=60)
    assert 0 < len(pairs) < len(ROWS)
    assert list(opened(place)["test"]) == pairs.to_arrow(columns=[]).read_all().to_pylist()
