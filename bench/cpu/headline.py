"""The numbers of the project's README: one table and one plot from one record.

`python -m bench --only headline` measures the sections `load` and `batches` on the joint dataset in one run, and writes
headline.json, headline.svg, the page README.md, and the table in the project's README between two markers.
"""

import re
from pathlib import Path
from statistics import median
from typing import Any

from bench import ROOT
from bench.cpu.load import BASELINE, IN_VERL, OURS, TRL, VERL, VERL_1, VERL_2, median_seconds
from bench.cpu.page import batch_rates, page
from bench.report import table

SECTIONS = ("load", "batches")
RECORD, README = ROOT / "bench" / "results" / "headline.json", ROOT / "README.md"
BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"

# Contender → its methods of drawing batches: tensors only, and with every column as Python objects.
METHODS = {
    OURS: (f"{OURS}: tensors only", f"{OURS}: `PromptLoader`, all columns and `raw_prompt`"),
    IN_VERL: ("", f"{IN_VERL}: `__getitems__`, no tokens"),
    VERL_2: ("", f"{VERL}: `__getitem__`, no tokens"),
    BASELINE: ("", f"{BASELINE}: `__getitem__`"),
}
_ORDER = (OURS, IN_VERL, VERL_2, VERL_1, TRL, BASELINE)
# Two colors of Okabe and Ito's palette, which color-blind readers can distinguish.
_OURS_COLOR, _OTHERS_COLOR = "#0072B2", "#E69F00"


def headline_table(record: dict[str, Any]) -> str:
    """Return the README's table and its caption.

    Args:
        record: A record with the sections of `SECTIONS`, measured on one dataset.
    """
    load, batches = record["load"], record["batches"]
    about, (data, facts) = load["about"], next(iter(load["about"]["datasets"].items()))
    rows, size = facts["rows"], batches["runs"][0]["batch"]
    seconds = {temperature: median_seconds(load, data, temperature) for temperature in ("cold", "warm")}
    rates = batch_rates(batches)
    lines = []
    for name in (name for name in _ORDER if name in seconds["cold"]):
        took = [seconds[temperature][name] for temperature in ("cold", "warm")]
        cells = [f"{rows / each:,.0f} rows/s ({each:.2f} s)" for each in took]
        methods = METHODS.get(name, ("", ""))
        cells += [f"{rates[method] / size:,.1f} /s" if method in rates else "" for method in methods]
        lines.append([f"**{text}**" if name == OURS and text else text for text in (name, *cells)])
    shape = f"batches of {size} × {about['limit']:,}"
    loads = ["load + filter, cold", "load + filter, warm"]
    head = [f"{rows:,} prompts", *loads, f"{shape}, tensors", f"{shape}, all columns"]
    ours = [run for run in load["runs"] if (run["contender"], run["temperature"]) == (OURS, "cold")]
    text, tokens = (ours[0][key] / 1e6 for key in ("text_bytes", "token_bytes"))
    peak = median((run["peak_rss"] - run["baseline_rss"]) / 1e6 for run in ours)
    caption = (
        f"Medians of {about['repeats']} runs, all in one session (`{about['command']}`), each keeping the same "
        f"{ours[0]['rows_kept']:,} rows. {text:,.0f} MB of text in {len(facts['files'])} files, tokenizer "
        f"{about['tokenizer']}, limit {about['limit']:,} tokens; {about['cores']} cores of {about['cpu']}, "
        f"{about['date']}, commit {about['commit']}. gpuload's cold load adds {peak:,.0f} MB to the memory of the "
        f"process at its peak, {peak / (text + tokens):.1f} times text + tokens. Batches inside verl have messages and "
        "columns but no tokens."
    )
    return f"{table(head, lines)}\n\n{caption}"


def headline_page(record: dict[str, Any]) -> str:
    """Return the page of the record: plot, headline table, and the tables of all sections."""
    return page(record, RECORD.name, f"![rows per second]({RECORD.stem}.svg)\n\n{headline_table(record)}")


def embedded(text: str) -> list[str]:
    """Return what a document has between each pair of markers."""
    return re.findall(f"{BEGIN}\n(.*?)\n{END}", text, re.DOTALL)


def embed(text: str, rendered: str) -> str:
    """Return a document with the table between its markers replaced; the same document if it has no markers."""
    return re.sub(f"{BEGIN}\n.*?{END}", lambda _: f"{BEGIN}\n{rendered}\n{END}", text, flags=re.DOTALL)


def plot(section: dict[str, Any], file: Path) -> None:
    """Draw rows per second of load and filter on the last dataset, one panel for cold and one for warm loads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and ids and dates do not change from run to run.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gpuload", "font.family": "sans-serif"})
    about, (data, facts) = section["about"], list(section["about"]["datasets"].items())[-1]
    names = [name for name in _ORDER if name in median_seconds(section, data, "cold")]
    figure, panels = plt.subplots(1, 2, figsize=(11, 1.3 + 0.36 * len(names)), sharey=True)
    for panel, temperature in zip(panels, ("cold", "warm"), strict=True):
        seconds = median_seconds(section, data, temperature)
        speeds = [facts["rows"] / seconds[name] for name in names]
        colors = [_OURS_COLOR if name in (OURS, IN_VERL) else _OTHERS_COLOR for name in names]
        bars = panel.barh([name.replace("`", "") for name in names], speeds, 0.7, color=colors)
        panel.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, fontsize=9)
        panel.set_title(f"{temperature} caches", loc="left", fontsize=10)
        panel.set_xlabel("rows/s, load + filter (higher is better)")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.margins(x=0.16)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    where = f"{about['cpu']}, {about['cores']} cores; {facts['rows']:,} prompts, tokenizer {about['tokenizer']}, "
    figure.text(0.01, 0.015, f"{where}limit {about['limit']:,} tokens; {about['date']}", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
