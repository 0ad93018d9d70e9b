"""The start of a run and an epoch's batches: all contenders side by side, with cold caches and with filled ones."""

import re
import sys
from dataclasses import dataclass, field
from typing import Any

from bench import VERL_PYTHON
from bench.data import Dataset, Plan, spread_over, two_sizes
from bench.fit import fitted_table
from bench.process import ContenderError, make_cold, run_contender
from bench.report import imports_note

OURS = "gpuload"
TRL_1, TRL_2 = "`datasets`, batched `map`", "`datasets`, batched `map`, `num_proc=2`"
BASELINE = "row by row"
IN_VERL = "gpuload inside verl 0.9.1"
VERL_1, VERL_2 = "verl 0.9.1, 1 worker", "verl 0.9.1, 2 workers"
OUTSIDE, INSIDE = (OURS, TRL_2, TRL_1, BASELINE), (IN_VERL, VERL_2, VERL_1)

BATCH = 256
COLD, CACHED = "cold", "cached"
_SMALL = 4_000
"""At most so many rows have the smaller size of a contender, and the larger one of those too slow for all rows."""

_COMPARED = ("rows_read", "rows_kept", "rows_digest", "prompts_digest", "tokens_digest")

NOTES = f"""\
Seconds, lower is better. Each run is a process of its own, the contenders take turns, and all kept the same rows: every
run compares digests of the rows, and of the tokens where the contender has them.

**Start of a run.** Counted: reading, rendering, tokenizing, filtering, and what the contender does in addition (gpuload
compares a sample of rows with the tokenizer and writes its token cache; `datasets` hashes the tokenizer and writes its
caches). Not counted: starting Python, imports and construction of the tokenizer, which are the same for all. After the
start, gpuload and the batched `map` have tokens; verl and the baseline do not, and tokenize again later.

- **cold**: empty cache directory, and the files are dropped from the page cache.
- **cached**: the same start in a new process, with the caches of the cold run: gpuload finds all tokens, `datasets`
  finds the mapped and filtered dataset. Row by row, nothing is cached.

**An epoch.** The first one after the start: all kept rows, shuffled, in batches of {BATCH}. Outside verl, these are
tensors with ids and mask, padded on the left to the limit; in the first run, rows, tokens and the sum of all ids were
compared. Inside verl 0.9.1, they are messages and columns without tokens, which its rollout makes later, through the
loader of its trainer.

- **{OURS}**: `gpuload.load`, and the dataset's `loader`.
- **{TRL_1}**: `datasets.map(batched=True)` with `apply_chat_template` on 1,000 rows at a time, then `filter`, as in
  TRL's trainers, with 1 process or with 2. Batches are made of this pretokenized dataset by transformers'
  `DataCollatorWithPadding`, in PyTorch's `DataLoader` with 0 workers or with 2.
- **{BASELINE}**: template and tokenizer, row by row, on a pandas frame, as in verl 0.1 and 0.2, at the start and in
  every epoch.
- **{IN_VERL}**, **verl 0.9.1**: construction of `RLHFDataset`, gpuload's or verl's own, in verl's environment. verl's
  has 1 `filter_overlong_prompts_workers` (its default) and 0 workers of the loader, or 2 of both; gpuload's has 0."""


@dataclass(frozen=True)
class Contender:
    """A program that loads and filters.

    Attributes:
        name: Name in tables.
        module: Module in `bench.contenders`.
        python: Interpreter of its environment.
        settings: Its own part of the task.
        whole: It is measured on all rows and on fewer; if not, on two smaller numbers of rows, without caches.
    """

    name: str
    module: str
    python: str = sys.executable
    settings: dict[str, Any] = field(default_factory=dict)
    whole: bool = True

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the two numbers of rows on which it is measured."""
        small, large = two_sizes(rows, _SMALL)
        return (large, rows) if self.whole else (small, large)


def contenders() -> list[Contender]:
    """Return the contenders that can run on this machine; some need the environment of `make verl-env`."""
    found = [
        Contender(OURS, "load_gpuload"),
        Contender(TRL_1, "load_trl", settings={"processes": 1}),
        Contender(TRL_2, "load_trl", settings={"processes": 2}),
        Contender(BASELINE, "load_rowwise", whole=False),
    ]
    if not VERL_PYTHON.exists():
        print("no .venv-verl (make verl-env creates it): nothing is measured inside verl")
        return found
    python = str(VERL_PYTHON)
    return [
        *found,
        Contender(IN_VERL, "load_gpuload_in_verl", python, {"loader_workers": [0]}),
        Contender(VERL_1, "load_verl", python, {"workers": 1, "loader_workers": []}, whole=False),
        Contender(VERL_2, "load_verl", python, {"workers": 2, "loader_workers": [0, 2]}),
    ]


def measure_load(plan: Plan) -> list[dict[str, Any]]:
    """Run, per dataset and repeat, every contender on all of its sizes, cold and then with its caches.

    Raises:
        ContenderError: A contender failed, kept other rows or made other tokens than the contenders before it.
    """
    runs: list[dict[str, Any]] = []
    everyone = contenders()
    for dataset in plan.datasets:
        by_size = {dataset.rows: dataset}
        for size in {size for each in everyone for size in each.sizes(dataset.rows)} - {dataset.rows}:
            by_size[size] = spread_over(dataset, size, plan.scratch / "spread" / dataset.name)
        seen: dict[Any, tuple[Any, str]] = {}
        for repeat in range(plan.repeats):
            for temperature in (COLD, CACHED):
                for contender in everyone:
                    for size in contender.sizes(dataset.rows):
                        if temperature == COLD or size == dataset.rows:
                            # An epoch follows the start that comes last.
                            batch = 0 if temperature == COLD and size == dataset.rows else BATCH
                            run = _run(plan, contender, by_size[size], temperature, repeat, batch)
                            _compare(seen, run, contender.name, dataset.name)
                            runs.append(run)
    return runs


def _run(
    plan: Plan, contender: Contender, dataset: Dataset, temperature: str, repeat: int, batch: int
) -> dict[str, Any]:
    """Run a contender once, with an epoch if `batch` is not 0."""
    cache = plan.scratch / re.sub(r"\W+", "-", f"{contender.name} {dataset.rows}").strip("-")
    if temperature == COLD:
        make_cold(cache, dataset.files)
    task = plan.task(dataset, **contender.settings, batch=batch, checked=repeat == 0)
    run = run_contender(contender.module, task, cache, contender.python)
    seconds = "".join(f", {name}: {epoch['seconds']:.2f} s" for name, epoch in run["epochs"].items())
    print(
        f"  {dataset.name:14} {temperature:6} {repeat + 1}/{plan.repeats} {contender.name:40} {dataset.rows:7,} rows"
        f" {run['seconds']:8.2f} s{seconds}",
        flush=True,
    )
    about = {"data": dataset.name, "rows": dataset.rows, "contender": contender.name, "temperature": temperature}
    return about | {"repeat": repeat} | run


def starts(runs: list[dict[str, Any]], data: str, temperature: str) -> dict[str, dict[int, list[float]]]:
    """Return the seconds of the starts on one dataset: contender → number of rows → those of each run."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if run["data"] == data and run["temperature"] == temperature:
            found.setdefault(run["contender"], {}).setdefault(run["rows"], []).append(run["seconds"])
    return found


def epochs(runs: list[dict[str, Any]], data: str) -> dict[str, dict[str, dict[int, list[float]]]]:
    """Return the seconds of the epochs on one dataset: contender → kind → number of rows → those of each run."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for run in runs:
        for kind, epoch in run.get("epochs", {}).items() if run["data"] == data else ():
            of_kind = found.setdefault(run["contender"], {}).setdefault(kind, {})
            of_kind.setdefault(run["rows"], []).append(epoch["seconds"])
    return found


def load_tables(runs: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Return a table of starts, and one of epochs, for each dataset; and the caches that were found."""
    parts = []
    for data, facts in about["datasets"].items():
        found: dict[str, dict[str, Any]] = {}
        for temperature in (COLD, CACHED):
            for name, seconds in starts(runs, data, temperature).items():
                found.setdefault(_group(temperature, name), {})[name] = seconds
        if found:
            parts.append(f"Start of a run, {data}:\n\n{fitted_table(found, facts['rows'], about)}")
        found = {}
        for name, kinds in epochs(runs, data).items():
            for kind, seconds in kinds.items():
                found.setdefault(_group("epoch", name), {})[f"{name}: {kind}"] = seconds
        if found:
            own = (f"{OURS}: tensors", IN_VERL)
            parts.append(f"An epoch, {data}:\n\n{fitted_table(found, facts['rows'], about, own)}")
    return "\n\n".join(part for part in (*parts, _cache_note(runs), imports_note(runs)) if part)


def _group(what: str, name: str) -> str:
    return f"{what}, inside verl" if name in INSIDE else what


def _cache_note(runs: list[dict[str, Any]]) -> str:
    """A sentence on the contenders whose second starts found the filtered dataset in a cache."""
    found = []
    for name in dict.fromkeys(run["contender"] for run in runs):
        own = [run for run in runs if run["contender"] == name]
        cached = [run for run in own if run["temperature"] == CACHED]
        if cached and any(run["new_result_caches"] for run in own if run["temperature"] == COLD):
            found.append(f"{name} in {sum(run['new_result_caches'] == 0 for run in cached)} of {len(cached)}")
    return f"Cached starts that found the filtered dataset in `datasets`' cache: {', '.join(found)}." if found else ""


def _compare(seen: dict[Any, tuple[Any, str]], run: dict[str, Any], contender: str, data: str) -> None:
    """Compare the rows read and kept, the tokens and the batches, with those of the first run that has them."""
    found = {key: run[key] for key in _COMPARED if key in run}
    for epoch in run["epochs"].values():
        found |= {f"{key} in an epoch": value for key, value in epoch.items() if key != "seconds"}
    for key, value in found.items():
        first, of = seen.setdefault((run["rows"], key), (value, contender))
        if value != first:
            raise ContenderError(f"{data}: {key} differs: {of} has {first}, {contender} has {value}")
