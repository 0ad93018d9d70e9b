"""The record → a picture: rows per second of load + filter, a bar per contender."""

from pathlib import Path
from typing import Any

from bench.load import OURS
from bench.tables import load_speeds

# Okabe and Ito's colours, told apart by colour-blind readers too; ours is the dark one.
_COLOURS = ("#0072B2", "#E69F00", "#999999", "#56B4E9", "#CC79A7")


def draw(section: dict[str, Any], file: Path) -> None:
    """One panel per temperature, a group of bars per data set; axes start at 0, so that lengths can be compared."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run["contender"] for run in section["runs"]))
    data_sets = list(dict.fromkeys(run["data"] for run in section["runs"]))
    inches = 1.6 + 1.35 * len(data_sets)
    figure, panels = plt.subplots(1, 2, figsize=(13, inches), sharey=True)
    height = 0.84 / len(names)
    for panel, temperature in zip(panels, ("cold", "warm"), strict=True):
        for place, data in enumerate(data_sets):
            speeds = load_speeds(section, data, temperature)
            for number, name in enumerate(names):
                y = place + (number - (len(names) - 1) / 2) * height
                label = name if place == 0 else None
                panel.barh(y, speeds[name], height * 0.9, color=_COLOURS[number % len(_COLOURS)], label=label)
                weight = "bold" if name == OURS else "normal"
                panel.annotate(
                    f"{speeds[name]:,.0f}", (speeds[name], y), (3, 0), textcoords="offset points",
                    va="center", fontsize=8, fontweight=weight,
                )  # fmt: skip
        panel.set_title(f"{temperature} caches", loc="left")
        panel.set_xlabel("rows/s, load + filter (more is better)")
        panel.set_yticks(range(len(data_sets)), data_sets)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.margins(x=0.14)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(names), frameon=False)
    about = section["about"]
    machine = f"{about['cpu']}, {about['cores']} cores"
    where = f"{machine}; {about['tokenizer']}, limit {about['limit']:,} tokens; {about['date']}"
    figure.text(0.01, 0.06 / inches, where, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.2 / inches, 1, 1 - 0.35 / inches))
    figure.savefig(file, dpi=130)
    plt.close(figure)
