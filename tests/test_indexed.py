"""Exports for Megatron-core: the bytes of its indexed datasets. trainers/test_megatron.py has its own reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gpuload
from gpuload.cli.main import main
from gpuload.core.errors import DataError
from gpuload.dataset.indexed import write_rows
from gpuload.packing import pack

pytest.importorskip("datasets", reason="exports need it")

LONG = 48
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "question " * (row % 7 + 1)},
            {"role": "assistant", "content": "answer " * (row * 5 % 11)},
        ]
    }
    for row in range(23)
]


def sequences(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """The sequences of an indexed dataset, and the first sequence of each document and their number."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    header, version, code, count, bounds = struct.unpack_from("<9sQBQQ", index)
    assert header == b"MMIDIDX\0\0"
    assert version == 1
    kind = {1: "u1", 4: "<i4"}[code]
    assert len(index) == 34 + 12 * count + 8 * bounds
    lengths = np.frombuffer(index, "<i4", count, 34)
    begins = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    values = prefix.with_name(prefix.name + ".bin").read_bytes()
    found = [np.frombuffer(values, kind, n, at).tolist() for n, at in zip(lengths, begins, strict=True)]
    return found, np.frombuffer(index, "<i8", bounds, 34 + 12 * count).tolist()


def masked(chats: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and loss of each row; no first token has loss."""
    ids = [row["input_ids"] for row in chats]
    return ids, [[0, *(int(label != -100) for label in row["labels"][1:])] for row in chats]


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix != ".json"}


@pytest.mark.parametrize("packing", [None, "bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("overlong", ["drop", "keep_start", "keep_end"])
def test_files(qwen: Any, tmp_path: Path, packing: Any, overlong: Any) -> None:
    chats = gpuload.load_chats(pa.Table.from_pylist(ROWS), qwen, max_length=LONG, overlong=overlong)
    options = {"packing": packing, "pack_length": LONG - 5} if packing else {}
    for name in ("one", "two"):
        gpuload.save_to_disk({"train": chats}, tmp_path / name, trainer="megatron", **options)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    train = tmp_path / "one" / "train"
    ids, loss = masked(chats)
    each = list(range(len(ids) + 1))
    assert sequences(train) == (ids, each)
    assert sequences(train.with_name("train-loss-mask")) == (loss, each)
    assert train.with_name("train.bin").stat().st_size == 4 * sum(map(len, ids))
    about = json.loads((tmp_path / "one" / "gpuload.json").read_text())["splits"]["train"]
    assert about["rows"] == len(ids) > 0
    packs = train.with_name("train-packs")
    if not packing:
        assert not packs.with_name("train-packs.idx").exists()
        return
    plan = pack([len(row) for row in ids], LONG - 5, packing)
    pieces = list(zip(plan.rows.tolist(), plan.first.tolist(), plan.lengths.tolist(), strict=True))
    assert sequences(packs) == ([ids[row][at : at + n] for row, at, n in pieces], plan.offsets.tolist())
    masks = packs.with_name("train-packs-loss-mask")
    assert sequences(masks) == ([loss[row][at : at + n] for row, at, n in pieces], plan.offsets.tolist())
    assert packs.with_name("train-packs.bin").is_symlink()
    assert (about["packs"], about["pack_length"]) == (len(plan), LONG - 5)


def test_splits_without_tokens(tmp_path: Path) -> None:
    """Megatron-core cannot map an empty file."""
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    for rows in ([], [{"input_ids": [], "loss_mask": []}]):
        reader = pa.Table.from_pylist(rows, schema).to_reader()
        with pytest.raises(DataError, match="split 'train' has no tokens.*leave it out"):
            write_rows(reader, tmp_path / "train", lambda _: None)


@pytest.mark.parametrize("kind", ["sft", "packed"])
def test_the_command(qwen: Any, qwen_folder: str, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["prepare", str(file), "--tokenizer", qwen_folder, "--export", kind, str(tmp_path / "out")]
    assert main([*command, "--for", "megatron", "--max-length", str(LONG)]) == 0
    chats = gpuload.load_chats(str(file), qwen, max_length=LONG)
    assert sequences(tmp_path / "out" / "train")[0] == masked(chats)[0]
    assert (tmp_path / "out" / "train-packs.idx").exists() == (kind == "packed")
