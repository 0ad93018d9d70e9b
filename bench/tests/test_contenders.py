"""Tests that contenders run, on a few rows, and agree with each other. Those of verl need its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiers import core, exhaustive

from bench.cpu.chats import chats_table
from bench.cpu.cores import STAGES, cores_table
from bench.cpu.packing import packing_tables
from bench.data import Dataset, chosen_evenly, conversations, first_rows, spread_over, two_sizes
from bench.process import ContenderError, run_contender
from bench.tests.test_headline import ABOUT
from bench.trainers import trl
from bench.verl.epochs import epochs_table
from gpuload.demo_data import demo_files

ROWS = 60


@pytest.fixture
def task(gsm8k: str, qwen_directory: str, tmp_path: Path) -> dict[str, Any]:
    """A task whose limit drops some rows."""
    file = str(first_rows(gsm8k, ROWS, tmp_path / "gsm8k.parquet"))
    return {"files": [file], "rows": ROWS, "tokenizer": qwen_directory, "limit": 90}


@exhaustive
def test_loads_keep_the_same_rows_and_make_the_same_batches(task: dict[str, Any], tmp_path: Path) -> None:
    """Also: imports are made before the clock starts."""
    task |= {"batch": 8, "checked": True}
    loads = (("load_gpuload", 1), ("load_trl", 1), ("load_trl", 2), ("load_rowwise", 1))
    found = [run_contender(name, task | {"processes": n}, tmp_path / f"{name}-{n}") for name, n in loads]
    gpuload, trl, *_ = found
    assert gpuload["rows_read"] == ROWS
    assert 0 < gpuload["rows_kept"] < ROWS
    assert len({run["rows_digest"] for run in found}) == 1
    assert gpuload["tokens_digest"] == trl["tokens_digest"]
    epochs = [run["epochs"]["tensors"] for run in found]
    assert epochs[0]["rows"] == gpuload["rows_kept"]
    assert len({(epoch["rows"], epoch["tokens"], epoch["sum_of_ids"]) for epoch in epochs}) == 1
    assert all(epoch["seconds"] > 0 for epoch in epochs)
    assert gpuload["epochs"]["all columns"]["seconds"] > 0
    assert gpuload["peak_rss"] >= gpuload["baseline_rss"] > 0
    assert trl["versions"]["datasets"]
    assert trl["new_result_caches"] > 0
    assert [run["imported"] for run in found] == [[]] * 4


@pytest.mark.parametrize("generated", core([0, 2500], 0))
def test_packs_are_those_of_trl(task: dict[str, Any], generated: int, tmp_path: Path) -> None:
    """The contender ends with an error where gpuload's packs and TRL's differ."""
    run = run_contender("packing", task | {"generated": generated, "size": 512, "batch": 2}, tmp_path / "packing")
    assert run["rows"] == (generated or ROWS)
    assert len(run["seconds"]) == len(run["fill"]) == 9
    assert run["fill"]["gpuload: trl"] == run["fill"]["TRL: bfd"] <= run["fill"]["gpuload: bfd"] <= 1
    assert "| TRL: bfd_split |" in (text := packing_tables([{"data": "gsm8k"} | run], ABOUT))
    assert ("| gsm8k | TRL |" in text) == (not generated)
    if not generated:
        assert run["epochs"]["gpuload"]["rows"] == run["epochs"]["TRL"]["rows"] == ROWS


@exhaustive
@pytest.mark.parametrize("module", ["chats", "pairs"])
def test_rows_are_prepared_as_by_trl(task: dict[str, Any], module: str, tmp_path: Path) -> None:
    runs = []
    for library in ("gpuload", "TRL"):
        scratch = tmp_path / library
        more = {"library": library, "processes": 1, "most": ROWS, "compared": True, "scratch": str(scratch)}
        runs.append({"data": "gsm8k", "name": library} | run_contender(module, task | more, scratch))
    assert runs[0]["kept"] == runs[1]["kept"] == ROWS
    assert runs[0]["digest"] == runs[1]["digest"] != ""
    assert runs[0]["imported"] == runs[1]["imported"] == []
    assert "| gsm8k | TRL |" in chats_table(runs, ABOUT)


def test_epochs_are_compared_with_verl_with_workers() -> None:
    def epochs(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": each, "process_cpu": 0.1, "workers_cpu": 0.25} for each in seconds]

    runs = [{"data": "gsm8k", "rows": 1000, "epochs": {"verl": epochs(1, 2, 9), "gpuload": epochs(0.5, 0.5, 0.1)}}]
    first, second = epochs_table(runs, ABOUT).splitlines()[2:]
    same = "0.10 (0.10–0.10) | 0.25 (0.25–0.25)"
    assert first == f"| gsm8k | 1,000 | verl | 2.00 (1.00–9.00) | {same} | 1.0× |"
    assert second == f"| gsm8k | 1,000 | gpuload | 0.50 (0.10–0.50) | {same} | 4.0× |"


@exhaustive
def test_stages_by_two_threads(task: dict[str, Any], tmp_path: Path) -> None:
    run = run_contender("cores", task | {"threads": 2, "copies": 3}, tmp_path / "cores")
    assert run["rows"] == 3 * ROWS
    assert set(run["stages"]) == set(STAGES)
    assert all(stage["seconds"] > 0 and stage["cpu"] > 0 for stage in run["stages"].values())
    assert run["load"]["rows"] == ROWS
    assert "| 2 |" in cores_table([run], ABOUT)


def test_a_failure_has_the_output_of_the_process(task: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match=r"load_gpuload failed with exit code 1:[\s\S]*nowhere.parquet"):
        run_contender("load_gpuload", task | {"files": ["nowhere.parquet"]}, tmp_path / "cache")


def test_a_dataset_is_described_without_directories(task: dict[str, Any]) -> None:
    facts = Dataset("gsm8k", tuple(task["files"]), ROWS).facts()
    assert facts["files"] == ["gsm8k.parquet"]
    assert facts["file_bytes"] > 0


@exhaustive
@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_trainers_of_trl_prepare_the_same(qwen_directory: str, trainer: str, tmp_path: Path) -> None:
    rows = conversations([str(first_rows(demo_files()[0], ROWS, tmp_path / "prompts.parquet"))])
    file = trl.write(trainer, rows, tmp_path)
    found = []
    for library in ("gpuload", "TRL"):
        task: dict[str, Any] = {"library": library, "trainer": trainer, "file": str(file), "tokenizer": qwen_directory}
        task |= {"rows": ROWS, "processes": None, "compared": True}
        found.append(run_contender("trl_trainers", task, tmp_path / library))
    assert found[0]["digest"] == found[1]["digest"] != ""
    assert found[0]["kept"] == ROWS
    assert set(found[0]["seconds"]) == set(found[0]["cpu_seconds"]) == set(found[1]["seconds"])
    assert "start" in found[0]["seconds"]


def test_fewer_rows_are_spread_over_all(task: dict[str, Any], tmp_path: Path) -> None:
    dataset = Dataset("gsm8k", (task["files"][0], task["files"][0]), 2 * ROWS)
    some = spread_over(dataset, 20, tmp_path)
    assert (some.rows, some.name, len(some.files)) == (20, "gsm8k", 2)
    assert (
        pq.read_table(some.files[0])["prompt"].to_pylist() == pq.read_table(task["files"][0])["prompt"].to_pylist()[::6]
    )
    assert chosen_evenly("abcdef", 3) == ["a", "c", "e"]
    assert chosen_evenly("ab", 5) == list("ababa")
    assert two_sizes(48_000, 4_000) == (1_000, 4_000)
    assert two_sizes(300, 4_000) == (37, 150)
