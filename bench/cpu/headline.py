"""The numbers of the project's README: one table and one plot from one record.

`python -m bench --only headline` measures the section `load` on the joint dataset, and writes headline.json,
headline.svg, the page README.md, and the table in the project's README between two markers.
"""

from pathlib import Path
from statistics import median
from typing import Any

from bench import ROOT
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
    epochs,
    starts,
)
from bench.cpu.page import page
from bench.fit import runs_of, seconds_at, spread
from bench.report import imports_note, table

SECTIONS = ("load",)
RECORD = ROOT / "bench" / "results" / "headline.json"

# Contender → whose epoch it is, and which. Workers of verl's filter do not change its batches.
EPOCHS = {
    OURS: (OURS, "tensors"),
    TRL_1: (TRL_1, "tensors"),
    TRL_2: (TRL_2, "tensors"),
    BASELINE: (BASELINE, "tensors"),
    IN_VERL: (IN_VERL, "0 workers"),
    VERL_1: (VERL_2, "0 workers"),
    VERL_2: (VERL_2, "2 workers"),
}
_COLUMNS = ("start, cold", "start, cached", "an epoch's batches")
# Two colors of Okabe and Ito's palette, which color-blind readers can distinguish.
_OURS_COLOR, _OTHERS_COLOR = "#0072B2", "#E69F00"

Cells = dict[str, list[list[float]]]


def cells(record: dict[str, Any]) -> Cells:
    """Return the seconds of each contender's runs in each column; none where nothing was measured."""
    runs = record["load"]
    data, facts = next(iter(record["about"]["datasets"].items()))
    rows, drawn = facts["rows"], epochs(runs, data)
    measured = [starts(runs, data, temperature) for temperature in (COLD, CACHED)]
    found: Cells = {}
    for name in (*OUTSIDE, *INSIDE):
        if name in measured[0]:
            columns = [seconds_at(each[name], rows) if name in each else [] for each in measured]
            whose, kind = EPOCHS[name]
            seconds = drawn.get(whose, {}).get(kind)
            found[name] = [*columns, seconds_at(seconds, rows) if seconds else []]
    if BASELINE in found and not found[BASELINE][1]:  # it has no cache
        found[BASELINE][1] = found[BASELINE][0]
    return found


def headline_table(record: dict[str, Any]) -> str:
    """Return the README's table and its caption.

    Args:
        record: A record with the sections of `SECTIONS`, measured on one dataset.
    """
    about, runs, found = record["about"], record["load"], cells(record)
    data, facts = next(iter(about["datasets"].items()))
    lines = []
    for name, columns in found.items():
        sizes = list(starts(runs, data, COLD)[name])
        counts = sorted({len(values) for values in columns if values})
        few = [f"{counts[0]} runs"] if counts[0] < about["repeats"] else []
        line = [] if facts["rows"] in sizes else [f"by the line through {' and '.join(f'{n:,}' for n in sizes)} rows"]
        note = f" ({', '.join(few + line)})" if few + line else ""
        text = [f"{spread(values)} s" if values else "–" for values in columns]
        lines.append([f"**{each}**" if name == OURS and each != "–" else each for each in (f"{name}{note}", *text)])
    ours = [run for run in runs if (run["contender"], run["temperature"], run["rows"]) == (OURS, COLD, facts["rows"])]
    text_bytes, tokens = (ours[0][key] / 1e6 for key in ("text_bytes", "token_bytes"))
    peak = median((run["peak_rss"] - run["baseline_rss"]) / 1e6 for run in ours)
    sentences = [
        f"Seconds, lower is better. {runs_of(about['repeats'])} The start of a run is reading, rendering, tokenizing",
        "and filtering, after imports; cached: with what a first start has stored, which for row by row is nothing.",
        f"An epoch is all rows in batches of {BATCH}: padded ids and mask outside verl, messages and columns without",
        "tokens inside. Workers and processes of a line are used for both.",
        f"All kept the same {ours[0]['rows_kept']:,} rows: {text_bytes:,.0f} MB of text in {len(facts['files'])}",
        f"files, tokenizer {about['tokenizer']}, limit {about['limit']:,} tokens. gpuload's cold start adds",
        f"{peak:,.0f} MB to the memory of the process at its peak, {peak / (text_bytes + tokens):.1f} times text and",
        f"tokens. One session (`{about['command']}`) on one machine: {about['cores']} cores of {about['cpu']},",
        f"load average at the start {about['load_average']}, {about['date']}, commit {about['commit']}.",
        imports_note(runs),
    ]
    head = [f"{facts['rows']:,} prompts", *_COLUMNS]
    return f"{table(head, lines, 1, about)}\n\n{' '.join(sentences).rstrip()}"


def outcome(record: dict[str, Any]) -> str:
    """Return the sentence with which the README begins, of medians: a cold start inside verl, by gpuload and by verl's
    own class with 2 workers, of all rows of both."""
    found, facts = cells(record), next(iter(record["about"]["datasets"].values()))
    ours, verl, default = (median(found[name][0]) for name in (IN_VERL, VERL_2, VERL_1))
    where = f"{facts['rows']:,} prompts inside verl 0.9.1, {record['about']['cores']} CPU cores, medians"
    seconds = f"{ours:.1f} seconds instead of {verl:.0f}"
    return (
        f"**Start LLM post-training in {seconds}: the same rows, in the same order, with every\n"
        "token that your tokenizer would make. A sample of rows is compared with it whenever tokens are made.**\n"
        f"({where}; verl with 2 workers. With 1, its default: {default:.0f}, by a line through smaller runs.)"
    )


def headline_page(record: dict[str, Any]) -> str:
    """Return the page of the record: plot, headline table, and the tables of all sections."""
    return page(record, RECORD.name, f"![seconds]({RECORD.stem}.svg)\n\n{headline_table(record)}")


def plot(record: dict[str, Any], file: Path, dark: bool = False) -> None:
    """Draw seconds: a panel for each column, contenders outside verl above those inside; for a dark page, if asked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and ids and dates do not change from run to run.
    ink = "#d7dae0" if dark else "#1d1f23"
    colored = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpuload", "font.family": "sans-serif"})
    plt.rcParams.update(dict.fromkeys(colored, ink))
    about, found = record["about"], cells(record)
    facts = next(iter(about["datasets"].values()))
    rows = [names for group in (OUTSIDE, INSIDE) if (names := [name for name in group if name in found])]
    figure, panels = plt.subplots(
        len(rows), 3, figsize=(12, 1.5 + 0.4 * len(found)), squeeze=False, height_ratios=[len(names) for names in rows]
    )
    for group, (names, line) in enumerate(zip(rows, panels, strict=True)):
        for number, (panel, title) in enumerate(zip(line, _COLUMNS, strict=True)):
            for place, name in enumerate(names):
                values = found[name][number]
                middle = median(values) if values else 0.0
                range_ = [[middle - min(values)], [max(values) - middle]] if values else None
                bar = panel.barh(
                    place, middle, 0.7, color=_OURS_COLOR if name in (OURS, IN_VERL) else _OTHERS_COLOR,
                    xerr=range_, error_kw={"elinewidth": 1, "ecolor": ink},
                )  # fmt: skip
                panel.bar_label(bar, [f"{spread([middle])} s" if values else "not measured"], padding=3, fontsize=9)
            labels = [name.replace("`", "") for name in names] if number == 0 else [""] * len(names)
            panel.set_yticks(range(len(names)), labels)
            panel.set_title(title if group == 0 else "", loc="left", fontsize=10)
            panel.invert_yaxis()
            panel.margins(x=0.28)
            panel.set_xlim(left=0)
            panel.spines[["top", "right"]].set_visible(False)
            panel.patch.set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("seconds (lower is better)")
    where = f"{about['cpu']}, {about['cores']} cores; {facts['rows']:,} prompts, tokenizer {about['tokenizer']}, "
    figure.text(0.01, 0.015, f"{where}limit {about['limit']:,} tokens; {about['date']}", fontsize=7)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, metadata={"Date": None}, transparent=True)
    plt.close(figure)
