"""Numbers of several runs, and lines through measurements of two sizes.

Most preparations of data have a part that takes the same time for any number of rows (`datasets` hashes the tokenizer,
gpuload opens it and compiles the template) and a part for each row. A rate that is measured with few rows has the fixed
part in it, so it says little about many. With two sizes, seconds = fixed + rows / rate.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bench.report import table

_OURS = "gpuload"

Seconds = Mapping[int, Sequence[float]]
"""Number of rows → the seconds of each run."""


class Line(NamedTuple):
    """Seconds by number of rows.

    Attributes:
        fixed: Seconds for no rows.
        per_row: Seconds for each row.
    """

    fixed: float
    per_row: float

    def at(self, rows: int) -> float:
        """Seconds for a number of rows."""
        return self.fixed + self.per_row * rows


def lines_of(seconds: Seconds) -> list[Line]:
    """Return the line through the smallest and the largest size of each run; none if there is one size only."""
    few, many = min(seconds), max(seconds)
    if few == many:
        return []
    slopes = [(b - a) / (many - few) for a, b in zip(seconds[few], seconds[many], strict=True)]
    return [Line(a - few * slope, slope) for a, slope in zip(seconds[few], slopes, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Return the median of some runs with minimum and maximum; the mean of two; one alone as it is."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))}–{number(max(values))})"


def number(value: float) -> str:
    """Return a number with two or three digits that count."""
    size = abs(value)
    if size >= 10:
        return f"{value:,.0f}" if size >= 100 else f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.3f}"


def runs_of(count: int) -> str:
    """Say what the numbers of `count` runs are."""
    if count < 3:
        return "One run." if count == 1 else "Means of 2 runs (minimum–maximum)."
    return f"Medians of {count} runs (minimum–maximum)."


def fitted_table(
    groups: Mapping[str, Mapping[str, Seconds]],
    rows: int,
    about: Mapping[str, Any],
    own: tuple[str, ...] = (_OURS,),
    unit: str = "seconds",
) -> str:
    """Return a table of seconds by number of rows, with fixed part, rate, and ratios at one number of rows.

    Args:
        groups: What is measured → who does it → seconds.
        rows: Number of rows for which all are compared. Seconds that were not measured are those of the line.
        about: Description of the run.
        own: What the names of those lines of gpuload begin with that others are compared with.
        unit: What is counted.
    """
    sizes = max(len(seconds) for found in groups.values() for seconds in found.values())
    lines = []
    for group, found in groups.items():
        at = {name: seconds_at(seconds, rows) for name, seconds in found.items()}
        ours = [name for name in found if name.startswith(own)]
        for name, seconds in found.items():
            cells = [cell for size in sorted(seconds) for cell in (f"{size:,}", spread(seconds[size]))]
            fits = lines_of(seconds)
            fixed = spread([fit.fixed for fit in fits]) if fits else ""
            # Where the line does not rise, the sizes are too small for a rate.
            rates = [1 / fit.per_row for fit in fits if fit.per_row > 0]
            rate = spread(rates) if fits and len(rates) == len(fits) else ""
            whole = spread(at[name]) if at[name] else ""
            line = "" if rows in seconds or not whole else ", by the line"
            ratios = [f"**{median(at[name]) / median(at[each]):.1f}×**" for each in ours if at[name] and at[each]]
            ratio = "" if name.startswith(_OURS) else " and ".join(ratios)
            filled = cells + [""] * (2 * sizes - len(cells))
            lines.append([group, name, *filled, fixed, rate, whole + line, ratio])
    pairs = ["rows", unit] * sizes
    head = ["", "", *pairs, "fixed part, s", "rows/s after it", f"{rows:,} rows, s", "times gpuload's"]
    return table(head, lines, 2, about)


def seconds_at(seconds: Seconds, rows: int) -> list[float]:
    """Return the seconds of each run for a number of rows: measured, or those of the line; none if there is no line."""
    return list(seconds[rows]) if rows in seconds else [line.at(rows) for line in lines_of(seconds)]
