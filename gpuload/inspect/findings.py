"""What a reader of the numbers has to decide, or to know first: one sentence each."""

from collections import Counter

from gpuload.core.words import counted
from gpuload.inspect.statistics import LengthGroup, Statistics

_MOST_REASONS = 3


def findings(found: Statistics) -> list[str]:
    """The sentences, the most important first: wrong tokens, dropped rows, then which limit to set."""
    report = found.report
    made = []
    if wrong := len(report.check.mismatches):
        made.append(f"{wrong:,} of the compared rows differ from the tokenizer.")
    reasons = Counter(report.rejected).most_common()
    made += [f"{count:,} of {rows(report.rows_read)} dropped: {why}." for why, count in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        made.append(f"{counted(len(reasons) - _MOST_REASONS, 'more reasons')} for dropped rows are in the table.")
    made.append(suggestion(found))
    if found.equal_pairs:
        made.append(f"Nothing is learned from {rows(found.equal_pairs)} in which chosen equals rejected.")
    if report.control_rows and not report.sanitized:
        made.append(f"Text of control tokens in messages becomes control tokens, in {rows(report.control_rows)}.")
    if report.rows_slow:
        made.append(f"transformers renders {rows(report.rows_slow)} one by one, which is slow.")
    return made


def suggestion(found: Statistics) -> str:
    """Which limit keeps nearly all rows, and what keeping all of them costs."""
    everything = found.groups[0]
    near, whole = found.limit_near(99), found.limit_near(100)
    all_of_them = f"{whole:,} keeps all rows"
    if near >= whole:
        return f"{found.limit_name}={all_of_them}, and pads {_pads(everything, whole)}."
    return f"{found.limit_name}={kept(everything, near)}; {all_of_them}, but pads {_pads(everything, whole)}."


def kept(group: LengthGroup, limit: int) -> str:
    """What one limit does: "160 keeps 99.3%, drops 62 rows and pads 35% of a batch"."""
    share, dropped = group.within(limit), len(group.lengths) - group.count(limit)
    return f"{limit:,} keeps {100 * share:.1f}%, drops {rows(dropped)} and pads {_pads(group, limit)}"


def _pads(group: LengthGroup, limit: int) -> str:
    return f"{100 * group.padding(limit):.0f}% of a batch"


def rows(count: int) -> str:
    """So many rows, in words."""
    return counted(count, "rows")
