"""ChatDataset for Automodel, compared with Automodel's own class: rows, errors, and the way from a configuration."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_automodel", reason="needs Automodel 0.7.0: make trainers-test")

from automodel_cases import BROKEN, ROWS, TOOL, chat, write_rows
from datasets import Dataset
from nemo_automodel._transformers.auto_tokenizer import NeMoAutoTokenizer
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset as Stock
from nemo_automodel.recipes._typed_config import RecipeConfig
from transformers import AutoTokenizer

from gpuload.cache.token_store import DiskTokens
from gpuload.integrations.automodel import ChatDataset, dataset

trl = pytest.importorskip("trl", reason="its templates are tested")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path / "rows.jsonl", ROWS + BROKEN)


def tokenizer_of(folder: str, template: str | None = None, **settings: Any) -> Any:
    tokenizer = NeMoAutoTokenizer.from_pretrained(folder)
    if template:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def result(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        return type(error), str(error)


def compare(path: str, tokenizer: Any, least: int, **settings: Any) -> ChatDataset:
    """Checks that all rows are equal, errors included, and that at least so many are tokenized by columns."""
    stock, ours = Stock(path, tokenizer, **settings), ChatDataset(path, tokenizer, **settings)
    assert [result(lambda row=row: ours[row]) for row in range(len(stock))] == [  # type: ignore[misc]
        result(lambda row=row: stock[row])
        for row in range(len(stock))  # type: ignore[misc]
    ]
    assert ours._rows is not None
    assert int((ours._rows.starts.diff() > 0).sum()) >= least
    return ours


@pytest.mark.parametrize(
    "template",
    [None, "qwen2_5_training", "qwen3_training", "qwen3", "glm4moe_training", "gemma3_training", "gemma4", "phi3_5"],
)
def test_rows_are_those_of_automodel(rows: str, qwen_folder: str, template: str | None) -> None:
    least = {"qwen3": 3, "phi3_5": 3}.get(template or "", 24)
    compare(rows, tokenizer_of(qwen_folder, template), least)


@pytest.mark.parametrize("template", [None, "qwen3_training"])
@pytest.mark.parametrize(
    "settings",
    [
        {"seq_length": 30},
        {"seq_length": 30, "truncation": True},
        {"seq_length": 30, "truncation": "longest_first", "padding": "max_length"},
        {"seq_length": 60, "padding": "max_length"},
        {"seq_length": 60, "padding": True, "truncation": False},
        {"mask_history": True},
        {"mask_reasoning_content": True},
        {"unshifted": True},
        {"unshifted": True, "seq_length": 50, "padding": "max_length", "truncation": True, "mask_history": True},
    ],
)
def test_settings_keep_their_meaning(
    rows: str, qwen_folder: str, template: str | None, settings: dict[str, Any]
) -> None:
    compare(rows, tokenizer_of(qwen_folder, template), 20, **settings)


@pytest.mark.parametrize(
    "attributes",
    [
        {"padding_side": "left"},
        {"truncation_side": "left"},
        {"pad_token": "<|im_end|>"},
        {"pad_token": "!"},  # id 0, which Automodel takes for none
        {"pad_token": "\n"},  # rows end with it
    ],
)
def test_sides_and_padding_tokens(rows: str, qwen_folder: str, attributes: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(qwen_folder, **attributes)
    compare(rows, tokenizer, 20)
    compare(rows, tokenizer, 20, seq_length=40, padding="max_length", truncation=True)


def test_a_tokenizer_of_transformers(rows: str, qwen_folder: str) -> None:
    compare(rows, AutoTokenizer.from_pretrained(qwen_folder), 24)


def test_bos_and_eos_are_not_added_to_rendered_conversations(rows: str, qwen_folder: str) -> None:
    tokenizer = NeMoAutoTokenizer.from_pretrained(qwen_folder, add_bos_token=True, add_eos_token=True)
    compare(rows, tokenizer, 24)


def test_a_template_in_the_configuration(rows: str, qwen_folder: str) -> None:
    text = (TEMPLATES / "qwen3_training.jinja").read_text()
    compare(rows, tokenizer_of(qwen_folder), 24, chat_template=text)


def test_parquet_with_a_slice_and_a_seed(tmp_path: Path, qwen_folder: str) -> None:
    tools = [[TOOL], None]
    Dataset.from_list([{"messages": chat(row), "tools": tools[row % 2]} for row in range(30)]).to_parquet(
        tmp_path / "train.parquet"
    )
    ours = compare(str(tmp_path / "train.parquet"), tokenizer_of(qwen_folder), 10, split="train[5:20]", shuffle_seed=3)
    assert len(ours) == 15


def test_rows_in_memory_are_not_tokenized_again(rows: str, qwen_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(qwen_folder)
    ours = ChatDataset(rows, tokenizer)
    assert ours._rows is not None
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *given, **named: pytest.fail("tokenized"))
    prepared = [row for row in range(len(ours)) if ours._rows.starts.diff()[row] > 0]
    assert len(prepared) >= 24
    for row in prepared * 2:
        assert ours[row]["input_ids"]


def test_a_second_start_tokenizes_nothing(
    rows: str, qwen_folder: str, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compare(rows, tokenizer_of(qwen_folder), 24)
    monkeypatch.setattr(dataset, "marked", lambda *given: pytest.fail("tokenized"))
    assert compare(rows, tokenizer_of(qwen_folder), 24)._rows is not None
    on_disk = ChatDataset(rows, tokenizer_of(qwen_folder), gpuload={"store": "disk"})
    assert isinstance(on_disk._rows, DiskTokens)
    assert [result(lambda row=row: on_disk[row]) for row in range(len(first))] == [  # type: ignore[misc]
        result(lambda row=row: first[row])
        for row in range(len(first))  # type: ignore[misc]
    ]


def test_workers_get_the_ids_once(rows: str, qwen_folder: str) -> None:
    ours = ChatDataset(rows, tokenizer_of(qwen_folder))
    before = ours[0]  # reading a row makes the views that are not sent to workers
    assert ours._rows is not None
    assert set(vars(ours._rows)) > set(ours._rows.__getstate__())
    ours._rows = pickle.loads(pickle.dumps(ours._rows))
    assert set(vars(ours._rows)) == set(ours._rows.__getstate__())
    assert ours[0] == before


def test_a_tokenizer_that_is_not_supported_falls_back(
    rows: str, qwen_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, *given: Any, **named: Any) -> Any:
            return super().apply_chat_template(conversation, *given, **named)

    tokenizer.__class__ = Own
    assert ChatDataset(rows, tokenizer)._rows is None
    assert "falls back to Automodel's ChatDataset: Own renders and encodes in its own way" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_recipe_finds_the_class(rows: str, qwen_folder: str, tmp_path: Path, workers: int) -> None:
    rows = write_rows(tmp_path / "good.jsonl", ROWS[:20])
    tokenizer = tokenizer_of(qwen_folder)
    batches = []
    for target in ("nemo_automodel.components.datasets.llm.chat_dataset", "gpuload.integrations.automodel"):
        dataset = {"_target_": f"{target}.ChatDataset", "path_or_dataset_id": rows, "seq_length": 4096}
        if target.startswith("gpuload"):
            dataset["gpuload"] = {"device": "cpu"}
        loader = {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
            "batch_size": 4,
            "num_workers": workers,
        }
        config = RecipeConfig(ConfigNode({"dataset": dataset, "dataloader": loader}))
        made = config.dataloader.build(dp_rank=0, dp_world_size=1, tokenizer=tokenizer)
        batches.append([{name: value.tolist() for name, value in batch.items()} for batch in made])
    assert batches[0] == batches[1]
    assert len(batches[1]) == 5
