"""Tests of the CPU benchmarks' tables, above all of those that the project's README has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT
from bench.__main__ import main, parse
from bench.cpu.headline import BEGIN, END, METHODS, README, RECORD, embed, embedded, headline_page, headline_table, plot
from bench.cpu.load import BASELINE, IN_VERL, OURS, TRL, VERL_1, VERL_2, measure_load
from bench.cpu.page import page
from bench.data import Dataset, Plan
from bench.process import ContenderError

ABOUT: dict[str, Any] = {
    "date": "2026-11-22 00:00 UTC", "cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux x86_64",
    "load_average": 0.0, "commit": "abc", "command": "python -m bench --only headline", "tokenizer": "qwen", "limit": 8,
    "repeats": 3, "quick": False, "datasets": {"joint": {"about": "", "files": ["a", "b"], "rows": 1000}},
}  # fmt: skip
SECONDS = {OURS: 0.1, TRL: 1.0, BASELINE: 10.0, IN_VERL: 0.2, VERL_1: 4.0, VERL_2: 2.0}


def record() -> dict[str, Any]:
    """A record of three repeats; the second one is ten times as slow, and the medians are those of `SECONDS`."""
    loads, batches = [], []
    for slower in (1, 10, 1):
        for temperature, factor in (("cold", 1.0), ("warm", 0.5)):
            for name, seconds in SECONDS.items():
                run: dict[str, Any] = {
                    "data": "joint",
                    "contender": name,
                    "temperature": temperature,
                    "versions": {"numpy": "2"},
                }
                run |= {"seconds": seconds * factor * slower, "rows_kept": 900, "new_result_caches": 0}
                if name == OURS:
                    run |= {"text_bytes": 3_000_000, "token_bytes": 1_000_000, "baseline_rss": 0, "peak_rss": 8_000_000}
                loads.append(run)
        rates = {
            "gpuload: tensors only": 25600.0,
            "gpuload: `PromptLoader`, all columns and `raw_prompt`": 12800.0,
            "gpuload inside verl 0.9.1: `__getitems__`, no tokens": 6400.0,
            "verl 0.9.1: `__getitem__`, no tokens": 2560.0,
            "baseline, row by row: `__getitem__`": 256.0,
        }
        rates = {name: rate / slower for name, rate in rates.items()}
        batches.append({"data": "joint", "batch": 256, "rates": rates, "versions": {"numpy": "2"}})
    return {"load": {"about": ABOUT, "runs": loads}, "batches": {"about": ABOUT, "runs": batches}}


def test_headline_table_has_medians_of_all_contenders() -> None:
    assert headline_table(record()) == (
        "| 1,000 prompts | load + filter, cold | load + filter, warm | batches of 256 × 8, tensors "
        "| batches of 256 × 8, all columns |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| **gpuload** | **10,000 rows/s (0.10 s)** | **20,000 rows/s (0.05 s)** | **100.0 /s** | **50.0 /s** |\n"
        "| gpuload inside verl 0.9.1 | 5,000 rows/s (0.20 s) | 10,000 rows/s (0.10 s) |  | 25.0 /s |\n"
        "| verl 0.9.1, 2 workers | 500 rows/s (2.00 s) | 1,000 rows/s (1.00 s) |  | 10.0 /s |\n"
        "| verl 0.9.1, 1 worker | 250 rows/s (4.00 s) | 500 rows/s (2.00 s) |  |  |\n"
        "| TRL-style batched `map` | 1,000 rows/s (1.00 s) | 2,000 rows/s (0.50 s) |  |  |\n"
        "| baseline, row by row | 100 rows/s (10.00 s) | 200 rows/s (5.00 s) |  | 1.0 /s |\n\n"
        "Medians of 3 runs, all in one session (`python -m bench --only headline`), each keeping the same 900 rows. "
        "3 MB of text in 2 files, tokenizer qwen, limit 8 tokens; 2 cores of a CPU, 2026-11-22 00:00 UTC, commit abc. "
        "gpuload's cold load adds 8 MB to the memory of the process at its peak, 2.0 times text + tokens. "
        "Batches inside verl have messages and columns but no tokens."
    )


def test_headline_methods_are_those_of_the_contenders() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "bench" / "contenders").glob("batches_*.py"))
    labels = [label for labels in METHODS.values() for label in labels if label]
    assert len(labels) == 5
    assert all(f'"{label}": rate(' in sources for label in labels)


def test_embed_replaces_what_is_between_the_markers() -> None:
    empty = f"before\n{BEGIN}\n{END}\nafter\n"
    filled = embed(empty, "a table\n\nand \\1 caption")
    assert filled == f"before\n{BEGIN}\na table\n\nand \\1 caption\n{END}\nafter\n"
    assert embedded(filled) == ["a table\n\nand \\1 caption"]
    assert embed(filled, "new") == embed(empty, "new")
    assert embed("no markers", "new") == "no markers"


def test_readme_has_the_table_of_the_record() -> None:
    """Each marked part of README.md is what the record renders; the record exists if there is a marked part."""
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == len(embedded(text))
    for table in embedded(text):
        assert table == headline_table(json.loads(RECORD.read_text()))
    if RECORD.exists():
        assert RECORD.with_name("README.md").read_text() == headline_page(json.loads(RECORD.read_text()))


# Records of trainers and of stores on disk have no page: their tables are in docs/trainers and docs/caching.md.
_WITHOUT_PAGE = ("trainers", "scale")
RECORDS = [
    file for file in sorted((ROOT / "bench" / "results").glob("*/*.json")) if file.parent.name not in _WITHOUT_PAGE
]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.parent.name)
def test_result_pages_are_rendered_from_their_records(file: Path) -> None:
    assert (file.parent / "README.md").read_text() == page(json.loads(file.read_text()), file.name)


def test_headline_page_is_rendered_from_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "headline.json").write_text(json.dumps(record()))
    before = README.read_text()
    assert main(["--only", "tables", "--name", "headline", "--output", str(tmp_path)]) == 0
    assert headline_table(record()) in capsys.readouterr().out
    text = (tmp_path / "README.md").read_text()
    assert "![rows per second](headline.svg)" in text
    assert headline_table(record()) in text
    assert "| joint | 1,000 | 900 | 10,000 (30.0) |" in text
    assert "**10.0×** TRL-style batched `map`" in text
    assert README.read_text() == before


def test_plot_shows_every_contender(tmp_path: Path) -> None:
    plot(record()["load"], tmp_path / "plot.svg")
    first = (tmp_path / "plot.svg").read_text()
    assert all(name.replace("`", "") in first.replace("`", "") for name in SECONDS)
    plot(record()["load"], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == first


def test_contenders_must_keep_the_same_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(module: str, *rest: Any) -> dict[str, Any]:
        return {"seconds": 1.0, "rows_kept": 9, "rows_digest": module}

    monkeypatch.setattr("bench.cpu.load.run_contender", run)
    plan = Plan((Dataset("joint", (), 10),), "", 8, 1, 1.0, tmp_path)
    with pytest.raises(ContenderError, match="joint: rows_digest differs: gpuload has load_gpuload"):
        measure_load(plan)


def test_recorded_command_names_no_directories() -> None:
    assert parse(["--quick", "--data", "/some/where/prompts"]).command == "python -m bench --quick --data prompts"
    with pytest.raises(SystemExit, match="2"):
        parse(["--only", "loadz"])
