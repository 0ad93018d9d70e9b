"""Tests that contenders run, on a few rows, and agree with each other. Those of verl need its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cpu.chats import chats_table
from bench.cpu.cores import STAGES, cores_table
from bench.cpu.packing import packing_tables
from bench.data import Dataset, first_rows
from bench.process import ContenderError, run_contender
from bench.verl.epochs import epochs_table

ROWS = 60


@pytest.fixture
def task(gsm8k: str, qwen_directory: str, tmp_path: Path) -> dict[str, Any]:
    """A task whose limit drops some rows."""
    file = str(first_rows(gsm8k, ROWS, tmp_path / "gsm8k.parquet"))
    about = {"kept": str(tmp_path / "kept.npy"), "batch": 8, "seconds": 0.05}
    return about | {"files": [file], "rows": ROWS, "tokenizer": qwen_directory, "limit": 90}


def test_loads_keep_the_same_rows(task: dict[str, Any], tmp_path: Path) -> None:
    modules = ("load_gpuload", "load_trl", "load_rowwise")
    gpuload, trl, baseline = (run_contender(module, task, tmp_path / module) for module in modules)
    assert gpuload["rows_read"] == ROWS
    assert 0 < gpuload["rows_kept"] < ROWS
    assert gpuload["rows_digest"] == trl["rows_digest"] == baseline["rows_digest"]
    assert gpuload["tokens_digest"] == trl["tokens_digest"]
    assert gpuload["peak_rss"] >= gpuload["baseline_rss"] > 0
    assert trl["versions"]["datasets"]
    assert trl["new_result_caches"] > 0


def test_batches_are_drawn_from_the_kept_rows(task: dict[str, Any], tmp_path: Path) -> None:
    drawn = [run_contender(module, task, tmp_path / module) for module in ("batches_gpuload", "batches_rowwise")]
    rates = drawn[0]["rates"] | drawn[1]["rates"]
    assert len(rates) == 6
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize("generated", [0, 2500])
def test_packs_are_those_of_trl(task: dict[str, Any], generated: int, tmp_path: Path) -> None:
    """The contender ends with an error where gpuload's packs and TRL's differ."""
    run = run_contender("packing", task | {"generated": generated, "size": 512, "batch": 2}, tmp_path / "packing")
    assert run["rows"] == (generated or ROWS)
    assert len(run["seconds"]) == len(run["fill"]) == 9
    assert run["fill"]["gpuload: trl"] == run["fill"]["TRL: bfd"] <= run["fill"]["gpuload: bfd"] <= 1
    about = {"about": {}, "runs": [{"data": "gsm8k"} | run]}
    assert "| gsm8k | TRL |" in packing_tables(about)


@pytest.mark.parametrize("module", ["chats", "pairs"])
def test_rows_are_prepared_as_by_trl(task: dict[str, Any], module: str, tmp_path: Path) -> None:
    runs = []
    for library in ("gpuload", "TRL"):
        scratch = tmp_path / library
        more = {"library": library, "processes": 1, "most": ROWS, "compared": ROWS, "scratch": str(scratch)}
        runs.append({"data": "gsm8k", "name": library} | run_contender(module, task | more, scratch))
    assert runs[0]["kept"] == runs[1]["kept"] == ROWS
    assert runs[0]["digest"] == runs[1]["digest"]
    assert "| gsm8k | TRL |" in chats_table({"about": {}, "runs": runs})


def test_stages_are_compared_with_the_libraries(task: dict[str, Any], tmp_path: Path) -> None:
    answer = run_contender("stages", task, tmp_path / "stages")
    assert answer["rows"] == ROWS
    assert len(answer["seconds"]) == 5


def test_epochs_are_compared_with_verl_with_workers() -> None:
    def epochs(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": each, "process_cpu": 0.1, "workers_cpu": 0.25} for each in seconds]

    runs = [{"data": "gsm8k", "rows": 1000, "epochs": {"verl": epochs(1, 2, 9), "gpuload": epochs(0.5, 0.5, 0.1)}}]
    first, second = epochs_table({"runs": runs}).splitlines()[2:]
    assert first == "| gsm8k | 1,000 | verl | 500 | 1.0× | 2.00 | 0.10 | 0.25 |"
    assert second == "| gsm8k | 1,000 | gpuload | 2,000 | 4.0× | 0.50 | 0.10 | 0.25 |"


def test_stages_by_two_threads(task: dict[str, Any], tmp_path: Path) -> None:
    run = run_contender("cores", task | {"threads": 2, "copies": 3}, tmp_path / "cores")
    assert run["rows"] == 3 * ROWS
    assert set(run["stages"]) == set(STAGES)
    assert all(stage["seconds"] > 0 and stage["cpu"] > 0 for stage in run["stages"].values())
    assert run["load"]["rows"] == ROWS
    assert "| 2 |" in cores_table({"runs": [run]})


def test_a_failure_has_the_output_of_the_process(task: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match=r"load_gpuload failed with exit code 1:[\s\S]*nowhere.parquet"):
        run_contender("load_gpuload", task | {"files": ["nowhere.parquet"]}, tmp_path / "cache")


def test_a_dataset_is_described_without_directories(task: dict[str, Any]) -> None:
    facts = Dataset("gsm8k", tuple(task["files"]), ROWS).facts()
    assert facts["files"] == ["gsm8k.parquet"]
    assert facts["file_bytes"] > 0
