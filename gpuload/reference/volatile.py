"""Templates whose prompts differ from run to run: random choices, and the time of day."""

import re
from collections.abc import Callable
from datetime import datetime

Clock = Callable[[str], str]
"""A template's `strftime_now`: a format → the formatted time."""

_RANDOM = re.compile(r"\|\s*random\b|\bmap\(\s*['\"]random['\"]|\blipsum\b")
_TELLS_TIME = re.compile(r"\bstrftime_now\b(?!\s+is\s+(not\s+)?defined\b)")
_TELLS_DATE = re.compile(r"\bstrftime_now\s*\(\s*(?:\"([^\"\\]*)\"|'([^'\\]*)')\s*\)")


def contains_randomness(template: str) -> bool:
    """Whether a template makes random choices: then not even two calls for one row are equal."""
    return _RANDOM.search(template) is not None


def tells_time(template: str) -> bool:
    """Whether a template may print the date or the time of day."""
    return _TELLS_TIME.search(template) is not None


def dates(template: str, clock: Clock | None) -> list[str] | None:
    """The dates that a template prints, formatted by its clock; None if it may print the time of day."""
    formats = [double or single for double, single in _TELLS_DATE.findall(template)]
    if len(formats) < len(_TELLS_TIME.findall(template)):
        return None
    if not formats:
        return []
    first, last = datetime(2001, 2, 3), datetime(2001, 2, 3, 23, 59, 59, 999999)
    if clock is None or any(first.strftime(form) != last.strftime(form) for form in formats):
        return None
    return [clock(form) for form in formats]


def volatile_reason(template: str, clock: Clock | None) -> str | None:
    """Why the prompts of a template differ from run to run on the same day, or None."""
    if contains_randomness(template):
        return "the chat template contains randomness"
    if dates(template, clock) is None:
        return "the chat template prints the time of day"
    return None
