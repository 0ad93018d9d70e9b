"""Tests of the CPU benchmarks' tables, above all of those that the project's README and documentation have."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT, documents
from bench.__main__ import main, parse
from bench.cpu.headline import EPOCHS, RECORD, cells, headline_page, headline_table, outcome, plot
from bench.cpu.load import (
    BASELINE,
    BATCH,
    CACHED,
    COLD,
    IN_VERL,
    INSIDE,
    OURS,
    OUTSIDE,
    TRL_1,
    TRL_2,
    VERL_1,
    VERL_2,
    contenders,
    load_tables,
    measure_load,
)
from bench.cpu.page import page
from bench.data import Dataset, Plan, first_rows
from bench.process import ContenderError
from bench.report import embed, embedded

ABOUT: dict[str, Any] = {
    "date": "2026-11-22 00:00 UTC", "cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux x86_64",
    "load_average": 0.5, "commit": "abc", "command": "python -m bench --only headline", "tokenizer": "qwen", "limit": 8,
    "repeats": 5, "quick": False, "datasets": {"joint": {"about": "", "files": ["a", "b"], "rows": 10_000}},
}  # fmt: skip
# Contender → seconds of the fixed part, rows/s after it, seconds of the cached start, and of each kind of epoch.
COSTS: dict[str, tuple[float, float, float | None, dict[str, float]]] = {
    OURS: (1.0, 10_000, 0.5, {"tensors": 0.25, "all columns": 0.75}),
    TRL_1: (1.0, 1_000, 1.5, {"tensors": 8.0}),
    TRL_2: (1.0, 2_000, 1.5, {"tensors": 4.0}),
    BASELINE: (0.0, 500, None, {"tensors": 40.0}),
    IN_VERL: (1.5, 20_000, 1.0, {"0 workers": 0.5}),
    VERL_1: (2.0, 100, None, {}),
    VERL_2: (2.0, 200, 2.5, {"0 workers": 3.0, "2 workers": 2.0}),
}


def record() -> dict[str, Any]:
    """A record of five repeats: one is twice as fast, another half as fast, and the medians are those of `COSTS`."""
    runs = []
    for repeat, factor in enumerate((1.0, 2.0, 0.5, 1.0, 1.0)):
        for name, (fixed, rate, cached, drawn) in COSTS.items():
            few = name in (BASELINE, VERL_1)
            for rows in (1_000, 4_000) if few else (4_000, 10_000) if name == OURS else (10_000,):
                cold: dict[str, Any] = {
                    "temperature": COLD,
                    "rows": rows,
                    "seconds": factor * (fixed + rows / rate),
                    "epochs": {},
                }
                if few:
                    cold["epochs"] = {kind: {"seconds": factor * s * rows / 10_000} for kind, s in drawn.items()}
                    if repeat >= 3:
                        continue
                if name == OURS:
                    cold |= {
                        "text_bytes": 3_000_000,
                        "token_bytes": 1_000_000,
                        "baseline_rss": 0,
                        "peak_rss": 8_000_000,
                    }
                found = [cold]
                if cached and rows == 10_000:
                    of_kinds = {kind: {"seconds": factor * s} for kind, s in drawn.items()}
                    found.append({"temperature": CACHED, "rows": rows, "seconds": factor * cached, "epochs": of_kinds})
                about = {"data": "joint", "contender": name, "repeat": repeat, "versions": {"numpy": "2"}}
                runs += [about | {"rows_kept": 900, "new_result_caches": 0, "imported": []} | run for run in found]
    return {"about": ABOUT, "load": runs}


def test_headline_table_has_seconds_of_all_contenders() -> None:
    line = "by the line through 1,000 and 4,000 rows"
    assert headline_table(record()).splitlines()[:9] == [
        "| 10,000 prompts | start, cold | start, cached | an epoch's batches |",
        "| --- | ---: | ---: | ---: |",
        "| **gpuload** | **2.00 (1.00–4.00) s** | **0.50 (0.25–1.00) s** | **0.25 (0.12–0.50) s** |",
        f"| {TRL_2} | 6.00 (3.00–12.0) s | 1.50 (0.75–3.00) s | 4.00 (2.00–8.00) s |",
        f"| {TRL_1} | 11.0 (5.50–22.0) s | 1.50 (0.75–3.00) s | 8.00 (4.00–16.0) s |",
        f"| row by row (3 runs, {line}) | 20.0 (10.0–40.0) s | 20.0 (10.0–40.0) s | 40.0 (20.0–80.0) s |",
        "| gpuload inside verl 0.9.1 | 2.00 (1.00–4.00) s | 1.00 (0.50–2.00) s | 0.50 (0.25–1.00) s |",
        f"| {VERL_2} | 52.0 (26.0–104) s | 2.50 (1.25–5.00) s | 2.00 (1.00–4.00) s |",
        f"| {VERL_1} (3 runs, {line}) | 102 (51.0–204) s | – | 3.00 (1.50–6.00) s |",
    ]
    caption = headline_table(record()).splitlines()[-1]
    assert "Medians of 5 runs (minimum–maximum)." in caption
    assert "2 cores of a CPU, load average at the start 0.5, 2026-11-22 00:00 UTC, commit abc." in caption
    assert "adds 8 MB to the memory of the process at its peak, 2.0 times text and tokens." in caption


def test_tables_of_a_busy_machine_say_so() -> None:
    busy = record() | {"about": ABOUT | {"load_average": 1.01}}
    mark = "| **busy machine: load average 1.01 on 2 cores**"
    assert headline_table(busy).startswith(f"{mark} 10,000 prompts |")
    assert load_tables(busy["load"], busy["about"]).count(f"\n{mark} |") == 2


def test_imports_that_were_counted_are_named() -> None:
    counted, unknown = record(), record()
    counted["load"][0]["imported"] = ["pandas", "pandas.core"]
    del unknown["load"][0]["imported"]
    assert headline_table(counted).endswith("Imported while the clocks ran: pandas, pandas.core.")
    assert "Seconds may contain imports" in headline_table(unknown)
    assert "import" not in headline_table(record()).replace("after imports", "")


def test_starts_have_fixed_part_and_rate() -> None:
    text = load_tables(record()["load"], ABOUT)
    assert "| cold | gpuload | 4,000 | 1.40 (0.70–2.80) | 10,000 | 2.00 (1.00–4.00) | 1.00 (0.50–2.00) |" in text
    fitted = "| 2.00 (1.00–4.00) | 100 (50.0–200) | 102 (51.0–204), by the line | **51.0×** |"
    assert f"| cold, inside verl | {VERL_1} | 1,000 | 12.0 (6.00–24.0) | 4,000 | 42.0 (21.0–84.0) {fitted}" in text
    assert (
        f"| epoch | {TRL_2}: tensors | 10,000 | 4.00 (2.00–8.00) |  |  |  |  | 4.00 (2.00–8.00) | **16.0×** |" in text
    )


def test_the_headline_has_every_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cpu.load.VERL_PYTHON", Path(__file__))
    names = {contender.name for contender in contenders()}
    assert names == set(OUTSIDE + INSIDE) == set(EPOCHS) == set(COSTS)


def test_embed_replaces_what_is_between_the_markers() -> None:
    empty = "before\n<!-- some:begin -->\n<!-- some:end -->\nafter\n"
    filled = embed(empty, "some", "a table\n\nand \\1 caption")
    assert filled == "before\n<!-- some:begin -->\na table\n\nand \\1 caption\n<!-- some:end -->\nafter\n"
    assert embedded(filled, "some") == ["a table\n\nand \\1 caption"]
    assert embed(filled, "some", "new") == embed(empty, "some", "new")
    assert embed("no markers", "some", "new") == "no markers"
    assert embed(filled, "other", "new") == filled


# Documents with markers for a table; others of `documents.TABLES` wait for a record.
MARKED = [table for table in documents.TABLES if f"<!-- {table.name}:begin -->" in (ROOT / table.page).read_text()]


@pytest.mark.parametrize("table", MARKED, ids=lambda table: table.name)
def test_documents_have_the_tables_of_the_records(table: documents.Embedded) -> None:
    assert embedded((ROOT / table.page).read_text(), table.name) == [table.rendered()]


def test_all_markers_of_documents_are_known() -> None:
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    begun = sum(file.read_text().count(":begin -->") for file in found)
    assert begun == sum(file.read_text().count(":end -->") for file in found) == len(MARKED) >= 5


# Records of trainers and of stores on disk have no page: their tables are in docs/trainers and docs/caching.md.
_WITHOUT_PAGE = ("trainers", "scale")
RECORDS = [
    file for file in sorted((ROOT / "bench" / "results").glob("*/*.json")) if file.parent.name not in _WITHOUT_PAGE
]


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.parent.name)
def test_result_pages_are_rendered_from_their_records(file: Path) -> None:
    assert (file.parent / "README.md").read_text() == page(json.loads(file.read_text()), file.name)


def test_the_headline_page_is_rendered_from_its_record() -> None:
    assert RECORD.with_name("README.md").read_text() == headline_page(json.loads(RECORD.read_text()))


def test_headline_page_is_rendered_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "headline.json").write_text(json.dumps(record()))
    readme = (ROOT / "README.md").read_text()
    assert main(["--only", "tables", "--name", "headline", "--output", str(tmp_path)]) == 0
    assert headline_table(record()) in capsys.readouterr().out
    text = (tmp_path / "README.md").read_text()
    assert "![seconds](headline.svg)" in text
    assert headline_table(record()) in text
    assert text.count("a CPU, 2 cores, 8.0 GiB") == 1  # one machine and one run for the whole page
    assert (ROOT / "README.md").read_text() == readme


def test_plot_shows_every_contender(tmp_path: Path) -> None:
    plot(record(), tmp_path / "plot.svg")
    first = (tmp_path / "plot.svg").read_text()
    assert all(name.replace("`", "") in first.replace("`", "") for name in COSTS)
    assert first.count("not measured") == 1
    assert all(title in first for title in ("start, cold", "start, cached", "an epoch's batches"))
    plot(record(), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == first
    plot(record(), tmp_path / "dark.svg", dark=True)
    assert (tmp_path / "dark.svg").read_text() != first
    assert "#1d1f23" not in (tmp_path / "dark.svg").read_text()


def test_the_first_sentence_has_the_seconds_of_the_record() -> None:
    text, found = outcome(json.loads(RECORD.read_text())), cells(json.loads(RECORD.read_text()))
    ours, verl = (statistics.median(found[name][0]) for name in (IN_VERL, VERL_2))
    assert f"in {ours:.1f} seconds instead of {verl:.0f}:" in text
    assert text in (ROOT / "README.md").read_text()


def test_contenders_must_keep_the_same_rows(gsm8k: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(module: str, *rest: Any) -> dict[str, Any]:
        return {"seconds": 1.0, "rows_kept": 9, "rows_digest": module, "epochs": {}}

    monkeypatch.setattr("bench.cpu.load.run_contender", run)
    file = first_rows(gsm8k, 16, tmp_path / "some.parquet")
    plan = Plan((Dataset("joint", (str(file),), 16),), "", 8, 1, tmp_path)
    with pytest.raises(ContenderError, match="joint: rows_digest differs: gpuload has load_gpuload"):
        measure_load(plan)


def test_repeats_and_sizes_of_contenders(gsm8k: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks: list[tuple[str, int, int]] = []

    def run(module: str, task: dict[str, Any], *rest: Any) -> dict[str, Any]:
        tasks.append((module, task["rows"], task["batch"]))
        return {"seconds": 1.0, "rows_kept": task["rows"], "epochs": {}}

    monkeypatch.setattr("bench.cpu.load.run_contender", run)
    file = first_rows(gsm8k, 64, tmp_path / "some.parquet")
    runs = measure_load(Plan((Dataset("joint", (str(file),), 64),), "", 8, 5, tmp_path))
    assert len(runs) == len(tasks)
    assert [tasks.count(("load_rowwise", rows, BATCH)) for rows in (8, 32, 64)] == [5, 5, 0]
    whole = ((32, BATCH), (64, 0), (64, BATCH))
    assert [tasks.count(("load_gpuload", rows, batch)) for rows, batch in whole] == [5] * 3
    assert [tasks.count(("load_trl", rows, batch)) for rows, batch in whole] == [2 * 5] * 3


def test_recorded_command_names_no_directories() -> None:
    assert parse(["--quick", "--data", "/some/where/prompts"]).command == "python -m bench --quick --data prompts"
    assert parse([]).repeats >= 5
    with pytest.raises(SystemExit, match="2"):
        parse(["--only", "loadz"])
