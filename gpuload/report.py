"""What a load did, for people: rows, reasons, seconds, exactness."""

from dataclasses import dataclass, field

from gpuload.verify import Check

_EXAMPLES = 5


@dataclass
class Report:
    """Filled while a load runs.

    Attributes:
        files: the sources' names.
        rows_read: rows looked at (after `max_samples`).
        rows_kept: rows in the data set.
        overlong: rows longer than `max_prompt_length`: dropped, or kept with `filter_overlong_prompts=False`.
        overlong_dropped: whether they were dropped.
        rejected: reason → number of rows dropped for it.
        examples: reason → the first rows, as "file row N".
        rows_compiled: rows that went through the compiled template.
        by_reference: why rows were rendered by transformers instead, one by one → how many.
        rows_left: rows that the engine's own tokenizer left to the host's.
        source_bytes, text_bytes, tokens: of files, of rendered text, of kept ids.
        shortest, longest: kept rows, in tokens.
        seconds: stage → seconds of work; stages overlap, so that they add up to more than `total`.
        engine: what did the work; notes: why something faster did not.
        check: the comparison with the reference.
        from_cache, into_cache: files whose tokens were found in the cache, and those whose tokens were put there.
        cache: its folder.
    """

    files: list[str]
    max_prompt_length: int
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
    rows_left: int = 0
    source_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0
    shortest: int = 0
    longest: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    from_cache: list[str] = field(default_factory=list)
    into_cache: list[str] = field(default_factory=list)
    cache: str = ""

    @property
    def rows_rejected(self) -> int:
        return sum(self.rejected.values())

    @property
    def refused(self) -> dict[str, int]:
        """The former name of `rejected`."""
        return self.rejected

    @property
    def rows_refused(self) -> int:
        """The former name of `rows_rejected`."""
        return self.rows_rejected

    def reject(self, place: str, reason: str) -> None:
        """Counts a row that has no tokens."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(place)

    def reasons(self) -> str:
        """The rejections, one line each, the most frequent first."""
        return "\n".join(
            f"  rejected   {count:,} rows: {reason} ({', '.join(self.examples[reason])}{', ...' * (count > _EXAMPLES)})"
            for reason, count in sorted(self.rejected.items(), key=lambda item: -item[1])[:10]
        )

    def __str__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        total = self.seconds.get("total", 0.0)
        dropped = self.rows_read - self.rows_kept
        what = "dropped" if self.overlong_dropped else "kept, for truncation"
        lines = [
            f"{files}: {self.rows_read:,} rows read, {self.rows_kept:,} kept, {dropped:,} dropped",
        ]
        if self.overlong:
            lines.append(f"  overlong   {self.overlong:,} rows of more than {self.max_prompt_length:,} tokens ({what})")
        if self.rejected:
            lines.append(self.reasons())
        if self.rows_kept:
            mean = self.tokens / self.rows_kept
            lines.append(
                f"  tokens     {self.tokens:,}; a row has {self.shortest:,} to {self.longest:,}, {mean:,.0f} on average"
            )
        lines += [
            f"  bytes      {_mb(self.source_bytes)} of files, {_mb(self.text_bytes)} of rendered text",
            "  seconds    " + ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items()),
            f"  speed      {self.rows_read / total if total else 0:,.0f} rows/s",
            f"  engine     {self.engine}",
            *(
                f"             {count:,} rows rendered by transformers: {why}"
                for why, count in self.by_reference.items()
            ),
            *(
                [f"             {self.rows_left:,} rows encoded on the host: not surely in NFC, or a piece too long"]
                if self.rows_left
                else []
            ),
            *(f"             {note}" for note in self.notes),
            *self._cached(),
            f"  exactness  {self._exactness()}",
        ]
        return "\n".join(lines)

    def _exactness(self) -> str:
        check = self.check
        said = []
        if check.rows:
            differ = f"{len(check.mismatches)} differ" if check.mismatches else "none differs"
            said.append(f"{check.rows:,} rows compared with the reference in {check.seconds:.2f} s, {differ}")
        if check.earlier:
            said.append(f"{check.earlier:,} rows compared when their tokens were made, none differed")
        return "; ".join(said) or "not checked"

    def _cached(self) -> list[str]:
        """What the cache had and got: one line, or none."""
        said = []
        if self.from_cache:
            said.append(f"tokens of {_some(self.from_cache, len(self.files))} from {self.cache}")
        if self.into_cache:
            said.append(f"tokens of {_some(self.into_cache, len(self.files))} kept in {self.cache}")
        return ["  cache      " + "; ".join(said)] if said else []


def _some(names: list[str], of: int) -> str:
    return f"{len(names)} of {of} files" if of > 1 else "this file"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
