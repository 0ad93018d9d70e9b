"""Record of a run on the CPU → Markdown page. Every number is the median of its repeats."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from bench.cpu import chats, cores, packing
from bench.cpu.load import BASELINE, IN_VERL, OURS, TRL, VERL, median_seconds
from bench.report import circumstances, table
from bench.verl import epochs, rollout

Section = dict[str, Any]
Run = dict[str, Any]

_LOAD_NOTES = f"""\
Rows per second of load and filter, with MB/s of rendered prompt text in brackets. The last column is the ratio of
gpuload to the fastest contender that is not gpuload. Each run is a process of its own, the contenders take turns, and
all kept the same rows: every run compares digests of the rows, and of the tokens where the contender has them.

Counted: reading, rendering, tokenizing, filtering, and what the contender does in addition (gpuload compares a sample
of rows with the tokenizer and writes its token cache; `datasets` writes its caches). Not counted: starting Python,
imports, construction of the tokenizer. After the load, gpuload and the batched `map` have tokens; verl and the baseline
do not, and tokenize again later.

- **cold**: empty cache directory, and the files are dropped from the page cache.
- **warm**: the same load in a new process, with the caches of the cold run: gpuload finds all tokens before the filter,
  `datasets` finds the filtered dataset.
- **{IN_VERL}**, **{VERL}**: construction of `RLHFDataset`, gpuload's or verl's own (with 1 or 2
  `filter_overlong_prompts_workers`), in verl's environment. This is the start-up that a trainer waits for.
- **{TRL}**: `datasets.map(batched=True)` with `apply_chat_template` on 1,000 rows at a time, then `filter`.
- **{BASELINE}**: template and tokenizer, row by row, on a pandas frame, as in verl 0.1 and 0.2."""

_BATCH_NOTES = f"""\
One process, shuffled. The filter is done before the clock starts, and all draw the same rows. {VERL}'s `__getitem__`
returns messages and columns but no tokens, which its rollout makes later: compare it with gpuload's rows that have
`raw_prompt`. The baseline renders, tokenizes and pads every row again."""

_MEMORY_NOTES = """\
Peak resident memory of `gpuload.load` in addition to what the process held before (imports and tokenizer), from the
kernel's high-water mark. "One row" is a load of one row of the same files: compiled tokenizer tables, thread stacks,
buffers. The goal is a peak of at most 3 times text + tokens. The columns that are passed through come on top."""

_STAGE_NOTES = """\
MB/s of rendered text on one core (pinned), in turns in one process, each in the form that suits it best: gpuload from
and to Arrow, `transformers` from Python lists in batches (making them is not counted), `tokenizers` with
`encode_batch_fast`. All texts and ids were compared and are equal. "Tracing" is the additional time of the first
rendering, which compiles the template for every shape of conversation in the data."""


def page(record: dict[str, Section], name: str, summary: str = "") -> str:
    """Return the page of a record.

    Args:
        record: Section → its description and runs.
        name: Name of the record's file.
        summary: Text before the sections.
    """
    parts = [
        "# Benchmarks",
        f"Made by `python -m bench` from [{name}]({name}). All numbers are medians of the repeats.",
    ]
    parts += [summary] if summary else []
    tables: dict[str, tuple[str, str, Callable[[Section], str]]] = {
        "load": ("Load and filter", _LOAD_NOTES, load_tables),
        "batches": ("Batches", _BATCH_NOTES, batch_table),
        "memory": ("Memory", _MEMORY_NOTES, memory_table),
        "stages": ("Stages", _STAGE_NOTES, stage_table),
        "cores": ("Cores", cores.NOTES, cores.cores_table),
        "packing": ("Packing", packing.NOTES, packing.packing_tables),
        "chats": ("Data for SFT", chats.NOTES, chats.chats_table),
        "pairs": ("Preference data", chats.PAIR_NOTES, chats.chats_table),
        "epochs": ("Epochs inside verl 0.9.1", epochs.NOTES, epochs.epochs_table),
        "verl": ("A rollout step inside verl 0.9.1", rollout.NOTES, rollout.rollout_table),
    }
    for key, (title, notes, render) in tables.items():
        if key in record:
            section = record[key]
            about = circumstances(section["about"], (run["versions"] for run in section["runs"]))
            parts += [f"## {title}", notes, about, render(section)]
    return "\n\n".join(parts) + "\n"


def load_tables(section: Section) -> str:
    """Return a table for cold and one for warm loads, with a line per dataset."""
    parts = []
    names = list(dict.fromkeys(run["contender"] for run in section["runs"]))
    ours = OURS if OURS in names else IN_VERL
    for temperature in ("cold", "warm"):
        lines = []
        for data, facts in section["about"]["datasets"].items():
            rows = facts["rows"]
            speeds = {name: rows / took for name, took in median_seconds(section, data, temperature).items()}
            if not speeds:
                continue
            runs = [run for run in section["runs"] if run["data"] == data]
            per_row = next((run["text_bytes"] / rows / 1e6 for run in runs if "text_bytes" in run), None)
            cells = [f"{speeds[n]:,.0f}" + (f" ({speeds[n] * per_row:,.1f})" if per_row else "") for n in names]
            best = max(set(names) - {OURS, IN_VERL}, key=lambda name: speeds[name])
            ratio = f"**{speeds[ours] / speeds[best]:.1f}×** {best}"
            lines.append([data, f"{rows:,}", f"{runs[0]['rows_kept']:,}", *cells, ratio])
        parts.append(table([f"{temperature}, rows/s", "rows", "kept", *names, "ratio"], lines))
    return "\n\n".join([*parts, _cache_note(section)]).rstrip()


def batch_rates(section: Section) -> dict[str, float]:
    """Return the median rows per second of each method of drawing batches."""
    rates: dict[str, list[float]] = {}
    for run in section["runs"]:
        for name, rate in run["rates"].items():
            rates.setdefault(name, []).append(rate)
    return {name: median(values) for name, values in rates.items()}


def batch_table(section: Section) -> str:
    """Return the methods of drawing batches, the fastest first."""
    rates = sorted(batch_rates(section).items(), key=lambda pair: -pair[1])
    data, size, limit = section["runs"][0]["data"], section["runs"][0]["batch"], section["about"]["limit"]
    head = [f"dataset {data}, batches of {size} × {limit:,}", "rows/s", "batches/s"]
    return table(head, [[name, f"{rate:,.0f}", f"{rate / size:,.1f}"] for name, rate in rates])


def memory_table(section: Section) -> str:
    """Return peak memory, text and tokens in MB."""
    lines = []
    for data in dict.fromkeys(run["data"] for run in section["runs"]):
        runs = [run for run in section["runs"] if run["data"] == data]
        whole, one = [run for run in runs if run["rows"] > 1], [run for run in runs if run["rows"] == 1]
        text, tokens, columns = (whole[0][key] / 1e6 for key in ("text_bytes", "token_bytes", "column_bytes"))
        peak, fixed = _grown(whole), _grown(one)
        ratios = [f"{value / (text + tokens):.2f}" for value in (peak, max(peak - fixed, 0))]
        lines.append([data, *(f"{value:,.1f}" for value in (text, tokens, columns, peak, fixed)), *ratios])
    head = ["MB", "text", "tokens", "columns", "peak", "one row", "peak / (text + tokens)", "the same without one row"]
    return table(head, lines)


def stage_table(section: Section) -> str:
    """Return MB/s of each stage, and ratios."""
    lines = []
    for tokenizer, data in dict.fromkeys((run["tokenizer"], run["data"]) for run in section["runs"]):
        runs = [run for run in section["runs"] if (run["tokenizer"], run["data"]) == (tokenizer, data)]
        seconds = {stage: median(run["seconds"][stage] for run in runs) for stage in runs[0]["seconds"]}
        speed = {stage: runs[0]["text_bytes"] / took / 1e6 for stage, took in seconds.items()}
        cells = [tokenizer, data]
        for ours, theirs in (("gpuload render", "transformers render"), ("gpuload encode", "tokenizers encode")):
            cells += [f"{speed[ours]:,.0f}", f"{speed[theirs]:,.1f}", f"**{speed[ours] / speed[theirs]:.1f}×**"]
        tracing = max(0.0, seconds["gpuload first render"] - seconds["gpuload render"])
        lines.append([*cells, f"{runs[0]['shapes']}", f"{tracing:.2f}"])
    names = "render|transformers|ratio|encode|tokenizers|ratio|shapes|tracing, s".split("|")
    head = ["MB/s, one core", "dataset", *names]
    return f"Engine: {section['runs'][0]['engine']}.\n\n" + table(head, lines, 2)


def _grown(runs: Iterable[Run]) -> float:
    """Median MB of resident memory that a load added."""
    return float(median((run["peak_rss"] - run["baseline_rss"]) / 1e6 for run in runs))


def _cache_note(section: Section) -> str:
    """A sentence on the contenders whose warm runs found the filtered dataset in a cache."""
    found = []
    for name in dict.fromkeys(run["contender"] for run in section["runs"]):
        runs = [run for run in section["runs"] if run["contender"] == name]
        if any(run["new_result_caches"] for run in runs if run["temperature"] == "cold"):
            warm = [run for run in runs if run["temperature"] == "warm"]
            found.append(f"{name} in {sum(run['new_result_caches'] == 0 for run in warm)} of {len(warm)}")
    return f"Warm runs that found the filtered dataset in `datasets`' cache: {', '.join(found)}." if found else ""
