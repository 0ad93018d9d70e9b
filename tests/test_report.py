"""What the report says: how each row was rendered, what took the time, and what a user must not overlook."""

import json
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import user

import gpuload
from gpuload.cli.main import main
from gpuload.core.words import counted
from gpuload.dataset.report import Report
from gpuload.integrations.ray.reports import ReportKeeper, merged
from gpuload.pipeline.verify import Check

Row = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ANSWER = [{"role": "assistant", "content": "four"}]
CALLING = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, *ANSWER]
OWN_TOOLS = "they have tools of their own"


def prompts_with_calls() -> list[Row]:
    return [{"prompt": [*user(f"What is {k}?"), *(CALLING if k % 3 == 0 else ANSWER)]} for k in range(9)]


def chats_with_tools() -> list[Row]:
    return [{"messages": [*user(f"{k}?"), *ANSWER], "tools": json.dumps([TOOL])} for k in range(8)]


def completions() -> list[Row]:
    """Some rows have calls in the prompt."""
    return [
        {"prompt": [*user(f"{k}?"), *(CALLING if k % 2 else ANSWER), *user("?")], "completion": ANSWER}
        for k in range(8)
    ]


def pairs_with_tools() -> list[Row]:
    rejected = [{"role": "assistant", "content": "five"}]
    rows = [{"prompt": user(f"{k}?"), "chosen": ANSWER, "rejected": rejected} for k in range(6)]
    return [{**row, "tools": json.dumps([TOOL])} for row in rows]


def loaded(kind: str, rows: list[Row], tokenizer: Any, **options: Any) -> Report:
    load: Callable[..., Any] = getattr(gpuload, kind)
    table = pa.Table.from_pylist(rows)
    report: Report = load(table, tokenizer, progress=False, **options).report
    return report


@pytest.mark.parametrize(
    ("kind", "rows", "compiled", "by_reference"),
    [
        ("load", prompts_with_calls(), 9, {}),
        ("load_chats", chats_with_tools(), 8, {}),
        ("load_chats", [{**row, "chat_template_kwargs": {"x": 1}} for row in chats_with_tools()], 0, {OWN_TOOLS: 8}),
        ("load_chats", completions(), 8, {}),
        ("load_pairs", pairs_with_tools(), 6, {}),
        ("load_pairs", [{**row, "tools": "[]"} for row in pairs_with_tools()], 6, {}),
    ],
    ids=["calls", "tools of chats", "arguments of chats", "completions", "tools of pairs", "no tools"],
)
def test_rows_are_compiled_or_by_reference(
    kind: str, rows: list[Row], compiled: int, by_reference: dict[str, int], qwen: Any
) -> None:
    report = loaded(kind, rows, qwen)
    assert (report.rows_compiled, report.by_reference) == (compiled, by_reference)
    assert report.rows_compiled + report.rows_by_reference == report.rows_read - report.rows_rejected == len(rows)
    assert ("chat template compiled" in report.engine) == (compiled > 0)
    assert (0 < report.reference_seconds <= report.seconds["render"]) == bool(by_reference)
    if by_reference:
        (why,) = by_reference
        share = f"{by_reference[why] / len(rows):.0%} of the rows, "
        assert f"{by_reference[why]} of {len(rows)} rows rendered by transformers: {share}" in str(report)
        assert f"{by_reference[why]} rows: {why}" in str(report)


def test_each_reason_has_its_share_of_the_time(qwen: Any) -> None:
    rows = [{**row, "chat_template_kwargs": {"x": 1}} for row in chats_with_tools()[:3]]
    rows += [{**row, "chat_template_kwargs": {"y": 1}, "tools": None} for row in chats_with_tools()[:2]]
    report = loaded("load_chats", rows, qwen)
    kwargs = "they have arguments of their own, in chat_template_kwargs"
    assert report.by_reference == {OWN_TOOLS: 3, kwargs: 2}
    seconds = {why: report.seconds[f"by transformers, because {why}"] for why in report.by_reference}
    assert sum(seconds.values()) == pytest.approx(report.reference_seconds)
    for why, count in report.by_reference.items():
        share = f"{min(seconds[why] / report.seconds['render'], 1):.0%}"
        assert f"{count} rows, {share} of the time: {why}" in str(report)
    hint = "hint: loading is faster without them"
    assert (hint in str(report)) == (report.reference_seconds > report.seconds["render"] / 10)
    report.reference_seconds = report.seconds["render"] / 20
    assert hint not in str(report)
    report.reference_seconds = report.seconds["render"] / 5
    assert hint in str(report)
    assert "because" not in str(report).splitlines()[0]


def test_rows_that_transformers_rejects_are_not_counted_twice(qwen: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    report = loaded("load", prompts_with_calls(), qwen, chat_template=template)
    assert (report.rows_rejected, report.rows_compiled, report.by_reference) == (3, 6, {})


def test_rows_of_a_tokenizer_that_encodes_in_its_own_way(qwen: Any) -> None:
    own = {"tokenizer_kwargs": {"verbose": False}}
    report = loaded("load", prompts_with_calls(), qwen, apply_chat_template_kwargs=own)
    why = "the tokenizer object renders and encodes prompt by prompt"
    assert (report.rows_compiled, report.by_reference) == (0, {why: 9})


def test_rows_of_mixed_forms_are_rendered_by_columns(qwen: Any, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    rows = [{"prompt": user(f"{k}") if k % 2 else f"{k}"} for k in range(6)] + [{"prompt": None}]
    file.write_text("\n".join(map(json.dumps, rows)))
    report = gpuload.load(str(file), qwen).report
    assert (report.rows_compiled, sum(report.by_reference.values()), report.rows_rejected) == (6, 0, 1)


def test_overlapping_stages_are_marked(gsm8k: str, qwen: Any) -> None:
    load, started = gpuload.load, time.perf_counter()
    report = load(gsm8k, qwen, max_samples=2500).report
    took = time.perf_counter() - started
    assert 0.9 * took - 0.1 < report.seconds["total"] <= took
    assert {"read", "render", "encode"} <= set(report.overlapping)
    assert {"total", "open"} <= set(report.seconds) - set(report.overlapping)
    waited, _, overlapping = str(report).splitlines()[0].removesuffix(")").partition(" (stages overlap: ")
    assert {part.rpartition(" ")[0] for part in overlapping.split(", ")} == set(report.overlapping)
    start, load = (float(part.split()[1]) for part in waited.rpartition("; ")[2].split(", "))
    assert abs(start + load - report.seconds["total"]) < 0.02
    assert abs(start - report.seconds["open"]) < 0.01


def test_the_report_has_a_speed_from_a_second_of_work_on() -> None:
    def shown(**seconds: float) -> str:
        return str(Report(["a"], 8, rows_read=3000, seconds=seconds, overlapping=["render"]))

    assert (
        shown(open=5.0, total=5.9, render=2.0)
        .splitlines()[0]
        .endswith("; start 5.00 s, load 0.90 s (stages overlap: render 2.00)")
    )
    assert "rows/s" not in shown(open=5.0, total=5.9)
    assert "  speed      2,000 rows/s\n" in shown(open=5.0, total=6.5)
    assert shown(total=1.0, wait=0.5).splitlines()[0].endswith("; load 1.00 s (wait 0.50)")
    assert shown().splitlines()[0] == "a: 3,000 rows read, 0 kept, 3,000 dropped"


@pytest.mark.parametrize("command", ["prepare", "inspect"])
def test_the_total_of_a_command_has_the_time_of_opening(
    command: str, qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from gpuload.inspect import data

    def slowly(*given: Any) -> Any:
        time.sleep(0.5)
        return open_all(*given)

    open_all, reports = data.open_all, []
    monkeypatch.setattr(data, "open_all", slowly)
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Report, "warning", lambda self: reports.append(self))
    file = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [user(f"What is {k}?") for k in range(9)]}), file)
    assert main([command, str(file), "--tokenizer", qwen_folder]) == 0
    (found,) = reports
    assert 0.5 <= found.seconds["open"] <= found.seconds["total"]


def test_many_rejected_rows_are_a_warning(qwen: Any) -> None:
    rows: list[Row] = [{"prompt": user(f"{k}")} for k in range(8)] + [{"prompt": []}] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded("load", rows, qwen)
        loaded("load", [*rows, *({"prompt": user("long " * 99)} for _ in range(9))], qwen, max_prompt_length=50)
    with pytest.warns(UserWarning, match=r"3 of 11 rows were dropped for other reasons .*\n.*prompt is an empty list"):
        loaded("load", [*rows, {"prompt": []}], qwen)
    chats: list[Row] = [{"messages": [*user("Hi"), *ANSWER * (k % 2)]} for k in range(8)]
    cut: list[Row] = [{"messages": [*user("long " * 99), *ANSWER]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded("load_chats", [*cut, *chats[1:2]], qwen, max_length=50, overlong="keep_start")
    with pytest.warns(UserWarning, match="4 of 8 rows were dropped for other reasons"):
        loaded("load_chats", chats, qwen)


PLURAL = re.compile(r"(?<![\w,.])(?<!of )1 (?:more |equal )?[a-z]{3,}s\b(?!/)")


@pytest.mark.parametrize(
    ("count", "what", "said"),
    [
        (0, "rows", "0 rows"),
        (1, "rows read", "1 row read"),
        (2000, "rows have loss", "2,000 rows have loss"),
        (1, "rows have loss", "1 row has loss"),
        (1, "more entries", "1 more entry"),
        (1, "batches", "1 batch"),
        (1, "pieces", "1 piece"),
        (1, "answers whose text has tokens", "1 answer whose text has tokens"),
    ],
)
def test_things_are_counted_in_words(count: int, what: str, said: str) -> None:
    assert counted(count, what) == said


def test_one_of_a_thing_is_no_plural(
    qwen_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports, objects and commands for data of one row, of which one is dropped for each reason."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    texts = ["", *("one" if k else "one<|im_end|>" for k in range(2)), "long " * 99]
    table = pa.table({"prompt": [user(text) if text else [] for text in texts]})
    answer = {"role": "assistant", "content": "\n\n<think>\n</think>", "reasoning_content": "a"}
    chats = pa.table({"messages": [[*user("Hi"), answer]]})
    rejected = pa.table({"messages": [[*user("Hi"), answer], user("Hi")]})
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [
            gpuload.load(table.slice(start, size), qwen_folder, max_prompt_length=60, progress=False)
            for start, size in ((0, 3), (1, 1), (2, 2))
        ]
        made += [gpuload.load_chats(chats, qwen_folder, turns=turns) for turns in ("conversation", "served")]
        made += [gpuload.load_chats(rejected, qwen_folder, turns="served", missing_reasoning="skip")]
        one = pa.Table.from_pylist(pairs)
        made += [gpuload.load_pairs(one, qwen_folder, objective=objective) for objective in ("dpo", "kto")]
    said = "\n".join(f"{data!r}\n{data.loader(1)!r}\n{data.report}\n{data.report.warning()}" for data in made)
    files = [str(tmp_path / f"{name}.parquet") for name in ("prompts", "chats")]
    pq.write_table(table.slice(2, 1), files[0])
    pq.write_table(rejected, files[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:
            for command in (["check", "--limit", "5"], ["show", "--row", "0"], ["inspect"], ["prepare"]):
                main([command[0], file, "--tokenizer", qwen_folder, *command[1:]])
    main(["cache"])
    said += capsys.readouterr().out
    assert "1 row read, 1 kept" in said
    assert "1 row has the text of control tokens" in said
    assert not [line for line in said.splitlines() if PLURAL.search(line)]


def test_reports_of_ranks_and_workers_add_up() -> None:
    def part(number: int) -> Report:
        return Report(
            ["a"],
            8,
            rows_read=10,
            rows_compiled=6,
            by_reference={"why": 4},
            reference_seconds=0.5 + number,
            counts={"things": 2},
            seconds={"render": 1.0 + number, "total": 3.0},
            overlapping=["render"],
            rejected={"no": 1},
            check=Check(rows=3, shapes=4, shapes_not_compared=1),
        )

    whole = part(0)
    whole.add(part(1))
    assert (whole.rows_compiled, whole.by_reference, whole.counts) == (12, {"why": 8}, {"things": 4})
    assert (whole.seconds["render"], whole.reference_seconds) == (2.0, 1.5)
    assert (whole.check.shapes, whole.check.shapes_not_compared) == (4, 1)

    keeper, empty = ReportKeeper(), Report(["a"], 8)
    for number in range(2):
        keeper.put((0, number), part(number))
    for _ in range(2):  # asked twice, it says the same
        found = merged(empty, keeper.get(), [(0, 0), (0, 1), (0, 2)])
        assert (found.rows_read, found.rejected, found.by_reference) == (20, {"no": 2}, {"why": 8})
        assert (found.seconds["render"], found.reference_seconds) == (3.0, 2.0)
        assert 3.0 <= found.seconds["total"] < 3.5  # both at the same time, not 6 seconds one after the other


def test_reasons_that_differ_in_numbers_are_one_line(qwen: Any) -> None:
    report = Report(["x"], 8)
    for row in range(300):
        report.reject(f"x row {row}", f"content of message {row % 100} is null")
    for row in range(20):
        report.reject(f"x row {300 + row}", f"reason {chr(97 + row)}")
    first, *others = report.reasons().splitlines()
    assert first == (
        "  rejected   300 rows: content of message 0 is null, or with other numbers "
        "(x row 0, x row 100, x row 200, x row 1, x row 101, ...)"
    )
    assert others[0] == "  rejected   1 row: reason a (x row 300)"
    assert others[9:] == ["  rejected   11 rows for further reasons: report.rejected has all of them"]


def test_the_schema_of_the_report() -> None:
    """Files that `save_to_disk` writes have it: what is counted later is a key of a dict, not a new attribute."""
    names = (
        "files max_prompt_length limit_name engine notes rows_read rows_kept overlong overlong_dropped rejected "
        "examples rows_compiled by_reference reference_seconds rows_fallback control_rows sanitized source_bytes "
        "text_bytes tokens shortest longest seconds overlapping counts check from_cache into_cache cache"
    ).split()
    assert list(asdict(Report([], 1))) == names
    names = ["rows", "earlier", "seconds", "mismatches", "shapes", "shapes_not_compared", "unreadable"]
    assert list(asdict(Check())) == names
