"""Plots of lengths as SVG elements for a page, in the colors of its theme.

matplotlib draws them in placeholder colors, which are then replaced with CSS: text and axes with the muted color of the
page, and series with its variables. So the same plot is legible in light and dark. Names of sources are written by the
page, and not by matplotlib, which would take `$` for mathematics and lacks glyphs for most scripts.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuload.core.errors import GpuloadError
from gpuload.inspect.statistics import LengthGroup

FEW = 8
"""How many groups are plotted."""

DASHES = ("", "4 1.5", "1.2 1.2", "7 2 1.5 2", "10 3", "4 1.5 1.2 1.5", "2.5 1", "12 2 2 2")
"""Dashes of the lines of groups, in widths of the line: they can be told apart without color."""

_MUTED = "#040506"
_SERIES = [f"#0a0b{number:02x}" for number in range(FEW)]


def pyplot() -> Any:
    """matplotlib's, which draws without a screen.

    Raises:
        GpuloadError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise GpuloadError("--html needs matplotlib: pip install 'gpuload[html]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def histogram(groups: Sequence[LengthGroup], number: int) -> str:
    """How many rows of a group have which length; up to the 99th percentile of all rows, so that plots compare.

    Args:
        groups: the first one is all rows.
        number: of the group.
    """
    draw, top = pyplot(), longest_shown(groups)
    with draw.rc_context(_settings(f"histogram {number}")):
        figure, axis = draw.subplots(figsize=(4.2, 1.7), layout="constrained")
        lengths = groups[number].lengths
        axis.hist(lengths[lengths <= top], bins=np.linspace(0, top, min(40, top) + 1), color=_SERIES[number])
        axis.set_xlim(0, top)
        axis.xaxis.set_major_locator(draw.MaxNLocator(4, integer=True))
        axis.yaxis.set_major_locator(draw.MaxNLocator(3, integer=True))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        return _svg(draw, figure, axis)


def longest_shown(groups: Sequence[LengthGroup]) -> int:
    """Up to which length histograms go, in tokens."""
    return max(1, int(np.percentile(groups[0].lengths, 99)))


def kept_by_limit(groups: Sequence[LengthGroup]) -> str:
    """Which share of the rows of each group is within a limit."""
    draw = pyplot()
    with draw.rc_context(_settings("kept by limit")):
        figure, axis = draw.subplots(figsize=(8.2, 3.2), layout="constrained")
        for number, group in reversed(list(enumerate(groups[:FEW]))):
            places = np.unique(np.linspace(0, len(group.lengths) - 1, 300).astype(int))
            dashes = [float(part) for part in DASHES[number].split()]
            axis.plot(
                np.maximum(group.lengths[places], 1),
                (places + 1) / len(group.lengths),
                color=_SERIES[number],
                linewidth=1.6 if number else 2.2,
                linestyle=(0, dashes) if dashes else "-",
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
        axis.set_ylim(0, 1.03)
        axis.grid(axis="y", color=_MUTED, alpha=0.25, linewidth=0.6)
        return _svg(draw, figure, axis)


def _settings(salt: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,  # ids that are always the same, and different in each plot
        "axes.edgecolor": _MUTED,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "font.size": 11,
    }


def _svg(draw: Any, figure: Any, axis: Any) -> str:
    """The figure as an element of a page: without XML's head and matplotlib's styles, in the colors of the page."""
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(which="both", length=0)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    draw.close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    colors = {_MUTED: "var(--muted)"} | {color: f"var(--series-{number})" for number, color in enumerate(_SERIES)}
    return re.sub("|".join(colors), lambda found: colors[found[0]], text)
