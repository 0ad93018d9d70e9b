"""The integration with TRL: what is made of a dataset in files is a file, which the next start maps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

datasets = pytest.importorskip("datasets", reason="TRL's data are of this package")
trl = pytest.importorskip("trl", reason="TRL is the reference of these tests")
from tiers import exhaustive  # noqa: E402
from tokenizer_cases import small_tokenizer  # noqa: E402
from trl_cases import LABELED, MESSAGES, PAIRS, equal, prepared  # noqa: E402

from gpuload.integrations import trl as ours  # noqa: E402
from gpuload.integrations.trl import steps  # noqa: E402
from gpuload.pipeline.run import load_given  # noqa: E402

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN3 = (TEMPLATES / "qwen3_training.jinja").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(QWEN3)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each load gets."""
    found: list[int] = []

    def counted(kind: Any, table: Any, *given: Any) -> Any:
        found.append(len(table))
        return load_given(kind, table, *given)

    monkeypatch.setattr(steps, "load_given", counted)
    return found


def in_file(rows: list[dict[str, Any]], folder: Path) -> Any:
    """A dataset of rows in the cache of `datasets`, as `load_dataset` makes it."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.parquet").exists():  # a dataset is named after the time of its file
        pq.write_table(datasets.Dataset.from_list(rows).data.table, folder / "rows.parquet")
    return datasets.Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "cache"))


def written(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("cache-gpuload-*.arrow"))


def sft_data(dataset: Any, tokenizer: Any, kind: Any = ours, packing: bool = False, **settings: Any) -> Any:
    return prepared(kind.SFTTrainer, trl.SFTConfig, dataset, tokenizer, packing, None, **settings)


def test_the_second_start_maps_the_file_of_the_first(tokenizer: Any, tmp_path: Path, loads: list[int]) -> None:
    first, second = (sft_data(in_file(MESSAGES, tmp_path), tokenizer, max_length=40) for _ in range(2))
    assert loads == [len(MESSAGES)]
    (file,) = written(tmp_path)
    for found in (first, second):
        equal(found, sft_data(MESSAGES, tokenizer, trl, max_length=40))
        assert [each["filename"] for each in found.cache_files] == [str(file)]
    assert first._fingerprint == second._fingerprint
    in_file(MESSAGES, tmp_path).cleanup_cache_files()
    assert not written(tmp_path)


def test_another_setting_is_another_file(tokenizer: Any, tmp_path: Path, loads: list[int]) -> None:
    other = small_tokenizer((TEMPLATES / "qwen2_5_training.jinja").read_text())
    changes: list[dict[str, Any]] = [
        {},
        {"max_length": 40},
        {"max_length": 40, "truncation_mode": "keep_end"},
        {"assistant_only_loss": True, "trainer_chat_template": QWEN3},
        {"max_length": 40, "packing": True},
    ]
    for settings in changes:
        found = sft_data(in_file(MESSAGES, tmp_path), tokenizer, **settings)
        equal(found, sft_data(MESSAGES, tokenizer, trl, **settings))
    equal(sft_data(in_file(MESSAGES, tmp_path), other), sft_data(MESSAGES, other, trl))
    shuffled: dict[str, Any] = {"shuffle_dataset": True, "seed": 3}  # the rows of the first one, in another order
    equal(sft_data(in_file(MESSAGES, tmp_path), tokenizer, **shuffled), sft_data(MESSAGES, tokenizer, trl, **shuffled))
    assert len(written(tmp_path)) == len(loads) == len(changes) + 1
    rows = [*MESSAGES[1:], MESSAGES[0]]
    equal(sft_data(in_file(rows, tmp_path / "rows"), tokenizer), sft_data(rows, tokenizer, trl))


@pytest.mark.parametrize(("name", "rows"), [("DPOTrainer", PAIRS), ("RewardTrainer", PAIRS), ("KTOTrainer", LABELED)])
def test_other_trainers(tokenizer: Any, tmp_path: Path, name: str, rows: Any) -> None:
    config = getattr(trl, name.replace("Trainer", "Config"))
    settings = {"max_length": 90, "per_device_train_batch_size": 4}
    for _ in range(2):
        found = prepared(getattr(ours, name), config, in_file(rows, tmp_path), tokenizer, **settings)
        equal(found, prepared(getattr(trl, name), config, rows, tokenizer, **settings))
    assert len(written(tmp_path)) == 1
    if name == "KTOTrainer":  # each row has the completion of another one of its batch
        settings["per_device_train_batch_size"] = 7
        found = prepared(ours.KTOTrainer, config, in_file(rows, tmp_path), tokenizer, **settings)
        equal(found, prepared(trl.KTOTrainer, config, rows, tokenizer, **settings))


@pytest.mark.parametrize("damage", [b"", b"no table", None])
def test_a_damaged_file_is_made_again(tokenizer: Any, tmp_path: Path, loads: list[int], damage: bytes | None) -> None:
    sft_data(in_file(MESSAGES, tmp_path), tokenizer)
    (file,) = written(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage is None else damage)
    equal(sft_data(in_file(MESSAGES, tmp_path), tokenizer), sft_data(MESSAGES, tokenizer, trl))
    assert len(loads) == 2
    assert file.read_bytes() == content


def test_rows_stay_in_memory_where_no_file_can_be(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sft_data(MESSAGES, tokenizer, trl)
    datasets.disable_caching()
    try:
        equal(sft_data(in_file(MESSAGES, tmp_path), tokenizer), expected)
    finally:
        datasets.enable_caching()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    equal(sft_data(in_file(MESSAGES, tmp_path), tokenizer), expected)
    assert "the train dataset is in memory" in caplog.text
    assert "No space left on device" in caplog.text
    assert not written(tmp_path)
    assert not list((tmp_path / "cache").rglob("tmp*.arrow"))


@exhaustive
def test_two_processes_share_one_file(tmp_path: Path) -> None:
    """Reference log probabilities are found by the second rank in the file that the first one has written."""
    in_file(PAIRS, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank}: equal, {len(PAIRS)} rows" for rank in range(2)]
    assert len(written(tmp_path)) == 1


def one_rank(folder: Path) -> None:
    """What each process of the test above runs."""
    import torch
    from test_trl_training import trained

    settings: dict[str, Any] = {"ddp_backend": "gloo", "precompute_ref_log_probs": True}
    found, losses = trained(ours, "DPOTrainer", in_file(PAIRS, folder), folder, **settings)
    expected, theirs = trained(trl, "DPOTrainer", in_file(PAIRS, folder), folder, **settings)
    same = losses == theirs and list(found) == list(expected) and len(found.cache_files) == 2
    told = "equal" if same else f"{losses}, not {theirs}, {found.cache_files}"
    os.write(1, f"rank {torch.distributed.get_rank()}: {told}, {len(found)} rows\n".encode())


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
