"""Tests of lines through two sizes, and of the tables of trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.fit import Line, fitted_table, lines_of, number, runs_of, spread
from bench.process import ContenderError
from bench.tests.test_headline import ABOUT
from bench.trainers import common


def test_a_line_is_that_of_each_run() -> None:
    first, second = lines_of({100: [3.0, 2.0], 500: [7.0, 10.0]})
    assert first == Line(2.0, 0.01)
    assert second == Line(0.0, 0.02)
    assert first.at(10_000) == 102.0
    assert lines_of({100: [3.0, 2.0]}) == []


def test_spread_names_median_and_extremes() -> None:
    assert spread([1.0]) == "1.00"
    assert spread([30.0, 1.0, 2.0]) == "2.00 (1.00–30.0)"
    assert runs_of(1) == "One run."
    assert runs_of(2) == "Means of 2 runs (minimum–maximum)."
    assert runs_of(5) == "Medians of 5 runs (minimum–maximum)."
    assert [number(value) for value in (0.0012, 0.12, 1.2, 12.34, 1234.5)] == ["0.001", "0.12", "1.20", "12.3", "1,234"]


def test_the_ratio_is_that_at_the_named_size() -> None:
    """With 2,000 rows, the trainer's rate is 500 rows/s; after its fixed part it is 1,000."""
    trainer = {1_000: [3.0], 2_000: [4.0]}
    found = {"SFT": {"gpuload": {2_000: [1.2], 10_000: [2.0]}, "gpuload, again": {10_000: [1.0]}, "trainer": trainer}}
    lines = fitted_table(found, 10_000, ABOUT).splitlines()
    assert lines[0].endswith(
        "| rows | seconds | rows | seconds | fixed part, s | rows/s after it | 10,000 rows, s | times gpuload's |"
    )
    assert lines[2:] == [
        "| SFT | gpuload | 2,000 | 1.20 | 10,000 | 2.00 | 1.00 | 10,000 | 2.00 |  |",
        "| SFT | gpuload, again | 10,000 | 1.00 |  |  |  |  | 1.00 |  |",
        "| SFT | trainer | 1,000 | 3.00 | 2,000 | 4.00 | 2.00 | 1,000 | 12.0, by the line | **6.0×** and **12.0×** |",
    ]


def test_one_size_says_nothing_about_others() -> None:
    found = {"SFT": {"gpuload": {10_000: [2.0]}, "trainer": {2_000: [4.0]}, "flat": {10: [2.0], 20: [2.0]}}}
    lines = fitted_table(found, 10_000, ABOUT).splitlines()
    assert lines[3] == "| SFT | trainer | 2,000 | 4.00 |  |  |  |  |  |  |"
    assert lines[4] == "| SFT | flat | 10 | 2.00 | 20 | 2.00 | 2.00 |  | 2.00, by the line | **1.0×** |"


# -- trainers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, qwen_directory: str) -> Any:
    """A command line; without the trainer's environment, contenders answer as told: 1 s, and 1 ms per row."""
    monkeypatch.setattr(
        "sys.argv", ["trl", "--quick", "--tokenizer", qwen_directory, "--record", str(tmp_path / "made.json")]
    )
    monkeypatch.setattr(common, "run_contender", answer)
    return common.arguments("A trainer.", "trl", rows=1_000, more={"type": int})


def answer(module: str, task: dict[str, Any], *rest: Any) -> dict[str, Any]:
    rows = len(Path(task["file"]).read_text().splitlines())
    assert rows == task["rows"]
    seconds = {"start": 1 + rows / 1000, "an epoch": rows / 100, "4 steps": 0.5}
    return {
        "seconds": seconds, "cpu_seconds": {name: 2 * value for name, value in seconds.items()}, "versions": {"a": "1"},
        "counts": {"calls": 7}, "digest": task.get("digest", "same") if task["compared"] else "",
    }  # fmt: skip


def test_a_trainer_is_compared_on_two_sizes(given: Any, capsys: pytest.CaptureFixture[str]) -> None:
    libraries: dict[str, Any] = {"gpuload": {}, "trainer": {}}
    common.compare(given, "trl_trainers", {"SFT": {}}, libraries, common.write_messages)
    assert '"rows": 15' in given.record.read_text()
    printed = capsys.readouterr().out
    unit = "CPU seconds" if "busy machine" in printed else "seconds"
    start = "2.12 | 120 | 2.24 | 2.00 | 500" if unit == "CPU seconds" else "1.06 | 120 | 1.12 | 1.00 | 1,000"
    assert f"rows | {unit} |" in printed
    assert f"| SFT: start | gpuload | 60 | {start} |" in printed
    assert "| SFT: start and an epoch | trainer | 15 |" in printed
    assert "| SFT | 4 steps | trainer |" in printed
    assert "| SFT | trainer | calls | 7 |" in printed


def test_libraries_must_prepare_the_same(given: Any) -> None:
    with pytest.raises(ContenderError, match="SFT: gpuload and the trainer have prepared other rows"):
        common.compare(
            given, "trl_trainers", {"SFT": {}}, {"gpuload": {}, "trainer": {"digest": "other"}}, common.write_messages
        )


def test_a_script_that_compares_nothing_has_no_options_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ray", "--quick"])
    given = common.arguments("Ray.", "ray", rows=1_000, compares=False)
    assert common.about(given)["repeats"] == 1
    monkeypatch.setattr("sys.argv", ["ray", "--repeats", "5"])
    with pytest.raises(SystemExit, match="2"):
        common.arguments("Ray.", "ray", rows=1_000, compares=False)
