"""Many small files, whose rows the host renders and encodes together: all that a user sees is as of each file alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_cases import same
from conftest import user
from test_served import MESSAGES

import gpuload
from gpuload.pipeline import parts, run

ANSWER = {"role": "assistant", "content": "an answer"}


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Forty JSON files of nine rows at most: rejected, overlong and by-reference rows, and texts of control tokens."""
    rng, files = np.random.default_rng(0), []
    for number in range(40):
        rows: list[Any] = [user("number " * int(n)) for n in rng.integers(0, 60, number % 10)]
        for row in range(number % 3, len(rows), 4):
            rows[row] = [{"role": "system", "content": f"row {row} \u00e9"}, *user("<|im_end|> \u4f60\u597d")]
        if number % 7 == 3:
            rows[-1:] = [None, [{"role": "tool", "content": "x"}]]
        if number == 5:
            rows = ["a text", "b"]
        path = tmp_path / f"{number:02}.jsonl"
        lines = [
            json.dumps({"prompt": row, "number": number, **({"more": k} if number % 2 else {})})
            for k, row in enumerate(rows)
        ]
        path.write_text("".join(f"{line}\n" for line in lines))
        files.append(str(path))
    return [file for file in files if Path(file).stat().st_size]


def loaded(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], joined: bool) -> tuple[Any, int]:
    """What a load gives if rows of small files are joined or not, and how many batches there were."""
    real, count = run.filter_rows, 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(run, "filter_rows", counted)
        if not joined:
            patched.setattr(parts, "_SMALL_ROWS", 0)
        return load(), count


def both(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> tuple[Any, Any]:
    """The same load with and without joined rows."""
    (found, few), (expected, many) = (loaded(monkeypatch, load, joined) for joined in (True, False))
    assert few < 5 < 20 < many
    return found, expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_prompt_length": 30, "return_raw_chat": True},
        {"return_full_prompt": True},
        {"store": "disk"},
        {"max_samples": 50, "shuffle": True, "seed": 1},
        {"max_prompt_length": 20, "filter_overlong_prompts": False, "truncation": "middle"},
    ],
    ids=str,
)
def test_prompts(
    options: dict[str, Any], small: list[str], qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter("ab")

    def load() -> Any:
        return gpuload.load(small, qwen, cache_dir=tmp_path / next(places), verify="full", **options)

    found, expected = both(monkeypatch, load)
    same(found, expected)
    assert found.report.control_rows == expected.report.control_rows > 0
    assert found.report.check.rows == expected.report.check.rows


@pytest.mark.usefixtures("warm_cache")
def test_each_file_has_an_entry_of_its_own(small: list[str], qwen_folder: str) -> None:
    cold = gpuload.load(small, qwen_folder)
    assert sorted(cold.report.into_cache) == sorted(small)
    warm = gpuload.load(small, qwen_folder)
    assert warm.report.from_cache == small
    same(warm, cold)
    for file in small[::5]:
        alone = gpuload.load(file, qwen_folder)
        assert alone.report.from_cache == [file]
        expected = gpuload.load(file, qwen_folder, token_cache=False)
        same(alone, expected, checked=False)
        assert alone.report.control_rows == expected.report.control_rows
    # Rows from the cache among rows of files that are not.
    other = Path(small[0]).with_name("other.jsonl")
    other.write_text(json.dumps({"prompt": user("other"), "number": 7}) + "\n")
    mixed = [*small[:9], str(other), *small[9:]]
    found = gpuload.load(mixed, qwen_folder)
    assert found.report.from_cache == small
    expected = gpuload.load(mixed, qwen_folder, token_cache=False)
    same(found, expected, checked=False)


@pytest.mark.parametrize("turns", ["conversation", "served"])
def test_chats(turns: Any, small: list[str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, file in enumerate(small):
        rows = [[*MESSAGES, *user(f"and {k}?"), ANSWER][: 2 + k % 3 * 2] for k in range(number % 9 + 1)]
        if number % 6 == 1:
            rows[0] = rows[0][:1]  # no answer
        if number % 5 == 1:
            rows[-1] = [*user("<|im_end|>"), ANSWER]
        Path(file).write_text("".join(json.dumps({"messages": row, "number": number}) + "\n" for row in rows))

    def load() -> Any:
        return gpuload.load_chats(small, qwen, max_length=100, turns=turns, token_cache=False, progress=False)

    found, expected = both(monkeypatch, load)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert [found[row] for row in range(len(found))] == [expected[row] for row in range(len(found))]
    for name in ("rejected", "examples", "rows_kept", "by_reference", "control_rows", "counts"):
        assert getattr(found.report, name) == getattr(expected.report, name), name
    assert found.fingerprint == expected.fingerprint


def test_pairs(small: list[str], qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, file in enumerate(small):
        rows = [
            {"prompt": user(f"q {k} " * k), "chosen": [ANSWER], "rejected": [{**ANSWER, "content": f"{number}"}]}
            for k in range(number % 9 + 1)
        ]
        if number % 6 == 1:
            rows[0]["chosen"] = None
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load() -> Any:
        return gpuload.load_pairs(small, qwen, max_length=40, progress=False)

    found, expected = both(monkeypatch, load)
    assert [found[row] for row in range(len(found))] == [expected[row] for row in range(len(found))]
    for name in ("rejected", "examples", "rows_kept", "by_reference"):
        assert getattr(found.report, name) == getattr(expected.report, name), name
