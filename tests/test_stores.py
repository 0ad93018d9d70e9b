"""Exports for trainers that read prepared rows from a directory: the columns that each of them expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import core

import gpuload
from gpuload.cli.main import main
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.errors import OptionError
from gpuload.dataset import arrow as row_reader
from gpuload.dataset.trainer_columns import CHATS, arrays

datasets = pytest.importorskip("datasets", reason="the format is that of datasets")
from export_cases import opened  # noqa: E402

LONG = 60

# What each trainer's own code does with a store: the columns, and their types.
CONTRACTS = {
    # LLaMA-Factory 0.9.5, data/collator.py: pads these, and gives all that it finds to the model.
    "llamafactory": {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"},
    # axolotl 0.18.0, utils/data/wrappers.py: a dataset with these is tokenized already.
    "axolotl": {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"},
    # SkyRL 0.3.0, train/dataset/pretokenized.py: requires both, with masks of 0 and 1.
    "skyrl": {"input_ids": "int32", "loss_mask": "int8"},
    # AReaL 1.0.4, dataset/gsm8k.py and utils/data.py: makes a tensor of each column, of equal shapes.
    "areal": {"input_ids": "int32", "loss_mask": "int8"},
}

PAIR = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
# LLaMA-Factory 0.9.5, data/collator.py, PairwiseDataCollatorWithPadding: reads exactly these.
PAIR_CONTRACT = {f"{part}_{name}": kind for part in ("chosen", "rejected") for name, kind in PAIR.items()}
MEDIA = ["images", "videos", "audios"]


def rows_of(count: int = 31) -> list[dict[str, Any]]:
    """Conversations of different lengths, with another column."""
    rng = np.random.default_rng(0)
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {row} " * int(rng.integers(1, 6))},
                {"role": "assistant", "content": f"answer {row} " * int(rng.integers(1, 40))},
                {"role": "user", "content": "and now?"},
                {"role": "assistant", "content": f"{row}"},
            ],
            "source": ["wiki", "code"][row % 2],
        }
        for row in range(count)
    ]


PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"question {row} " * (row % 5 + 1)}],
        "chosen": [{"role": "assistant", "content": f"good {row} " * (row % 7 + 1)}],
        "rejected": [{"role": "assistant", "content": f"bad {row} " * (row % 3 + 1)}],
        "source": "wiki",
    }
    for row in range(23)
]


def chats_of(tokenizer: Any, **options: Any) -> gpuload.ChatDataset:
    return gpuload.load_chats(pa.Table.from_pylist(rows_of()), tokenizer, **options)


def types_of(dataset: Any) -> dict[str, str]:
    return {name: feature.feature.dtype for name, feature in dataset.features.items() if name not in MEDIA}


@pytest.mark.parametrize("options", [{}, {"max_length": LONG, "overlong": "keep_start"}, {"loss_on": "all"}])
@pytest.mark.parametrize("trainer", CONTRACTS)
def test_rows_are_those_of_the_dataset(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(row_reader, "_ROWS", 7)
    chats = chats_of(qwen, **options)
    gpuload.save_to_disk({"train": chats}, tmp_path / "sft", trainer=trainer)
    store = opened(tmp_path / "sft")["train"]
    assert types_of(store) == CONTRACTS[trainer]
    for found, row in zip(store, (chats[k] for k in range(len(chats))), strict=True):
        assert found["input_ids"] == row["input_ids"]
        if "labels" in found:
            assert found["labels"] == row["labels"]
            assert found["attention_mask"] == [1] * len(row["labels"])
        else:
            assert found["loss_mask"] == [0] + [int(label != -100) for label in row["labels"][1:]]
    about = json.loads((tmp_path / "sft" / "gpuload.json").read_text())
    assert about["options"] == {"trainer": trainer}


@pytest.mark.parametrize("overlong", ["drop", "keep_start", "keep_end"])
def test_pairs_for_llamafactory(qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlong: Any) -> None:
    monkeypatch.setattr(row_reader, "_ROWS", 5)
    pairs = gpuload.load_pairs(pa.Table.from_pylist(PAIRS), qwen, objective="dpo", max_length=LONG, overlong=overlong)
    assert 0 < len(pairs) <= len(PAIRS)
    gpuload.save_to_disk({"train": pairs}, tmp_path / "dpo", trainer="llamafactory")
    store = opened(tmp_path / "dpo")["train"]
    assert types_of(store) == PAIR_CONTRACT
    assert all(store.features[name].dtype == "null" for name in MEDIA)
    assert store.column_names == [*PAIR_CONTRACT, *MEDIA]
    for found, row in zip(store, (pairs[k] for k in range(len(pairs))), strict=True):
        for part in ("chosen", "rejected"):
            ids = row["prompt_ids"] + row[f"{part}_ids"]
            labels = [-100] * len(row["prompt_ids"]) + row[f"{part}_ids"]
            kept = slice(-LONG, None) if overlong == "keep_end" else slice(LONG)
            assert found[f"{part}_input_ids"] == ids[kept]
            assert found[f"{part}_labels"] == labels[kept]
            assert found[f"{part}_attention_mask"] == [1] * len(ids[kept])
        assert [found[name] for name in MEDIA] == [None] * 3


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=8))
def test_loss_masks_begin_with_0(rows: list[list[bool]]) -> None:
    """The first token of each row has no loss, and all others keep theirs, also next to rows without tokens."""
    offsets = offsets_of(np.array([len(row) for row in rows], np.int64))
    loss = Ragged(np.array([flag for row in rows for flag in row], bool), offsets)
    ids = Ragged(np.arange(len(loss.values), dtype=np.int32), offsets)
    (found,) = arrays(["loss_mask"], ids, loss, offsets)
    assert found.to_pylist() == [[0, *map(int, row[1:])] if row else [] for row in rows]
    assert loss.values.tolist() == [flag for row in rows for flag in row]


def test_stores_of_two_trainers_have_different_fingerprints(qwen: Any, tmp_path: Path) -> None:
    """`datasets` caches what is made of a dataset under its fingerprint."""
    chats = chats_of(qwen)
    found, stores = set(), set(CHATS) - {"megatron"}
    for trainer in stores:
        gpuload.save_to_disk({"train": chats}, tmp_path / trainer, trainer=trainer)
        found.add(opened(tmp_path / trainer)["train"]._fingerprint)
    assert len(found) == len(stores)


def test_invalid_arguments(qwen: Any, tmp_path: Path) -> None:
    chats = chats_of(qwen)
    pairs = gpuload.load_pairs(pa.Table.from_pylist(PAIRS), qwen, objective="rm")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (chats, {"trainer": "axolot"}, "trainer='axolot': did you mean axolotl"),
        (chats, {"trainer": "skyrl", "columns": ["source"]}, "columns=.*: skyrl reads no other columns"),
        (chats, {"trainer": "areal", "packing": "bfd"}, "packing='bfd': packs are for TRL; areal packs rows itself"),
        (pairs, {"trainer": "skyrl"}, "trainer='skyrl'; expected one of llamafactory, trl"),
        (pairs, {"trainer": "llamafactory"}, "is for objective='dpo', not 'rm'"),
        (pairs, {"trainer": "llamafactory", "columns": ["source"]}, "llamafactory reads no other columns"),
    ]
    for dataset, options, message in wrong:
        with pytest.raises(OptionError, match=message):
            gpuload.save_to_disk({"train": dataset}, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", core([*CONTRACTS, "trl"], "trl"))
def test_the_command(qwen: Any, qwen_folder: str, tmp_path: Path, trainer: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of()))
    command = ["prepare", str(file), "--tokenizer", qwen_folder, "--export", "sft", str(tmp_path / "out")]
    assert main([*command, "--for", trainer, "--split", f"validation={file}", "--max-length", str(LONG)]) == 0
    chats = gpuload.load_chats(str(file), qwen, max_length=LONG)
    assert 0 < len(chats) < len(rows_of())
    expected = chats.to_arrow(trainer=trainer).read_all().to_pylist()
    store = opened(tmp_path / "out")
    assert list(store["train"]) == list(store["validation"]) == expected


def test_the_command_with_pairs(qwen: Any, qwen_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    command = ["prepare", str(file), "--tokenizer", qwen_folder, "--export", "dpo", str(tmp_path / "out")]
    assert main([*command, "--for", "llamafactory"]) == 0
    pairs = gpuload.load_pairs(str(file), qwen, objective="dpo")
    expected = pairs.to_arrow(trainer="llamafactory").read_all().to_pylist()
    assert list(opened(tmp_path / "out")["train"]) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "sft", "OUT", "x", "--for", "verl"], "--for verl: --export sft is for trl, llamafactory"),
        (["--export", "packed", "OUT", "x", "--for", "axolotl"], "--for axolotl: --export packed is for trl"),
        (["--export", "rm", "OUT", "x", "--for", "llamafactory"], "--for llamafactory: --export rm is for trl"),
        (["--export", "sft", "OUT", "x", "--for", "skyrl", "--columns", "a"], "--columns is for --for trl"),
        (["--for", "skyrl", "x"], "--for is an argument of --export"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, qwen_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "--tokenizer", qwen_folder, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
