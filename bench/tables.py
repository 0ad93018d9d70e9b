"""The record → Markdown. Every number is the median of its repeats."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from bench.load import OURS

Section = dict[str, Any]
Run = dict[str, Any]

_LOAD_NOTES = """\
Rows per second of load + filter, with MB/s of rendered prompt text in brackets. The last column is gpuload over the
strongest of the others. Every run is a process of its own, the contenders take turns, and all kept the same rows:
checked by digest in every run, and the tokens too where a contender has them (gpuload, batched map).

Counted: reading the files, rendering, tokenizing, filtering, and what each contender does besides (gpuload checks a
sample of rows against the tokenizer and keeps its tokens on disk; `datasets` writes its caches). Not counted: starting
Python, imports, constructing the tokenizer. What is left afterwards differs: gpuload and batched map have the tokens,
verl and row by row have thrown them away and make them again later.

- **cold**: the contender's cache folder is emptied and the files are dropped from the page cache.
- **warm**: the same again in a new process, with the caches that the cold run left: gpuload finds all tokens before
  the filter, `datasets` the finished filter.
- **row by row**: verl 0.1 and 0.2: pandas, and one `apply_chat_template` per row.
- **batched map**: as TRL's trainers prepare data: `datasets`, `map(batched=True)` with `apply_chat_template` on a
  thousand rows at a time, then `filter`.
- **verl 0.9.1**: its own `RLHFDataset` with 1 and 2 `filter_overlong_prompts_workers`, in an environment of its own."""

_BATCH_NOTES = """\
Rows per second, one process, shuffled. verl 0.9.1's `__getitem__` returns messages and columns and no tokens (they are
made later, in its rollout); `raw_prompt` marks gpuload's rows with messages *and* tokens, the fair comparison.
Row by row renders, tokenizes and pads every row anew, as verl 0.1 and 0.2 do. The filter is done before the clock runs,
and all draw the same rows."""

_MEMORY_NOTES = """\
Peak resident memory during `gpuload.load` beyond what the process held right before it (imports and tokenizer), from
the kernel's high-water mark. "One row" is the same for a load of one row of the same files: compiled tokenizer tables,
thread stacks, buffers. The goal is a peak of at most 3 times text + tokens; the passed-through columns, which the data
set keeps too, are named beside it."""

_STAGE_NOTES = """\
MB/s of rendered text on one core (pinned), by turns in one process, each in the form it likes best: gpuload from and to
Arrow, `transformers` from Python lists in batches (making those is not counted), `tokenizers` by `encode_batch_fast`.
Texts and ids were compared and are the same. "Tracing" is how much longer the first rendering takes: compiling the
template for every shape of conversation in the data."""

_WAYS = {
    ("gpuload", "tensors"): "gpuload, tensors alone, from the token store",
    ("gpuload", "loader"): "gpuload, `PromptLoader`, all keys",
    ("gpuload", "loader, raw_prompt"): "gpuload, `PromptLoader`, all keys and `raw_prompt`",
    ("gpuload", "getitems"): "gpuload, `__getitems__`",
    ("gpuload", "getitems, raw_prompt"): "gpuload, `__getitems__` with `raw_prompt`",
    ("verl 0.9.1", "getitem"): "verl 0.9.1, `__getitem__`",
    ("row by row", "getitem"): "row by row, `__getitem__`",
}


def write(record: dict[str, Section], file: Path, record_name: str) -> str:
    """Writes all sections of a record as tables, and returns the text."""
    parts = ["# Benchmarks", f"Made by `python -m bench` from [{record_name}]({record_name}), medians of all repeats."]
    tables = {"load": load_tables, "batches": batch_table, "memory": memory_table, "stages": stage_table}
    for name, table in tables.items():
        if name in record:
            parts += table(record[name])
    text = "\n\n".join(parts) + "\n"
    file.write_text(text)
    return text


def load_tables(section: Section) -> list[str]:
    """Cold and warm, data set by data set."""
    parts = ["## Load + filter", _LOAD_NOTES, _circumstances(section)]
    if any(run["contender"].startswith("verl") for run in section["runs"]):
        parts.append("![rows per second](load.png)")
    names = list(dict.fromkeys(run["contender"] for run in section["runs"]))
    for temperature in ("cold", "warm"):
        lines = []
        for data, facts in section["about"]["data_sets"].items():
            speeds = load_speeds(section, data, temperature)
            if not speeds:
                continue
            some = next(run for run in section["runs"] if run["data"] == data and run["contender"] == OURS)
            per_row = some["text_bytes"] / facts["rows"] / 1e6
            cells = [f"{speeds[name]:,.0f} ({speeds[name] * per_row:,.1f})" for name in names]
            best = max(names[1:], key=lambda name: speeds[name])
            ratio = f"**{speeds[OURS] / speeds[best]:.1f}×** {best}"
            lines.append([data, f"{facts['rows']:,}", f"{some['rows_kept']:,}", *cells, ratio])
        parts.append(
            f"### {temperature.capitalize()}\n\n" + _table([temperature, "rows", "kept", *names, "ratio"], lines)
        )
    return [*parts, _cache_note(section)]


def load_speeds(section: Section, data: str, temperature: str) -> dict[str, float]:
    """Contender → median rows per second."""
    rows = section["about"]["data_sets"][data]["rows"]
    seconds: dict[str, list[float]] = {}
    for run in section["runs"]:
        if run["data"] == data and run["temperature"] == temperature:
            seconds.setdefault(run["contender"], []).append(run["seconds"])
    return {name: rows / median(values) for name, values in seconds.items()}


def batch_table(section: Section) -> list[str]:
    """Every way to draw, the fastest first."""
    rates: dict[tuple[str, str], list[float]] = {}
    for run in section["runs"]:
        for way, rate in run["rates"].items():
            rates.setdefault((run["contender"], way), []).append(rate)
    medians = {way: median(values) for way, values in rates.items()}
    lines = [
        [_WAYS.get(way, " ".join(way)), f"{medians[way]:,.0f}"] for way in sorted(medians, key=lambda w: -medians[w])
    ]
    ours = medians[("gpuload", "getitems, raw_prompt")]
    others = {way[0]: rate for way, rate in medians.items() if way[0] != "gpuload"}
    compared = [f"{ours / rate:.1f} times {name}'s `__getitem__`" for name, rate in others.items()]
    text = f"256 rows by `__getitems__` with `raw_prompt`: {', '.join(compared)}."
    data = section["runs"][0]["data"]
    limit = section["about"]["limit"]
    heading = f"## Batches of 256 × {limit:,}, data set {data}"
    return [heading, _BATCH_NOTES, _circumstances(section), _table(["way", "rows/s"], lines), text]


def memory_table(section: Section) -> list[str]:
    """Peak against text and tokens, in MB."""
    lines = []
    for data in dict.fromkeys(run["data"] for run in section["runs"]):
        runs = [run for run in section["runs"] if run["data"] == data]
        whole, one = [run for run in runs if run["rows"] > 1], [run for run in runs if run["rows"] == 1]
        text, tokens, columns = (whole[0][key] / 1e6 for key in ("text_bytes", "token_bytes", "column_bytes"))
        peak, fixed = _grown(whole), _grown(one)
        ratios = [f"{value / (text + tokens):.2f}" for value in (peak, max(peak - fixed, 0))]
        numbers = [f"{value:,.1f}" for value in (text, tokens, columns, peak, fixed)]
        lines.append([data, *numbers, *ratios])
    head = ["MB", "text", "tokens", "columns", "peak", "one row", "peak / (text + tokens)", "the same without one row"]
    return ["## Memory", _MEMORY_NOTES, _circumstances(section), _table(head, lines)]


def stage_table(section: Section) -> list[str]:
    """MB/s of each stage, and ratios."""
    lines = []
    for tokenizer, data in dict.fromkeys((run["tokenizer"], run["data"]) for run in section["runs"]):
        runs = [run for run in section["runs"] if (run["tokenizer"], run["data"]) == (tokenizer, data)]
        seconds = {what: median(run["seconds"][what] for run in runs) for what in runs[0]["seconds"]}
        speed = {what: runs[0]["text_bytes"] / took / 1e6 for what, took in seconds.items()}
        cells = [tokenizer, data]
        for ours, theirs in (("gpuload render", "transformers render"), ("gpuload encode", "tokenizers encode")):
            cells += [f"{speed[ours]:,.0f}", f"{speed[theirs]:,.1f}", f"**{speed[ours] / speed[theirs]:.1f}×**"]
        tracing = max(0.0, seconds["gpuload first render"] - seconds["gpuload render"])
        lines.append([*cells, f"{runs[0]['shapes']}", f"{tracing:.2f}"])
    head = [
        "MB/s, one core",
        "",
        "render",
        "transformers",
        "ratio",
        "encode",
        "tokenizers",
        "ratio",
        "shapes",
        "tracing, s",
    ]
    engine = section["runs"][0]["engine"]
    return ["## Stages", _STAGE_NOTES, f"Engine: {engine}.", _circumstances(section), _table(head, lines)]


def _grown(runs: Iterable[Run]) -> float:
    return median((run["peak_rss"] - run["baseline_rss"]) / 1e6 for run in runs)


def _circumstances(section: Section) -> str:
    """One small paragraph: when, where, with what."""
    about = section["about"]
    versions: dict[str, set[str]] = {}
    for run in section["runs"]:
        for package, number in run["versions"].items():
            versions.setdefault(package, set()).add(number)
    packages = ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in versions.items())
    commit = f", commit {about['commit']}" if about["commit"] else ""
    rough = ("A quick run on the first rows of each file: not a measurement. ") * about["quick"]
    return (
        f"<sub>{rough}{about['date']}{commit}; {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, "
        f"{about['system']}, load average at the start {about['load_average']}; tokenizer {about['tokenizer']}, limit "
        f"{about['limit']:,} tokens, repeats: {about['repeats']}; {packages}.</sub>"
    )


def _cache_note(section: Section) -> str:
    """Which contenders found their result ready in the warm runs."""
    found = []
    for name in dict.fromkeys(run["contender"] for run in section["runs"]):
        runs = [run for run in section["runs"] if run["contender"] == name]
        if any(run["new_result_caches"] for run in runs if run["temperature"] == "cold"):
            warm = [run for run in runs if run["temperature"] == "warm"]
            hits = sum(run["new_result_caches"] == 0 for run in warm)
            found.append(f"{name} in {hits} of {len(warm)}")
    if not found:
        return ""
    return f"Warm runs that found their filter's result in `datasets`' cache and did no work again: {', '.join(found)}."


def _table(
    head: list[str], lines: list[list[str]], align: Callable[[int], str] = lambda i: "---:" if i else "---"
) -> str:
    rows = [head, [align(i) for i in range(len(head))], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
