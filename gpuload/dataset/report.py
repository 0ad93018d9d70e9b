"""The report of a load, for people: rows, reasons, seconds, verification."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from gpuload.core.words import counted
from gpuload.engines.host.few import FEW

_EXAMPLES, _MOST_REASONS = 5, 10
_MOST_REJECTED = 1 / 5  # of the rows; beyond, a warning is given
_MUCH = 1 / 10  # of the time of rendering
_LEAST_WORK = 1.0  # seconds; below, most of them are what any number of rows takes

OF_REASON = "by transformers, because "
"""`Report.seconds` has the time of rows that transformers rendered under this and the reason: a part of "render"."""


@dataclass
class Check:
    """The outcome of a verification."""

    rows: int = 0  # how many rows were compared
    earlier: int = 0  # how many rows were compared, without a difference, when cached tokens were made
    seconds: float = 0.0  # CPU time spent
    mismatches: list[str] = field(default_factory=list)  # one sentence for each row that differs
    shapes: int = 0  # how many different ones the rows have: the roles of their messages, and the fields of these
    shapes_not_compared: int = 0  # how many of them have no row that was compared
    unreadable: list[str] = field(default_factory=list)  # one sentence for each row that could not be compared

    def count_shapes(self, shapes: Mapping[int, bool]) -> None:
        """Counts shapes: number of a shape → whether a row of it was compared."""
        self.shapes, self.shapes_not_compared = len(shapes), len(shapes) - sum(shapes.values())


@dataclass(eq=False, repr=False)
class Report:
    """What a load did; `print(prompts.report)` shows it.

    These attributes stay. What is counted later gets a reason, a stage, a key of `counts` or a note of its own.

    Attributes:
        files: names of the sources.
        max_prompt_length: the limit in tokens.
        limit_name: name of the option that sets it.
        engine: what rendered and encoded.
        notes: why a faster encoder or engine was not used, and other remarks.
        rows_read: rows that were looked at (after `max_samples`).
        rows_kept: rows in the dataset.
        overlong: rows over the limit: dropped, or kept with `filter_overlong_prompts=False`.
        overlong_dropped: whether they were dropped.
        rejected: reason → number of rows dropped for it.
        examples: reason → the first such rows, as "file row N".
        rows_compiled: rows rendered by the compiled template, or taken as plain text.
        by_reference: why rows were rendered by transformers, one by one → how many. With `rows_compiled`, these are all
            rows that were rendered; those in `rejected` may have been, or not.
        reference_seconds: the part of the seconds of rendering that transformers took.
        rows_fallback: rows that fell back from the GPU's tokenizer to the host's.
        control_rows: rows whose messages contain the text of a control token, as far as they were rendered or the token
            cache counted them.
        sanitized: whether that text was encoded as plain text, and did not become the control token.
        source_bytes, text_bytes: bytes of the files, and of the rendered text.
        tokens: ids of the kept rows.
        shortest, longest: the kept rows' smallest and largest number of tokens.
        seconds: stage → seconds of work; "total" is what the caller waited for.
        overlapping: the stages at which several threads, or other stages, work at the same time: their seconds add up
            to more than "total".
        counts: what else was counted, in words → how many.
        check: the outcome of the verification.
        from_cache, into_cache: files whose tokens were found in the token cache, and were written to it.
        cache: the cache's directory.
    """

    files: list[str]
    max_prompt_length: int
    limit_name: str = "max_prompt_length"
    engine: str = ""
    notes: list[str] = field(default_factory=list)
    rows_read: int = 0
    rows_kept: int = 0
    overlong: int = 0
    overlong_dropped: bool = True
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    rows_compiled: int = 0
    by_reference: dict[str, int] = field(default_factory=dict)
    reference_seconds: float = 0.0
    rows_fallback: int = 0
    control_rows: int = 0
    sanitized: bool = False
    source_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    shortest: int = 0
    longest: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    overlapping: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    from_cache: list[str] = field(default_factory=list)
    into_cache: list[str] = field(default_factory=list)
    cache: str = ""

    @property
    def rows_rejected(self) -> int:
        """Rows for which no prompt could be made."""
        return sum(self.rejected.values())

    @property
    def rows_by_reference(self) -> int:
        """Rows rendered by transformers, one by one."""
        return sum(self.by_reference.values())

    @property
    def rows_slow(self) -> int:
        """Those of them that would be rendered faster if their template could be compiled: none of few rows."""
        return self.rows_by_reference - self.by_reference.get(FEW, 0)

    @property
    def refused(self) -> dict[str, int]:
        """The former name of `rejected`."""
        return self.rejected

    @property
    def rows_refused(self) -> int:
        """The former name of `rows_rejected`."""
        return self.rows_rejected

    @property
    def rows_left(self) -> int:
        """The former name of `rows_fallback`."""
        return self.rows_fallback

    def reject(self, place: str, reason: str) -> None:
        """Counts a row without tokens."""
        _count(self.rejected, {reason: 1})
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(place)

    def count(self, counts: Mapping[str, int]) -> None:
        """Adds to `counts`."""
        _count(self.counts, counts)

    def add(self, other: "Report") -> None:
        """Adds what another process has done for the same load, at the same time."""
        for name in ("rows_read", "overlong", "rows_compiled", "rows_fallback", "control_rows", "text_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("rejected", "by_reference", "counts"):
            _count(getattr(self, name), getattr(other, name))
        for reason, examples in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + examples)[:_EXAMPLES]
        self.shortest = min((n for n in (self.shortest, other.shortest) if n), default=0)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = max(self.seconds.get(stage, 0.0), seconds)
        self.overlapping += [stage for stage in other.overlapping if stage not in self.overlapping]
        self.reference_seconds = max(self.reference_seconds, other.reference_seconds)
        self.check.rows += other.check.rows
        self.check.earlier += other.check.earlier
        # Which shapes both have seen is not known here: there are at least so many.
        self.check.shapes = max(self.check.shapes, other.check.shapes)
        self.check.shapes_not_compared = max(self.check.shapes_not_compared, other.check.shapes_not_compared)
        self.check.seconds = max(self.check.seconds, other.check.seconds)
        self.check.mismatches += other.check.mismatches
        self.check.unreadable += other.check.unreadable
        self.notes += [note for note in other.notes if note not in self.notes]
        for mine, theirs in ((self.from_cache, other.from_cache), (self.into_cache, other.into_cache)):
            mine[:] = [name for name in self.files if name in mine or name in theirs]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and names as plain data that JSON can hold: the attributes by their names.

        Examples:
            >>> prompts.report.to_dict()["rows_kept"]
            100
        """
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from gpuload.dataset.notebook import lines_html

        return lines_html(str(self))

    def reasons(self) -> str:
        """The reasons for rejected rows, the most frequent first, one line for all that differ only in numbers."""
        alike: dict[str, list[str]] = {}
        for reason in sorted(self.rejected, key=self.rejected.__getitem__, reverse=True):
            alike.setdefault(re.sub(r"\d[\d,]*", "0", reason), []).append(reason)
        lines = []
        for reasons in alike.values():
            count = sum(self.rejected[reason] for reason in reasons)
            examples = [place for reason in reasons for place in self.examples[reason]]
            places = ", ".join([*examples[:_EXAMPLES], *["..."] * (count > _EXAMPLES)])
            said = reasons[0] + ", or with other numbers" * (len(reasons) > 1)
            lines.append((count, f"  rejected   {counted(count, 'rows')}: {said} ({places})"))
        lines.sort(key=itemgetter(0), reverse=True)
        if unlisted := sum(count for count, _ in lines[_MOST_REASONS:]):
            said = f"  rejected   {counted(unlisted, 'rows')} for further reasons: report.rejected has all of them"
            lines[_MOST_REASONS:] = [(unlisted, said)]
        return "\n".join(line for _, line in lines)

    def __str__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        dropped = self.rows_read - self.rows_kept
        what = "dropped" if self.overlong_dropped else "kept, to be truncated"
        lines = [
            f"{files}: {counted(self.rows_read, 'rows read')}, {self.rows_kept:,} kept, "
            f"{dropped:,} dropped{self._waited()}"
        ]
        if self.overlong:
            limit = f"{self.limit_name}={self.max_prompt_length}"
            lines.append(f"  overlong   {counted(self.overlong, 'rows')} over {limit} ({what})")
        if self.rejected:
            lines.append(self.reasons())
        if self.rows_kept:
            mean = self.tokens / self.counts.get("rows as served", self.rows_kept)
            lines.append(
                f"  tokens     {self.tokens:,}; {self.shortest:,} to {self.longest:,} per row, mean {mean:,.0f}"
            )
        lines += [
            f"  bytes      {megabytes(self.source_bytes)} in files, {megabytes(self.text_bytes)} of rendered text",
            *([f"  speed      {self.rows_read / self._work:,.0f} rows/s"] if self._work >= _LEAST_WORK else []),
            f"  engine     {self.engine}",
            *self._by_reference(),
            *self._fallback(),
            *self._control(),
            *(f"             {counted(count, what)}" for what, count in self.counts.items()),
            *(f"             {note}" for note in self.notes),
            *self._cached(),
            f"  verified   {self._verification()}",
        ]
        return "\n".join(lines)

    @property
    def _work(self) -> float:
        """Seconds of the load after files and tokenizer were opened."""
        return self.seconds.get("total", 0.0) - self.seconds.get("open", 0.0)

    def _waited(self) -> str:
        """What the caller waited for: first the opening, then the work, with its stages, of which some may overlap."""
        if "total" not in self.seconds:
            return ""
        stages = {name: f"{name} {value:.2f}" for name, value in self.seconds.items() if not name.startswith(OF_REASON)}
        del stages["total"]
        start = [f"start {self.seconds['open']:.2f} s"] if stages.pop("open", None) else []
        alone = [text for name, text in stages.items() if name not in self.overlapping]
        overlapping = [text for name, text in stages.items() if name in self.overlapping]
        parts = [*alone, *([f"stages overlap: {', '.join(overlapping)}"] if overlapping else [])]
        work = f"load {self._work:.2f} s" + (f" ({', '.join(parts)})" if parts else "")
        return f"; {', '.join([*start, work])}"

    def _share(self, why: str) -> str:
        """The share of the time of rendering that the rows with one of several reasons took."""
        rendering = self.seconds.get("render", 0.0)
        if len(self.by_reference) < 2 or not rendering:
            return ""
        return f", {min(self.seconds.get(OF_REASON + why, 0.0) / rendering, 1):.0%} of the time"

    def _by_reference(self) -> list[str]:
        """The rows rendered by transformers: how many, their share of the time of rendering, and why."""
        if not self.by_reference:
            return []
        if not self.rows_slow:
            return [f"             {counted(self.rows_by_reference, 'rows')} rendered by transformers: {FEW}"]
        rows, rendering = self.rows_by_reference, self.seconds.get("render", 0.0)
        shares = f"{rows / (rows + self.rows_compiled):.0%} of the rows"
        share = min(self.reference_seconds / rendering, 1) if rendering else 0.0
        if share:
            shares += f", {share:.0%} of the time of rendering"
        hint = "               hint: loading is faster without them: docs/agents.md says what is compiled"
        return [
            f"             {rows:,} of {rows + self.rows_compiled:,} rows rendered by transformers: {shares}",
            *(
                f"               {counted(count, 'rows')}{self._share(why)}: {why}"
                for why, count in self.by_reference.items()
            ),
            *([hint] if share > _MUCH else []),
        ]

    def _fallback(self) -> list[str]:
        why = "text that the device cannot normalize, or a pre-token too long for it"
        if self.sanitized:
            why += ", or control tokens in messages"
        encoded = counted(self.rows_fallback, "rows encoded on the host")
        return [f"             {encoded}: {why}"] if self.rows_fallback else []

    def _control(self) -> list[str]:
        if not self.control_rows:
            return []
        what = "was encoded as plain text" if self.sanitized else "became control tokens"
        found = counted(self.control_rows, "rows have the text of control tokens in their messages")
        return [f"  untrusted  {found}; it {what}"]

    def warning(self) -> str | None:
        """What a user should know even if nobody reads the report: many rows were dropped, and not for their length."""
        # Some reasons are about the limit too, such as a prompt that leaves no room for what is learned.
        dropped = sum(count for why, count in self.rejected.items() if f"{self.limit_name}=" not in why)
        if dropped <= self.rows_read * _MOST_REJECTED:
            return None
        return (
            f"gpuload: {dropped:,} of {self.rows_read:,} rows were dropped for other reasons than their "
            f"length:\n{self.reasons()}"
        )

    def _verification(self) -> str:
        check = self.check
        parts = []
        if check.rows:
            differ = f"{len(check.mismatches)} differ" if check.mismatches else "none differ"
            parts.append(
                f"{counted(check.rows, 'rows')} compared with the tokenizer in {check.seconds:.2f} s, {differ}"
            )
        if check.unreadable:
            parts.append(
                f"{counted(len(check.unreadable), 'rows')} could not be compared, such as {check.unreadable[0]}: "
                "check_media='decode' drops rows whose images cannot be decoded"
            )
        if check.shapes_not_compared:
            of = f"{check.shapes_not_compared:,} of {check.shapes:,} shapes of rows"
            parts.append(f"{of} (roles and fields of messages) were not compared: verify='full' compares all rows")
        if check.earlier:
            parts.append(f"{counted(check.earlier, 'rows compared')} when their tokens were cached, none differed")
        return "; ".join(parts) or "no rows compared"

    def _cached(self) -> list[str]:
        """What was read from the token cache and written to it: one line, or none."""
        parts = []
        if self.from_cache:
            parts.append(f"tokens of {_some(self.from_cache, len(self.files))} read from {self.cache}")
        if self.into_cache:
            parts.append(f"tokens of {_some(self.into_cache, len(self.files))} written to {self.cache}")
        return ["  cache      " + "; ".join(parts)] if parts else []


def _count(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _some(names: list[str], of: int) -> str:
    return f"{len(names)} of {of} files" if of > 1 else "this file"


def megabytes(nbytes: int) -> str:
    """Bytes as text, such as "1,234.5 MB"."""
    return f"{nbytes / 1e6:,.1f} MB"
